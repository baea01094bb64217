"""Verdicts of the emulation on chunked schedules: which are right, which fail, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest
import torch

import operations
from candidates import Schedule
from candidates._delta_rule.emulate import (
    GATE_FLOOR,
    INVERSE,
    InverseName,
    triangular_inverse,
)
from candidates._delta_rule.kernel.options import LOWEST_BOUND
from candidates.kda_prefill import FAMILY
from candidates.kda_prefill.emulate import KERNEL, Variant, emulate, largest_exponent
from candidates.kda_prefill.kernel.steep_plan import STEEP_WINDOW
from candidates.kda_prefill.space import KdaSchedule, bears_contract
from operations import Regime, TensorError
from operations.kda_prefill import KdaWorkload

OPERATION = operations.get("kda_prefill")
CHAIN = KdaWorkload("chain-256", heads=2, lengths=(256,))
SHORT = KdaWorkload("short-96", heads=1, lengths=(96,))
OVERFLOW = 88.7
SIMILAR = OPERATION.regimes["similar_keys"]


def point(
    bt: int, anchor: str, block: int | None = None, diagonal: str | None = None, segments: int = 1
) -> Schedule:
    return KdaSchedule(bt, anchor, block, diagonal, segments, 64).schedule()


@cache
def case(shape: KdaWorkload, regime: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    inputs = OPERATION.generate(shape, OPERATION.regimes[regime], seed=0)
    return inputs, OPERATION.fast_oracle(inputs)


@cache
def constant(shape: KdaWorkload, gate: float) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    inputs = dict(case(shape, "constant")[0])
    inputs["g"] = torch.full_like(inputs["g"], gate)
    return inputs, OPERATION.fast_oracle(inputs)


def errors(
    schedule: Schedule,
    shape: KdaWorkload,
    data: tuple[Mapping[str, Any], Mapping[str, torch.Tensor]],
    variant: Variant = KERNEL,
    regime: Regime | None = None,
) -> tuple[TensorError, ...]:
    inputs, expected = data
    return OPERATION.compare(emulate(schedule, inputs, variant), expected, shape, regime)


def worst(found: Iterable[TensorError]) -> float:
    return max(e.max_rel for e in found)


def finite(found: Iterable[TensorError]) -> bool:
    return all(e.finite for e in found)


def right(found: Iterable[TensorError]) -> bool:
    return all(e.within for e in found)


def arithmetics() -> list[Schedule]:
    """Offered schedules that differ in what one chunk computes and bear the contract."""
    return [
        s
        for s in FAMILY.offered("kda_prefill")
        if s["form"] == "split"
        and s["segments"] == 1
        and s["rows"] == 64
        and bears_contract(KdaSchedule.of(s))
    ]


# ------------------------------------------------------------------ what is offered is right


def test_there_are_seventeen_arithmetics() -> None:
    assert len(arithmetics()) == 17


@pytest.mark.parametrize("schedule", arithmetics(), ids=str)
def test_offered_arithmetic_is_right_in_every_regime_within_its_bound(schedule: Schedule) -> None:
    bound = FAMILY.gate_bound(schedule)
    for shape in OPERATION.reduced():
        for regime in OPERATION.regimes.values():
            if bound is not None and regime.gate_floor < bound:
                continue
            found = errors(schedule, shape, case(shape, regime.name), regime=regime)
            assert right(found), (shape.name, regime.name, [e for e in found if not e.within])


@pytest.mark.parametrize("schedule", arithmetics(), ids=str)
def test_gates_at_the_declared_bound_are_right(schedule: Schedule) -> None:
    bound = FAMILY.gate_bound(schedule)
    gate = -1e4 if bound is None else bound
    assert right(errors(schedule, SHORT, constant(SHORT, gate)))


@pytest.mark.parametrize(
    "schedule", [s for s in arithmetics() if FAMILY.gate_bound(s) is not None], ids=str
)
def test_gates_a_tenth_past_the_declared_bound_are_wrong(schedule: Schedule) -> None:
    gate = 1.1 * (FAMILY.gate_bound(schedule) or 0.0)
    assert worst(errors(schedule, SHORT, constant(SHORT, gate))) > 0.1


@pytest.mark.parametrize("regime", ["constant", "beyond_6", "beyond_20", "beyond_1e4"])
def test_a_few_tokens_that_forget_everything_are_right_in_eight_heads(regime: str) -> None:
    # Each output is (q k) beta v, and rounded operands are off by a share of |q| |k|: a slice of
    # two heads may by chance hold small q k alone, and 1.04e-2 rms was seen on a GPU's inputs.
    shape = KdaWorkload("few-tokens", heads=8, lengths=(1, 2, 3, 4, 5, 6, 7, 8, 9, 4, 4, 4))
    for seed in range(2):
        inputs = OPERATION.generate(shape, OPERATION.regimes[regime], seed=seed)
        data = inputs, OPERATION.fast_oracle(inputs)
        for schedule in (point(16, "mid"), point(32, "mid"), point(64, "pairs", 32, "mid")):
            found = errors(schedule, shape, data)
            assert right(found), (schedule.key, seed, [e for e in found if not e.within])


# ---------------------------------------------------------------------- what fails, and how


@pytest.mark.parametrize(
    "schedule",
    [point(64, "mid"), point(32, "start"), point(32, "end"), point(64, "start")],
    ids=str,
)
def test_schedules_beyond_the_budget_are_not_finite_in_production(schedule: Schedule) -> None:
    for regime in ("production", "sweep_lb5", "constant", "mixed"):
        inputs, _ = case(CHAIN, regime)
        assert not finite(errors(schedule, CHAIN, case(CHAIN, regime))), regime
        assert largest_exponent(schedule, inputs) > OVERFLOW, regime


def test_bt_64_mid_hides_its_fault_behind_mild_gates() -> None:
    schedule = point(64, "mid")
    for regime in ("mild", "sweep_lb1", "sweep_lb2", "sweep_lb3", "slow"):
        assert right(errors(schedule, CHAIN, case(CHAIN, regime))), regime
    assert not finite(errors(schedule, CHAIN, constant(CHAIN, -3.0)))


@pytest.mark.parametrize(
    ("schedule", "holds", "fails"),
    [
        (point(16, "start"), "constant", "beyond_6"),
        (point(16, "end"), "constant", "beyond_6"),
        (point(32, "pairs", 16, "start"), "constant", "beyond_6"),
        (point(64, "pairs", 16, "end"), "constant", "beyond_6"),
    ],
    ids=str,
)
def test_where_constant_gates_end_a_schedule(schedule: Schedule, holds: str, fails: str) -> None:
    assert right(errors(schedule, CHAIN, case(CHAIN, holds)))
    assert not finite(errors(schedule, CHAIN, case(CHAIN, fails)))
    assert largest_exponent(schedule, case(CHAIN, fails)[0]) > OVERFLOW


@pytest.mark.parametrize(
    ("schedule", "exponent"),
    [
        (point(16, "start"), 80.0),
        (point(16, "mid"), 40.0),
        (point(16, "end"), 75.0),
        (point(16, "halving"), 0.0),
        (point(32, "mid"), 80.0),
        (point(64, "mid"), 160.0),
        (point(64, "pairs", 16, "mid"), 40.0),
        (point(64, "pairs", 16, "halving"), 0.0),
    ],
    ids=str,
)
def test_largest_exponent_at_constant_gates(schedule: Schedule, exponent: float) -> None:
    assert largest_exponent(schedule, case(CHAIN, "constant")[0]) == pytest.approx(exponent)


@pytest.mark.parametrize(
    "schedule",
    [point(16, "mid"), point(32, "mid"), point(64, "pairs", 16, "mid")],
    ids=str,
)
def test_steep_chunks_leave_no_exponent_beyond_the_budget(schedule: Schedule) -> None:
    for regime in OPERATION.regimes:
        inputs, _ = case(CHAIN, regime)
        assert largest_exponent(schedule, inputs) <= -STEEP_WINDOW, regime


def test_multiplying_by_a_mask_makes_nan_inside_the_contract() -> None:
    schedule = point(32, "mid")
    for regime in ("sweep_lb5", "constant", "mixed"):
        data = case(CHAIN, regime)
        assert right(errors(schedule, CHAIN, data)), regime
        assert not finite(errors(schedule, CHAIN, data, Variant(mask="multiply"))), regime


def test_clamped_exponents_are_finite_and_silently_wrong_from_minus_3_on() -> None:
    schedule, clamped = point(64, "mid"), Variant(clamp=40.0)
    for regime in ("mild", "sweep_lb1", "sweep_lb2"):
        assert right(errors(schedule, CHAIN, case(CHAIN, regime), clamped)), regime
    for regime in ("sweep_lb3", "sweep_lb5", "constant", "mixed"):
        found = errors(schedule, CHAIN, case(CHAIN, regime), clamped)
        assert finite(found), regime
        assert worst(found) > 0.1, regime


def test_power_series_inverses_break_on_similar_keys_and_halving_does_not() -> None:
    data = case(CHAIN, "similar_keys")
    stable: tuple[InverseName, ...] = (
        "merged_tf32",
        "merged8_tf32",
        "halving_fp32",
        "halving_tf32",
        "halving_fp16",
        "halving_bf16",
    )
    for bt in (16, 64):
        schedule = point(bt, "halving")
        for name in stable:
            assert right(errors(schedule, CHAIN, data, Variant(inverse=name), SIMILAR)), name
        series = Variant(inverse="neumann_fp16")
        assert not right(errors(schedule, CHAIN, data, series, SIMILAR)), bt
    # On independent keys the two cannot be told apart.
    series = Variant(inverse="neumann_fp16")
    assert right(errors(point(16, "mid"), CHAIN, case(CHAIN, "slow"), series))


@pytest.mark.parametrize("bt", [16, 32, 64])
def test_the_kernels_inverse_is_an_inverse(bt: int) -> None:
    lower = torch.rand(3, bt, bt, generator=torch.Generator().manual_seed(bt)).tril(-1)
    exact = torch.linalg.inv(torch.eye(bt).double() + lower.double())
    error = (triangular_inverse(lower, INVERSE) - exact).abs().amax() / exact.abs().amax()
    assert error <= (1e-6 if bt == 16 else 2e-3)


def test_the_gate_floor_is_the_kernels() -> None:
    assert LOWEST_BOUND == GATE_FLOOR


def test_a_full_reset_of_the_memory_is_served_without_nan() -> None:
    for schedule in (
        point(16, "halving"),
        point(64, "pairs", 16, "halving"),
        point(32, "mid"),
        point(64, "pairs", 32, "mid"),
    ):
        for regime in ("beyond_single_inf", "beyond_single_1e4", "beyond_1e4"):
            assert right(errors(schedule, CHAIN, case(CHAIN, regime))), regime


# ------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("segments", [2, 4, 8])
@pytest.mark.parametrize(
    ("bt", "anchor", "block", "diagonal"),
    [
        (16, "start", None, None),
        (32, "mid", None, None),
        (64, "pairs", 16, "halving"),
    ],
)
def test_segments_are_right_where_the_state_is_remembered(
    bt: int, anchor: str, block: int | None, diagonal: str | None, segments: int
) -> None:
    shape = KdaWorkload("long-1100-chain", heads=1, lengths=(1100,))
    cut = point(bt, anchor, block, diagonal, segments)
    for regime in ("slow", "mixed", "one_hot_state", "production"):
        data = case(shape, regime)
        assert right(errors(cut, shape, data)), regime
    # They really took another way: M is rounded to bf16, so the bits differ.
    inputs, _ = case(shape, "slow")
    whole = emulate(point(bt, anchor, block, diagonal), inputs)["final_state"]
    if segments > 2:
        assert not torch.equal(emulate(cut, inputs)["final_state"], whole)
    else:  # the first segment ends in the second one's state: no map, no rounding
        assert torch.equal(emulate(cut, inputs)["final_state"], whole)


def test_a_long_sequence_beside_empty_ones_keeps_its_state() -> None:
    # Two segments and one empty sequence: as many units as sequences.
    shape = KdaWorkload("long-empty", heads=1, lengths=(0, 600))
    assert right(errors(point(16, "mid", segments=2), shape, case(shape, "slow")))


# ----------------------------------------------------------------------------- ragged batches


def packed(shape: KdaWorkload, regime: str, n: int) -> dict[str, Any]:
    """Sequence ``n`` of a case, alone."""
    inputs, _ = case(shape, regime)
    lo, hi = inputs["cu_seqlens"][n : n + 2].tolist()
    alone = {name: inputs[name][lo:hi] for name in ("q", "k", "v", "g", "beta")}
    return {
        **alone,
        "cu_seqlens": torch.tensor([0, hi - lo], dtype=torch.int32),
        "initial_state": inputs["initial_state"][n : n + 1],
        "scale": inputs["scale"],
    }


def test_a_sequence_does_not_know_its_neighbours() -> None:
    shape = KdaWorkload("ragged", heads=2, lengths=(1, 65, 0, 130, 31))
    schedule = point(32, "mid", segments=4)
    inputs, _ = case(shape, "production")
    together = emulate(schedule, inputs)
    cu = inputs["cu_seqlens"].tolist()
    for n in range(5):
        alone = emulate(schedule, packed(shape, "production", n))
        torch.testing.assert_close(
            together["final_state"][n], alone["final_state"][0], rtol=1e-5, atol=1e-6
        )
        # A product over other batch sizes may sum in another order: one bf16 step apart.
        torch.testing.assert_close(
            together["o"][cu[n] : cu[n + 1]], alone["o"], rtol=1e-2, atol=1e-3
        )
    assert torch.equal(together["final_state"][2], inputs["initial_state"][2])


def test_rows_of_no_sequence_are_zero_and_what_they_hold_is_not_read() -> None:
    inputs = dict(case(KdaWorkload("gap", heads=1, lengths=(100,)), "slow")[0])
    inputs["cu_seqlens"] = torch.tensor([3, 40], dtype=torch.int32)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name].clone()
        inputs[name][:3], inputs[name][40:] = float("nan"), float("nan")
    out = emulate(point(64, "halving"), inputs)
    assert out["o"][:3].eq(0).all()
    assert out["o"][40:].eq(0).all()
    assert out["o"].isfinite().all()
    assert out["o"][3:40].ne(0).any()
    assert out["final_state"].isfinite().all()


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_nothing_to_do_leaves_the_states(lengths: tuple[int, ...]) -> None:
    shape = KdaWorkload("nothing", heads=3, lengths=lengths)
    inputs = OPERATION.generate(shape, OPERATION.regimes["slow"], seed=1)
    out = emulate(point(16, "mid", segments=4), inputs)
    assert out["o"].shape == (0, 3, 128)
    assert torch.equal(out["final_state"], inputs["initial_state"])


def test_outputs_have_the_operations_shapes_and_dtypes() -> None:
    for shape in OPERATION.reduced():
        inputs, _ = case(shape, "production")
        out = FAMILY.emulate(point(16, "start"), inputs)
        for name, want in OPERATION.outputs(inputs).items():
            assert (out[name].shape, out[name].dtype) == (want.shape, want.dtype), name
