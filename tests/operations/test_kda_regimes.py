"""What the input regimes of KDA prefill promise."""

from __future__ import annotations

import math

import pytest
import torch

from operations._delta_rule.statistics import SAMPLE_HEADS, SAMPLE_TOKENS
from operations.kda_prefill import OPERATION, KdaWorkload

SAMPLE = KdaWorkload("statistics", heads=SAMPLE_HEADS, lengths=(SAMPLE_TOKENS,))
SMALL = KdaWorkload("small", heads=3, lengths=(40, 0, 1, 70))
NAMES = list(OPERATION.regimes)
RAW = [n for n in NAMES if OPERATION.raw_form(SMALL, OPERATION.regimes[n], seed=0) is not None]


@pytest.mark.parametrize("name", RAW)
def test_raw_form_activates_to_what_generate_returns(name: str) -> None:
    regime = OPERATION.regimes[name]
    inputs = OPERATION.generate(SMALL, regime, seed=5)
    raw = OPERATION.raw_form(SMALL, regime, seed=5)
    assert raw is not None
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(raw[key], value), key
        else:
            assert raw[key] == value
    assert raw["g_raw"].dtype == raw["beta_logits"].dtype == torch.bfloat16
    assert raw["A_log"].shape == (3,)
    assert raw["dt_bias"].shape == (3, 128)
    assert raw["A_log"].dtype == raw["dt_bias"].dtype == torch.float32
    x = (raw["g_raw"].double() + raw["dt_bias"].double()) * raw["A_log"].double().exp()[:, None]
    g = raw["lower_bound"] / (1 + (-x).exp())
    # fp32 keeps 24 bits of a pre-activation of size x, and a sigmoid's relative slope is <= 1.
    torch.testing.assert_close(
        inputs["g"].double(), g, rtol=2**-22 * max(1.0, x.abs().max().item()), atol=1e-30
    )
    torch.testing.assert_close(
        inputs["beta"].double(), raw["beta_logits"].double().sigmoid(), rtol=1e-6, atol=0
    )
    for name_, raw_name in (("q", "q_raw"), ("k", "k_raw")):
        unit = torch.nn.functional.normalize(raw[raw_name].double(), dim=-1)
        torch.testing.assert_close(inputs[name_].double(), unit, rtol=2**-8, atol=1e-9)


def test_safe_gates_have_a_raw_form_and_the_others_have_none() -> None:
    safe = {"production", "production_spread", "slow", "similar_keys", "non_negative_keys"}
    assert set(RAW) == safe | {n for n in NAMES if n.startswith("sweep_")}


def test_ranking_regimes_are_production_and_the_mild_one_decides_nothing() -> None:
    roles = {n: r.role for n, r in OPERATION.regimes.items()}
    assert NAMES[0] == "production"
    assert {n for n, r in OPERATION.regimes.items() if r.ranks} == {
        "production",
        "production_spread",
    }
    assert [n for n in NAMES if roles[n] == "slow"] == ["slow"]
    mild = OPERATION.regimes["mild"]
    assert not mild.ranks
    assert not mild.gates
    assert all(r.gates for n, r in OPERATION.regimes.items() if n != "mild")


def test_sweep_runs_from_mild_to_production_severity() -> None:
    sweep = [r for r in OPERATION.regimes.values() if r.role == "sweep"]
    assert [r.severity for r in sweep] == [-1.0, -2.0, -3.0, -5.0]
    for r in sweep:
        assert r.gate_floor == r.severity
        assert r.statistics["mean"] == pytest.approx(r.severity / 2, rel=0.01)


def test_production_gate_is_centred_at_half_the_lower_bound_with_unit_spread() -> None:
    s = OPERATION.regimes["production"].statistics
    assert s["mean"] == pytest.approx(-2.5, abs=0.05)
    assert s["std"] == pytest.approx(1.0, abs=0.1)
    # What BT = 32 from the chunk start and BT = 64 from the middle cannot hold.
    assert s["sum32_min"] < -88.7
    raw = OPERATION.raw_form(SAMPLE, OPERATION.regimes["production"], seed=0)
    assert raw is not None
    assert raw["lower_bound"] == -5.0
    assert raw["A_log"].abs().max() > 0.05, "an implementation that drops A_log must differ"
    assert raw["dt_bias"].abs().max() > 0.5, "an implementation that drops dt_bias must differ"


def test_production_spread_saturates_at_both_ends_inside_one_head() -> None:
    regime = OPERATION.regimes["production_spread"]
    raw = OPERATION.raw_form(SAMPLE, regime, seed=0)
    assert raw is not None
    assert raw["A_log"].max().item() == pytest.approx(math.log(16))
    steep = raw["g"][:, raw["A_log"].argmax()]
    assert (steep < -4.9).double().mean() > 0.3
    assert (steep > -0.1).double().mean() > 0.3
    one_head = OPERATION.raw_form(KdaWorkload("h1", heads=1, lengths=(8,)), regime, seed=0)
    assert one_head is not None
    assert one_head["A_log"].item() == pytest.approx(math.log(16))


def test_constant_and_mixed_gates_are_exact() -> None:
    for name, level in (("constant", -5.0), ("beyond_20", -20.0), ("beyond_inf", -math.inf)):
        assert (OPERATION.generate(SMALL, OPERATION.regimes[name], seed=0)["g"] == level).all()
    g = OPERATION.generate(SMALL, OPERATION.regimes["mixed"], seed=0)["g"]
    assert (g == -5.0).sum() * 2 == g.numel()
    assert (g == torch.tensor(-0.001)).sum() * 2 == g.numel()


def test_similar_keys_are_similar_pairwise_and_almost_overwritten() -> None:
    inputs = OPERATION.generate(SAMPLE, OPERATION.regimes["similar_keys"], seed=2)
    k = torch.nn.functional.normalize(inputs["k"].float(), dim=-1).movedim(1, 0)
    for cosines in k @ k.mT:
        assert cosines.mean() > 0.9
        assert cosines.min() > 0.8
    assert inputs["beta"].mean() == pytest.approx(0.95, abs=0.005)
    k = OPERATION.generate(SMALL, OPERATION.regimes["non_negative_keys"], seed=2)["k"]
    assert (k >= 0).all()


def test_scattered_gates_are_strong_in_every_chunk_and_reset_no_token() -> None:
    g = OPERATION.generate(SAMPLE, OPERATION.regimes["beyond_scattered"], seed=0)["g"]
    strong = g < -1
    assert strong.double().mean() == pytest.approx(1 / 64, rel=0.05)
    assert strong.unflatten(0, (-1, 16)).any(1).any(-1).all()
    assert strong.double().mean(-1).max() < 0.2
    sizes = (-g[strong]).log10()
    for decade in range(1, 6):
        share = ((sizes >= decade) & (sizes < decade + 1)).double().mean()
        assert share == pytest.approx(1 / math.log10(1e6 / 3), abs=0.02)
    assert (g[~strong] > -0.0101).all()


def _inverse_errors(regime: str, size: int) -> tuple[float, float]:
    """Largest entry of, and error in, (I + L)^-1 by doubling powers of L rounded to fp16."""
    w = KdaWorkload("inverse", heads=2, lengths=(size,))
    inputs = OPERATION.generate(w, OPERATION.regimes[regime], seed=0)
    k, b = (inputs[n].double().movedim(0, 1) for n in ("k", "g"))
    b = b.cumsum(1)
    pair = (b[:, :, None] - b[:, None]).clamp(max=0).exp()
    L = torch.einsum("hid,hjd,hijd->hij", k, k, pair) * inputs["beta"].double().mT[..., None]
    L = L.tril(-1)
    eye = torch.eye(size, dtype=torch.float64)
    exact = torch.linalg.inv(eye + L)

    def half(x: torch.Tensor) -> torch.Tensor:
        return x.half().double()

    X, P = eye - half(L), half(-L)
    for _ in range(size.bit_length() - 2):
        P = half(P @ P)
        X = half(X + X @ P)
    error = (X - exact).abs().max().item()
    return exact.abs().max().item(), error if math.isfinite(error) else math.inf


def test_similar_keys_break_the_power_series_inverse_that_random_keys_allow() -> None:
    largest, error = _inverse_errors("similar_keys", 16)
    assert largest < 1.5, "the answer itself stays near 1"
    assert error > 0.05
    assert _inverse_errors("similar_keys", 64)[1] > 100
    assert _inverse_errors("production", 16)[1] < 2e-3
