"""What the input regimes of GDN prefill promise."""

from __future__ import annotations

import math

import pytest
import torch

from operations._delta_rule.statistics import SAMPLE_HEADS, SAMPLE_TOKENS
from operations.gdn_prefill import OPERATION, GdnWorkload
from operations.gdn_prefill._generators import activate_gate
from operations.gdn_prefill.raw import plain

SAMPLE = GdnWorkload(
    "statistics", heads=SAMPLE_HEADS // 2, value_heads=SAMPLE_HEADS, lengths=(SAMPLE_TOKENS,)
)
SMALL = GdnWorkload("small", heads=2, value_heads=6, lengths=(40, 0, 1, 70))
NAMES = list(OPERATION.regimes)
RAW = [n for n in NAMES if OPERATION.raw_form(SMALL, OPERATION.regimes[n], seed=0) is not None]


@pytest.mark.parametrize("name", RAW)
def test_raw_form_activates_to_what_generate_returns(name: str) -> None:
    regime = OPERATION.regimes[name]
    inputs = OPERATION.generate(SMALL, regime, seed=5)
    raw = OPERATION.raw_form(SMALL, regime, seed=5)
    assert raw is not None
    for key, value in inputs.items():
        assert torch.equal(raw[key], value) if torch.is_tensor(value) else raw[key] == value
    assert raw["g_raw"].dtype == raw["beta_logits"].dtype == torch.bfloat16
    assert raw["g_raw"].shape == (111, 6)
    for key in ("A_log", "dt_bias"):
        assert raw[key].shape == (6,)
        assert raw[key].dtype == torch.float32
    packed = (raw[n] for n in ("q_raw", "k_raw", "v", "g_raw", "beta_logits", "cu_seqlens"))
    meant = plain(
        *packed, gate="softplus", A_log=raw["A_log"], dt_bias=raw["dt_bias"], beta_logits=True,
        l2norm=True,
    )  # fmt: skip
    torch.testing.assert_close(inputs["g"].double(), meant["g"], rtol=2e-5, atol=1e-30)
    torch.testing.assert_close(inputs["beta"].double(), meant["beta"], rtol=1e-6, atol=1e-30)
    for key in ("q", "k"):
        own = inputs[key].double().repeat_interleave(3, 1)
        assert (meant[key] - own).abs().max() < 2**-8, "bf16 rounding of a unit vector"


def test_regimes_with_a_raw_form_are_those_a_softplus_gate_gives() -> None:
    assert {"production", "production_steep", "slow", "sweep_A1", "sweep_A16"} <= set(RAW)
    assert {"no_gate", "constant_inf", "single_1e4", "scattered", "mild"}.isdisjoint(RAW)
    for r in OPERATION.regimes.values():
        assert r.name in RAW or r.role in ("edge", "mild"), "what ranks is fed in either form"


def test_roles_say_what_ranks_and_what_only_gates() -> None:
    ranks = [n for n, r in OPERATION.regimes.items() if r.ranks]
    assert ranks == ["production", "production_steep"], "the first one ranks"
    assert [n for n, r in OPERATION.regimes.items() if r.role == "slow"] == ["slow"]
    assert [n for n, r in OPERATION.regimes.items() if not r.gates] == ["mild"]


def test_production_gates_are_of_heads_that_remember_long_and_of_heads_that_do_not() -> None:
    w = GdnWorkload("layer", heads=16, value_heads=32, lengths=(500,))
    raw = OPERATION.raw_form(w, OPERATION.regimes["production"], seed=0)
    assert raw is not None
    A, dt = raw["A_log"].exp(), torch.nn.functional.softplus(raw["dt_bias"])
    assert 0 < A.min() < 0.5
    assert 15.5 < A.max() < 16
    assert 0.001 <= dt.min() < 0.0013
    assert 0.085 < dt.max() <= 0.1
    # Not sorted by head, and the one not by the other.
    assert (A.diff() < 0).any()
    assert torch.corrcoef(torch.stack([A, dt.log()]))[0, 1].abs() < 0.5
    memory = -1 / raw["g"].double().mean(0)  # tokens
    assert memory.max() > 100
    assert memory.min() < 2


def test_few_heads_span_the_initialisation_too() -> None:
    w = GdnWorkload("share", heads=2, value_heads=4, lengths=(2000,))
    for seed in range(3):
        raw = OPERATION.raw_form(w, OPERATION.regimes["production_steep"], seed=seed)
        assert raw is not None
        A = raw["A_log"].exp().sort().values
        assert ((torch.arange(4) * 4 < A) & (torch.arange(1, 5) * 4 > A)).all()
        assert (raw["dt_bias"] == 1).all()


def test_steep_production_overflows_what_anchors_at_a_chunk_s_start() -> None:
    s = OPERATION.regimes["production_steep"].statistics
    assert s["sum16_min"] < -88.7
    assert s["mean"] == pytest.approx(-11, abs=1)


def test_steps_of_the_sweep_shorten_the_chunk_that_does_not_overflow() -> None:
    sweep = [r for r in OPERATION.regimes.values() if r.role == "sweep"]
    assert [r.severity for r in sweep] == [-1.0, -2.0, -4.0, -8.0, -16.0]
    for r, fits in zip(sweep, (64, 32, 16, 4, 0), strict=True):
        g = OPERATION.generate(SAMPLE, r, seed=0)["g"].double()
        worst = {n: g.reshape(-1, n, SAMPLE_HEADS).sum(1).min() for n in (4, 8, 16, 32, 64, 128)}
        assert [n for n in worst if worst[n] > -88.7] == [n for n in worst if n <= fits]
        assert (f"{fits} tokens do, of {2 * fits} not" in r.source) == (fits > 0)
        # E softplus(N(0, 1)) = 0.806
        assert r.severity is not None
        assert r.statistics["mean"] == pytest.approx(0.806 * r.severity, rel=0.01)


def test_constant_and_mixed_gates_are_exact() -> None:
    levels = {"no_gate": 0.0, "constant_2": -2.0, "constant_20": -20.0, "constant_inf": -math.inf}
    for name, level in levels.items():
        assert (OPERATION.generate(SMALL, OPERATION.regimes[name], seed=0)["g"] == level).all()
    g = OPERATION.generate(SMALL, OPERATION.regimes["mixed_heads"], seed=0)["g"]
    assert (g[:, 0::2] == -20.0).all()
    assert (g[:, 1::2] == torch.tensor(-0.001)).all()


def test_beta_regimes_are_near_their_ends_and_not_at_them() -> None:
    low = OPERATION.generate(SAMPLE, OPERATION.regimes["beta_near_0"], seed=0)["beta"]
    high = OPERATION.generate(SAMPLE, OPERATION.regimes["beta_near_1"], seed=0)["beta"]
    assert low.min() > 0
    assert low.max() < 0.01
    assert high.min() > 0.99
    assert high.max() < 1


def test_scattered_gates_are_strong_here_and_there() -> None:
    g = OPERATION.generate(SAMPLE, OPERATION.regimes["scattered"], seed=0)["g"]
    strong = g < -1
    assert strong.double().mean() == pytest.approx(1 / 64, rel=0.1)
    assert (g[~strong] > -0.0101).all()
    assert g.min() < -1e5


def test_mild_gates_are_those_of_the_usage_example() -> None:
    g = OPERATION.generate(SAMPLE, OPERATION.regimes["mild"], seed=0)["g"]
    assert g.max() < -0.313
    assert g.min() > -0.694
    s = OPERATION.regimes["mild"].statistics
    assert s["sum64_min"] > -88.7, "a chunk anchored at its start is right on it"


def test_the_gate_of_a_large_pre_activation_is_linear_and_of_a_small_one_exponential() -> None:
    A_log, dt_bias = torch.tensor([0.0, math.log(16.0)]), torch.tensor([0.0, 1.0])
    g = activate_gate(torch.tensor([[60.0, 59.0], [-40.0, -41.0]]).bfloat16(), A_log, dt_bias)
    torch.testing.assert_close(g[0], torch.tensor([-60.0, -960.0]))
    torch.testing.assert_close(g[1], torch.tensor([-1.0, -16.0]) * math.exp(-40.0))
