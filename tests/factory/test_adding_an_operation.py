"""The example of docs/adding-an-operation.md: a row softmax from outside the repository.

As it stands, found by its entry points, it goes through every command that an operation meets
without a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "row-softmax"
PAGE = ROOT / "docs" / "adding-an-operation.md"
MODULE = EXAMPLE / "row_softmax.py"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``python ARGUMENTS`` in one directory, where the example is as if pip had installed it."""
    site, here = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("here")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    info = site / "kernel_factory_row_softmax-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{k} = {v}" for k, v in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (site / MODULE.name).write_text(MODULE.read_text("utf-8"))
    path = os.pathsep.join([str(ROOT), str(site)])
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def python(*argv: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, argv)],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
        )

    return python


@pytest.fixture(scope="module")
def launched(run: Run) -> str:
    """What ``factory launch`` prints of the example's campaign."""
    return said(run("-m", "factory", "launch", EXAMPLE / "row_softmax.toml"))


@pytest.fixture
def factory(run: Run, launched: str) -> Run:
    """``factory ARGUMENTS`` beside that campaign."""
    return functools.partial(run, "-m", "factory")


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_operation_family_and_baseline_with_their_entry_points_are_under_150_lines() -> None:
    declaration = (EXAMPLE / "pyproject.toml").read_text("utf-8")
    _, entry_points = declaration.split("[project.entry-points]\n")
    assert len(entry_points.splitlines()) == 3
    lines = [*MODULE.read_text("utf-8").splitlines(), *entry_points.splitlines()]
    assert len(lines) < 150
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    shown = re.search(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    assert shown is not None
    declared = tomllib.loads(shown[1])["project"]["entry-points"]
    assert declared == project["entry-points"], "the page declares what the example does"


def test_right_schedules_are_ranked_and_those_right_on_mild_logits_alone_rejected(
    launched: str,
) -> None:
    ranked, failed = launched.split("not ranked")
    page = PAGE.read_text("utf-8")
    shown, _ = page.split("$ factory launch docs/examples/row-softmax")[1].split("not ranked")
    row = r"^ +\d+ +\d+ +.*$"
    assert re.findall(row, shown, re.M) == re.findall(row, ranked, re.M)
    rejected = re.findall(r"rejected +emulate +(\S+ \S+) +regime production", failed)
    assert rejected == [f"shift=none rows={rows}" for rows in (1, 4, 16)]
    (first,) = re.findall(r"reason\n.*\n(.*)\n\.\.\.", page)
    assert first in failed


def test_leaderboard_compare_report_and_show_know_it(factory: Run, tmp_path: Path) -> None:
    rows = json.loads(said(factory("leaderboard", "--operation", "row_softmax", "--json")))
    assert [r["schedule"]["rows"] for r in rows] == [16, 4, 1]
    assert {r["operation"] for r in rows} == {"row_softmax"}
    compared = json.loads(said(factory("compare", "2", "1", "--json")))
    assert compared["ratio"] == pytest.approx(16.28 / 18.17, abs=1e-3)
    assert compared["verdict"] is None, "a model's times are told apart by nobody"
    said(factory("report", "row_softmax", "-o", tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert "shift=max rows=16" in page
    assert "shift=none rows=1" in said(factory("show", "4"))
    assert "softmax of each row" in said(factory("operations", "row_softmax"))


def test_a_kernel_of_its_own_is_gated_and_the_wrong_one_does_not_pass(
    factory: Run, tmp_path: Path
) -> None:
    found = json.loads(said(factory("check", EXAMPLE / "online.py", "--json")))
    stages = {s["id"]: s["verdict"] for s in found["stages"]}
    assert found["verdict"] == "passed"
    assert (stages["gate"], stages["time"]) == ("passed", "not run")
    text = (EXAMPLE / "online.py").read_text("utf-8")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("largest = new", "pass"))
    assert wrong.read_text("utf-8") != text
    done = factory("check", wrong, "--json")
    assert done.returncode == 1
    stages = {s["id"]: s["verdict"] for s in json.loads(done.stdout)["stages"]}
    assert stages["load"] == "passed"
    assert stages["gate"] not in ("passed", "not run")


def test_what_has_no_measured_winner_is_not_exported(factory: Run) -> None:
    done = factory("export", "row_softmax", "--to", "folder")
    assert done.returncode == 1
    assert "no winner of row_softmax to export" in done.stderr


def test_its_baseline_is_a_control_and_is_right(run: Run) -> None:
    code = """
import json, candidates, operations
operation = operations.get("row_softmax")
names = [b.name for b in candidates.baselines("row_softmax")]
(one,) = candidates.baselines("row_softmax")
workload = operation.workloads["odd-1021"]
inputs = operation.generate(workload, operation.regimes["production"], seed=1)
outputs = one.load(workload, None).bind(inputs, operation.outputs(inputs))()
(error,) = operation.compare(outputs, operation.oracle(inputs), workload)
shipped = [b.name for b in candidates.baselines("kda_prefill")]
print(json.dumps([names, one.missing(), error.within, len(shipped)]))
"""
    names, missing, within, shipped = json.loads(said(run("-c", code)))
    assert (names, missing, within) == (["torch_softmax"], None, True)
    assert shipped == 6
