"""KDA prefill in a job on a real GPU: the gate is quick, and raw inputs are timed as well."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import candidates
import operations
from factory.bench import bench
from factory.bench_entries import Entry
from factory.bench_rows import rows
from factory.device import open_job
from factory.device.cuda import CudaDevice
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


@pytest.mark.parametrize(
    ("name", "values", "form"),
    [
        ("kda_prefill", {"frame": "middle", "builders": 3, "waves": 1}, "safe_g16_b16_logits_l2"),
        (
            "gdn_prefill",
            {"bt": 32, "rows": 128, "waves": 1, "builders": 3},
            "softplus_g16_b16_logits_l2",
        ),
    ],
)
def test_a_bench_times_ours_on_activated_and_on_raw_inputs(
    tmp_path: Path, name: str, values: dict[str, int | str], form: str
) -> None:
    pytest.importorskip("cutlass")
    operation, family = operations.get(name), candidates.get(name)
    schedule = family.schedule({"form": "fused", **values})
    smallest = min(operation.tuned(), key=operation.floor_bytes).name
    found = bench(
        operation,
        family,
        [Entry(schedule, "named")],
        device=CudaDevice.find(),
        baselines=(),
        log_dir=tmp_path,
        rounds=1,
        workloads=[smallest],
        fed_raw=candidates.fed_raw(name),
    )
    assert [m.reason for m in found.missing] == []
    assert [(c.id, c.input_form, c.inexact) for c in found.contestants] == [
        ("ours", "activated", ()),
        ("ours_raw", "raw", ()),
    ]
    times = {c: [r for r in rows(found) if r.contestant == c] for c in ("ours", "ours_raw")}
    cells = {c: {(r.regime, r.clock, r.cache) for r in mine} for c, mine in times.items()}
    assert len(cells["ours"]) == 8
    assert cells["ours_raw"] == cells["ours"]
    for contestant, mine in times.items():
        launched = {k for r in mine if r.clock == "gpu" for k in r.kernels}
        raw = [k for k in launched if form in k]
        assert bool(raw) == (contestant == "ours_raw"), launched


@pytest.mark.soak
def test_a_controls_median_repeats_within_one_percent_over_ten_jobs(tmp_path: Path) -> None:
    operation, family = operations.get("kda_prefill"), candidates.get("kda_prefill")
    present = [b for b in candidates.baselines("kda_prefill") if b.missing() is None]
    # fla last: its autotuner takes a minute.
    liked = ("flashkda", "cudnn_fused", "fla")
    named = [b for name in liked for b in present if b.name == name] or present
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
