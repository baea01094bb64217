from __future__ import annotations

import board
import pytest
from pydantic import ValidationError

import leaderboard
from leaderboard import Clock, MeasurementRecord, TrialRecord, TrialStatus


def trial(**changes: object) -> TrialRecord:
    values: dict[str, object] = {
        "id": 1,
        "campaign_id": "kda-1",
        "number": 0,
        "schedule_key": "bt=16",
        "schedule": {"bt": 16},
        "status": TrialStatus.PASSED,
        "stage": "time",
        "clock": Clock.GPU,
        "score_us": 10.0,
        "source_hash": "a",
        "started_at": board.START,
    }
    return TrialRecord.model_validate({**values, **changes})


@pytest.mark.parametrize("status", [s for s in TrialStatus if s is not TrialStatus.PASSED])
def test_only_a_passed_trial_carries_a_time(status: TrialStatus) -> None:
    assert trial().score_us == 10.0
    with pytest.raises(ValidationError, match="cannot carry a time"):
        trial(status=status)


@pytest.mark.parametrize("missing", ["score_us", "clock"])
def test_a_passed_trial_needs_score_and_clock(missing: str) -> None:
    with pytest.raises(ValidationError, match="needs a score and its clock"):
        trial(**{missing: None})


@pytest.mark.parametrize("us", [0.0, -1.0])
def test_a_time_is_above_zero(us: float) -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        trial(score_us=us)
    with pytest.raises(ValidationError, match="greater than 0"):
        board.time("j", "w", us, trial_id=1)


def test_a_measurement_has_one_owner() -> None:
    for owners in ({}, {"trial_id": 1, "control": "flashkda"}):
        with pytest.raises(ValidationError, match="a trial or a control"):
            board.time("j", "w", 1.0, **owners)


def test_a_measurement_has_ordered_quantiles() -> None:
    with pytest.raises(ValidationError, match="low_us <= median_us"):
        board.time("j", "w", 1.0, trial_id=1, low_us=2.0)


def test_records_are_frozen_and_refuse_unknown_fields() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        trial().score_us = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        MeasurementRecord.model_validate(
            {**board.time("j", "w", 1.0, trial_id=1).model_dump(), "speedup": 3.9}
        )


@pytest.mark.parametrize(
    ("status", "finished"),
    [(s, s not in (TrialStatus.RUNNING, TrialStatus.ABANDONED)) for s in TrialStatus],
)
def test_running_and_abandoned_do_not_use_up_the_budget(
    status: TrialStatus, finished: bool
) -> None:
    assert status.finished is finished


def test_every_public_name_loads() -> None:
    assert sorted(leaderboard.__all__) == dir(leaderboard)
    for name in leaderboard.__all__:
        assert getattr(leaderboard, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'speedup'"):
        leaderboard.speedup  # noqa: B018
