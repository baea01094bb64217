"""A finalist's verdict: what the held-out workloads said of a trial that had passed."""

from __future__ import annotations

import board
import pytest

from leaderboard import Clock, JobStatus, StageStatus, Store, StoreError, TrialStatus, ranked


def final(status: StageStatus = StageStatus.PASSED, reason: str = ""):
    return board.stage("finals", status, reason=reason)


def test_a_finalist_wrong_on_a_held_out_shape_is_passed_no_more(store: Store) -> None:
    fast = board.passed(store, 0, "job-1", 10.0)
    slow = board.passed(store, 1, "job-1", 20.0)
    wrong = board.error(workload="odd-17/1", max_rel=0.4, within=False)
    reason = "regime slow, workload odd-17/1: o is off by max 4.00e-01"
    after = store.record_finals(fast.id, final(StageStatus.REJECTED, reason), errors=[wrong])
    assert (after.status, after.stage, after.reason) == (TrialStatus.REJECTED, "finals", reason)
    assert (after.score_us, after.slow_us, after.clock) == (None, None, None)
    seen = store.get_trial(fast.id)
    assert [s.stage for s in seen.stages] == ["gate", "time", "finals"]
    assert [(e.stage, e.workload) for e in seen.errors if not e.within] == [("finals", "odd-17/1")]
    store.close_job("job-1", JobStatus.VALID)
    assert [r.id for r in ranked(store, campaign_id="kda-1", clock=Clock.GPU)] == [slow.id]


def test_a_good_finalist_keeps_its_score_and_gets_its_times(store: Store) -> None:
    trial = board.passed(store, 0, "job-1", 10.0)
    times = board.times("job-1", 0, 11.0, 51.0, phase="final")
    after = store.record_finals(trial.id, final(), measurements=times)
    assert (after.status, after.score_us) == (TrialStatus.PASSED, 10.0)
    kept = [m for m in store.get_trial(trial.id).measurements if m.phase == "final"]
    assert len(kept) == len(times)


def test_finals_that_are_run_again_replace_the_earlier_verdict(store: Store) -> None:
    trial = board.passed(store, 0, "job-1", 10.0)
    for _ in range(2):
        store.record_finals(trial.id, final(), errors=[board.error(workload="odd-17/1")])
    seen = store.get_trial(trial.id)
    assert [s.stage for s in seen.stages] == ["gate", "time", "finals"]
    assert len([e for e in seen.errors if e.stage == "finals"]) == 1


def test_only_a_passed_trial_can_be_a_finalist(store: Store) -> None:
    failed = board.failed(store, 0, TrialStatus.REJECTED, "nan")
    with pytest.raises(StoreError, match="is rejected: it cannot be a finalist"):
        store.record_finals(failed.id, final())


def test_a_failed_finalist_carries_no_time(store: Store) -> None:
    trial = board.passed(store, 0, "job-1", 10.0)
    with pytest.raises(StoreError, match="stage finals is crashed: it carries no time"):
        store.record_finals(
            trial.id,
            final(StageStatus.CRASHED, "illegal address"),
            measurements=board.times("job-1", trial.id, 1.0, 1.0, phase="final"),
        )
