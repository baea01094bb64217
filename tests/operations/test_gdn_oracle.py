"""The float64 oracle of GDN prefill against another form of it, KDA's, and known limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operations import kda_prefill
from operations._delta_rule import oracle
from operations._delta_rule.oracle import chunked, token_by_token
from operations.gdn_prefill import OPERATION, GdnWorkload

BOTH = pytest.mark.parametrize("evaluate", [token_by_token, chunked])
Evaluate = Callable[[Any], dict[str, torch.Tensor]]


def problem(
    lengths: tuple[int, ...],
    *,
    H: int = 1,
    HV: int = 2,
    K: int = 4,
    V: int = 4,
    seed: int = 0,
    **fixed: Any,
) -> dict[str, Any]:
    """Small inputs of any head size, in float64 so that nothing is rounded on the way in."""
    rng = torch.Generator().manual_seed(seed)
    T = sum(lengths)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    out: dict[str, Any] = {
        "q": randn(T, H, K),
        "k": torch.nn.functional.normalize(randn(T, H, K), dim=-1),
        "v": randn(T, HV, V),
        "g": -randn(T, HV).abs(),
        "beta": randn(T, HV).sigmoid(),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "initial_state": randn(len(lengths), HV, V, K),
        "scale": 0.7,
    }
    return {**out, **fixed}


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
    p = problem((5, 0, 1, 70), H=H, HV=HV, K=3, V=5)
    if not with_state:
        p["initial_state"] = None
    o, final = as_transitions(p)
    got = evaluate(p)
    np.testing.assert_allclose(got["o"].numpy(), o, rtol=0, atol=1e-13)
    np.testing.assert_allclose(got["final_state"].numpy(), final, rtol=0, atol=1e-13)


def as_kda(p: dict[str, Any]) -> dict[str, Any]:
    """The same call for KDA: every channel has the head's gate, every value head its own q, k."""
    group = p["v"].shape[1] // p["k"].shape[1]
    q, k = (p[n].repeat_interleave(group, 1) for n in ("q", "k"))
    return {**p, "q": q, "k": k, "g": p["g"][..., None].expand(*p["g"].shape, q.shape[-1])}


@pytest.mark.parametrize("regime", list(OPERATION.regimes))
def test_equals_kda_s_oracle_with_the_gate_repeated_over_channels(regime: str) -> None:
    w = GdnWorkload("as-kda", heads=1, value_heads=2, lengths=(33, 0, 40))
    inputs = OPERATION.generate(w, OPERATION.regimes[regime], seed=2)
    kda = kda_prefill.OPERATION
    for evaluate in (OPERATION.oracle, OPERATION.fast_oracle):
        got = evaluate(inputs)
        for name, x in kda.oracle(as_kda(inputs)).items():
            assert (got[name] - x).abs().max() <= 1e-12 * x.abs().max()


@BOTH
def test_without_gate_and_writes_the_state_stays_and_is_read(evaluate: Evaluate) -> None:
    p = problem((80,), H=1, HV=2)
    p |= {"g": torch.zeros_like(p["g"]), "beta": torch.zeros_like(p["beta"])}
    got = evaluate(p)
    assert torch.equal(got["final_state"], p["initial_state"])
    want = 0.7 * torch.einsum("hvk,tk->thv", p["initial_state"][0], p["q"][:, 0])
    torch.testing.assert_close(got["o"], want, rtol=0, atol=1e-14)


@BOTH
def test_full_writes_of_orthonormal_keys_store_the_values_exactly(evaluate: Evaluate) -> None:
    eye = torch.eye(4, dtype=torch.float64)[:, None]
    p = problem((4,), k=eye, q=eye, initial_state=None, scale=1.0)
    p |= {"g": torch.zeros_like(p["g"]), "beta": torch.ones_like(p["beta"])}
    got = evaluate(p)
    assert torch.equal(got["o"], p["v"]), "token t reads its own write"
    for j in range(2):
        assert torch.equal(got["final_state"][0, j], p["v"][:, j].mT), "row v, column k"


@BOTH
def test_each_value_head_has_a_gate_of_its_own(evaluate: Evaluate) -> None:
    p = problem((1,), HV=3, beta=torch.zeros(1, 3, dtype=torch.float64))
    want = p["initial_state"][0] * p["g"][0].exp()[:, None, None]
    torch.testing.assert_close(evaluate(p)["final_state"][0], want, rtol=1e-14, atol=0)


@BOTH
@pytest.mark.parametrize("level", [-1e4, -math.inf])
def test_the_strongest_gates_leave_each_token_alone(evaluate: Evaluate, level: float) -> None:
    p = problem((70,), H=1, HV=2)
    p["g"] = torch.full_like(p["g"], level)
    alone = 0.7 * p["beta"] * (p["q"] * p["k"]).sum(-1)
    got = evaluate(p)
    torch.testing.assert_close(got["o"], alone[..., None] * p["v"], rtol=0, atol=1e-14)
    assert got["final_state"].isfinite().all()


@pytest.mark.parametrize("w", OPERATION.reduced(), ids=lambda w: w.name)
@pytest.mark.parametrize("regime", ["production", "scattered", "single_inf", "closed_ends"])
def test_chunked_form_equals_the_definition_on_reduced_workloads(w: Any, regime: str) -> None:
    inputs = OPERATION.generate(w, OPERATION.regimes[regime], seed=0)
    assert relative(OPERATION.fast_oracle(inputs), OPERATION.oracle(inputs)) < 1e-10


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest ``max|a - b| / max|b|`` over the outputs."""
    return max(
        ((a[n] - b[n]).abs().max() / b[n].abs().max().clamp_min(1e-30)).item()
        for n in ("o", "final_state")
    )


@pytest.mark.parametrize("name", list(OPERATION.regimes))
def test_chunked_form_equals_the_definition_in_every_regime(name: str) -> None:
    w = GdnWorkload("both", heads=1, value_heads=2, lengths=(130, 0, 63, 1))
    inputs = OPERATION.generate(w, OPERATION.regimes[name], seed=1)
    assert relative(OPERATION.fast_oracle(inputs), OPERATION.oracle(inputs)) < 1e-10


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 140), max_size=4),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    strength=st.sampled_from([0.0, 1e-3, 1.0, 40.0, 1e5]),
    seed=st.integers(0, 9),
)
def test_chunked_form_equals_the_definition_for_any_lengths(
    lengths: list[int], heads: int, group: int, strength: float, seed: int
) -> None:
    p = problem(tuple(lengths), H=heads, HV=heads * group, seed=seed)
    p["g"] = p["g"] * strength
    slow, fast = token_by_token(p), chunked(p)
    torch.testing.assert_close(fast["o"], slow["o"], rtol=0, atol=1e-11)
    torch.testing.assert_close(fast["final_state"], slow["final_state"], rtol=0, atol=1e-11)


def test_chunked_form_does_not_depend_on_how_it_is_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    w = GdnWorkload("sliced", heads=1, value_heads=2, lengths=(200, 0, 65, 130))
    inputs = OPERATION.generate(w, OPERATION.regimes["production"], seed=0)
    whole = chunked(inputs)
    monkeypatch.setattr(oracle, "_SLICE_BYTES", {"cpu": 1})
    assert relative(chunked(inputs), whole) < 1e-12
