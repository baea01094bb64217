"""What is left of an offer, and what of it is nearest to a wish."""

from __future__ import annotations

from candidates import Parameter, Schedule
from factory.offer import Offer

PARAMETERS = (
    Parameter("form", ("flat", "tree"), "which knobs there are"),
    Parameter("tile", (1, 2, 3, 4), "flat alone", {"form": ("flat",)}),
    Parameter("arity", (1, 2), "tree alone", {"form": ("tree",)}),
    Parameter("pad", (0, 1, 2), "both"),
)
FLAT = [
    Schedule.of(PARAMETERS, {"form": "flat", "tile": t, "pad": p})
    for t in (1, 2, 3, 4)
    for p in (0, 1, 2)
]
TREE = [
    Schedule.of(PARAMETERS, {"form": "tree", "arity": a, "pad": p}) for a in (1, 2) for p in (0, 1)
]


def test_what_is_taken_is_gone_and_the_rest_stands_in_its_order():
    offer = Offer(PARAMETERS, [*TREE, *FLAT, TREE[0]])
    assert list(offer) == [*TREE, *FLAT]
    offer.take(TREE[1])
    offer.take(TREE[1])
    assert TREE[1] not in offer
    assert offer.knows(TREE[1])
    assert list(offer) == [TREE[0], *TREE[2:], *FLAT]
    assert len(offer) == 15


def test_the_nearest_come_by_the_number_of_knobs_that_differ():
    offer = Offer(PARAMETERS, [*TREE, *FLAT])
    wish = {"form": "flat", "tile": 2, "pad": 1}
    found = offer.nearest(wish, 16, seed=0)
    assert sorted(found) == sorted([*TREE, *FLAT])

    def apart(schedule: Schedule) -> int:
        own = schedule.as_dict()
        return sum(own.get(p.name) != wish.get(p.name) for p in PARAMETERS)

    assert [apart(s) for s in found] == sorted(apart(s) for s in found)
    assert found[0].as_dict() == wish
    offer.take(found[0])
    assert apart(offer.nearest(wish, 1, seed=0)[0]) == 1


def test_of_those_equally_near_a_seed_says_one_and_without_it_the_order_of_the_offer():
    offer = Offer(PARAMETERS, FLAT)
    offer.take(FLAT[0])
    wish = FLAT[0].as_dict()
    assert offer.nearest(wish, 5) == [s for s in FLAT[1:] if s["tile"] == 1 or s["pad"] == 0]
    firsts = [offer.nearest(wish, seed=seed)[0] for seed in range(60)]
    assert set(firsts) == {s for s in FLAT[1:] if s["tile"] == 1 or s["pad"] == 0}
    assert firsts == [offer.nearest(wish, seed=seed)[0] for seed in range(60)]


def test_no_more_are_found_than_are_left():
    offer = Offer(PARAMETERS, FLAT[:3])
    offer.take(FLAT[1])
    assert set(offer.nearest({"form": "tree", "arity": 1, "pad": 0}, 9, seed=0)) == {
        FLAT[0],
        FLAT[2],
    }
