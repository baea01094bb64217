"""Exact segments of the fused form on an sm90 GPU: right, and the same in every run."""

from __future__ import annotations

import pytest
import torch

import operations
from candidates.kda_prefill.kernel import launch
from candidates.kda_prefill.kernel.config import FusedConfig
from operations.kda_prefill import KdaWorkload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

OPERATION = operations.get("kda_prefill")
REGIMES = ("slow", "mixed", "one_hot_state", "similar_keys", "sweep_lb1", "beyond_20")
WORKLOADS = (
    KdaWorkload("ragged", heads=3, lengths=(2047, 1, 3000)),
    KdaWorkload("empty", heads=3, lengths=(0, 0, 37, 0, 1, 130, 0)),
    KdaWorkload("odd pieces", heads=5, lengths=(5000,)),
    KdaWorkload("across sequences", heads=7, lengths=(3000, 77, 1500)),
    KdaWorkload("many segments", heads=1, lengths=(4096,)),
    KdaWorkload("no state", heads=2, lengths=(100, 0, 900), initial_state=False),
    KdaWorkload("full", heads=24, lengths=(2000,)),
)


@pytest.mark.parametrize(("frame", "builders"), [("middle", 3), ("middle", 2), ("boundary", 2)])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name.replace(" ", "-"))
def test_exact_segments_are_right_and_the_same_in_every_run(
    frame: str, builders: int, workload: KdaWorkload
) -> None:
    schedule = launch.LoadedSchedule(FusedConfig(frame, builders))
    for regime in REGIMES:
        inputs = OPERATION.generate(workload, OPERATION.regimes[regime], seed=1, device="cuda")
        call = schedule.bind(inputs, OPERATION.outputs(inputs))
        first = {name: x.clone() for name, x in call().items()}
        again = call()
        assert all(torch.equal(x, again[name]) for name, x in first.items()), regime
        want = OPERATION.fast_oracle(inputs)
        errors = OPERATION.compare(first, want, workload, OPERATION.regimes[regime])
        assert [e for e in errors if not e.within] == [], regime
