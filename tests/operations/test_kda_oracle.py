"""The float64 oracle of KDA prefill against a second writing of it, and against known limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operations._delta_rule import oracle as _oracle
from operations._delta_rule.oracle import boundaries, chunked, token_by_token
from operations.kda_prefill import OPERATION, KdaWorkload

BOTH = pytest.mark.parametrize("evaluate", [token_by_token, chunked])
Evaluate = Callable[[Any], dict[str, torch.Tensor]]


def problem(
    lengths: tuple[int, ...], *, H: int = 1, K: int = 4, V: int = 4, seed: int = 0, **fixed: Any
) -> dict[str, Any]:
    """Small inputs of any head size, in float64 so that nothing is rounded on the way in."""
    rng = torch.Generator().manual_seed(seed)
    T = sum(lengths)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    k = torch.nn.functional.normalize(randn(T, H, K), dim=-1)
    out: dict[str, Any] = {
        "q": randn(T, H, K),
        "k": k,
        "v": randn(T, H, V),
        "g": -randn(T, H, K).abs(),
        "beta": randn(T, H).sigmoid(),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "initial_state": randn(len(lengths), H, V, K),
        "scale": 0.7,
    }
    return {**out, **fixed}


def element_by_element(p: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The recurrence in Python floats on the key-major S [K][V], written from the definition."""
    q, k, v, g, beta = (p[n].tolist() for n in ("q", "k", "v", "g", "beta"))
    cu, scale = p["cu_seqlens"].tolist(), p["scale"]
    T, H, V = p["v"].shape
    K = p["k"].shape[-1]
    o = [[[0.0] * V for _ in range(H)] for _ in range(T)]
    final = []
    for n in range(len(cu) - 1):
        heads = []
        for h in range(H):
            given_state = p["initial_state"]
            S = [
                [0.0 if given_state is None else given_state[n, h, b, a].item() for b in range(V)]
                for a in range(K)
            ]
            for t in range(cu[n], cu[n + 1]):
                S = [[math.exp(g[t][h][a]) * S[a][b] for b in range(V)] for a in range(K)]
                recalled = [sum(S[a][b] * k[t][h][a] for a in range(K)) for b in range(V)]
                for a in range(K):
                    for b in range(V):
                        S[a][b] += beta[t][h] * k[t][h][a] * (v[t][h][b] - recalled[b])
                for b in range(V):
                    o[t][h][b] = scale * sum(S[a][b] * q[t][h][a] for a in range(K))
            heads.append([[S[a][b] for a in range(K)] for b in range(V)])
        final.append(heads)
    return o, final


@BOTH
@pytest.mark.parametrize("with_state", [True, False])
def test_equals_an_independent_elementwise_recurrence(evaluate: Evaluate, with_state: bool) -> None:
    p = problem((5, 0, 1, 37), H=2, K=3, V=5)
    if not with_state:
        p["initial_state"] = None
    o, final = element_by_element(p)
    got = evaluate(p)
    torch.testing.assert_close(got["o"], torch.tensor(o).double(), rtol=0, atol=1e-6)
    exact = {"dtype": torch.float64}
    torch.testing.assert_close(got["o"], torch.tensor(o, **exact), rtol=0, atol=1e-13)
    torch.testing.assert_close(got["final_state"], torch.tensor(final, **exact), rtol=0, atol=1e-13)


@BOTH
def test_without_gate_and_writes_the_state_stays_and_is_read(evaluate: Evaluate) -> None:
    p = problem((20,), H=2)
    p |= {"g": torch.zeros_like(p["g"]), "beta": torch.zeros_like(p["beta"])}
    got = evaluate(p)
    assert torch.equal(got["final_state"], p["initial_state"])
    want = 0.7 * torch.einsum("hvk,thk->thv", p["initial_state"][0], p["q"])
    torch.testing.assert_close(got["o"], want, rtol=0, atol=1e-14)


@BOTH
def test_full_writes_of_orthonormal_keys_store_the_values_exactly(evaluate: Evaluate) -> None:
    eye = torch.eye(4, dtype=torch.float64)[:, None]
    p = problem((4,), k=eye, q=eye, initial_state=None, scale=1.0)
    p |= {"g": torch.zeros_like(p["g"]), "beta": torch.ones_like(p["beta"])}
    got = evaluate(p)
    assert torch.equal(got["o"], p["v"]), "token t reads its own write"
    assert torch.equal(got["final_state"][0, 0], p["v"][:, 0].mT), "row v, column k"


@BOTH
def test_a_full_write_replaces_what_the_key_held(evaluate: Evaluate) -> None:
    p = problem((2,), initial_state=None, scale=1.0)
    p["k"][1] = p["k"][0]
    p |= {"q": p["k"], "g": torch.zeros_like(p["g"]), "beta": torch.ones_like(p["beta"])}
    torch.testing.assert_close(evaluate(p)["o"], p["v"], rtol=0, atol=1e-14)


@BOTH
@pytest.mark.parametrize("level", [-1e4, -math.inf])
def test_the_strongest_gates_leave_each_token_alone(evaluate: Evaluate, level: float) -> None:
    p = problem((35,), H=2)
    p["g"] = torch.full_like(p["g"], level)
    alone = 0.7 * p["beta"] * (p["q"] * p["k"]).sum(-1)
    got = evaluate(p)
    torch.testing.assert_close(got["o"], alone[..., None] * p["v"], rtol=0, atol=1e-14)
    assert got["final_state"].isfinite().all()


@BOTH
def test_decay_acts_on_key_columns(evaluate: Evaluate) -> None:
    p = problem((1,), K=3, V=2)
    p["beta"] = torch.zeros_like(p["beta"])
    want = p["initial_state"][0, 0] * p["g"][0, 0].exp()[None, :]
    torch.testing.assert_close(evaluate(p)["final_state"][0, 0], want, rtol=1e-14, atol=0)


@BOTH
def test_sequences_do_not_see_each_other(evaluate: Evaluate) -> None:
    p = problem((30, 0, 19, 1), H=2)
    cu = p["cu_seqlens"].tolist()
    whole = evaluate(p)
    for n in range(4):
        part = {x: p[x][cu[n] : cu[n + 1]] for x in ("q", "k", "v", "g", "beta")}
        part |= {"cu_seqlens": torch.tensor([0, cu[n + 1] - cu[n]]), "scale": p["scale"]}
        part["initial_state"] = p["initial_state"][n : n + 1]
        alone = evaluate(part)
        torch.testing.assert_close(whole["o"][cu[n] : cu[n + 1]], alone["o"], rtol=0, atol=1e-13)
        torch.testing.assert_close(
            whole["final_state"][n], alone["final_state"][0], rtol=0, atol=1e-13
        )
    assert torch.equal(whole["final_state"][1], p["initial_state"][1])


@BOTH
def test_scale_is_linear_and_zero_is_a_scale(evaluate: Evaluate) -> None:
    p = problem((20,))
    zero = evaluate({**p, "scale": 0.0})
    assert zero["o"].count_nonzero() == 0
    one, two = evaluate({**p, "scale": 1.0}), evaluate({**p, "scale": 2.0})
    torch.testing.assert_close(2 * one["o"], two["o"], rtol=1e-13, atol=0)
    assert torch.equal(one["final_state"], two["final_state"])


@BOTH
def test_inputs_are_left_alone(evaluate: Evaluate) -> None:
    p = problem((20, 3))
    before = {n: x.clone() for n, x in p.items() if isinstance(x, torch.Tensor)}
    evaluate(p)
    assert all(torch.equal(p[n], x) for n, x in before.items())


@pytest.mark.parametrize(
    ("offsets", "meant"),
    [
        ([0, 30], [0, 30]),
        ([1, 37], [1, 37]),
        ([0, 20, 10, 37], [0, 20, 20, 37]),
        ([-5, 10, 99], [0, 10, 37]),
        ([], []),
    ],
)
def test_malformed_offsets_are_clamped_and_uncovered_rows_are_zero(
    offsets: list[int], meant: list[int]
) -> None:
    p = problem((37,), initial_state=None, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    assert boundaries(p) == meant
    covered = torch.zeros(37, dtype=torch.bool)
    for a, b in itertools.pairwise(meant):
        covered[a:b] = True
    slow, fast = token_by_token(p), chunked(p)
    assert slow["o"][~covered].count_nonzero() == 0
    assert (slow["o"][covered] != 0).all()
    torch.testing.assert_close(fast["o"], slow["o"], rtol=0, atol=1e-13)
    torch.testing.assert_close(fast["final_state"], slow["final_state"], rtol=0, atol=1e-13)


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest ``max|a - b| / max|b|`` over the outputs."""
    return max(
        ((a[n] - b[n]).abs().max() / b[n].abs().max().clamp_min(1e-30)).item()
        for n in ("o", "final_state")
    )


@pytest.mark.parametrize("name", list(OPERATION.regimes))
def test_chunked_form_equals_the_definition_in_every_regime(name: str) -> None:
    for w in OPERATION.reduced():
        inputs = OPERATION.generate(w, OPERATION.regimes[name], seed=0)
        assert relative(OPERATION.fast_oracle(inputs), OPERATION.oracle(inputs)) < 1e-10


@pytest.mark.parametrize("name", ["ragged-0-1-63-64/3", "empty-around-37/3", "chunk-edges/2"])
def test_chunked_form_equals_the_definition_on_held_out_lengths(name: str) -> None:
    w = OPERATION.workloads[name]
    for regime in ("slow", "beyond_single_inf"):
        inputs = OPERATION.generate(w, OPERATION.regimes[regime], seed=1)
        assert relative(OPERATION.fast_oracle(inputs), OPERATION.oracle(inputs)) < 1e-10


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 50), max_size=5),
    heads=st.integers(1, 3),
    strength=st.sampled_from([0.0, 1e-3, 1.0, 40.0, 1e5]),
    seed=st.integers(0, 9),
)
def test_chunked_form_equals_the_definition_for_any_lengths(
    lengths: list[int], heads: int, strength: float, seed: int
) -> None:
    p = problem(tuple(lengths), H=heads, seed=seed)
    p["g"] = p["g"] * strength
    slow, fast = token_by_token(p), chunked(p)
    torch.testing.assert_close(fast["o"], slow["o"], rtol=0, atol=1e-11)
    torch.testing.assert_close(fast["final_state"], slow["final_state"], rtol=0, atol=1e-11)


def test_chunked_form_does_not_depend_on_how_it_is_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    w = KdaWorkload("sliced", heads=2, lengths=(70, 0, 33, 100))
    inputs = OPERATION.generate(w, OPERATION.regimes["mixed"], seed=0)
    whole = chunked(inputs)
    monkeypatch.setattr(_oracle, "_SLICE_BYTES", {"cpu": 1})
    assert relative(chunked(inputs), whole) < 1e-12
