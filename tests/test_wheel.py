"""The built wheel holds what the package reads at run time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import importlib.resources as res, json, pathlib, sys
import candidates, factory, leaderboard, operations
from factory.report import build_report
from leaderboard import open_store, shipped_store
def listed(package, *path):
    folder = res.files(package)
    for name in path:
        folder = folder / name
    return [entry.name for entry in folder.iterdir()]
packages = (candidates, factory, leaderboard, operations)
store = open_store("sqlite:///" + sys.argv[1])
campaigns = store.list_campaigns()
results = shipped_store()
print(json.dumps({
    "migrations": listed("leaderboard", "migrations", "versions"),
    "presets": listed("factory", "presets"),
    "page": listed("factory", "report"),
    "export": listed("factory", "export", "templates", "delta_rule")
    + listed("factory", "export", "templates", "delta_rule", "tests")
    + listed("factory", "export", "templates", "gdn_prefill"),
    "report": build_report(results, results.get_campaign())[:15],
    "campaigns": len(campaigns),
    "shipped": len(results.list_campaigns()),
    "homes": {m.__name__: str(pathlib.Path(m.__file__).parents[1]) for m in packages},
    "operations": operations.names(),
    "typed": all((res.files(m.__name__) / "py.typed").is_file() for m in packages),
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy and installed without its dependencies."""
    base = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    source = base / "source"
    for name in tracked:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(base), str(source)], check=True)
    (wheel,) = base.glob("kernel_factory-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(base / "site"), str(wheel)], check=True
    )
    return base / "site"


def test_the_installed_wheel_finds_migrations_presets_and_shipped_results(
    installed: Path, tmp_path: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path / "new.db")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert set(seen["homes"].values()) == {str(installed)}
    assert any(name.startswith("0001") for name in seen["migrations"])
    assert {"kda_prefill.toml", "quickstart.toml"} <= set(seen["presets"])
    assert {"page.css", "page.js"} <= set(seen["page"])
    assert {"README.md", "LICENSE", "api.py", "conftest.py", "parts.txt"} <= set(seen["export"])
    assert seen["report"] == "<!doctype html>"
    assert seen["campaigns"] == 0
    assert seen["shipped"] >= 1
    assert "kda_prefill" in seen["operations"]
    assert seen["typed"]


def test_the_installed_command_answers(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "factory"), "operations"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "kda_prefill" in done.stdout
