"""Verdicts of the emulation on GDN's schedules: right for every gate at every chunk length."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import operations
from candidates.gdn_prefill import FAMILY
from candidates.gdn_prefill.emulate import emulate, largest_exponent
from candidates.gdn_prefill.space import GdnSchedule
from operations.gdn_prefill import GdnWorkload

OPERATION = operations.get("gdn_prefill")
CHAIN = GdnWorkload("chain-256", heads=1, value_heads=2, lengths=(256,))


@cache
def case(shape: GdnWorkload, regime: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    inputs = OPERATION.generate(shape, OPERATION.regimes[regime], seed=0)
    return inputs, OPERATION.fast_oracle(inputs)


def wrong(outputs: dict[str, torch.Tensor], shape: GdnWorkload, regime: str) -> list[Any]:
    expected = case(shape, regime)[1]
    errors = OPERATION.compare(outputs, expected, shape, OPERATION.regimes[regime])
    return [e for e in errors if not e.within]


@pytest.mark.parametrize("regime", list(OPERATION.regimes))
@pytest.mark.parametrize("bt", [16, 32, 64])
def test_offered_arithmetic_is_right_in_every_regime(bt: int, regime: str) -> None:
    schedule = GdnSchedule(bt).schedule()
    chain, _, ragged, stateless = OPERATION.reduced()
    for shape in (chain, ragged, stateless):
        found = wrong(emulate(schedule, case(shape, regime)[0]), shape, regime)
        assert found == [], shape.name


@pytest.mark.parametrize("bt", [16, 32, 64])
def test_no_exponent_is_positive_whatever_the_gates(bt: int) -> None:
    for regime in ("production_steep", "constant_inf", "scattered", "no_gate"):
        assert largest_exponent(GdnSchedule(bt).schedule(), case(CHAIN, regime)[0]) == 0.0


def test_a_strong_gate_costs_the_slow_ones_behind_it_no_digits() -> None:
    inputs = dict(case(CHAIN, "slow")[0], initial_state=None)

    def error(bt: int) -> float:
        want = OPERATION.fast_oracle(inputs)["o"]
        got = emulate(GdnSchedule(bt).schedule(), inputs)["o"].double()
        return float((got - want).norm() / want.norm())

    for bt in (16, 64):
        inputs["g"] = case(CHAIN, "slow")[0]["g"]
        without = error(bt)
        for level in (-90.0, -1e6, float("-inf")):
            inputs["g"] = case(CHAIN, "slow")[0]["g"].clone()
            inputs["g"][:: bt // 4] = level
            assert error(bt) <= 1.3 * without, (bt, level)


def test_power_series_inverses_break_on_similar_keys() -> None:
    inputs, _ = case(CHAIN, "similar_keys")
    schedule = GdnSchedule(64).schedule()
    assert wrong(emulate(schedule, inputs), CHAIN, "similar_keys") == []
    assert wrong(emulate(schedule, inputs, "neumann_fp16"), CHAIN, "similar_keys") != []


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_segments_are_right_where_the_state_is_remembered(segments: int) -> None:
    shape = GdnWorkload("long-1100", heads=1, value_heads=2, lengths=(1100,))
    whole = emulate(GdnSchedule(32).schedule(), case(shape, "slow")[0])["final_state"]
    cut = GdnSchedule(32, segments).schedule()
    for regime in ("slow", "one_hot_state", "mixed_heads", "production"):
        assert wrong(emulate(cut, case(shape, regime)[0]), shape, regime) == []
    # They really took another way: M is rounded to bf16, so the bits differ.
    state = emulate(cut, case(shape, "slow")[0])["final_state"]
    assert torch.equal(state, whole) == (segments == 2)


def test_eight_segments_add_up_the_rounding_of_maps_that_are_nearly_the_identity() -> None:
    """Known: a map is kept in bf16, and what it is short of 1 may be half a step of bf16, to the
    same side in every segment.  The funnel rejects what it costs too much."""
    chain = OPERATION.reduced()[0]
    inputs, _ = case(chain, "one_hot_state")
    views = {
        (s["bt"], s["segments"]) for s in FAMILY.offered("gdn_prefill") if s["form"] == "split"
    }
    rejected = {
        (bt, segments)
        for bt, segments in views
        if wrong(emulate(GdnSchedule(bt, segments).schedule(), inputs), chain, "one_hot_state")
    }
    assert rejected == {(16, 8)}


def test_value_heads_read_their_own_key_head() -> None:
    shape = GdnWorkload("grouped", heads=2, value_heads=4, lengths=(40,))
    inputs = dict(case(shape, "slow")[0])
    got = emulate(GdnSchedule(16).schedule(), inputs)
    for name in ("q", "k"):
        inputs[name] = inputs[name].clone()
        inputs[name][:, 1] = inputs[name][:, 0].flip(0)
    other = emulate(GdnSchedule(16).schedule(), inputs)
    assert torch.equal(other["o"][:, :2], got["o"][:, :2])
    assert not torch.equal(other["o"][:, 2], got["o"][:, 2])
    assert not torch.equal(other["o"][:, 3], got["o"][:, 3])


def test_rows_of_no_sequence_are_zero_and_what_they_hold_is_not_read() -> None:
    inputs = dict(case(GdnWorkload("gap", heads=1, value_heads=2, lengths=(100,)), "slow")[0])
    inputs["cu_seqlens"] = torch.tensor([3, 40], dtype=torch.int32)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name].clone()
        inputs[name][:3], inputs[name][40:] = float("nan"), float("nan")
    out = emulate(GdnSchedule(64).schedule(), inputs)
    assert out["o"][:3].eq(0).all()
    assert out["o"][40:].eq(0).all()
    assert out["o"].isfinite().all()
    assert out["o"][3:40].ne(0).any()
    assert out["final_state"].isfinite().all()


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_nothing_to_do_leaves_the_states(lengths: tuple[int, ...]) -> None:
    shape = GdnWorkload("nothing", heads=1, value_heads=3, lengths=lengths)
    inputs = OPERATION.generate(shape, OPERATION.regimes["slow"], seed=1)
    out = FAMILY.emulate(GdnSchedule(16, 4).schedule(), inputs)
    assert out["o"].shape == (0, 3, 128)
    assert torch.equal(out["final_state"], inputs["initial_state"])


def test_outputs_have_the_operations_shapes_and_dtypes() -> None:
    for shape in OPERATION.reduced():
        inputs, _ = case(shape, "production")
        out = FAMILY.emulate(GdnSchedule(16).schedule(), inputs)
        for name, want in OPERATION.outputs(inputs).items():
            assert (out[name].shape, out[name].dtype) == (want.shape, want.dtype), name
