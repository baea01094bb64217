"""A job on the simulated device: every way to be wrong, broken or dishonest has its verdict."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import device_fakes as fakes
import pytest
import torch
from device_jobs import LIMITS, schedule, start, through
from waiting import HANG_S, until

from factory.cli import _run
from factory.device import DeviceJob, process
from factory.machine import Gpu
from factory.stages.base import HarnessError
from leaderboard import open_store
from leaderboard.records import Clock, JobStatus, StageStatus, TrialStatus

STEADY = (fakes.FakeBaseline(),)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceJob]:
    with start(tmp_path_factory.mktemp("logs")) as opened:
        yield opened


def test_a_right_candidate_passes_and_gets_its_times(job: DeviceJob) -> None:
    handle = job.prepare(schedule("good"))
    gate = job.gate(handle)
    assert gate.status is StageStatus.PASSED, gate.reason
    assert {e.regime for e in gate.errors} == {"production", "steep", "gentle", "slow", "beyond"}
    assert {e.workload for e in gate.errors} == {"16", "33", "64", "128"}
    assert all(e.within and e.finite for e in gate.errors)
    assert job.screen(handle).status is StageStatus.PASSED
    timed = job.time(handle)
    job.release(handle)
    assert timed.status is StageStatus.PASSED, timed.reason
    taken = {(m.workload, m.regime, m.clock, m.cache) for m in timed.measurements}
    production = {
        (w, "production", c, "warm")
        for w in ("16", "33", "64", "128")
        for c in (Clock.GPU, Clock.PER_CALL, Clock.PIPELINED)
    }
    cold = {(w, "production", Clock.GPU, "cold") for w in ("16", "33", "64", "128")}
    slow = {(w, "slow", Clock.GPU, "warm") for w in ("16", "33", "64", "128")}
    assert taken == production | cold | slow
    by_workload = {m.workload: m for m in timed.measurements if m.clock is Clock.GPU}
    assert by_workload["128"].median_us == pytest.approx(11.28)
    assert by_workload["128"].kernels == ("fake_main",)
    assert by_workload["128"].method == "simulated"
    # One call pays the launch (2 us) and the kernel; a burst overlaps them.
    host = {m.clock: m.median_us for m in timed.measurements if m.workload == "16"}
    assert host[Clock.PER_CALL] == pytest.approx(12.16, abs=0.01)
    assert 10.16 <= host[Clock.PIPELINED] < 10.4
    expected = (10.16 * 10.33 * 10.64 * 11.28) ** 0.25
    assert timed.score_us == pytest.approx(expected)
    assert timed.slow_us == pytest.approx(expected)


def test_results_in_memory_of_its_own_are_taken_over(job: DeviceJob) -> None:
    assert through(job, "other_memory").status is StageStatus.PASSED
    assert through(job, "other_strides").status is StageStatus.PASSED


def test_the_first_breach_of_the_sweep_is_reported(job: DeviceJob) -> None:
    result = through(job, "wrong_when_steep")
    assert result.status is StageStatus.REJECTED
    assert result.details["first_breach"] == "steep"
    assert result.reason.startswith("first breach at a bound of -5: steep 16: o is off by max")
    steps = [(s["regime"], s["severity"], s["breached"]) for s in result.details["sweep"]]
    assert steps == [("gentle", -1.0, False), ("steep", -5.0, True)]
    assert result.details["sweep"][1]["max_rel"]["o"] == pytest.approx(1.0, rel=0.5)
    assert [e.within for e in result.errors if e.regime == "gentle"] == [True] * 8


def test_regimes_past_the_declared_bound_are_recorded_and_not_run(job: DeviceJob) -> None:
    result = through(job, "narrow")
    assert result.status is StageStatus.PASSED, result.reason
    outside = [e for e in result.errors if e.out_of_contract]
    assert [(e.regime, e.max_rel) for e in outside] == [("beyond", None)]


def test_a_bound_above_production_is_no_candidate(job: DeviceJob) -> None:
    result = through(job, "narrower")
    assert result.status is StageStatus.REJECTED
    assert "production is out of its contract" in result.reason


def test_time_at_slow_gates_stands_beside_production(job: DeviceJob) -> None:
    result = through(job, "depends_on_data", "gate", "time")
    assert result.score_us == pytest.approx(10.6, abs=0.1)
    assert result.slow_us == pytest.approx(110.6, abs=0.1)


def test_the_screen_ends_hopeless_candidates(job: DeviceJob) -> None:
    through(job, "good", "gate", "time")
    result = through(job, "hopeless", "gate", "screen")
    assert result.status is StageStatus.SLOW
    assert "times the best so far" in result.reason
    assert result.score_us is None


def test_a_time_that_does_not_count_screens_nobody(tmp_path: Path) -> None:
    with start(tmp_path) as job:
        rejected = through(job, "fast_and_wrong_when_slow", "time")
        assert rejected.status is StageStatus.REJECTED
        assert "slow 16: o is off by" in rejected.reason
        screened = through(job, "good", "screen")
        assert screened.status is StageStatus.PASSED, screened.reason


def test_a_verdict_is_final_for_its_handle(job: DeviceJob) -> None:
    handle = job.prepare(schedule("exits"))
    first = job.gate(handle)
    assert job.time(handle) is first
    job.release(handle)


def test_a_toolchain_that_fails_the_smoke_kernel_is_named_with_its_versions(
    tmp_path: Path,
) -> None:
    said = "the smoke kernel failed on simulated: .*unsupported PTX .version 9.1"
    with pytest.raises(HarnessError, match=said) as caught:
        start(tmp_path, device=fakes.WithOldToolchain())
    versions = str(caught.value).rpartition("; ")[2]
    python = ".".join(map(str, sys.version_info[:3]))
    assert versions.startswith(f"driver 470.1, cuda 11.4, torch {torch.__version__}")
    assert versions.endswith(f"python {python}")


def test_a_launch_stops_where_the_smoke_kernel_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    gpu = Gpu(0, "simulated", "u", "470.1", "9.0")
    monkeypatch.setattr("factory.plan.sm90_gpus", lambda: (gpu,))
    monkeypatch.setattr("factory.device.cuda.CudaDevice.find", fakes.WithOldToolchain)
    code = _run(["launch", "toy_scale", "--clock", "gpu", "--db", "sqlite:///factory.db"])
    said = capsys.readouterr().err
    assert code == 3, said
    assert "the smoke kernel failed on simulated" in said
    assert "driver 470.1, cuda 11.4" in said
    with open_store("sqlite:///factory.db", read_only=True) as store:
        (campaign,) = store.list_campaigns()
        statuses = {t.status for t in store.list_trials(campaign.id)}
    # What a CPU stage may have ended before the GPU was asked has its verdict, and nothing else.
    assert not statuses & {TrialStatus.PASSED, TrialStatus.CRASHED, TrialStatus.TIMEOUT}


def test_a_toolchain_fault_is_no_verdict(job: DeviceJob) -> None:
    handle = job.prepare(schedule("toolchain_error"))
    with pytest.raises(HarnessError, match="fake-dsl"):
        job.gate(handle)
    job.release(handle)


def test_loading_processes_stand_still_during_a_timing(job: DeviceJob) -> None:
    handle = job.prepare(schedule("good"))
    state = Path(f"/proc/{handle.child.pid}/stat")
    with job._alone():
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "its stop")
    assert job.gate(handle).status is StageStatus.PASSED
    job.release(handle)


def test_the_time_that_loading_takes_is_not_the_gates(
    job: DeviceJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = job.prepare(schedule("good"))

    class Clock:
        """Stands at 0 while the candidate loads, which is past the limit of the gate then."""

        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return 0.0 if handle.child._ready is None else 10 * LIMITS.gate_s

    monkeypatch.setattr(process, "time", Clock)
    result = job.gate(handle)
    job.release(handle)
    assert result.status is StageStatus.PASSED, result.reason


def test_a_loaded_candidate_may_wait_past_the_load_limit(job: DeviceJob, tmp_path: Path) -> None:
    handle = job.prepare(schedule("good"), log_path=tmp_path / "trial.log")
    assert select.select([handle.child._link], [], [], HANG_S)[0], "answered, not heard"
    handle.child._expire()
    assert job.gate(handle).status is StageStatus.PASSED
    job.release(handle)
    assert handle.log_path == tmp_path / "trial.log"
    assert handle.log_path.exists()


def test_finalists_are_timed_in_turns_and_meet_held_out_workloads(tmp_path: Path) -> None:
    kinds = ("good", "better", "wrong")
    with start(tmp_path, baselines=STEADY) as job:
        finals = job.finals([schedule(k) for k in kinds], rounds=2)
    assert finals.order == (schedule("better"), schedule("good"))
    assert finals.results[schedule("wrong")].status is StageStatus.REJECTED
    best = finals.results[schedule("better")]
    assert {m.phase for m in best.measurements} == {"final"}
    assert {m.workload for m in best.measurements if m.held_out} == {"1", "77"}
    assert {e.workload for e in best.errors} == {"1", "77"}
    pooled = next(m for m in best.measurements if m.workload == "16" and m.regime == "production")
    assert len(pooled.samples_us) == 30
    assert best.score_us == pytest.approx(8.6, abs=0.1)
    assert {m.control for m in finals.controls} == {"steady"}


def test_samples_of_a_throttled_device_are_taken_again(tmp_path: Path) -> None:
    with start(tmp_path) as job:
        hot = through(job, "runs_hot", "time")
        assert hot.status is StageStatus.PASSED, hot.reason
        assert hot.details["clock"]["production"]["thrown_away"] > 0
        assert hot.details["clock"]["production"]["sm_share"] == 0.5
        gpu = [m for m in hot.measurements if m.clock is Clock.GPU]
        assert max(s for m in gpu for s in m.samples_us) < 12.0
    assert job.record.status is JobStatus.VALID


def test_a_device_that_stays_throttled_voids_the_job(tmp_path: Path) -> None:
    with start(tmp_path, limits=replace(LIMITS, clock_share=0.9)) as job:
        assert through(job, "stays_hot", "time").status is StageStatus.PASSED
    assert job.record.status is JobStatus.VOID
    assert "throttled: the SM clock stayed below 90% of its maximum" in job.record.note
    assert job.record.details["throttled"][0] == "production 16"


def test_a_job_tells_its_seed_and_the_errors_of_its_controls(tmp_path: Path) -> None:
    with start(tmp_path, seed=12, baselines=STEADY) as job:
        handle = job.prepare(schedule("good"))
        gate = job.gate(handle)
        assert job.time(handle).status is StageStatus.PASSED
        job.release(handle)
        job.controls()
    assert job.record.seed == 12
    beside = {
        (e["regime"], e["workload"], e["tensor"], e["seed"])
        for e in job.record.details["control_errors"]["steady"]
    }
    mine = {(e.regime, e.workload, e.tensor, e.seed) for e in gate.errors}
    assert beside == {m for m in mine if m[0] in ("production", "slow")}


def test_without_a_seed_each_job_draws_fresh_inputs(tmp_path: Path) -> None:
    seeds = []
    for _ in range(2):
        with start(tmp_path, seed=None) as job:
            seeds.append(job.record.seed)
    assert None not in seeds
    assert seeds[0] != seeds[1]


def test_the_same_seed_draws_the_same_inputs_again(tmp_path: Path) -> None:
    found = []
    for seed in (5, 5, 6):
        with start(tmp_path, seed=seed) as job:
            found.append(through(job, "good").errors)
    assert found[0] == found[1] != found[2]


def test_controls_are_read_before_between_and_after(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    peers = (
        fakes.FakeBaseline(),
        fakes.FakeBaseline("takes_raw", form="raw"),
        fakes.FakeBaseline("absent", absent="absent is not installed; pip install absent"),
        fakes.FakeBaseline("broken", broken=True),
    )
    with start(tmp_path, baselines=peers, on_event=lambda *e: events.append(e)) as job:
        assert through(job, "good", "gate", "time").status is StageStatus.PASSED
        job.controls("between")
        every = job.controls()
    assert job.record.status is JobStatus.VALID, job.record.note
    assert job.record.drift == pytest.approx(0.0, abs=1e-9)
    assert {m.control for m in every} == {"steady", "takes_raw"}
    assert {m.phase for m in every} == {"before", "between", "after"}
    assert {m.input_form for m in every if m.control == "takes_raw"} == {"raw"}
    assert {m.regime for m in every if m.control == "takes_raw"} == {"production"}
    assert {m.regime for m in every if m.control == "steady"} == {"production", "slow"}
    lines = [line for kind, line in events if kind == "control"]
    assert any(line.startswith("absent: absent is not installed") for line in lines)
    assert any(line.startswith("broken is left out: ") and "SIGABRT" in line for line in lines)


def test_a_control_that_keeps_what_it_makes_of_few_inputs_is_timed_without_making_it(
    tmp_path: Path,
) -> None:
    # Four workloads have three input sets each; of four sets it keeps what it made.
    with start(tmp_path, baselines=(fakes.FakeBaseline(keeps=4),)) as job:
        every = job.controls("before")
    assert job.record.details["left_out"] == {}
    assert {m.workload for m in every} == {"16", "33", "64", "128"}
    assert {m.kernels for m in every if m.clock is Clock.GPU} == {("control_main",)}
    per_call = {m.workload: set(m.samples_us) for m in every if m.clock is Clock.PER_CALL}
    assert {w: len(seen) for w, seen in per_call.items()} == dict.fromkeys(per_call, 1)


def test_a_control_that_tunes_itself_at_first_gets_all_its_samples(tmp_path: Path) -> None:
    with start(tmp_path, baselines=(fakes.FakeBaseline(tunes_us=3e6),)) as job:
        first = job.controls("before")
        job.controls("after")
    assert {len(m.samples_us) for m in first if m.clock is Clock.GPU} == {30, 9}
    cold = {m.workload for m in first if m.cache == "cold" and m.clock is Clock.GPU}
    assert cold == {"16", "33", "64", "128"}
    assert {len(m.samples_us) for m in first if m.clock is Clock.PER_CALL} == {12}
    assert {m.kernels for m in first if m.clock is Clock.GPU} == {("control_main",)}
    assert job.record.drift == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("more", "phases"), [({"tunes_us": 3e6}, {"before", "between"}),
                                              ({"us": 3e5}, {"before"})])  # fmt: skip
def test_a_control_is_slow_by_its_samples_and_not_by_its_first_calls(
    tmp_path: Path, more: dict[str, float], phases: set[str]
) -> None:
    peer = fakes.FakeBaseline(**more)
    with start(tmp_path, baselines=(peer,), regimes=("production",)) as job:
        found = (*job.controls("before"), *job.controls("between"))
    assert {m.phase for m in found} == phases


def test_a_candidate_is_timed_without_what_it_does_at_its_first_call(tmp_path: Path) -> None:
    with start(tmp_path) as job:
        timed = through(job, "uploads_at_first", "time")
    assert timed.status is StageStatus.PASSED, timed.reason
    assert {m.kernels for m in timed.measurements if m.clock is Clock.GPU} == {("fake_main",)}


def test_an_inexact_control_keeps_its_time_and_is_flagged(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    peers = (
        fakes.FakeBaseline(),
        fakes.FakeBaseline("inexact", factor=1.05),
        fakes.FakeBaseline("nonfinite", factor=float("nan")),
    )
    with start(tmp_path, baselines=peers, on_event=lambda *e: events.append(e)) as job:
        every = (*job.controls("before"), *job.controls("after"))
    assert {m.control for m in every} == {"steady", "inexact"}
    lines = [line for kind, line in events if kind == "control"]
    assert any(
        line.startswith("inexact: production timed, but outputs of timed calls are wrong")
        for line in lines
    )
    assert any(line.startswith("nonfinite is left out: ") for line in lines)
    kept = job.record.details["control_errors"]["inexact"]
    assert not all(e["within"] for e in kept)


def test_a_process_that_does_not_end_keeps_nothing_else_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(tmp_path, baselines=STEADY)
    job.controls("before")
    held, other = (job.prepare(schedule("spins_loading")).child for _ in range(2))
    kill = held.kill

    def survives() -> None:
        raise HarnessError("process 1 survives SIGKILL")

    monkeypatch.setattr(held, "kill", survives)
    control = next(c for c in job._children if c not in (held, other))
    try:
        with pytest.raises(HarnessError, match="survives SIGKILL"):
            job.close()
        assert not other.alive
        assert not control.alive
        assert not job._arena._open
        assert job.record.status is JobStatus.VOID
        assert "process 1 survives SIGKILL" in job.record.note
        assert job.close() is job.record
    finally:
        kill()


def test_a_drifting_control_voids_the_job(tmp_path: Path) -> None:
    with start(tmp_path, baselines=(fakes.FakeBaseline(us=20, later_us=21),)) as job:
        job.controls("before")
        job.controls("after")
    assert job.record.status is JobStatus.VOID
    assert job.record.drift == pytest.approx(0.05, abs=0.01)
    assert "drifted by" in job.record.note


def test_a_job_cut_short_is_void(tmp_path: Path) -> None:
    job = start(tmp_path)
    waiting = job.prepare(schedule("spins_loading"))

    def interrupted() -> None:
        with job:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert job.record.status is JobStatus.VOID
    assert "cut short: KeyboardInterrupt" in job.record.note
    assert not waiting.child.alive


def test_children_die_with_a_killed_job(tmp_path: Path) -> None:
    code = (
        "import select, time, device_fakes as f\n"
        "from factory.device import open_job\n"
        "from factory.device.simulated import SimulatedDevice\n"
        f"j = open_job(f.OPERATION, f.FAMILY, seed=1, log_dir={str(tmp_path)!r},"
        " baselines=(), device=SimulatedDevice())\n"
        "h = j.prepare(f.FAMILY.schedule({'kind': 'loads_never'}))\n"
        "select.select([h.child._link], [], [])\n"
        "print(h.child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert driver.stdout is not None
    child = int(driver.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    until(lambda: not _runs(child), "the end of a child after that of its job")


def _runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
