"""Input regimes of GDN prefill, as data: where each comes from and how it is drawn.

How the numbers are drawn from a :class:`Recipe` is in ``_generators``; what was
measured of them is in ``_statistics``.  Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from operations._base import Regime
from operations._delta_rule import recipes
from operations._delta_rule.recipes import STRONG_BETA, WEAK_BETA, RegimeTable
from operations.gdn_prefill._spec import SIMILAR_KEYS_TOLERANCES
from operations.gdn_prefill._statistics import MEASURED

__all__ = ["RECIPES", "REGIMES", "Recipe"]

Gate = Literal[
    "softplus_initial",
    "softplus_unit_bias",
    "softplus_plain",
    "softplus_slow",
    "constant",
    "mixed",
    "remembered",
    "single_token",
    "scattered",
    "closed",
    "log_sigmoid_of_uniform",
]


@dataclass(frozen=True)
class Recipe(recipes.Recipe):
    """How one regime of GDN is drawn.

    Parameters
    ----------
    gate : str
        Rule of the gate.  The ``softplus_*`` rules draw a bf16 pre-activation,
        ``A_log`` and ``dt_bias`` and activate them, so they have a raw form.
    level : float
        The rule's number: ``exp(A_log)`` of a plain softplus gate, value of a
        constant one, of the strong heads of mixed ones, of the closed end, at
        the single token, strongest of the scattered gates.
    """

    gate: Gate

    @property
    def raw(self) -> bool:
        """Whether the gate comes from a pre-activation."""
        return self.gate.startswith("softplus_")


def _build() -> tuple[dict[str, Regime], dict[str, Recipe]]:
    table = RegimeTable[Recipe](MEASURED)
    add = table.add
    add(
        "production",
        "production",
        -31.0,
        Recipe("softplus_initial", keys="silu"),
        "the gate -exp(A_log) * softplus(a + dt_bias) as the GatedDeltaNet layer of "
        "flash-linear-attention and the Mamba2 layers before it start it: exp(A_log) over (0, 16), "
        "softplus(dt_bias) log-uniform over [0.001, 0.1]; a of unit spread, cut at 4 (a "
        "projection of 2048 normalised channels by weights of deviation 0.02 has 0.9); q and k "
        "through SiLU, as after the layer's short convolution. By head the mean gate runs from "
        "about -1.5 to -0.005: some forget within a token or two, some remember for hundreds",
    )
    add(
        "production_steep",
        "production",
        -81.0,
        Recipe("softplus_unit_bias", keys="silu"),
        "the same gate as Qwen3-Next's public implementation starts it: exp(A_log) over (0, 16), "
        "dt_bias of 1: means of -0.3 to -22 by head, so that nearly every chunk forgets all it "
        "was given, and a chunk's sum is far past what fp32 can hold the exponential of",
    )
    add(
        "slow",
        "slow",
        -0.01,
        Recipe("softplus_slow"),
        "gates about uniform in (-0.01, 0]: heads with long memory, which the smallest "
        "softplus(dt_bias) of the initialisation already give; drawn as a softplus gate with very "
        "negative pre-activations, so raw-input implementations can be fed the same data",
    )
    for A, fits in ((1, 64), (2, 32), (4, 16), (8, 4), (16, 0)):
        sums = f"{fits} tokens do, of {2 * fits} not" if fits else "as few as 4 tokens do not"
        add(
            f"sweep_A{A}",
            "sweep",
            -4.02 * A,
            Recipe("softplus_plain", level=float(A)),
            f"severity sweep: -{A} * softplus(randn), up to the upper end of the initialisation; "
            "a chunk anchored at its start stays inside fp32 where its gates sum to more than "
            f"-88.7, and those of {sums}",
            severity=-float(A),
        )
    add(
        "no_gate",
        "edge",
        0.0,
        Recipe("constant", level=0.0),
        "every gate exactly 0, which is the delta rule without a gate and what a softplus that "
        "underflows gives: nothing is ever forgotten but by overwriting",
    )
    for text, level in (("2", -2.0), ("6", -6.0), ("20", -20.0), ("1e4", -1e4), ("inf", -inf)):
        add(
            f"constant_{text}",
            "edge",
            level,
            Recipe("constant", level=level),
            f"every gate exactly -{text}: a whole chunk at one exponent, which the unbounded "
            "-exp(A_log) * softplus gate can give",
        )
    add(
        "mixed_heads",
        "edge",
        -20.0,
        Recipe("mixed", level=-20.0),
        "even value heads constant -20, odd ones -0.001: heads that share a key head differ most "
        "in what they remember, so a gate that is read by key head, or from a neighbour, shows",
    )
    add(
        "similar_keys",
        "edge",
        -0.01,
        Recipe("softplus_slow", keys="similar", beta_logit=STRONG_BETA),
        "keys with mean cosine 0.91 inside a head, beta near 0.95 and slow gates, with values "
        "that share a part too, as repeated tokens give: powers of the triangular factor grow "
        "like binomials and break power-series inverses",
        tolerances=SIMILAR_KEYS_TOLERANCES,
    )
    add(
        "non_negative_keys",
        "edge",
        -0.01,
        Recipe("softplus_slow", keys="non_negative", beta_logit=STRONG_BETA),
        "non-negative keys (cosine about 0.64, as after a ReLU feature map), beta near 0.95 and "
        "slow gates",
    )
    add(
        "one_hot_state",
        "edge",
        -2e-5,
        Recipe("remembered", beta_logit=WEAK_BETA, state="one_hot"),
        "initial state with a single 1 off the diagonal in each head, gates in (-2e-5, 0] and "
        "beta near 0.0025 so that it survives the longest sequence: a transposed state layout or "
        "a lost carry is off by its whole value",
    )
    add(
        "beta_near_0",
        "edge",
        -0.01,
        Recipe("softplus_slow", beta_logit=(-8.0, 0.5)),
        "write strengths near 0.0003, a saturated sigmoid, and slow gates: the initial state and "
        "its carry are nearly all of every output",
    )
    add(
        "beta_near_1",
        "edge",
        -0.01,
        Recipe("softplus_slow", beta_logit=(8.0, 0.5)),
        "write strengths near 0.9997, a saturated sigmoid, and slow gates: every write replaces "
        "what its key held",
    )
    add(
        "closed_ends",
        "edge",
        -20.0,
        Recipe("closed", level=-20.0, keys="some_zero", beta_logit=(0.0, inf)),
        "every value at an end that its range includes: even value heads exactly 0, odd ones "
        "exactly 0 or exactly -20, beta exactly 0 or exactly 1, one key in eight exactly zero, as "
        "saturated activations and a normalised zero vector give",
    )
    for text, level in (("1e4", -1e4), ("1e6", -1e6), ("inf", -inf)):
        add(
            f"single_{text}",
            "edge",
            level,
            Recipe("single_token", level=level),
            f"slow gates but for one token of each sequence and value head, where it is -{text}: "
            "a full reset of the memory, as at a document boundary",
        )
    add(
        "scattered",
        "edge",
        -1e6,
        Recipe("scattered", level=-1e6),
        "slow gates but for one in 64, anywhere, of any size from -3 to -1e6 (uniform in its "
        "logarithm): most chunks have a reset somewhere inside, and the digits of the slow gates "
        "after it still count",
    )
    add(
        "mild",
        "mild",
        -0.7,
        Recipe("log_sigmoid_of_uniform"),
        "log(sigmoid(rand)), the gates of the usage example in chunk_gated_delta_rule's own "
        "documentation: all of them within (-0.7, -0.3), so that no head remembers for more than "
        "a few tokens and none is steep. It never ranks nor decides",
    )
    return table.regimes, table.recipes


REGIMES, RECIPES = _build()
