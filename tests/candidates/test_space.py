"""The schedule space: what is offered, what budgets refuse, which gates are declared."""

from __future__ import annotations

import pytest

from candidates._delta_rule import space as scan_space
from candidates._delta_rule.space import consumer_registers, ring_stages
from candidates.kda_prefill import FAMILY, space
from candidates.kda_prefill.kernel.prep_plan import Plan
from candidates.kda_prefill.space import (
    CONTRACT_GATE,
    FusedSchedule,
    KdaSchedule,
    bears_contract,
    exponent_steps,
    own_bound,
)

FULL = FAMILY.offered("kda_prefill")
QUICK = FAMILY.offered("quickstart")
FUSED = FAMILY.offered("fused")
SPLIT = tuple(s for s in FULL if not space.is_fused(s))


def point(
    bt: int, anchor: str, block: int | None = None, diagonal: str | None = None, rows: int = 64
) -> KdaSchedule:
    return KdaSchedule(bt, anchor, block, diagonal, 1, rows)


def bears(schedules: tuple) -> list[bool]:
    return [bears_contract(KdaSchedule.of(s)) for s in schedules]


def test_presets_hold_at_most_128_distinct_schedules_that_can_all_be_built() -> None:
    assert FAMILY.presets() == ("kda_prefill", "quickstart", "survey", "fused")
    for schedules in (FULL, QUICK, FUSED):
        assert len(set(schedules)) == len(schedules) <= 128
        assert [s for s in schedules if FAMILY.problems(s)] == []
    assert set(QUICK) <= set(FULL)


def test_the_offered_order_is_the_same_every_time() -> None:
    assert FAMILY.offered("kda_prefill") == FULL
    assert FULL[: len(FUSED)] == FUSED
    assert SPLIT[0].key == "form=split bt=16 anchor=start segments=1 rows=64"


def test_the_full_preset_is_every_buildable_schedule_that_bears_the_contract() -> None:
    # 4 rules at BT = 16, 6 at 32, 7 at 64; 4 segment counts; 128 rows only where registers last.
    assert sum(bears(SPLIT)) == (4 + 6) * 4 * 2 + 7 * 4
    for name, choices in ((p.name, p.choices) for p in FAMILY.parameters):
        assert {s.get(name) for s in FULL} - {None} == set(choices), name


def test_instructive_failures_are_offered_with_the_rest() -> None:
    failing = {s.key for s, good in zip(SPLIT, bears(SPLIT), strict=True) if not good}
    assert failing == {
        "form=split bt=32 anchor=start segments=1 rows=64",
        "form=split bt=32 anchor=end segments=1 rows=64",
        "form=split bt=64 anchor=start segments=1 rows=64",
        "form=split bt=64 anchor=mid segments=1 rows=64",
    }
    assert bears(QUICK).count(True) >= 9
    assert {s.key for s in QUICK} >= {
        "form=split bt=64 anchor=mid segments=1 rows=64",
        "form=split bt=32 anchor=start segments=1 rows=64",
    }


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'quick'.*kda_prefill, quickstart, survey, fused"):
        FAMILY.offered("quick")


def test_views_and_schedules_convert_both_ways() -> None:
    for schedule in SPLIT:
        assert KdaSchedule.of(schedule).schedule() == schedule
    for schedule in FUSED:
        assert FusedSchedule.of(schedule).schedule() == schedule


def test_block_and_diagonal_belong_to_pairs_alone() -> None:
    values = {"form": "split", "bt": 32, "anchor": "mid", "segments": 1, "rows": 64}
    assert FAMILY.schedule(values)["bt"] == 32
    with pytest.raises(ValueError, match="block does not apply"):
        FAMILY.schedule({**values, "block": 16})
    with pytest.raises(ValueError, match="block is missing"):
        FAMILY.schedule({**values, "anchor": "pairs"})


@pytest.mark.parametrize(
    ("view", "steps"),
    [
        (point(16, "start"), 16),
        (point(16, "end"), 15),
        (point(16, "mid"), 8),
        (point(32, "mid"), 16),
        (point(64, "mid"), 32),
        (point(64, "halving"), 0),
        (point(64, "pairs", 32, "mid"), 16),
        (point(64, "pairs", 16, "start"), 16),
        (point(64, "pairs", 16, "halving"), 0),
    ],
)
def test_largest_exponent_in_gates_is_that_of_the_diagonal_window(
    view: KdaSchedule, steps: int
) -> None:
    assert exponent_steps(view) == steps


def test_declared_bounds_follow_from_the_exponent_budget() -> None:
    bound = FAMILY.gate_bound
    assert bound(point(16, "start").schedule()) == -5.0
    assert bound(point(16, "end").schedule()) == pytest.approx(-80 / 15)
    assert bound(point(64, "pairs", 16, "end").schedule()) == pytest.approx(-80 / 15)


def test_windows_anchored_in_their_middle_or_halved_declare_no_bound() -> None:
    bound = FAMILY.gate_bound
    assert bound(point(16, "mid").schedule()) is None
    assert bound(point(32, "mid").schedule()) is None
    assert bound(point(64, "pairs", 32, "mid").schedule()) is None
    assert bound(point(16, "halving").schedule()) is None
    assert bound(point(64, "pairs", 32, "halving").schedule()) is None


def test_no_schedule_escapes_by_declaring_a_weak_bound() -> None:
    view = point(64, "mid")
    assert own_bound(view) == -2.5
    assert FAMILY.gate_bound(view.schedule()) == CONTRACT_GATE
    for schedule in FULL:
        bound = FAMILY.gate_bound(schedule)
        assert bound is None or bound <= CONTRACT_GATE


def test_a_block_as_long_as_the_chunk_has_no_pairs() -> None:
    (problem,) = FAMILY.problems(point(32, "pairs", 32, "mid").schedule())
    assert "block=32" in problem
    assert "bt=32" in problem


def test_the_state_of_128_rows_does_not_fit_the_registers_at_bt_64() -> None:
    (problem,) = FAMILY.problems(point(64, "halving", rows=128).schedule())
    assert "232" in problem
    assert FAMILY.problems(point(64, "halving").schedule()) == ()


def test_budget_estimates_agree_with_what_the_compiler_gave_the_plain_scan() -> None:
    # Registers and stages of the plain scan on sm_90a, 64 rows (stages: without its cap of 12).
    for bt, registers, stages in ((16, 166, 14), (32, 202, 7), (64, 250, 3)):
        assert abs(consumer_registers(point(bt, "mid")) - registers) <= 16
        assert ring_stages(point(bt, "mid")) == stages
    assert ring_stages(point(32, "mid", rows=128)) == 6
    assert ring_stages(point(64, "mid", rows=128)) == 2


def test_shared_memory_budgets_name_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (space, scan_space):
        monkeypatch.setattr(module, "SHARED_MEMORY_BYTES", 100 * 1024)
    prep, ring = FAMILY.problems(point(64, "pairs", 16, "mid").schedule())
    assert f"{Plan(64, 'pairs', 16, 'mid').smem_bytes} bytes" in prep
    assert "102400" in prep
    assert "1 chunk images fit 102400" in ring


def test_the_fused_form_has_knobs_of_its_own() -> None:
    assert FUSED[0].key == "form=fused frame=middle builders=3 waves=1"
    assert len(FUSED) <= 12
    assert all(space.is_fused(s) for s in FUSED)
    assert [s for s in FULL if space.is_fused(s)] == list(FUSED)
    with pytest.raises(ValueError, match="bt does not apply"):
        FAMILY.schedule({**FUSED[0].as_dict(), "bt": 16})


def test_the_fused_form_declares_no_gate_bound() -> None:
    assert {FAMILY.gate_bound(schedule) for schedule in FUSED} == {None}


def test_builders_that_would_spill_are_refused_by_name() -> None:
    (problem,) = FAMILY.problems(FusedSchedule("boundary", 3, 1).schedule())
    assert "builders=3" in problem
    assert "frame=boundary" in problem


def test_the_survey_holds_every_kind_and_both_forms() -> None:
    survey = FAMILY.offered("survey")
    assert len(survey) == len(set(survey)) == 27
    assert set(survey) <= set(FULL)
    assert {s.get("bt") for s in survey if s["form"] == "split"} == {16, 32, 64}
    assert [s["form"] for s in survey[-4:]] == ["fused"] * 4
    assert point(64, "mid").schedule() in survey
