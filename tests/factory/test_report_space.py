"""What a report says of the space: which parameters matter, and every schedule as a line."""

from __future__ import annotations

import pytest
from report_page import NOW, begun, job, page_of, passed, rejected

from factory.report.data import gather
from leaderboard import JobStatus


@pytest.fixture
def store(tmp_path):
    with begun(tmp_path) as opened:
        yield opened


def of_choices(store, times, lost=()):
    """A campaign of schedules with these times, and some that were rejected."""
    job(store)
    number = 0
    for choices, us in times:
        key = " ".join(f"{k}={v}" for k, v in choices.items())
        passed(store, number, us, schedule=choices, schedule_key=f"{key} #{number}")
        number += 1
    for choices in lost:
        rejected(store, number, "wrong", schedule=choices, schedule_key=f"lost {number}")
        number += 1
    store.close_job("job-1", JobStatus.VALID)
    return gather(store, store.get_campaign(), now=NOW).runs[0].space


def test_what_decides_the_time_explains_it_and_what_does_not_explains_nothing(store):
    times = [({"a": a, "b": b}, 10.0 * a) for a in (1, 2, 4) for b in (1, 2, 3, 4)]
    space = of_choices(store, times)
    shares = {i.name: i.share for i in space.importances}
    assert shares == {"a": pytest.approx(1.0), "b": 0.0}
    assert [i.name for i in space.importances] == ["a", "b"]
    assert space.importances[0].means == tuple(
        (str(a), pytest.approx(10.0 * a), 4) for a in (1, 2, 4)
    )


def test_chance_is_taken_off_a_parameter_of_many_choices(store):
    """Ten choices among twenty trials explain half of what is only noise, unadjusted."""
    noise = [1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 0.7, 1.4, 1.05, 0.95]
    times = [({"n": i % 10}, 50.0 * noise[(7 * i + i // 10) % 10]) for i in range(20)]
    (only,) = of_choices(store, times).importances
    assert only.share < 0.35


def test_a_parameter_is_judged_among_those_that_have_it(store):
    """Every schedule with a ``form`` of its own is fast; its child explains nothing more."""
    times = [({"form": "x", "child": c}, 10.0) for c in (1, 2)]
    times += [({"form": "y"}, 100.0), ({"form": "y", "other": 1}, 101.0)]
    space = of_choices(store, times)
    shares = {i.name: (round(i.share, 3), i.trials) for i in space.importances}
    assert shares["form"][0] > 0.99
    assert shares["child"] == (0.0, 2)
    (axis,) = [a for a in space.axes if a.name == "child"]
    assert axis.choices == ("-", "1", "2")


def test_every_schedule_is_a_line_the_failed_first_and_the_fastest_last(store):
    times = [({"a": n % 3}, 50.0 - n) for n in range(20)]
    space = of_choices(store, times, lost=[{"a": 1}])
    values = [p.value for p in space.paths]
    assert values[0] is None
    assert values[1:] == sorted(values[1:], reverse=True)
    assert [p.fast for p in space.paths] == [False] * 19 + [True] * 2
    page = page_of(store)
    assert len(page.of_class("path")) == 21
    assert len([x for x in page.of_class("path") if "lost" in x["class"].split()]) == 1
    assert {int(x["data-trial"]) for x in page.of_class("path")} == {p.id for p in space.paths}


def test_a_space_without_a_choice_is_not_drawn(store):
    assert of_choices(store, [({"a": 1}, 10.0), ({"a": 1}, 20.0)]) is None
    assert "What mattered" not in page_of(store).said()
