"""Judging outputs of GDN prefill: heads are those with a state, and its own mistakes show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from operations import Regime
from operations.gdn_prefill import OPERATION, GdnWorkload

W = GdnWorkload("judged", heads=2, value_heads=4, lengths=(20, 0, 41, 1))


def rounded(expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The best a kernel can return: the reference in the outputs' own types."""
    return {"o": expected["o"].bfloat16(), "final_state": expected["final_state"].float()}


def failing(got: Any, expected: Any, w: GdnWorkload, regime: Regime) -> set[tuple[str, str]]:
    errors = OPERATION.compare(rounded(got), expected, w, regime)
    return {(e.tensor, e.scope) for e in errors if not e.within}


def test_every_value_head_and_sequence_is_judged_by_itself() -> None:
    regime = OPERATION.regimes["slow"]
    expected = OPERATION.fast_oracle(OPERATION.generate(W, regime, seed=0))
    errors = OPERATION.compare(rounded(expected), expected, W)
    assert all(e.within for e in errors)
    for tensor in ("o", "final_state"):
        assert [e.scope for e in errors if e.tensor == tensor] == [
            "all",
            *(f"head {h}" for h in range(4)),
            *(f"sequence {n}" for n in range(4)),
        ]
    got = {n: x.clone() for n, x in expected.items()}
    expected["o"][:, 3] *= 1e-3
    got["o"][:, 3] *= 1.1e-3
    scopes = failing(got, expected, W, regime)
    assert ("o", "head 3") in scopes
    assert not {("o", "all"), ("o", "head 2")} & scopes


def _heads_of(name: str, order: list[int]) -> Any:
    def change(inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: inputs[name][:, order].contiguous()}

    return change


MISTAKES = {
    # For 2 heads of q and k and 4 of v, the value heads 0, 1, 2, 3 read key heads 0, 0, 1, 1.
    "value head j reads key head j % H": lambda i: {
        n: i[n][:, [0, 1, 0, 1]].contiguous() for n in ("q", "k")
    },
    "queries of the first key head only": lambda i: {"q": i["q"][:, [0, 0]].contiguous()},
    "the gate of the group's first value head": _heads_of("g", [0, 0, 2, 2]),
    "the gate of a neighbouring head": _heads_of("g", [1, 0, 3, 2]),
    "write strength of a neighbouring head": _heads_of("beta", [1, 0, 3, 2]),
    "gate shifted by one token": lambda i: {"g": i["g"].roll(1, 0)},
    "transposed initial state": lambda i: {"initial_state": i["initial_state"].mT.contiguous()},
    "initial state of a neighbouring head": _heads_of("initial_state", [1, 0, 3, 2]),
    "gate ignored": lambda i: {"g": torch.zeros_like(i["g"])},
    "scale ignored": lambda i: {"scale": 128**-0.5},
}


REGIMES = ("production", "production_steep", "mixed_heads")
HIDDEN = {
    ("mixed_heads", "gate shifted by one token"),  # one gate for all tokens of a head
    # An initial state is forgotten at once: seldom off by more than rounding.
    ("production_steep", "initial state of a neighbouring head"),
    ("production_steep", "transposed initial state"),
}


@pytest.mark.parametrize(
    ("regime", "mistake"), [(r, m) for r in REGIMES for m in MISTAKES if (r, m) not in HIDDEN]
)
def test_a_known_mistake_is_rejected_in_this_regime(regime: str, mistake: str) -> None:
    w = GdnWorkload("mistaken", heads=2, value_heads=4, lengths=(150,), scale=0.5)
    inputs = OPERATION.generate(w, OPERATION.regimes[regime], seed=0)
    expected = OPERATION.fast_oracle(inputs)
    got = OPERATION.fast_oracle({**inputs, **MISTAKES[mistake](inputs)})
    assert failing(got, expected, w, OPERATION.regimes[regime])


@pytest.mark.parametrize("regime", ["no_gate", "slow", "beta_near_0", "one_hot_state"])
def test_a_dropped_carry_is_rejected_where_much_is_remembered(regime: str) -> None:
    w = GdnWorkload("cut", heads=1, value_heads=2, lengths=(300,))
    inputs = OPERATION.generate(w, OPERATION.regimes[regime], seed=0)
    expected = OPERATION.fast_oracle(inputs)
    state = inputs["initial_state"]
    cut = {
        **inputs,
        "cu_seqlens": torch.tensor([0, 150, 300], dtype=torch.int32),
        "initial_state": torch.cat([state, torch.zeros_like(state)]),
    }
    got = OPERATION.fast_oracle(cut)
    got["final_state"] = got["final_state"][1:]
    scopes = failing(got, expected, w, OPERATION.regimes[regime])
    assert {("o", "all"), ("final_state", "all")} <= scopes


def test_only_similar_keys_has_tolerances_of_its_own_and_says_why() -> None:
    own = {r.name: r.tolerances for r in OPERATION.regimes.values() if r.tolerances}
    assert set(own) == {"similar_keys"}
    for name, tolerance in own["similar_keys"].items():
        usual = OPERATION.tolerances[name]
        assert (tolerance.max_rel, tolerance.rms_rel) > (usual.max_rel, usual.rms_rel)
        assert "emulat" in tolerance.source
        assert "emulat" in usual.source
