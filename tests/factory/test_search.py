"""Search: which schedules are proposed, and what the sampler learns."""

from __future__ import annotations

import pytest

import candidates
from candidates import Parameter, Schedule
from factory.search import SAMPLERS, Outcome, Search, violation
from leaderboard.records import ErrorRecord, TrialStatus

FAMILY = candidates.get("toy_scale")


def drain(search: Search, status: TrialStatus = TrialStatus.PASSED) -> list[Schedule]:
    seen = []
    while (schedule := search.ask()) is not None:
        seen.append(schedule)
        score = 10.0 if status is TrialStatus.PASSED else None
        search.tell(Outcome(schedule, status, score))
    return seen


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_offered_schedule_is_proposed_once_and_nothing_else(sampler):
    offered = FAMILY.offered("six")
    seen = drain(Search(FAMILY.parameters, offered, sampler=sampler, seed=3))
    assert sorted(seen) == sorted(offered)
    assert len(set(seen)) == len(seen)


def test_grid_keeps_the_order_of_the_offer():
    offered = FAMILY.offered("six")
    assert drain(Search(FAMILY.parameters, offered, sampler="grid")) == list(offered)


def test_same_seed_and_answers_give_the_same_proposals():
    offered = FAMILY.offered("many")
    runs = [drain(Search(FAMILY.parameters, offered, seed=5)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != drain(Search(FAMILY.parameters, offered, seed=6))


def test_history_is_not_proposed_again():
    offered = FAMILY.offered("many")
    first = Search(FAMILY.parameters, offered, seed=1)
    history = []
    for _ in range(15):
        schedule = first.ask()
        outcome = Outcome(schedule, TrialStatus.PASSED, float(schedule["block"]))
        first.tell(outcome)
        history.append(outcome)
    resumed = Search(FAMILY.parameters, offered, seed=1, history=history)
    rest = drain(resumed)
    assert not {o.schedule for o in history} & set(rest)
    assert len(rest) == len(offered) - 15


def test_resuming_continues_as_if_never_stopped():
    offered = FAMILY.offered("many")
    whole = Search(FAMILY.parameters, offered, seed=2)
    history, order = [], []
    for i in range(20):
        schedule = whole.ask()
        order.append(schedule)
        outcome = Outcome(schedule, TrialStatus.PASSED, 1.0 + float(schedule["block"]))
        whole.tell(outcome)
        if i < 12:
            history.append(outcome)
    resumed = Search(FAMILY.parameters, offered, seed=2, history=history)
    again = []
    for _ in range(8):
        schedule = resumed.ask()
        again.append(schedule)
        resumed.tell(Outcome(schedule, TrialStatus.PASSED, 1.0 + float(schedule["block"])))
    assert again == order[12:]


def test_children_of_other_parents_are_never_sampled():
    offered = FAMILY.offered("six")
    search = Search(FAMILY.parameters, offered, seed=0)
    for schedule in drain(search, TrialStatus.REJECTED):
        assert (schedule.get("block") is not None) == (schedule["kind"] == "exact")


def test_an_abandoned_schedule_may_be_proposed_again_after_a_restart():
    offered = FAMILY.offered("six")
    history = [Outcome(offered[0], TrialStatus.ABANDONED)]
    assert offered[0] in drain(Search(FAMILY.parameters, offered, history=history))


def test_taken_schedules_are_not_asked():
    offered = FAMILY.offered("six")
    search = Search(FAMILY.parameters, offered, seed=0)
    search.take(offered[2])
    search.tell(Outcome(offered[2], TrialStatus.PASSED, 3.0))
    assert offered[2] not in drain(search)
    with pytest.raises(ValueError, match="before"):
        search.take(offered[2])
    with pytest.raises(ValueError, match="not offered"):
        search.take(FAMILY.schedule({"kind": "hangs"}))


def test_telling_twice_or_unasked_is_refused():
    offered = FAMILY.offered("six")
    search = Search(FAMILY.parameters, offered)
    with pytest.raises(ValueError, match="never proposed"):
        search.tell(Outcome(offered[0], TrialStatus.REJECTED))
    schedule = search.ask()
    search.tell(Outcome(schedule, TrialStatus.REJECTED))
    with pytest.raises(ValueError, match="told before"):
        search.tell(Outcome(schedule, TrialStatus.REJECTED))


def wide_space() -> tuple[tuple[Parameter, ...], list[Schedule]]:
    parameters = (
        Parameter("a", tuple(range(8)), "good when small"),
        Parameter("b", tuple(range(8)), "good when small"),
        Parameter("c", ("right", "wrong"), "wrong never passes"),
    )
    space = [
        Schedule.of(parameters, {"a": a, "b": b, "c": c})
        for a in range(8)
        for b in range(8)
        for c in ("right", "wrong")
    ]
    return parameters, space


def spent(sampler: str, seed: int) -> tuple[float, int]:
    """Best score and number of wrong proposals in 40 of 128."""
    parameters, space = wide_space()
    search = Search(parameters, space, sampler=sampler, seed=seed)
    best, wrong = 1e9, 0
    for _ in range(40):
        schedule = search.ask()
        if schedule["c"] == "wrong":
            wrong += 1
            search.tell(Outcome(schedule, TrialStatus.REJECTED))
            continue
        score = 1.0 + int(schedule["a"]) + int(schedule["b"])
        best = min(best, score)
        search.tell(Outcome(schedule, TrialStatus.PASSED, score))
    return best, wrong


def test_tpe_learns_to_avoid_what_the_gate_rejects():
    wrong_tpe = sum(spent("tpe", seed)[1] for seed in range(3))
    wrong_random = sum(spent("random", seed)[1] for seed in range(3))
    assert wrong_tpe < 0.7 * wrong_random


def test_verdicts_violate_different_constraints():
    parameters, space = wide_space()
    statuses = [
        TrialStatus.PASSED,
        TrialStatus.REJECTED,
        TrialStatus.INFEASIBLE,
        TrialStatus.CRASHED,
        TrialStatus.TIMEOUT,
        TrialStatus.SLOW,
    ]
    expected = [set(), {"gate"}, {"budget"}, {"runs"}, {"runs"}, set()]
    history = [
        Outcome(s, status, 5.0 if status in (TrialStatus.PASSED, TrialStatus.SLOW) else None)
        for s, status in zip(space, statuses, strict=False)
    ]
    told = Search(parameters, space)
    for outcome in history:
        told.take(outcome.schedule)
        told.tell(outcome)
    restored = Search(parameters, space, history=history)
    for search in (told, restored):
        trials = search._parzen.shown(seed=0)
        violated = [{k for k, v in t.constraints.items() if v > 0} for t in trials]
        assert violated == expected
        assert [t.state.name for t in trials] == ["COMPLETE"] + ["PRUNED"] * 5


# -- what is known before the sampler is asked -----------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_first_proposals_come_first_and_in_order(sampler):
    offered = FAMILY.offered("six")
    first = (offered[2], offered[0])
    search = Search(FAMILY.parameters, offered, sampler=sampler, first=first)
    assert drain(search)[:2] == list(first)
    history = [Outcome(offered[2], TrialStatus.PASSED, 1.0)]
    again = Search(FAMILY.parameters, offered, sampler=sampler, first=first, history=history)
    assert again.ask() == offered[0]


def test_a_first_proposal_that_is_not_offered_is_refused():
    with pytest.raises(ValueError, match="is not offered"):
        Search(FAMILY.parameters, FAMILY.offered("six"), first=[FAMILY.schedule({"kind": "hangs"})])


def test_prior_trials_teach_and_are_proposed_all_the_same():
    parameters, space = wide_space()
    prior = [
        Outcome(s, TrialStatus.REJECTED)
        if s["c"] == "wrong"
        else Outcome(s, TrialStatus.PASSED, 1.0 + int(s["a"]) + int(s["b"]))
        for s in space[::3]
    ]

    def wrong_in_ten(seed, known):
        search = Search(parameters, space, seed=seed, prior=known)
        asked = [search.ask() for _ in range(10)]
        return sum(s["c"] == "wrong" for s in asked)

    cold = sum(wrong_in_ten(seed, []) for seed in range(3))
    warm = sum(wrong_in_ten(seed, prior) for seed in range(3))
    assert warm < 0.5 * cold
    search = Search(parameters, space[:4], prior=prior)
    assert sorted(drain(search)) == sorted(space[:4])


def test_the_gaussian_process_learns_where_it_is_fast_and_what_is_wrong():
    best, wrong = spent("gp", 0)
    assert best <= 2.0
    assert wrong < spent("random", 0)[1]


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_trials_under_way_are_not_proposed_again(sampler):
    parameters, space = wide_space()
    search = Search(parameters, space, sampler=sampler, seed=1)
    for schedule in [search.ask() for _ in range(10)]:
        search.tell(Outcome(schedule, TrialStatus.PASSED, 1.0 + int(schedule["a"])))
    assert len({search.ask() for _ in range(6)}) == 6


def test_random_draws_evenly_from_what_is_offered():
    offered = FAMILY.offered("six")  # three of one kind, one each of three others
    firsts = [
        Search(FAMILY.parameters, offered, sampler="random", seed=s).ask() for s in range(120)
    ]
    assert min(firsts.count(s) for s in offered) >= 8


def wrong_by(max_rel, *, finite=True, within=False):
    return ErrorRecord(
        stage="gate",
        regime="production",
        workload="w",
        tensor="y",
        scope="all",
        max_rel=max_rel,
        rms_rel=None,
        finite=finite,
        within=within,
        seed=0,
    )


def test_how_badly_a_schedule_failed_reaches_the_constraint():
    near, far = violation([wrong_by(0.02)]), violation([wrong_by(0.02), wrong_by(0.6)])
    assert 1.0 < near < far < violation([wrong_by(None, finite=False)]) == 2.0
    assert violation([wrong_by(0.5, within=True)]) == 1.0
    parameters, space = wide_space()
    search = Search(parameters, space, history=[Outcome(space[0], TrialStatus.REJECTED, None, far)])
    (trial,) = search._parzen.shown(seed=0)
    assert trial.constraints == {"gate": far}
