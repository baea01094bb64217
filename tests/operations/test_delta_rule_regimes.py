"""What the input regimes of every gated delta rule promise; more in the files of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from operations import Operation, Regime, gdn_prefill, kda_prefill
from operations._delta_rule.generators import seed_of
from operations._delta_rule.statistics import SAMPLE_HEADS, SAMPLE_TOKENS, measure
from operations._delta_rule.workloads import DeltaRuleWorkload
from operations.gdn_prefill import GdnWorkload
from operations.kda_prefill import KdaWorkload

GDN, KDA = gdn_prefill.OPERATION, kda_prefill.OPERATION
WHOLE, RAGGED = (SAMPLE_TOKENS,), (40, 0, 1, 70)


@dataclass(frozen=True)
class Shapes:
    """The shape that statistics were measured on, and small ones that differ by name only."""

    sample: DeltaRuleWorkload
    small: DeltaRuleWorkload
    renamed: DeltaRuleWorkload


SHAPES: dict[Operation, Shapes] = {
    KDA: Shapes(
        KdaWorkload("statistics", heads=SAMPLE_HEADS, lengths=WHOLE),
        KdaWorkload("small", heads=3, lengths=RAGGED),
        KdaWorkload("other", heads=3, lengths=RAGGED),
    ),
    GDN: Shapes(
        GdnWorkload("statistics", heads=SAMPLE_HEADS // 2, value_heads=SAMPLE_HEADS, lengths=WHOLE),
        GdnWorkload("small", heads=2, value_heads=6, lengths=RAGGED),
        GdnWorkload("other", heads=2, value_heads=6, lengths=RAGGED),
    ),
}
REGIMES = [pytest.param(o, name, id=f"{o.name}-{name}") for o in SHAPES for name in o.regimes]

# A mean over millions is steady; extremes and sums of windows hang on single draws, so another
# random stream may move them by a few per cent. GDN has 128 times fewer gates.
SUMS = {"sum16_min": 0.1, "sum32_min": 0.1, "sum64_min": 0.1}
OF_SPREAD = {KDA: {"mean": 0.02, "max": 0.05}, GDN: {"mean": 0.05, "max": 0.05}}
OF_ITSELF = {KDA: {"std": 0.02, "min": 0.05, **SUMS}, GDN: {"std": 0.05, "min": 0.1, **SUMS}}


@pytest.mark.parametrize(("operation", "name"), REGIMES)
def test_stored_statistics_are_what_the_generator_draws(operation: Operation, name: str) -> None:
    regime = operation.regimes[name]
    measured = measure(operation.generate(SHAPES[operation].sample, regime, seed=0))
    assert measured.keys() == regime.statistics.keys()
    spread = max(regime.statistics["std"], 1e-9)
    of_spread, of_itself = OF_SPREAD[operation], OF_ITSELF[operation]
    for key, stored in regime.statistics.items():
        if key in of_spread:
            assert measured[key] == pytest.approx(stored, abs=of_spread[key] * spread)
        elif key in of_itself:
            assert measured[key] == pytest.approx(stored, rel=of_itself[key], abs=1e-12)
        else:  # shares, the mean of beta, cosines
            tolerance = 0.1 if key == "key_cosine_min" else 0.01
            assert measured[key] == pytest.approx(stored, abs=tolerance)


@pytest.mark.parametrize(("operation", "name"), REGIMES)
def test_drawn_inputs_stay_inside_the_contract_and_above_the_gate_floor(
    operation: Operation, name: str
) -> None:
    regime = operation.regimes[name]
    inputs = operation.generate(SHAPES[operation].sample, regime, seed=1)
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


@pytest.mark.parametrize(
    ("operation", "level", "tolerance"), [(KDA, -5, 0.01), (GDN, -20, 0.02)], ids=["kda", "gdn"]
)
def test_closed_ends_are_reached_exactly_and_often(
    operation: Operation, level: float, tolerance: float
) -> None:
    sample = SHAPES[operation].sample
    inputs = operation.generate(sample, operation.regimes["closed_ends"], seed=0)
    g, beta, k = inputs["g"], inputs["beta"], inputs["k"]
    assert (g[..., 0::2] == 0).all()
    assert ((g == 0) | (g == level)).all()
    assert (g[..., 1::2] == 0).double().mean() == pytest.approx(0.5, abs=tolerance)
    assert ((beta == 0) | (beta == 1)).all()
    assert (beta == 1).double().mean() == pytest.approx(0.5, abs=0.02)
    assert (k == 0).all(-1).double().mean() == pytest.approx(1 / 8, abs=0.02)
    assert (inputs["q"] != 0).any(-1).all()


@pytest.mark.parametrize(
    ("operation", "prefix"), [(KDA, "beyond_single"), (GDN, "single")], ids=["kda", "gdn"]
)
@pytest.mark.parametrize(("name", "level"), [("1e4", -1e4), ("1e6", -1e6), ("inf", -math.inf)])
def test_single_token_resets_once_per_nonempty_sequence_and_head(
    operation: Operation, prefix: str, name: str, level: float
) -> None:
    small = SHAPES[operation].small
    g = operation.generate(small, operation.regimes[f"{prefix}_{name}"], seed=0)["g"]
    reset = (g == level).reshape(small.tokens, small.state_heads, -1)
    assert torch.equal(reset.any(-1), reset.all(-1))
    hit = reset.all(-1)
    cu = small.boundaries
    for n, length in enumerate(small.lengths):
        assert hit[cu[n] : cu[n + 1]].sum(0).tolist() == [int(length > 0)] * small.state_heads
    assert (g[~hit] > -0.01).all()


@pytest.mark.parametrize(
    ("operation", "w", "least"),
    [
        (KDA, KdaWorkload("memory", heads=1, lengths=(8192,)), 0.6),
        (GDN, GdnWorkload("memory", heads=1, value_heads=1, lengths=(4096,)), 0.8),
    ],
    ids=["kda", "gdn"],
)
def test_one_hot_state_outlives_the_sequence_and_is_not_its_own_transpose(
    operation: Operation, w: DeltaRuleWorkload, least: float
) -> None:
    inputs = operation.generate(w, operation.regimes["one_hot_state"], seed=0)
    start = inputs["initial_state"][0, 0]
    assert start.count_nonzero() == 1
    assert start[start.mT != 0].item() == 0
    final = operation.fast_oracle(inputs)["final_state"][0, 0]
    assert final[start != 0].item() > least, "so that a quarter is left after 32768 tokens"
    assert final.abs().max() == final[start != 0].item()


@pytest.mark.parametrize(
    ("operation", "another"), [(KDA, "sweep_lb5"), (GDN, "sweep_A4")], ids=["kda", "gdn"]
)
def test_equal_arguments_draw_equal_bytes_and_any_other_draws_others(
    operation: Operation, another: str
) -> None:
    production, sweep = operation.regimes["production"], operation.regimes[another]
    small, renamed = SHAPES[operation].small, SHAPES[operation].renamed
    first = operation.generate(small, production, seed=0)
    again = operation.generate(small, production, seed=0)
    assert all(torch.equal(first[n], again[n]) for n in ("q", "k", "v", "g", "initial_state"))
    for w, r, seed in ((small, production, 1), (small, sweep, 0), (renamed, production, 0)):
        assert not torch.equal(operation.generate(w, r, seed=seed)["q"], first["q"])


def test_the_seed_does_not_depend_on_the_process() -> None:
    assert seed_of(0, SHAPES[KDA].small, KDA.regimes["slow"]) == 4901065385244017023


@pytest.mark.parametrize("operation", SHAPES, ids=lambda o: o.name)
def test_unknown_regime_is_refused_by_name(operation: Operation) -> None:
    stranger = Regime("warm", "edge", -1.0, "nowhere", {})
    fault = f"unknown {operation.name} regime 'warm'; known: prod"
    for call in (operation.generate, operation.raw_form):
        with pytest.raises(ValueError, match=fault):
            call(SHAPES[operation].small, stranger, seed=0)
