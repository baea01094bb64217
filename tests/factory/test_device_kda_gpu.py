"""KDA prefill in a job on a real GPU: the gate is quick enough to be asked of every candidate."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import candidates
import operations
from factory.device import open_job
from leaderboard.records import Clock, StageStatus

pytestmark = pytest.mark.gpu


def test_gate_and_times_of_one_schedule_take_seconds(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    operation, family = operations.get("kda_prefill"), candidates.get("kda_prefill")
    schedule = next(
        s for s in family.offered("kda_prefill") if s.get("bt") == 32 and s.get("segments") == 1
    )
    with open_job(operation, family, seed=3, log_dir=tmp_path, baselines=()) as job:
        first, again = job.prepare(schedule), job.prepare(schedule)
        for stage in (job.gate, job.screen, job.time):  # draws the inputs, once a job
            assert stage(first).status is StageStatus.PASSED
        again.child.ready()
        seconds = {}
        for stage in (job.gate, job.screen, job.time):
            start = time.perf_counter()
            assert stage(again).status is StageStatus.PASSED
            seconds[stage.__name__] = time.perf_counter() - start
        start = time.perf_counter()
        thorough = job.gate(again, thorough=True)
        seconds["thorough gate"] = time.perf_counter() - start
        assert thorough.status is StageStatus.PASSED, thorough.reason
        assert thorough.details["probes"]["production"]["asked"] == 11
    assert seconds["gate"] < 20
    assert seconds["thorough gate"] < 20
    assert seconds["time"] < 10


@pytest.mark.soak
def test_a_controls_median_repeats_within_one_percent_over_ten_jobs(tmp_path: Path) -> None:
    operation, family = operations.get("kda_prefill"), candidates.get("kda_prefill")
    present = [b for b in candidates.baselines("kda_prefill") if b.missing() is None]
    named = [b for b in present if b.name in ("flashkda", "cudnn_fused", "fla")] or present
    assert named, "no baseline can run here"
    medians = []
    for number in range(10):
        with open_job(
            operation,
            family,
            seed=number,
            log_dir=tmp_path,
            baselines=named[:1],
            workloads=("2048/12/1",),
            regimes=("production",),
        ) as job:
            (reading,) = (
                m.median_us
                for m in job.controls("before")
                if m.clock is Clock.GPU and m.cache == "warm"
            )
            medians.append(reading)
    assert max(medians) / min(medians) < 1.01, medians
