"""Ways in which others were fooled, each with a fake candidate that does just that.

Ids are those of the field cases: B1 to B15.  B11 and the ranking half of B12
are kept by the leaderboard's tests, and what needs a real GPU is in
``test_device_gpu``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import device_fakes as fakes
import pytest
from device_jobs import LIMITS, schedule, start, through

from factory.device import DeviceJob, Handle
from factory.device.simulated import SimulatedDevice
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import Clock, JobStatus, StageStatus


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceJob]:
    with start(tmp_path_factory.mktemp("logs")) as opened:
        yield opened


GATED = {
    "B3 zeroes_v": ("rejected", "input changed: v"),
    "B3 changes_input": ("rejected", "input changed: v"),
    "B5 empty": ("rejected", "o "),
    "B5 unwritten": ("rejected", "non-finite or unwritten"),
    "B5 last_row": ("rejected", "o has 8 non-finite or unwritten elements"),
    "B6 nan": ("rejected", "total has 1 non-finite or unwritten elements"),
    "B7 raises": ("crashed", "RuntimeError: CUDA error: an illegal memory access"),
    "B7 aborts": ("crashed", "SIGABRT"),
    "B7 exits": ("crashed", "exit code 3"),
    "B7 quits": ("crashed", "SystemExit"),
    "B7 hoards": ("crashed", "host memory above its limit of 0.6 GiB"),
    "B12 wrong_on_the_largest": ("rejected", "128: o is off by max 1.00e-02"),
    "B15 overwrites_initial": ("rejected", "input changed: initial"),
    "wrong": ("rejected", "o is off by max 1.00e-02"),
    "flickers": ("rejected", "two runs on equal inputs differ in o"),
    "flickers_when_busy": ("rejected", "differ in o when another stream is busy"),
    "ignores_scale": ("rejected", "production scale doubled: o is off by"),
    "looks_ahead": ("rejected", "production causality of g: o[0:8] changed"),
    "claims_bitwise_causality": ("rejected", "claims bitwise causality, but earlier rows moved"),
    "other_dtype": ("rejected", "returns o as float64, expected float32"),
    "other_shape": ("rejected", "returns total as (4,), expected (8,)"),
    "elsewhere": ("rejected", "returns o on meta, expected cpu"),
    "sparse": ("crashed", "result: "),
    "lazy": ("rejected", "returns _Lazy, expected a dict"),
    "lazy_name": ("rejected", "names an output by _LazyName, expected str"),
    "lazy_tensor": ("rejected", "returns o as _LazyTensor, expected torch.Tensor itself"),
    "lazy_method": ("rejected", "non-finite or unwritten"),
    "lazy_stride": ("rejected", "non-finite or unwritten"),
    "lazy_import": ("rejected", "non-finite or unwritten"),
    "nameless": ("rejected", "kernel identity: it declares no kernel names"),
    "build_error": ("infeasible", "does not compile: 240 registers"),
}


@pytest.fixture(scope="module")
def verdicts(job: DeviceJob) -> dict[str, StageResult]:
    """All of :data:`GATED` through the gate of one job, two prepared ahead."""
    results: dict[str, StageResult] = {}
    waiting: deque[tuple[str, Handle]] = deque()
    for case in [*GATED, None, None]:
        if case is not None:
            kind = case.split()[-1]
            job._limits = replace(LIMITS, host_bytes=600 << 20) if kind == "hoards" else LIMITS
            waiting.append((case, job.prepare(schedule(kind))))
            job._limits = LIMITS
        if len(waiting) > 2 or case is None:
            name, handle = waiting.popleft()
            results[name] = job.gate(handle)
            job.release(handle)
    return results


@pytest.mark.parametrize("case", GATED)
def test_the_gate_says_what_is_wrong(verdicts: dict[str, StageResult], case: str) -> None:
    status, words = GATED[case]
    result = verdicts[case]
    assert (result.status.value, result.score_us) == (status, None)
    assert words in result.reason
    assert "\n" not in result.reason


TIMED = {
    "B1 library": "kernel identity: launched 'library_gemm', undeclared",
    "B1 oracle": "kernel identity: a timed call launched nothing",
    "B2 replays": "outputs of timed calls are wrong",
    "B2 in_bind": "outputs of timed calls are wrong",
    "B2 keeps_its_first": "outputs of timed calls are wrong",
    "B4 instant": "is below the",
    "B12 instant_on_the_largest": "production 128: 0.00 us is below the",
    "remembers_its_last": "pipelined: 0.00 us is below the",
    "lazy": "returns _Lazy, expected a dict",
    "lazy_once": "returns _Lazy, expected a dict",
    "B15 overwrites_when_timed": "input changed: initial",
}
GATE_CATCHES = ("replays", "remembers_its_last", "lazy", "lazy_once")
"""Some because its probes share addresses."""


@pytest.mark.parametrize("case", TIMED)
def test_a_cheat_that_passes_the_gate_gets_no_time(job: DeviceJob, case: str) -> None:
    kind = case.split()[-1]
    handle = job.prepare(schedule(kind))
    if kind not in GATE_CATCHES:
        assert job.gate(handle).status is StageStatus.PASSED
    result = job.time(handle)
    job.release(handle)
    assert (result.status, result.measurements) == (StageStatus.REJECTED, ())
    assert TIMED[case] in result.reason


def test_b1_the_names_of_launched_kernels_stand_with_each_time(job: DeviceJob) -> None:
    result = through(job, "good", "gate", "time")
    gpu = [m for m in result.measurements if m.clock is Clock.GPU]
    assert {m.kernels for m in gpu} == {("fake_main",)}
    assert result.details["launches"]["production"]["16"] == {"fake_main": 39}


def test_b4_a_forged_clock_changes_nothing(job: DeviceJob) -> None:
    result = through(job, "forges_clock", "gate", "time")
    assert result.status is StageStatus.PASSED, result.reason
    assert result.score_us == pytest.approx(10.6, abs=0.1)


def test_b4_a_child_cannot_have_measured_more_than_passed(tmp_path: Path) -> None:
    with start(tmp_path, device=SimulatedDevice(real_time=True)) as job:
        result = through(job, "takes_a_second", "time")
    assert result.status is StageStatus.REJECTED
    assert "its process says that" in result.reason
    assert result.measurements == ()


def test_b7_a_crash_harms_no_neighbour(job: DeviceJob) -> None:
    good, bad, twin = (job.prepare(schedule(k)) for k in ("good", "aborts", "twin"))
    first = job.gate(good)
    assert job.gate(bad).status is StageStatus.CRASHED
    second = job.gate(twin)
    times = [job.time(h).score_us for h in (good, twin)]
    for handle in (good, bad, twin):
        job.release(handle)
    assert first.status is second.status is StageStatus.PASSED
    assert first.errors == second.errors
    assert times[0] == pytest.approx(times[1], rel=0.01)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("spins", "no answer within 2 s"), ("spins_loading", "did not load within 2 s")],
)
def test_b8_a_hang_is_ended_within_its_limit(tmp_path: Path, kind: str, words: str) -> None:
    with start(tmp_path) as job:
        job._limits = replace(LIMITS, gate_s=2, load_s=2 if kind == "spins_loading" else 120)
        handle = job.prepare(schedule(kind))
        if kind == "spins":
            handle.child.ready()
        result = job.gate(handle)  # comes back: both would go on until they are ended
        assert result.status is StageStatus.TIMEOUT
        assert words in result.reason
        assert not handle.child.alive
        with pytest.raises(ProcessLookupError):
            os.killpg(handle.child.pid, 0)
        job._limits = LIMITS
        assert through(job, "good").status is StageStatus.PASSED


def test_b9_kinds_of_time_are_records_of_their_own(job: DeviceJob) -> None:
    result = through(job, "fifty", "gate", "time")
    kinds = {
        m.clock: (m.method, m.median_us)
        for m in result.measurements
        if (m.workload, m.regime, m.cache) == ("16", "production", "warm")
    }
    assert kinds[Clock.GPU] == ("simulated", pytest.approx(50.0, rel=0.05))
    assert kinds[Clock.PER_CALL] == ("perf_counter", pytest.approx(52.2, abs=0.1))
    assert kinds[Clock.PIPELINED][0] == "perf_counter"


def test_b9_without_a_profiler_there_is_an_error_and_no_other_kind(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="CUPTI is missing"):
        start(tmp_path, device=fakes.WithoutProfiler())


def test_b10_the_flush_is_outside_the_window_and_the_policy_in_the_row(job: DeviceJob) -> None:
    result = through(job, "fifty", "gate", "time")
    gpu = [m for m in result.measurements if m.clock is Clock.GPU and m.regime == "production"]
    assert {m.cache for m in gpu} == {"warm", "cold"}
    assert {m.kernels for m in gpu} == {("fake_main",)}  # the flush takes 40 us under its own name
    assert all(m.median_us == pytest.approx(50.5, abs=1.0) for m in gpu)


def test_b13_an_oracle_out_of_memory_is_the_harness(tmp_path: Path) -> None:
    with start(tmp_path, operation=fakes.BrokenOracle()) as job:
        handle = job.prepare(schedule("good"))
        with pytest.raises(HarnessError, match="out of memory in the oracle"):
            job.gate(handle)


def test_b14_a_replaced_process_is_handed_what_it_needs_anew(tmp_path: Path) -> None:
    with start(tmp_path) as job:
        assert through(job, "good").status is StageStatus.PASSED
        assert through(job, "aborts").status is StageStatus.CRASHED
        after = through(job, "good", "gate", "time")
        assert after.status is StageStatus.PASSED, after.reason
        assert through(job, "wrong").status is StageStatus.REJECTED
    assert job.record.status is JobStatus.VALID


def test_b15_a_call_without_the_optional_tensor_is_asked_of_finalists(job: DeviceJob) -> None:
    for kind, status in (("good", StageStatus.PASSED), ("ignores_none", StageStatus.REJECTED)):
        handle = job.prepare(schedule(kind))
        assert job.gate(handle).status is StageStatus.PASSED
        result = job.gate(handle, thorough=True)
        job.release(handle)
        assert result.status is status
    assert "production no initial: o is off by" in result.reason


def test_ten_names_for_one_kernel_are_a_ten_way_tie(tmp_path: Path) -> None:
    names = [schedule(k) for k in fakes.NAMES]
    with start(tmp_path) as job:
        finals = job.finals([*names, schedule("better"), schedule("twin")], rounds=2)
    assert set(finals.groups[0]) == {schedule("better")}
    assert set(finals.groups[1]) == {*names, schedule("twin")}
    assert [s for group in finals.groups for s in group] == list(finals.order)
