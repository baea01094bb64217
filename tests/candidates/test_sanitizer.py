"""Every form of the kernels under compute-sanitizer, where that is installed.

A call each on ragged sequences, an empty one among them, in a process of its own.  Blocks come from
the driver one by one, so that what reaches past a tensor is not hidden in torch's pool.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kept import compile_kept

import candidates
from candidates._delta_rule.kernel.toolchain import require_dsl

ROOT = Path(__file__).resolve().parents[2]
FORMS = {
    "kda fused": ("kda_prefill", "form=fused frame=middle builders=3 waves=1"),
    "kda in four segments": (
        "kda_prefill", "form=split bt=32 anchor=mid segments=4 rows=64",
    ),
    "gdn fused": ("gdn_prefill", "form=fused bt=32 rows=128 waves=1 builders=3"),
    "gdn in four segments": ("gdn_prefill", "form=split bt=32 segments=4 rows=64"),
}  # fmt: skip
CALL = """
import sys
from dataclasses import replace
import torch
import candidates, operations
name, key = sys.argv[1:]
operation, family = operations.get(name), candidates.get(name)
schedule = next(s for p in family.presets() for s in family.offered(p) if s.key == key)
like = next(w for w in operation.tuned() if w.initial_state)
narrow = {n: 1 for n in ("heads", "value_heads") if hasattr(like, n)}
workload = replace(like, name="sanitized", lengths=(130, 0, 37), **narrow)
inputs = operation.generate(workload, operation.regimes["production"], seed=1, device="cuda")
outputs = operation.outputs(inputs)
torch.cuda.synchronize()
family.load(schedule).bind(inputs, outputs)()
torch.cuda.synchronize()
errors = operation.compare(outputs, operation.fast_oracle(inputs), workload)
assert all(e.within for e in errors), errors
"""


def command(operation: str, key: str) -> list[str]:
    return [sys.executable, "-c", CALL, operation, key]


def test_the_forms_are_offered() -> None:
    for operation, key in FORMS.values():
        family = candidates.get(operation)
        assert key in {s.key for preset in family.presets() for s in family.offered(preset)}


def sanitized(tool: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program under a tool of compute-sanitizer; exit code 99 if that reports something."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, a part of the CUDA toolkit, is not on PATH")
    return subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "99", *argv],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
    )


@functools.cache
def follows_a_lanes_arrival() -> bool:
    """Whether racecheck sees that one lane's arrival at an mbarrier orders what its warp wrote.

    That of CUDA 13.0 does not, where it sees it of an arrival by each thread.
    """
    program = str(Path(__file__).with_name("arrivals.py"))
    by_thread = sanitized("racecheck", [sys.executable, program, "thread"])
    assert by_thread.returncode == 0, f"the tool itself does not work\n{by_thread.stdout[-4000:]}"
    by_lane = sanitized("racecheck", [sys.executable, program, "lane"])
    assert by_lane.returncode in (0, 99), by_lane.stdout[-4000:]
    return by_lane.returncode == 0


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("form", FORMS)
def test_the_sanitizer_finds_nothing(form: str, tool: str) -> None:
    if tool == "racecheck" and not follows_a_lanes_arrival():
        pytest.skip("this racecheck reports a race in a right kernel whose lanes arrive for a warp")
    done = sanitized(tool, command(*FORMS[form]))
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}"


@pytest.mark.parametrize("by_lane", [True, False])
def test_the_kernel_that_tries_the_tool_compiles(by_lane: bool) -> None:
    require_dsl()
    from arrivals import job

    ptx = compile_kept(*job(by_lane)).ptx
    assert ptx.count("mbarrier.arrive") == 1
    assert ("bar.warp.sync" in ptx) is by_lane
