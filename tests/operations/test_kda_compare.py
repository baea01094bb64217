"""Judging outputs of KDA prefill: what passes, what does not, and in which slice it shows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from operations import TensorError
from operations.kda_prefill import OPERATION, KdaWorkload

W = KdaWorkload("judged", heads=3, lengths=(20, 0, 41, 1))


def reference(regime: str = "slow", w: KdaWorkload = W) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs = OPERATION.generate(w, OPERATION.regimes[regime], seed=0)
    return inputs, OPERATION.fast_oracle(inputs)


def rounded(expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The best a kernel can return: the reference in the outputs' own types."""
    return {"o": expected["o"].bfloat16(), "final_state": expected["final_state"].float()}


def by_scope(errors: tuple[TensorError, ...], tensor: str) -> dict[str, TensorError]:
    return {e.scope: e for e in errors if e.tensor == tensor}


def failing(errors: tuple[TensorError, ...]) -> set[tuple[str, str]]:
    return {(e.tensor, e.scope) for e in errors if not e.within}


def test_rounded_reference_passes_in_every_slice() -> None:
    _, expected = reference()
    errors = OPERATION.compare(rounded(expected), expected, W)
    assert not failing(errors)
    assert [e.scope for e in errors if e.tensor == "o"] == [
        "all",
        *(f"head {h}" for h in range(3)),
        *(f"sequence {n}" for n in range(4)),
    ]
    # Half a unit in the last place of bf16, over the largest value in its binade.
    assert 2**-11 < by_scope(errors, "o")["all"].max_rel <= 2**-8
    assert by_scope(errors, "final_state")["all"].max_rel < 1e-7


def test_errors_are_the_stated_quotients_in_each_slice() -> None:
    _, expected = reference()
    rng = torch.Generator().manual_seed(0)
    got = {n: x + 0.01 * torch.randn(x.shape, generator=rng) for n, x in expected.items()}
    errors = OPERATION.compare(got, expected, W)
    cu = W.boundaries
    for name, x in got.items():
        rows = [slice(cu[n], cu[n + 1]) if name == "o" else slice(n, n + 1) for n in range(4)]
        slices: dict[str, Any] = {"all": (slice(None),)}
        slices |= {f"head {h}": (slice(None), h) for h in range(3)}
        slices |= {f"sequence {n}": (r,) for n, r in enumerate(rows)}
        scopes = by_scope(errors, name)
        assert scopes.keys() == slices.keys()
        for scope, at in slices.items():
            a, b = x[at], expected[name][at]
            if a.numel() == 0:
                assert (scopes[scope].max_rel, scopes[scope].rms_rel) == (0.0, 0.0)
                continue
            want_max = ((a - b).abs().max() / b.abs().max()).item()
            want_rms = (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)).item()
            assert scopes[scope].max_rel == pytest.approx(want_max, rel=1e-9)
            assert scopes[scope].rms_rel == pytest.approx(want_rms, rel=1e-9)


@pytest.mark.parametrize("tensor", ["o", "final_state"])
def test_a_wrong_quiet_head_shows_in_its_own_scope_only(tensor: str) -> None:
    _, expected = reference()
    expected[tensor][:, 1] *= 1e-3
    got = rounded(expected)
    got[tensor][:, 1] *= 1.1
    scopes = failing(OPERATION.compare(got, expected, W))
    assert (tensor, "head 1") in scopes
    assert not scopes & {(tensor, "all"), (tensor, "head 0"), (tensor, "head 2")}


def test_a_wrong_quiet_sequence_shows_in_its_own_scope_only() -> None:
    _, expected = reference()
    rows = slice(*W.boundaries[2:4])
    expected["o"][rows] *= 1e-3
    got = rounded(expected)
    got["o"][rows] *= 1.1
    assert failing(OPERATION.compare(got, expected, W)) == {("o", "sequence 2")}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_nonfinite_element_fails_its_slices_and_is_counted(value: float) -> None:
    _, expected = reference()
    got = rounded(expected)
    got["final_state"][2, 1, 5, 7] = value
    errors = OPERATION.compare(got, expected, W)
    assert failing(errors) == {("final_state", s) for s in ("all", "head 1", "sequence 2")}
    bad = by_scope(errors, "final_state")["all"]
    assert (bad.finite, bad.nonfinite_count) == (False, 1)
    assert bad.max_rel == bad.rms_rel == math.inf
    clean = by_scope(errors, "final_state")["head 0"]
    assert clean.finite
    assert clean.nonfinite_count == 0


def test_untouched_outputs_fail_everywhere_there_is_an_element() -> None:
    inputs, expected = reference()
    errors = OPERATION.compare(OPERATION.outputs(inputs), expected, W)
    passing = {(e.tensor, e.scope) for e in errors if e.within}
    assert passing == {("o", "sequence 1")}, "an empty sequence has no output rows"


def test_where_the_reference_is_zero_only_zero_is_right() -> None:
    w = KdaWorkload("zeros", heads=2, lengths=(5, 0), initial_state=False)
    _, expected = reference(w=w)
    assert expected["final_state"][1].count_nonzero() == 0
    got = rounded(expected)
    scopes = by_scope(OPERATION.compare(got, expected, w), "final_state")
    assert scopes["sequence 1"].within
    assert scopes["sequence 1"].max_rel == 0.0
    got["final_state"][1, 0, 0, 0] = 1e-9
    errors = OPERATION.compare(got, expected, w)
    assert failing(errors) == {("final_state", "sequence 1")}
    assert by_scope(errors, "final_state")["sequence 1"].max_rel == math.inf


@pytest.mark.parametrize(
    ("regime", "mistake"),
    [
        ("one_hot_state", "transposed initial state"),
        ("slow", "transposed initial state"),
        ("production", "dropped initial state"),
        ("slow", "dropped carry"),
        ("mixed", "dropped carry"),
        ("similar_keys", "dropped carry"),
        ("one_hot_state", "dropped carry"),
        ("production", "scale ignored"),
        ("constant", "gate shifted by one token"),
        ("production", "gate shifted by one token"),
        ("slow", "read before the write"),
    ],
)
def test_a_known_mistake_is_rejected(regime: str, mistake: str) -> None:
    w = KdaWorkload("mistaken", heads=2, lengths=(300,), scale=0.5)
    inputs, expected = reference(regime, w)
    wrong = dict(inputs)
    if mistake == "transposed initial state":
        wrong["initial_state"] = inputs["initial_state"].mT.contiguous()
    elif mistake == "dropped initial state":
        wrong["initial_state"] = None
    elif mistake == "scale ignored":
        wrong["scale"] = 128**-0.5
    elif mistake == "gate shifted by one token":
        wrong["g"] = inputs["g"].roll(1, 0)
        wrong["g"][0] = 0.0
    got = OPERATION.fast_oracle(wrong)
    if mistake == "dropped carry":
        cut = dict(inputs)
        cut["cu_seqlens"] = torch.tensor([0, 150, 300], dtype=torch.int32)
        zero = torch.zeros_like(inputs["initial_state"])
        cut["initial_state"] = torch.cat([inputs["initial_state"], zero])
        got = OPERATION.fast_oracle(cut)
        got["final_state"] = got["final_state"][1:]
    elif mistake == "read before the write":
        got["o"] = got["o"].roll(1, 0)
    assert failing(OPERATION.compare(rounded(got), expected, w))


def test_a_transposed_final_state_is_rejected() -> None:
    _, expected = reference("one_hot_state")
    got = rounded(expected)
    got["final_state"] = got["final_state"].mT.contiguous()
    assert ("final_state", "all") in failing(OPERATION.compare(got, expected, W))


def test_missing_outputs_and_other_shapes_are_named() -> None:
    _, expected = reference()
    got = rounded(expected)
    with pytest.raises(ValueError, match="output 'final_state' is missing; got \\['o'\\]"):
        OPERATION.compare({"o": got["o"]}, expected, W)
    with pytest.raises(ValueError, match="output 'o' has shape \\[61, 3, 128\\]"):
        OPERATION.compare({**got, "o": got["o"][1:]}, expected, W)
    other = KdaWorkload("other", heads=3, lengths=(20, 41))
    with pytest.raises(ValueError, match="workload 'other'"):
        OPERATION.compare(got, expected, other)


def test_a_reference_that_is_not_finite_is_the_harness_fault_and_raises() -> None:
    _, expected = reference()
    got = rounded(expected)
    expected["o"][3, 0, 0] = math.nan
    with pytest.raises(ValueError, match="reference of 'o' is not finite"):
        OPERATION.compare(got, expected, W)


def test_a_regime_with_its_own_tolerances_is_judged_by_them() -> None:
    _, expected = reference()
    got = rounded(expected)
    got["o"] *= 1.02  # off by 2e-2: over the operation's 1.5e-2, under the regime's 3e-2
    similar, production = OPERATION.regimes["similar_keys"], OPERATION.regimes["production"]
    assert ("o", "all") in failing(OPERATION.compare(got, expected, W))
    assert ("o", "all") in failing(OPERATION.compare(got, expected, W, production))
    assert not failing(OPERATION.compare(got, expected, W, similar))
    got["o"] *= 1.02
    assert ("o", "all") in failing(OPERATION.compare(got, expected, W, similar))


def test_only_similar_keys_has_tolerances_of_its_own_and_says_why() -> None:
    own = {r.name: r.tolerances for r in OPERATION.regimes.values() if r.tolerances}
    assert set(own) == {"similar_keys"}
    for name, tolerance in own["similar_keys"].items():
        assert name in OPERATION.tolerances
        assert "emulated" in tolerance.source
