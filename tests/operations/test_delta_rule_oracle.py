"""The float64 oracle of the gated delta rules: other writings of each, and known limits of both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operations import Operation, Workload, gdn_prefill, kda_prefill
from operations._delta_rule import oracle
from operations._delta_rule.oracle import boundaries, chunked, token_by_token
from operations.gdn_prefill import GdnWorkload
from operations.kda_prefill import KdaWorkload

GDN, KDA = gdn_prefill.OPERATION, kda_prefill.OPERATION
Evaluate = Callable[[Any], dict[str, torch.Tensor]]
Problem = Callable[..., dict[str, Any]]


def drawn(
    lengths: tuple[int, ...],
    *,
    by_channel: bool,
    H: int = 1,
    group: int = 1,
    K: int = 4,
    V: int = 4,
    seed: int = 0,
    **fixed: Any,
) -> dict[str, Any]:
    """Small inputs of any head size, in float64 so that nothing is rounded on the way in."""
    rng = torch.Generator().manual_seed(seed)
    T, HV = sum(lengths), H * group

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    out: dict[str, Any] = {
        "q": randn(T, H, K),
        "k": torch.nn.functional.normalize(randn(T, H, K), dim=-1),
        "v": randn(T, HV, V),
        "g": -(randn(T, HV, K) if by_channel else randn(T, HV)).abs(),
        "beta": randn(T, HV).sigmoid(),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "initial_state": randn(len(lengths), HV, V, K),
        "scale": 0.7,
    }
    return {**out, **fixed}


kda: Problem = partial(drawn, by_channel=True)
gdn: Problem = partial(drawn, by_channel=False, group=2)
BOTH = pytest.mark.parametrize("evaluate", [token_by_token, chunked])
EACH = pytest.mark.parametrize("problem", [kda, gdn], ids=["kda", "gdn"])


def per_value_head(p: dict[str, Any], name: str) -> torch.Tensor:
    """q or k of the head that each value head reads."""
    x: torch.Tensor = p[name]
    return x.repeat_interleave(p["v"].shape[1] // x.shape[1], 1)


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
    p = kda((5, 0, 1, 37), H=2, K=3, V=5)
    if not with_state:
        p["initial_state"] = None
    o, final = element_by_element(p)
    got = evaluate(p)
    torch.testing.assert_close(got["o"], torch.tensor(o).double(), rtol=0, atol=1e-6)
    exact = {"dtype": torch.float64}
    torch.testing.assert_close(got["o"], torch.tensor(o, **exact), rtol=0, atol=1e-13)
    torch.testing.assert_close(got["final_state"], torch.tensor(final, **exact), rtol=0, atol=1e-13)


def as_transitions(p: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The paper's form: ``S_t = S_{t-1} alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T``.

    One transition matrix a token instead of a residual, and the gate as a factor alpha.
    """
    arrays = {n: p[n].double().numpy() for n in ("q", "k", "v", "g", "beta")}
    q, k, v, g, beta = arrays.values()
    T, HV, V = v.shape
    H, K = k.shape[1:]
    cu = p["cu_seqlens"].tolist()
    o = np.zeros((T, HV, V))
    final = np.zeros((len(cu) - 1, HV, V, K))
    for n in range(len(cu) - 1):
        for j in range(HV):
            h = j * H // HV
            S = np.zeros((V, K))
            if p["initial_state"] is not None:
                S = p["initial_state"][n, j].double().numpy()
            for t in range(cu[n], cu[n + 1]):
                step = np.exp(g[t, j]) * (np.eye(K) - beta[t, j] * np.outer(k[t, h], k[t, h]))
                S = S @ step + beta[t, j] * np.outer(v[t, j], k[t, h])
                o[t, j] = p["scale"] * (S @ q[t, h])
            final[n, j] = S
    return o, final


@BOTH
@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("with_state", [True, False])
def test_equals_the_paper_s_transition_form(
    evaluate: Evaluate, H: int, HV: int, with_state: bool
) -> None:
    p = gdn((5, 0, 1, 70), H=H, group=HV // H, K=3, V=5)
    if not with_state:
        p["initial_state"] = None
    o, final = as_transitions(p)
    got = evaluate(p)
    np.testing.assert_allclose(got["o"].numpy(), o, rtol=0, atol=1e-13)
    np.testing.assert_allclose(got["final_state"].numpy(), final, rtol=0, atol=1e-13)


def as_kda(p: dict[str, Any]) -> dict[str, Any]:
    """The same call for KDA: every channel has the head's gate, every value head its own q, k."""
    q, k = (per_value_head(p, n) for n in ("q", "k"))
    return {**p, "q": q, "k": k, "g": p["g"][..., None].expand(*p["g"].shape, q.shape[-1])}


@pytest.mark.parametrize("regime", list(GDN.regimes))
def test_equals_kda_s_oracle_with_the_gate_repeated_over_channels(regime: str) -> None:
    w = GdnWorkload("as-kda", heads=1, value_heads=2, lengths=(33, 0, 40))
    inputs = GDN.generate(w, GDN.regimes[regime], seed=2)
    for evaluate in (GDN.oracle, GDN.fast_oracle):
        got = evaluate(inputs)
        for name, x in KDA.oracle(as_kda(inputs)).items():
            assert (got[name] - x).abs().max() <= 1e-12 * x.abs().max()


@BOTH
@EACH
def test_without_gate_and_writes_the_state_stays_and_is_read(
    evaluate: Evaluate, problem: Problem
) -> None:
    p = problem((80,), H=2)
    p |= {"g": torch.zeros_like(p["g"]), "beta": torch.zeros_like(p["beta"])}
    got = evaluate(p)
    assert torch.equal(got["final_state"], p["initial_state"])
    want = 0.7 * torch.einsum("hvk,thk->thv", p["initial_state"][0], per_value_head(p, "q"))
    torch.testing.assert_close(got["o"], want, rtol=0, atol=1e-14)


@BOTH
@EACH
def test_full_writes_of_orthonormal_keys_store_the_values_exactly(
    evaluate: Evaluate, problem: Problem
) -> None:
    eye = torch.eye(4, dtype=torch.float64)[:, None]
    p = problem((4,), k=eye, q=eye, initial_state=None, scale=1.0)
    p |= {"g": torch.zeros_like(p["g"]), "beta": torch.ones_like(p["beta"])}
    got = evaluate(p)
    assert torch.equal(got["o"], p["v"]), "token t reads its own write"
    assert torch.equal(got["final_state"][0], p["v"].permute(1, 2, 0)), "row v, column k"


@BOTH
@EACH
def test_a_full_write_replaces_what_the_key_held(evaluate: Evaluate, problem: Problem) -> None:
    p = problem((2,), initial_state=None, scale=1.0)
    p["k"][1] = p["k"][0]
    p |= {"q": p["k"], "g": torch.zeros_like(p["g"]), "beta": torch.ones_like(p["beta"])}
    torch.testing.assert_close(evaluate(p)["o"], p["v"], rtol=0, atol=1e-14)


@BOTH
@EACH
@pytest.mark.parametrize("level", [-1e4, -math.inf])
def test_the_strongest_gates_leave_each_token_alone(
    evaluate: Evaluate, problem: Problem, level: float
) -> None:
    p = problem((70,), H=2)
    p["g"] = torch.full_like(p["g"], level)
    q, k = (per_value_head(p, n) for n in ("q", "k"))
    alone = 0.7 * p["beta"] * (q * k).sum(-1)
    got = evaluate(p)
    torch.testing.assert_close(got["o"], alone[..., None] * p["v"], rtol=0, atol=1e-14)
    assert got["final_state"].isfinite().all()


@BOTH
def test_decay_acts_on_key_columns(evaluate: Evaluate) -> None:
    p = kda((1,), K=3, V=2)
    p["beta"] = torch.zeros_like(p["beta"])
    want = p["initial_state"][0, 0] * p["g"][0, 0].exp()[None, :]
    torch.testing.assert_close(evaluate(p)["final_state"][0, 0], want, rtol=1e-14, atol=0)


@BOTH
def test_each_value_head_has_a_gate_of_its_own(evaluate: Evaluate) -> None:
    p = gdn((1,), group=3, beta=torch.zeros(1, 3, dtype=torch.float64))
    want = p["initial_state"][0] * p["g"][0].exp()[:, None, None]
    torch.testing.assert_close(evaluate(p)["final_state"][0], want, rtol=1e-14, atol=0)


@BOTH
@EACH
def test_sequences_do_not_see_each_other(evaluate: Evaluate, problem: Problem) -> None:
    p = problem((80, 0, 19, 1), H=2)
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
@EACH
def test_scale_is_linear_and_zero_is_a_scale(evaluate: Evaluate, problem: Problem) -> None:
    p = problem((70,))
    zero = evaluate({**p, "scale": 0.0})
    assert zero["o"].count_nonzero() == 0
    one, two = evaluate({**p, "scale": 1.0}), evaluate({**p, "scale": 2.0})
    torch.testing.assert_close(2 * one["o"], two["o"], rtol=1e-13, atol=0)
    assert torch.equal(one["final_state"], two["final_state"])


@BOTH
@EACH
def test_inputs_are_left_alone(evaluate: Evaluate, problem: Problem) -> None:
    p = problem((20, 3))
    before = {n: x.clone() for n, x in p.items() if isinstance(x, torch.Tensor)}
    evaluate(p)
    assert all(torch.equal(p[n], x) for n, x in before.items())


@EACH
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
    problem: Problem, offsets: list[int], meant: list[int]
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


RAGGED = GdnWorkload("both", heads=1, value_heads=2, lengths=(130, 0, 63, 1))
CASES: list[tuple[Operation, Workload, str, int]] = [
    *((KDA, w, regime, 0) for regime in KDA.regimes for w in KDA.reduced()),
    *(
        (KDA, KDA.workloads[name], regime, 1)
        for name in ("ragged-0-1-63-64/3", "empty-around-37/3", "chunk-edges/2")
        for regime in ("slow", "beyond_single_inf")
    ),
    *((GDN, RAGGED, regime, 1) for regime in GDN.regimes),
    *(
        (GDN, w, regime, 0)
        for regime in ("production", "scattered", "single_inf", "closed_ends")
        for w in GDN.reduced()
    ),
]


@pytest.mark.parametrize(
    ("operation", "w", "regime", "seed"),
    CASES,
    ids=[f"{operation.name} {w.name} {regime}" for operation, w, regime, _ in CASES],
)
def test_chunked_form_equals_the_definition(
    operation: Operation, w: Workload, regime: str, seed: int
) -> None:
    inputs = operation.generate(w, operation.regimes[regime], seed=seed)
    assert relative(operation.fast_oracle(inputs), operation.oracle(inputs)) < 1e-10


@EACH
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 140), max_size=5),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    strength=st.sampled_from([0.0, 1e-3, 1.0, 40.0, 1e5]),
    seed=st.integers(0, 9),
)
def test_chunked_form_equals_the_definition_for_any_lengths(
    problem: Problem, lengths: list[int], heads: int, group: int, strength: float, seed: int
) -> None:
    p = problem(tuple(lengths), H=heads, group=group, seed=seed)
    p["g"] = p["g"] * strength
    slow, fast = token_by_token(p), chunked(p)
    torch.testing.assert_close(fast["o"], slow["o"], rtol=0, atol=1e-11)
    torch.testing.assert_close(fast["final_state"], slow["final_state"], rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("operation", "w", "regime"),
    [
        (KDA, KdaWorkload("sliced", heads=2, lengths=(70, 0, 33, 100)), "mixed"),
        (
            GDN,
            GdnWorkload("sliced", heads=1, value_heads=2, lengths=(200, 0, 65, 130)),
            "production",
        ),
    ],
    ids=["kda", "gdn"],
)
def test_chunked_form_does_not_depend_on_how_it_is_sliced(
    operation: Operation, w: Workload, regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = operation.generate(w, operation.regimes[regime], seed=0)
    whole = chunked(inputs)
    monkeypatch.setattr(oracle, "_SLICE_BYTES", {"cpu": 1})
    assert relative(chunked(inputs), whole) < 1e-12
