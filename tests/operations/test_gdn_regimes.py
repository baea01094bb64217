"""What the input regimes of GDN prefill promise."""

from __future__ import annotations

import math

import pytest
import torch

from operations import Regime
from operations._delta_rule.statistics import SAMPLE_HEADS, SAMPLE_TOKENS, measure
from operations.gdn_prefill import OPERATION, GdnWorkload
from operations.gdn_prefill._generators import activate_gate
from operations.gdn_prefill.raw import plain

SAMPLE = GdnWorkload(
    "statistics", heads=SAMPLE_HEADS // 2, value_heads=SAMPLE_HEADS, lengths=(SAMPLE_TOKENS,)
)
SMALL = GdnWorkload("small", heads=2, value_heads=6, lengths=(40, 0, 1, 70))
NAMES = list(OPERATION.regimes)
RAW = [n for n in NAMES if OPERATION.raw_form(SMALL, OPERATION.regimes[n], seed=0) is not None]


@pytest.mark.parametrize("name", NAMES)
def test_stored_statistics_are_what_the_generator_draws(name: str) -> None:
    regime = OPERATION.regimes[name]
    inputs = OPERATION.generate(SAMPLE, regime, seed=0)
    measured = measure(inputs)
    assert measured.keys() == regime.statistics.keys()
    spread = max(regime.statistics["std"], 1e-9)
    # Extremes and sums of windows hang on single draws.
    loose = {"std": 0.05, "min": 0.1, "sum16_min": 0.1, "sum32_min": 0.1, "sum64_min": 0.1}
    for key, stored in regime.statistics.items():
        if key in ("mean", "max"):
            assert measured[key] == pytest.approx(stored, abs=0.05 * spread)
        elif key in loose:
            assert measured[key] == pytest.approx(stored, rel=loose[key], abs=1e-12)
        else:  # shares, the mean of beta, cosines
            tolerance = 0.1 if key == "key_cosine_min" else 0.01
            assert measured[key] == pytest.approx(stored, abs=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_drawn_inputs_stay_inside_the_contract_and_above_the_gate_floor(name: str) -> None:
    regime = OPERATION.regimes[name]
    inputs = OPERATION.generate(SAMPLE, regime, seed=1)
    g = inputs["g"]
    assert not g.isnan().any()
    assert g.max() <= 0
    assert g.min() >= regime.gate_floor
    assert ((inputs["beta"] >= 0) & (inputs["beta"] <= 1)).all()
    for x in (inputs["q"], inputs["k"]):
        norm = torch.linalg.vector_norm(x.double(), dim=-1)
        unit = norm if name != "closed_ends" else norm[norm > 0]
        assert (unit - 1).abs().max() < 4e-3, "unit norm up to bf16 rounding"
    assert inputs["v"].double().std() == pytest.approx(1.0, rel=0.02)
    assert len(regime.source) > 40


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


def test_closed_ends_are_reached_exactly_and_often() -> None:
    inputs = OPERATION.generate(SAMPLE, OPERATION.regimes["closed_ends"], seed=0)
    g, beta, k = inputs["g"], inputs["beta"], inputs["k"]
    assert (g[:, 0::2] == 0).all()
    assert ((g == 0) | (g == -20)).all()
    assert (g[:, 1::2] == 0).double().mean() == pytest.approx(0.5, abs=0.02)
    assert ((beta == 0) | (beta == 1)).all()
    assert (beta == 1).double().mean() == pytest.approx(0.5, abs=0.02)
    assert (k == 0).all(-1).double().mean() == pytest.approx(1 / 8, abs=0.02)


@pytest.mark.parametrize(("name", "level"), [("1e4", -1e4), ("1e6", -1e6), ("inf", -math.inf)])
def test_single_token_resets_once_per_nonempty_sequence_and_value_head(
    name: str, level: float
) -> None:
    g = OPERATION.generate(SMALL, OPERATION.regimes[f"single_{name}"], seed=0)["g"]
    hit = g == level
    cu = SMALL.boundaries
    for n, length in enumerate(SMALL.lengths):
        assert hit[cu[n] : cu[n + 1]].sum(0).tolist() == [int(length > 0)] * 6
    assert (g[~hit] > -0.01).all()


def test_scattered_gates_are_strong_here_and_there() -> None:
    g = OPERATION.generate(SAMPLE, OPERATION.regimes["scattered"], seed=0)["g"]
    strong = g < -1
    assert strong.double().mean() == pytest.approx(1 / 64, rel=0.1)
    assert (g[~strong] > -0.0101).all()
    assert g.min() < -1e5


def test_one_hot_state_outlives_the_sequence_and_is_not_its_own_transpose() -> None:
    w = GdnWorkload("memory", heads=1, value_heads=1, lengths=(4096,))
    inputs = OPERATION.generate(w, OPERATION.regimes["one_hot_state"], seed=0)
    start = inputs["initial_state"][0, 0]
    assert start.count_nonzero() == 1
    assert start[start.mT != 0].item() == 0
    final = OPERATION.fast_oracle(inputs)["final_state"][0, 0]
    assert final[start != 0].item() > 0.8, "so that a quarter is left after 32768 tokens"
    assert final.abs().max() == final[start != 0].item()


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


def test_equal_arguments_draw_equal_bytes_and_any_other_draws_others() -> None:
    production, sweep = OPERATION.regimes["production"], OPERATION.regimes["sweep_A4"]
    first = OPERATION.generate(SMALL, production, seed=0)
    again = OPERATION.generate(SMALL, production, seed=0)
    assert all(torch.equal(first[n], again[n]) for n in ("q", "k", "v", "g", "initial_state"))
    renamed = GdnWorkload("other", heads=2, value_heads=6, lengths=SMALL.lengths)
    for w, r, seed in ((SMALL, production, 1), (SMALL, sweep, 0), (renamed, production, 0)):
        assert not torch.equal(OPERATION.generate(w, r, seed=seed)["q"], first["q"])


def test_unknown_regime_is_refused_by_name() -> None:
    stranger = Regime("warm", "edge", -1.0, "nowhere", {})
    for call in (OPERATION.generate, OPERATION.raw_form):
        with pytest.raises(ValueError, match="unknown gdn_prefill regime 'warm'; known: prod"):
            call(SMALL, stranger, seed=0)
