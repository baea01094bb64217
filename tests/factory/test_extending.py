"""The example of docs/extending.md works as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "row-scale"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that finds the example as if pip had installed it."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    info = site / "kernel_factory_row_scale-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{k} = {v}" for k, v in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (site / "row_scale.py").write_text((EXAMPLE / "row_scale.py").read_text("utf-8"))
    path = os.pathsep.join([str(ROOT), str(site)])
    return {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def test_the_example_is_ranked_and_its_wrong_half_rejected(
    installed: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "factory", "launch", str(EXAMPLE / "row_scale.toml")],
        cwd=tmp_path,
        env=installed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    ranked, failed = done.stdout.split("not ranked")
    shown, _ = page.split("$ factory launch docs/examples/row-scale")[1].split("not ranked")
    assert re.findall(r"^ +\d+ +\d+ +.*$", shown, re.M) == re.findall(
        r"^ +\d+ +\d+ +.*$", ranked, re.M
    )
    rejected = re.findall(r"rejected +emulate +(\S+ \S+) +regime production", failed)
    assert rejected == [f"factor=bf16 rows={rows}" for rows in (1, 4, 16)]
    # The last digit of an error may differ between builds of torch.
    (first,) = re.findall(r"reason\n.*\n(.*)\n\.\.\.", page)
    told = [re.sub(r"\d\.\d\de-", "e-", line) for line in failed.splitlines()]
    assert re.sub(r"\d\.\d\de-", "e-", first) in told


def test_the_examples_baseline_is_a_control_and_is_right(
    installed: dict[str, str], tmp_path: Path
) -> None:
    code = """
import json, candidates, operations
operation = operations.get("row_scale")
names = [b.name for b in candidates.baselines("row_scale")]
(one,) = candidates.baselines("row_scale")
workload = operation.workloads["odd-1021"]
inputs = operation.generate(workload, operation.regimes["production"], seed=1)
outputs = one.load(workload, None).bind(inputs, operation.outputs(inputs))()
(error,) = operation.compare(outputs, operation.oracle(inputs), workload)
shipped = [b.name for b in candidates.baselines("kda_prefill")]
print(json.dumps([names, one.missing(), error.within, len(shipped)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=installed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names, missing, within, shipped = json.loads(done.stdout)
    assert (names, missing, within) == (["torch_eager"], None, True)
    assert shipped == 5
