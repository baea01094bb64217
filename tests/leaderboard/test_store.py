from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import board
import pytest
import sqlalchemy as sa

from leaderboard import (
    LEASE_SECONDS,
    CampaignRecord,
    CampaignStatus,
    Clock,
    FingerprintRecord,
    HeldError,
    JobStatus,
    StageStatus,
    Store,
    StoreError,
    TrialStatus,
    UnknownError,
    driver_name,
    open_store,
)
from leaderboard._lease import is_stale
from leaderboard.models import TrialRow

PASSED, RUNNING, ABANDONED = TrialStatus.PASSED, TrialStatus.RUNNING, TrialStatus.ABANDONED


# Campaigns


def test_a_campaign_comes_back_as_it_went(store: Store) -> None:
    record = board.campaign("kda-2", minutes=5, slow_regime=None, budget=3)
    assert store.create_campaign(record) == record
    assert store.get_campaign("kda-2") == record
    assert [c.id for c in store.list_campaigns()] == ["kda-1", "kda-2"]


def test_a_campaign_is_found_by_id_by_name_and_as_the_newest(store: Store) -> None:
    store.create_campaign(board.campaign("kda-2", minutes=5))
    store.create_campaign(board.campaign("other-1", name="other", minutes=9))
    assert store.get_campaign("kda-1").id == "kda-1"
    assert store.get_campaign("kda").id == "kda-2"
    assert store.get_campaign().id == "other-1"
    with pytest.raises(UnknownError, match="did you mean 'other'"):
        store.get_campaign("othr")


def test_an_empty_database_says_so(url: str) -> None:
    with open_store(url) as empty, pytest.raises(UnknownError, match="no campaign yet"):
        empty.get_campaign()


def test_a_campaign_id_is_taken_once(store: Store) -> None:
    with pytest.raises(StoreError, match="kda-1 already exists"):
        store.create_campaign(board.campaign(budget=99))
    assert store.get_campaign("kda-1").budget == 10


def test_a_naive_time_is_refused(store: Store) -> None:
    naive = board.campaign("kda-2", created_at=datetime(2026, 11, 30))
    with pytest.raises(StoreError, match="no time zone"):
        store.create_campaign(naive)


def test_status_and_budget_of_a_campaign_change(store: Store) -> None:
    before = store.get_campaign("kda-1")
    after = store.set_campaign_status("kda-1", CampaignStatus.FINISHED, budget=20)
    assert (after.status, after.budget) == (CampaignStatus.FINISHED, 20)
    assert after.updated_at > before.updated_at
    assert store.get_campaign("kda-1") == after


# The lease


def other_store(store: Store) -> Store:
    return open_store(store.name)


def test_a_second_driver_is_told_who_holds_the_campaign(store: Store) -> None:
    held = store.acquire("kda-1")
    assert held.driver == driver_name() == f"{socket.gethostname()}:{os.getpid()}"
    with other_store(store) as second:
        with pytest.raises(HeldError, match=re.escape(f"held by {driver_name()}")) as caught:
            second.acquire("kda-1", f"{socket.gethostname()}:{os.getppid()}")
        assert caught.value.holder == driver_name()
        assert 0 <= caught.value.age_seconds < 60
        store.release("kda-1")
        assert second.acquire("kda-1", "elsewhere:7").driver == "elsewhere:7"


def test_a_reader_sees_one_moment(store: Store, url: str) -> None:
    """An export that saw a trial's times and not the trial could not be imported."""
    with store.reading() as session:
        count = sa.select(sa.func.count()).select_from(TrialRow)
        assert session.scalar(count) == 0
        with open_store(url) as writer:
            board.begin(writer, 0)
        assert session.scalar(count) == 0
    with store.reading() as session:
        assert session.scalar(count) == 1


def test_a_container_is_a_host_of_its_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are not seen from another of the same name, and may have the same numbers."""
    here = driver_name()
    stat = os.stat

    def elsewhere(path: Any, *args: Any, **options: Any) -> Any:
        if path == "/proc/self/ns/pid":
            return SimpleNamespace(st_ino=4026532999)
        return stat(path, *args, **options)

    monkeypatch.setattr("leaderboard._lease.os.stat", elsewhere)
    there = driver_name()
    monkeypatch.undo()
    assert re.fullmatch(
        rf"{re.escape(socket.gethostname())}/\w{{8}}-4026532999:{os.getpid()}", there
    )
    now = datetime.now(UTC)
    dead = f"{there.rpartition(':')[0]}:999999999"
    assert not is_stale(dead, now, now)
    assert is_stale(f"{here.rpartition(':')[0]}:999999999", now, now)


def test_only_the_holder_writes(store: Store) -> None:
    store.acquire("kda-1")
    with other_store(store) as second:
        for write in (
            lambda: board.begin(second, 0),
            lambda: second.set_campaign_status("kda-1", CampaignStatus.FAILED),
            lambda: second.abandon_open_trials("kda-1"),
            lambda: second.open_job(board.job("job-2")),
            lambda: second.heartbeat("kda-1"),
        ):
            with pytest.raises(HeldError):
                write()
        assert second.list_trials("kda-1") == []
        second.create_campaign(board.campaign("kda-2"))  # others are free
        board.begin(second, 0, "kda-2")


class StoppedClock:
    """Stands still until it is told that time has passed."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def step(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock(leaderboard_now: Callable[[StoppedClock], None]) -> StoppedClock:
    """That of the leaderboard."""
    made = StoppedClock()
    leaderboard_now(made)
    return made


def test_a_silent_driver_loses_the_campaign_and_notices(store: Store, clock: StoppedClock) -> None:
    store.acquire("kda-1", "elsewhere:7")
    trial = board.begin(store, 0)
    with other_store(store) as second:
        clock.step(LEASE_SECONDS)
        with pytest.raises(HeldError, match=r"last sign 300 s ago"):
            second.acquire("kda-1")
        clock.step(0.001)
        assert second.acquire("kda-1").driver == driver_name()
        with pytest.raises(HeldError):
            store.finish_trial(trial.id, TrialStatus.CRASHED)
        with pytest.raises(HeldError):
            store.heartbeat("kda-1")
        store.release("kda-1")  # no longer its own to give
        assert second.get_campaign("kda-1").driver == driver_name()


def test_every_write_renews_the_lease(store: Store, clock: StoppedClock) -> None:
    store.acquire("kda-1", "elsewhere:7")
    writes = [lambda: board.begin(store, 0), lambda: store.heartbeat("kda-1")]
    for write in writes:
        clock.step(200)
        write()
        assert store.get_campaign("kda-1").heartbeat_at == clock.now


def test_a_dead_driver_is_followed_at_once(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    name = f"{socket.gethostname()}:{child.pid}"
    store.acquire("kda-1", name)
    child.wait()
    with other_store(store) as second:
        assert second.acquire("kda-1").driver == driver_name()


def test_a_driver_nobody_waited_for_is_dead_too(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    store.acquire("kda-1", f"{socket.gethostname()}:{child.pid}")
    # Waits for its end and leaves it a zombie.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with other_store(store) as second:
        assert second.acquire("kda-1").driver == driver_name()
    child.wait()


# Trials


def test_a_trial_comes_back_with_all_that_was_seen(store: Store) -> None:
    trial = board.begin(store, 0, gate_bound=-math.inf)
    assert (trial.status, trial.attempt, trial.gate_bound) == (RUNNING, 1, -math.inf)
    details = {"kernels": [{"name": "prep", "registers": 128}], "worst": math.inf, "ok": None}
    gate = board.stage("gate", details=details)
    errors = (
        board.error(),
        board.error(max_rel=None, rms_rel=None, finite=False, within=False, regime="beyond"),
        board.error(out_of_contract=True, max_rel=None, rms_rel=None),
    )
    store.record_stage(trial.id, gate, errors)
    times = tuple(board.times("job-1", trial.id, 10.0, 50.0))
    store.record_stage(trial.id, board.stage("time"), measurements=times)
    done = store.finish_trial(
        trial.id, PASSED, clock=Clock.GPU, score_us=10.0, slow_us=50.0, job_id="job-1"
    )
    got = store.get_trial(trial.id)
    assert got.stages == (gate, board.stage("time"))
    assert got.errors == errors
    assert got.measurements == times
    assert got.stage == "time"
    assert (got.method, got.cache) == ("cupti", "warm")
    assert got.model_copy(update={"stages": (), "errors": (), "measurements": ()}) == done
    assert store.get_trial(got.uid) == got == store.load_trials("kda-1")[0]
    assert store.get_trial(str(got.id)) == got


def test_nan_in_details_survives(store: Store) -> None:
    trial = board.begin(store, 0)
    store.record_stage(trial.id, board.stage(details={"stats": {"mean": math.nan}}))
    (stage,) = store.get_trial(trial.id).stages
    assert math.isnan(stage.details["stats"]["mean"])


def test_details_without_a_json_form_are_refused_whole(store: Store) -> None:
    trial = board.begin(store, 0)
    with pytest.raises(StoreError, match="a set has no JSON form"):
        store.record_stage(trial.id, board.stage(details={"x": {1, 2}}), [board.error()])
    got = store.get_trial(trial.id)
    assert (got.stages, got.errors) == ((), ())


def test_trials_come_in_order_of_proposal_and_by_status(store: Store) -> None:
    board.failed(store, 2, TrialStatus.REJECTED, "nan")
    board.modelled(store, 0, 3.0)
    board.begin(store, 1)
    assert [t.number for t in store.list_trials("kda-1")] == [0, 1, 2]
    assert [t.number for t in store.list_trials("kda-1", [PASSED, RUNNING])] == [0, 1]
    assert [len(t.stages) for t in store.load_trials("kda-1", [PASSED])] == [1]


def test_an_unknown_trial_is_named(store: Store) -> None:
    for ref in (99, "99", "feed" * 8, "no such thing"):
        with pytest.raises(UnknownError, match=f"no trial {ref}"):
            store.get_trial(ref)


def test_a_finished_schedule_is_never_recorded_again(store: Store) -> None:
    first = board.failed(store, 0, TrialStatus.REJECTED, "nan")
    with pytest.raises(StoreError, match=f"already rejected as trial {first.id}"):
        board.begin(store, 5, schedule_key=first.schedule_key)
    store.create_campaign(board.campaign("kda-2"))
    board.begin(store, 0, "kda-2", schedule_key=first.schedule_key)  # another campaign may


def test_the_database_itself_refuses_a_schedule_finished_twice(store: Store) -> None:
    board.failed(store, 0, TrialStatus.REJECTED, "nan")
    other = board.failed(store, 1, TrialStatus.REJECTED, "nan")
    with pytest.raises(StoreError, match=r"(?i)unique"), store.writing() as session:
        session.execute(
            sa.text("UPDATE kf_trials SET schedule_key = 'bt=16 n=0', attempt = 2 WHERE id = :id"),
            {"id": other.id},
        )


def test_the_database_itself_refuses_a_time_on_a_failure(store: Store) -> None:
    trial = board.failed(store, 0, TrialStatus.REJECTED, "nan")
    with pytest.raises(StoreError, match=r"(?i)check"), store.writing() as session:
        session.execute(
            sa.text("UPDATE kf_trials SET score_us = 1.0 WHERE id = :id"), {"id": trial.id}
        )


def test_a_running_schedule_does_not_run_beside_itself(store: Store) -> None:
    board.begin(store, 0)
    with pytest.raises(StoreError, match="already running"):
        board.begin(store, 1, schedule_key="bt=16 n=0")
    with pytest.raises(StoreError, match=r"(?i)unique"):
        board.begin(store, 0, schedule_key="another")


def test_resume_abandons_open_trials_and_their_schedules_run_again(store: Store) -> None:
    done = board.failed(store, 0, TrialStatus.REJECTED, "nan")
    cut = board.begin(store, 1)
    assert store.abandon_open_trials("kda-1") == 1
    assert store.abandon_open_trials("kda-1") == 0
    assert store.list_trials("kda-1", [RUNNING]) == []
    assert store.get_trial(cut.id).status is ABANDONED
    assert store.get_trial(done.id) is not None
    again = board.begin(store, 1)
    assert again.attempt == 2
    store.finish_trial(again.id, TrialStatus.TIMEOUT, reason="60 s")
    assert [t.status for t in store.list_trials("kda-1")] == [
        TrialStatus.REJECTED,
        ABANDONED,
        TrialStatus.TIMEOUT,
    ]


def test_a_finished_trial_is_final(store: Store) -> None:
    trial = board.modelled(store, 0, 3.0)
    with pytest.raises(StoreError, match="passed already"):
        store.finish_trial(trial.id, TrialStatus.CRASHED)
    with pytest.raises(StoreError, match="passed already"):
        store.record_stage(trial.id, board.stage("gate"))


def test_a_trial_ends_at_the_stage_it_fails(store: Store) -> None:
    trial = board.begin(store, 0)
    store.record_stage(trial.id, board.stage("emulate", StageStatus.REJECTED))
    with pytest.raises(StoreError, match="ended at stage emulate: rejected"):
        store.record_stage(trial.id, board.stage("compile"))
    with pytest.raises(StoreError, match="stage emulate failed"):
        store.finish_trial(trial.id, PASSED, clock=Clock.MODELLED, score_us=1.0)


def test_a_stage_is_recorded_once(store: Store) -> None:
    trial = board.begin(store, 0)
    store.record_stage(trial.id, board.stage("gate"))
    with pytest.raises(StoreError, match="gate recorded already"):
        store.record_stage(trial.id, board.stage("gate"))


# No time on a failure, no score without all its times


@pytest.mark.parametrize(
    "status", [s for s in StageStatus if s not in (StageStatus.PASSED, StageStatus.SLOW)]
)
def test_a_failed_stage_carries_no_time(store: Store, status: StageStatus) -> None:
    trial = board.begin(store, 0)
    with pytest.raises(StoreError, match="carries no time"):
        store.record_stage(
            trial.id,
            board.stage("time", status),
            measurements=board.times("job-1", trial.id, 1.0, 1.0),
        )


@pytest.mark.parametrize("status", [s for s in TrialStatus if s not in (PASSED, RUNNING)])
def test_a_failed_trial_carries_no_time(store: Store, status: TrialStatus) -> None:
    trial = board.begin(store, 0)
    with pytest.raises(StoreError, match="cannot carry a time"):
        store.finish_trial(trial.id, status, score_us=1.0)
    assert store.get_trial(trial.id).status is RUNNING


@pytest.mark.parametrize("dropped", range(4))
def test_a_measured_pass_needs_a_time_on_every_workload_and_regime(
    store: Store, dropped: int
) -> None:
    trial = board.begin(store, 0)
    times = board.times("job-1", trial.id, 10.0, 50.0)
    lost = times.pop(dropped)
    store.record_stage(trial.id, board.stage("time"), measurements=times)
    missing = re.escape(f"3 of 4 gpu times are there; the first missing is {lost.workload}")
    with pytest.raises(StoreError, match=f"{missing} on {lost.regime}"):
        store.finish_trial(
            trial.id, PASSED, clock=Clock.GPU, score_us=10.0, slow_us=50.0, job_id="job-1"
        )


@pytest.mark.parametrize(
    "other",
    [{"clock": Clock.PER_CALL}, {"held_out": True}, {"phase": "final"}, {"job_id": "job-2"}],
    ids=str,
)
def test_times_of_another_kind_do_not_make_a_score(store: Store, other: dict[str, object]) -> None:
    store.open_job(board.job("job-2"))
    trial = board.begin(store, 0)
    times = [t.model_copy(update=other) for t in board.times("job-1", trial.id, 10.0, 50.0)]
    store.record_stage(trial.id, board.stage("time"), measurements=times)
    with pytest.raises(StoreError, match="0 of 4 gpu times"):
        store.finish_trial(
            trial.id, PASSED, clock=Clock.GPU, score_us=10.0, slow_us=50.0, job_id="job-1"
        )


def test_methods_and_cache_states_do_not_complete_each_other(store: Store) -> None:
    trial = board.begin(store, 0)
    warm = board.times("job-1", trial.id, 10.0, 50.0)
    mixed = [warm[0], warm[1].model_copy(update={"cache": "cold"}), *warm[2:]]
    store.record_stage(trial.id, board.stage("time"), measurements=mixed)
    with pytest.raises(StoreError, match="3 of 4"):
        store.finish_trial(
            trial.id, PASSED, clock=Clock.GPU, score_us=10.0, slow_us=50.0, job_id="job-1"
        )


@pytest.mark.parametrize(("score_us", "slow_us"), [(9.9, 50.0), (10.0, 49.0), (10.0, None)])
def test_a_score_that_is_not_the_geomean_is_refused(
    store: Store, score_us: float, slow_us: float | None
) -> None:
    trial = board.begin(store, 0)
    store.record_stage(
        trial.id, board.stage("time"), measurements=board.times("job-1", trial.id, 10.0, 50.0)
    )
    with pytest.raises(StoreError, match="not the geomean of its times, 10 us"):
        store.finish_trial(
            trial.id, PASSED, clock=Clock.GPU, score_us=score_us, slow_us=slow_us, job_id="job-1"
        )


def test_of_warm_and_cold_the_score_tells_which_it_is(store: Store) -> None:
    trial = board.begin(store, 0)
    warm = board.times("job-1", trial.id, 10.0, 50.0)
    cold = board.times("job-1", trial.id, 14.0, 60.0, cache="cold")
    store.record_stage(trial.id, board.stage("time"), measurements=[*warm, *cold])
    done = store.finish_trial(
        trial.id, PASSED, clock=Clock.GPU, score_us=14.0, slow_us=60.0, job_id="job-1"
    )
    assert done.cache == "cold"


def test_the_last_reading_of_a_cell_counts(store: Store) -> None:
    trial = board.begin(store, 0)
    screen = board.time("job-1", board.WORKLOADS[0], 99.0, trial_id=trial.id)
    store.record_stage(trial.id, board.stage("screen"), measurements=[screen])
    store.record_stage(
        trial.id, board.stage("time"), measurements=board.times("job-1", trial.id, 10.0, 50.0)
    )
    store.finish_trial(
        trial.id, PASSED, clock=Clock.GPU, score_us=10.0, slow_us=50.0, job_id="job-1"
    )


def campaign_without(**changes: object) -> CampaignRecord:
    return board.campaign("kda-2", **changes)


def test_a_measured_pass_needs_named_workloads(store: Store) -> None:
    store.create_campaign(campaign_without(workloads=()))
    store.open_job(board.job("job-2", "kda-2"))
    trial = board.begin(store, 0, "kda-2")
    store.record_stage(trial.id, board.stage("gate"))
    with pytest.raises(StoreError, match="names no tuned workloads"):
        store.finish_trial(trial.id, PASSED, clock=Clock.GPU, score_us=1.0, job_id="job-2")


def test_a_campaign_may_have_no_slow_regime(store: Store) -> None:
    store.create_campaign(campaign_without(slow_regime=None))
    store.open_job(board.job("job-2", "kda-2"))
    trial = board.begin(store, 0, "kda-2")
    times = board.times("job-2", trial.id, 10.0, 50.0)[:2]
    store.record_stage(trial.id, board.stage("time"), measurements=times)
    done = store.finish_trial(trial.id, PASSED, clock=Clock.GPU, score_us=10.0, job_id="job-2")
    assert done.slow_us is None


def test_a_pass_needs_score_clock_stage_and_job(store: Store) -> None:
    trial = board.begin(store, 0)
    with pytest.raises(StoreError, match="no stage is recorded"):
        store.finish_trial(trial.id, PASSED, clock=Clock.MODELLED, score_us=1.0)
    store.record_stage(trial.id, board.stage("gate"))
    for missing in ({"clock": Clock.MODELLED}, {"score_us": 1.0}):
        with pytest.raises(StoreError, match="without a score and its clock"):
            store.finish_trial(trial.id, PASSED, **missing)
    with pytest.raises(StoreError, match="belongs to a job"):
        store.finish_trial(trial.id, PASSED, clock=Clock.GPU, score_us=1.0)
    with pytest.raises(StoreError, match="no slow time"):
        store.finish_trial(trial.id, PASSED, clock=Clock.MODELLED, score_us=1.0, slow_us=2.0)
    with pytest.raises(StoreError, match="cannot finish as running"):
        store.finish_trial(trial.id, RUNNING)


def test_a_job_of_another_campaign_makes_no_score(store: Store) -> None:
    store.create_campaign(board.campaign("kda-2"))
    store.open_job(board.job("job-2", "kda-2"))
    trial = board.begin(store, 0)
    store.record_stage(
        trial.id, board.stage("time"), measurements=board.times("job-2", trial.id, 10.0, 50.0)
    )
    with pytest.raises(StoreError, match="another campaign's"):
        store.finish_trial(
            trial.id, PASSED, clock=Clock.GPU, score_us=10.0, slow_us=50.0, job_id="job-2"
        )


# Jobs and fingerprints


def test_a_fingerprint_is_stored_once(store: Store) -> None:
    store.put_fingerprint(board.FINGERPRINT)
    assert store.get_fingerprint(board.FINGERPRINT.id) == board.FINGERPRINT
    with pytest.raises(StoreError, match="other contents"):
        store.put_fingerprint(FingerprintRecord(id=board.FINGERPRINT.id, values={"gpu": "other"}))


def test_a_job_is_closed_once_and_its_times_are_final(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    closed = store.close_job(
        "job-1", JobStatus.VALID, drift=0.01, note="ok", details={"errors": {"fla": 0.004}}
    )
    assert (closed.status, closed.drift, closed.note) == (JobStatus.VALID, 0.01, "ok")
    assert (closed.seed, closed.details) == (7, {"opened": True, "errors": {"fla": 0.004}})
    assert closed.ended_at is not None
    assert store.get_job("job-1") == closed == store.list_jobs("kda-1")[0]
    with pytest.raises(StoreError, match="already closed as valid"):
        store.close_job("job-1", JobStatus.VOID)
    with pytest.raises(StoreError, match="its times are final"):
        store.add_measurements(board.controls("job-1", 20.0))
    trial = board.begin(store, 0)
    with pytest.raises(StoreError, match="its times are final"):
        store.record_stage(
            trial.id, board.stage("time"), measurements=board.times("job-1", trial.id, 1.0, 1.0)
        )


def test_a_job_needs_its_fingerprint(store: Store) -> None:
    record = board.job("job-2").model_copy(update={"fingerprint_id": "e" * 64})
    with pytest.raises(StoreError, match="store its fingerprint first"):
        store.open_job(record)


def test_jobs_a_killed_driver_left_open_become_void(store: Store) -> None:
    store.open_job(board.job("job-2"))
    store.close_job("job-2", JobStatus.VALID)
    assert store.void_open_jobs("kda-1", "driver died") == 1
    assert (store.get_job("job-1").status, store.get_job("job-1").note) == (
        JobStatus.VOID,
        "driver died",
    )
    assert store.get_job("job-2").status is JobStatus.VALID


def test_only_passed_trials_get_further_times(store: Store) -> None:
    failed = board.failed(store, 0, TrialStatus.REJECTED, "nan")
    with pytest.raises(StoreError, match="is rejected: it carries no time"):
        store.add_measurements(board.times("job-1", failed.id, 1.0, 1.0, phase="final"))
    good = board.passed(store, 1, "job-1", 10.0)
    store.add_measurements(board.times("job-1", good.id, 11.0, 51.0, phase="final"))
    assert len(store.get_trial(good.id).measurements) == 8


def test_unknown_rows_are_refused_by_name(store: Store) -> None:
    for call, name in (
        (lambda: board.begin(store, 0, "nope"), "no campaign 'nope'"),
        (lambda: store.acquire("nope"), "no campaign 'nope'"),
        (lambda: store.close_job("nope", JobStatus.VOID), "no job 'nope'"),
        (lambda: store.finish_trial(77, TrialStatus.CRASHED), "no trial 77"),
        (lambda: store.get_fingerprint("nope"), "no fingerprint 'nope'"),
    ):
        with pytest.raises(UnknownError, match=name):
            call()
