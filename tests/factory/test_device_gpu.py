"""The real device: shared memory, kernel times, faults and hangs on an sm90 GPU.

Ids B1 to B15 are those of the field cases.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import device_fakes as fakes
import device_gpu_fakes as kernels
import pytest

from candidates import Schedule
from factory.device import DeviceJob, Limits, open_job
from factory.device.protocol import Sampling
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import Clock, StageStatus

pytestmark = pytest.mark.gpu

LIMITS = Limits(load_s=120, gate_s=10, time_s=30, arena_bytes=1 << 30, answer_bytes=1 << 30)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceJob]:
    with open_job(
        fakes.OPERATION,
        kernels.FAMILY,
        seed=1,
        limits=LIMITS,
        log_dir=tmp_path_factory.mktemp("logs"),
        baselines=(),
    ) as opened:
        yield opened


def schedule(kind: str) -> Schedule:
    return kernels.FAMILY.schedule({"kind": kind})


def through(job: DeviceJob, kind: str, *stages: str) -> StageResult:
    handle = job.prepare(schedule(kind))
    try:
        for stage in stages or ("gate",):
            result: StageResult = getattr(job, stage)(handle)
            if result.status is not StageStatus.PASSED:
                break
        return result
    finally:
        job.release(handle)


def test_the_fingerprint_names_machine_and_toolchain(job: DeviceJob) -> None:
    values = job.fingerprint.values
    assert job.record.gpu == values["gpu"]
    wanted = ("gpu_uuid", "sku", "driver", "cuda", "torch", "python", "operation_version", "source")
    assert all(values[name] for name in wanted)
    assert values["max_sm_mhz"] > 1000
    assert isinstance(values["ecc"], bool)


def test_the_clock_of_the_gpu_is_read_during_a_timing(job: DeviceJob) -> None:
    details = through(job, "good", "time").details["clock"]["production"]
    assert details["sm_share"] is None or 0.1 < details["sm_share"] < 1.2


def test_a_right_kernel_passes_and_gets_its_times(job: DeviceJob) -> None:
    result = through(job, "good", "gate", "screen", "time")
    assert result.status is StageStatus.PASSED, result.reason
    assert result.details["kernels"]["production"] == ["fake_main"]
    medians = {
        m.clock: m.median_us
        for m in result.measurements
        if (m.workload, m.regime, m.cache) == ("16", "production", "warm")
    }
    assert medians[Clock.GPU] < medians[Clock.PIPELINED] < medians[Clock.PER_CALL]
    assert {m.method for m in result.measurements if m.clock is Clock.GPU} == {"cupti busy"}


def test_b9_a_50_us_kernel_reads_50_us(job: DeviceJob) -> None:
    result = through(job, "sleeps", "gate", "time")
    assert result.status is StageStatus.PASSED, result.reason
    gpu = [m for m in result.measurements if m.clock is Clock.GPU and m.workload == "16"]
    assert all(m.median_us == pytest.approx(50, rel=0.05) for m in gpu), gpu
    pipelined = [m for m in result.measurements if m.clock is Clock.PIPELINED]
    assert all(m.median_us > 50 for m in pipelined)


def test_b10_the_cache_flush_stays_outside_the_window(job: DeviceJob) -> None:
    handle = job.prepare(schedule("sleeps"))
    regime = fakes.OPERATION.regimes["production"]
    names = handle.child.ready()["kernel_names"]
    timed = job._timer.take(
        handle.child,
        regime,
        [fakes.OPERATION.workloads["16"]],
        Sampling(gpu=9, flush=True),
        declared=names,
        limit_s=20,
        stage="time",
    )
    job.release(handle)
    assert timed.wrong == ""
    assert timed.kernels["16"] == ("fake_main",)
    assert max(timed.samples["16"][Clock.GPU]) < 60


def test_b7_b14_an_illegal_address_harms_no_neighbour(job: DeviceJob) -> None:
    good, bad, twin = (job.prepare(schedule(k)) for k in ("good", "faults", "twin"))
    first, fault, second = job.gate(good), job.gate(bad), job.gate(twin)
    scores = [job.time(h).score_us or 0.0 for h in (good, twin)]
    for handle in (good, bad, twin):
        job.release(handle)
    assert fault.status is StageStatus.CRASHED
    assert "illegal memory access" in fault.reason
    assert first.status is second.status is StageStatus.PASSED
    assert first.errors == second.errors
    assert scores[0] == pytest.approx(scores[1], rel=0.05)


def test_b8_a_hang_on_the_gpu_is_ended_and_leaves_nothing(job: DeviceJob) -> None:
    through(job, "good")
    before = job._device.free_bytes()
    begin = time.monotonic()
    handle = job.prepare(schedule("hangs"))
    result = job.gate(handle)
    took = time.monotonic() - begin
    assert result.status is StageStatus.TIMEOUT, result.reason
    assert took < LIMITS.load_s + LIMITS.gate_s + 10
    assert not Path(f"/proc/{handle.child.pid}").exists()
    job.release(handle)
    assert through(job, "good").status is StageStatus.PASSED
    assert job._device.free_bytes() > before - (64 << 20)


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        pytest.param("zeroes_v", "rejected", "input changed: v", id="B3 zeroes_v"),
        pytest.param("last_row", "rejected", "o has 8 non-finite or unwritten", id="B5 last_row"),
        pytest.param("empty", "rejected", "non-finite or unwritten", id="B5 empty"),
        pytest.param("nan", "rejected", "total has 1 non-finite", id="B6 nan"),
        pytest.param("greedy", "crashed", "out of memory", id="B7 greedy"),
        pytest.param("overwrites_initial", "rejected", "input changed: initial", id="B15"),
    ],
)
def test_the_gate_says_what_is_wrong(job: DeviceJob, kind: str, status: str, words: str) -> None:
    result = through(job, kind)
    assert (result.status.value, result.score_us) == (status, None)
    assert words in result.reason


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("library", "kernel identity: launched", id="B1 library"),
        pytest.param("oracle", "kernel identity: launched", id="B1 oracle"),
        pytest.param("replays", "outputs of timed calls are wrong", id="B2 replays"),
    ],
)
def test_a_cheat_that_passes_the_gate_gets_no_time(job: DeviceJob, kind: str, words: str) -> None:
    # The gate catches replays too: its probes share addresses.
    result = through(job, kind, *(("time",) if kind == "replays" else ("gate", "time")))
    assert result.status is StageStatus.REJECTED
    assert words in result.reason


def test_b4_a_forged_clock_changes_nothing(job: DeviceJob) -> None:
    honest, forged = (through(job, k, "gate", "time") for k in ("good", "forges_clock"))
    assert forged.status is StageStatus.PASSED, forged.reason
    assert forged.score_us == pytest.approx(honest.score_us, rel=0.1)
    host = [m.median_us for m in forged.measurements if m.clock is Clock.PER_CALL]
    assert min(host) > 1.0


def test_b13_an_oracle_out_of_memory_is_the_harness(tmp_path: Path) -> None:
    with open_job(
        fakes.BrokenOracle(),
        kernels.FAMILY,
        seed=1,
        limits=LIMITS,
        log_dir=tmp_path,
        baselines=(),
    ) as job:
        handle = job.prepare(schedule("good"))
        with pytest.raises(HarnessError, match="out of memory in the oracle"):
            job.gate(handle)


def test_ten_names_for_one_kernel_are_a_ten_way_tie(job: DeviceJob) -> None:
    finals = job.finals([schedule(name) for name in kernels.NAMES], rounds=3)
    assert [len(group) for group in finals.groups] == [10], {
        s.key: finals.results[s].score_us for s in finals.order
    }
