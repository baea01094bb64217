"""Every form of the kernels under compute-sanitizer, where that is installed.

A call each on ragged sequences, an empty one among them, in a process of its own.  Blocks come from
the driver one by one, so that what reaches past a tensor is not hidden in torch's pool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import candidates

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


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("form", FORMS)
def test_the_sanitizer_finds_nothing(form: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, a part of the CUDA toolkit, is not on PATH")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "99", *command(*FORMS[form])],
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}"
