"""A trial against a control of its job: what is named, and what is not told apart."""

from __future__ import annotations

import board
import pytest

import leaderboard
from leaderboard import JobStatus, Store, Verdict, query, query_shapes, ratio


def timed(store: Store, us: float, control_us: float = 40.0) -> int:
    """A trial of so many microseconds in a job with one control; returns its id."""
    store.open_job(board.job("j"))
    store.add_measurements(board.controls("j", control_us))
    trial = board.passed(store, 0, "j", us)
    store.close_job("j", JobStatus.VALID, drift=0.01)
    return trial.id


@pytest.mark.parametrize(
    ("us", "verdict"),
    [
        (20.0, Verdict.FASTER),
        (39.2, Verdict.NOT_TOLD_APART),
        (40.0, Verdict.NOT_TOLD_APART),
        (40.8, Verdict.NOT_TOLD_APART),
        (60.0, Verdict.SLOWER),
    ],
)
def test_a_lead_within_what_a_job_may_drift_by_is_none(
    store: Store, us: float, verdict: Verdict
) -> None:
    id_ = timed(store, us)
    found = ratio(store, id_, "flashkda")
    assert found.ratio == pytest.approx(us / 40.0)
    assert found.low <= found.ratio <= found.high
    assert found.verdict is verdict
    assert [s.verdict for s in found.shapes] == [verdict, verdict]
    assert [s.verdict for s in query_shapes(store, query(store))] == [verdict, verdict]


@pytest.mark.parametrize(
    ("drift", "verdict"), [(0.005, Verdict.FASTER), (0.2, Verdict.NOT_TOLD_APART)]
)
def test_the_campaign_says_how_much_a_job_may_drift(
    store: Store, drift: float, verdict: Verdict
) -> None:
    other = board.campaign("strict", config={"device": {"drift": drift}})
    store.create_campaign(other)
    store.open_job(board.job("j", "strict"))
    store.add_measurements(board.controls("j", 40.0))
    id_ = board.passed(store, 0, "j", 36.0, campaign_id="strict").id
    store.close_job("j", JobStatus.VALID, drift=0.001)
    assert ratio(store, id_, "flashkda").verdict is verdict
    shapes = query_shapes(store, query(store, campaign="strict"))
    assert {s.verdict for s in shapes} == {verdict}


def test_all_readings_of_a_control_count_but_those_of_the_finals(store: Store) -> None:
    store.open_job(board.job("j"))
    store.add_measurements(board.controls("j", 40.0, phases=("before",)))
    store.add_measurements(board.controls("j", 44.0, phases=("after",)))
    store.add_measurements(board.controls("j", 4.0, phases=("final",)))
    id_ = board.passed(store, 0, "j", 20.0).id
    store.close_job("j", JobStatus.VALID, drift=0.1)
    found = ratio(store, id_, "flashkda")
    assert found.control_us == pytest.approx(42.0)
    assert found.high < 0.6, "over 4 us it would be five"


def test_without_a_control_there_is_no_verdict(store: Store) -> None:
    store.open_job(board.job("j"))
    board.passed(store, 0, "j", 20.0)
    store.close_job("j", JobStatus.VALID)
    assert {s.verdict for s in query_shapes(store, query(store))} == {None}
    with pytest.raises(leaderboard.QueryError, match="did not time control"):
        ratio(store, 1, "flashkda")
