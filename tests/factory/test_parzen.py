"""What the default sampler looks at, and how often: both bounded, however large the campaign."""

from __future__ import annotations

import math
from collections import deque

import pytest
from optuna.trial import TrialState

from candidates import Parameter, Schedule
from factory.parzen import BEST, OTHERS, RUNNING, Parzen
from factory.search import Outcome, Search
from leaderboard.records import TrialStatus

PARAMETERS = (
    Parameter("x", tuple(range(60)), "good when small"),
    Parameter("y", tuple(range(60)), "good when small"),
    Parameter("c", ("right", "wrong"), "wrong never passes"),
)
SPACE = [
    Schedule.of(PARAMETERS, {"x": x, "y": y, "c": c})
    for c in ("wrong", "right")
    for x in range(60)
    for y in range(60)
]


def outcome(schedule: Schedule) -> Outcome:
    if schedule["c"] == "wrong":
        return Outcome(schedule, TrialStatus.REJECTED)
    return Outcome(schedule, TrialStatus.PASSED, 10.0 + int(schedule["x"]) + int(schedule["y"]))


def fed(schedules: list[Schedule], running: list[Schedule]) -> Parzen:
    parzen = Parzen(PARAMETERS)
    for schedule in schedules:
        parzen.learn(outcome(schedule))
    for schedule in running:
        parzen.begin(schedule)
    return parzen


def test_a_draw_looks_at_everything_while_that_is_little():
    parzen = fed(SPACE[:: len(SPACE) // (BEST + OTHERS) + 1], SPACE[1 : 1 + RUNNING])
    shown = parzen.shown(seed=3)
    assert [t.number for t in shown] == list(range(len(shown)))
    assert len(shown) > 100 + RUNNING


def test_a_draw_looks_at_the_best_and_at_no_more_of_a_long_campaign_than_of_a_short_one():
    told, running = SPACE[:1000] + SPACE[3600:4600], SPACE[5000:6000]
    parzen = fed(told, running)
    shown = parzen.shown(seed=3)
    finished = [t for t in shown if t.state is not TrialState.RUNNING]
    assert len(finished) == BEST + OTHERS
    values = sorted(t.value for t in finished if t.value is not None)
    scores = sorted(o.score_us for o in map(outcome, told) if o.score_us is not None)
    assert values[:BEST] == [math.log(score) for score in scores[:BEST]]
    under_way = [t.params for t in shown if t.state is TrialState.RUNNING]
    assert under_way == [s.as_dict() for s in running[-RUNNING:]]
    assert [t.number for t in shown] == sorted({t.number for t in shown})


def test_what_was_wrong_early_is_known_in_the_end():
    parzen = fed(SPACE[:1000] + SPACE[3600:4600], [])
    for seed in range(5):
        wrong = [t for t in parzen.shown(seed) if t.constraints]
        assert len(wrong) > OTHERS // 4
        assert parzen.draw(seed)["c"] == "right"


def test_the_same_seed_shows_and_draws_the_same_and_another_one_other_trials():
    one, two = (fed(SPACE[::3], SPACE[1:40:3]) for _ in range(2))
    numbers = [[t.number for t in parzen.shown(5)] for parzen in (one, two)]
    assert numbers[0] == numbers[1] != [t.number for t in one.shown(6)]
    assert one.draw(5) == two.draw(5)


def test_nothing_is_learnt_of_an_abandoned_trial():
    parzen = fed([], SPACE[:2])
    parzen.end(Outcome(SPACE[0], TrialStatus.ABANDONED))
    assert [t.params for t in parzen.shown(0)] == [SPACE[1].as_dict()]


@pytest.mark.parametrize(("under_way", "proposals_a_draw"), [(1, 1), (64, 1), (192, 3), (640, 10)])
def test_a_draw_serves_the_more_proposals_the_more_is_under_way(
    monkeypatch, under_way, proposals_a_draw
):
    draws = []
    plain = Parzen.draw
    monkeypatch.setattr(Parzen, "draw", lambda self, seed: draws.append(seed) or plain(self, seed))
    search = Search(PARAMETERS, SPACE, seed=1)
    waiting: deque[Schedule] = deque()

    def propose() -> None:
        while len(waiting) < under_way:
            waiting.append(search.ask())

    for _ in range(10):  # enough to fit an estimator
        propose()
        search.tell(outcome(waiting.popleft()))
    draws.clear()
    propose()
    seen = set(waiting)
    search.tell(outcome(waiting.popleft()))
    for _ in range(60):
        propose()
        assert waiting[-1] not in seen
        seen.add(waiting[-1])
        search.tell(outcome(waiting.popleft()))
    assert len(draws) == pytest.approx(60 / proposals_a_draw, abs=1)
