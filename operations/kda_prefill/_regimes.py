"""Input regimes of KDA prefill, as data: where each comes from and how it is drawn.

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
from operations.kda_prefill._spec import SIMILAR_KEYS_TOLERANCES
from operations.kda_prefill._statistics import MEASURED

__all__ = ["PRODUCTION_LOWER_BOUND", "RECIPES", "REGIMES", "Recipe"]

PRODUCTION_LOWER_BOUND = -5.0
"""Lower bound of the safe gate in the models that ship KDA."""

Gate = Literal[
    "safe_production",
    "safe_spread",
    "safe_plain",
    "safe_slow",
    "constant",
    "mixed",
    "remembered",
    "single_token",
    "scattered",
    "closed",
    "log_sigmoid",
]


@dataclass(frozen=True)
class Recipe(recipes.Recipe):
    """How one regime of KDA is drawn.

    Parameters
    ----------
    gate : str
        Rule of the gate.  The ``safe_*`` rules draw a bf16 pre-activation,
        ``A_log`` and ``dt_bias`` and activate them, so they have a raw form.
    level : float
        The rule's number: lower bound of a safe gate, value of a constant one,
        value at the single token, strongest of the scattered gates.
    """

    gate: Gate
    level: float = PRODUCTION_LOWER_BOUND

    @property
    def raw(self) -> bool:
        """Whether the gate comes from a pre-activation."""
        return self.gate.startswith("safe_")


def _build() -> tuple[dict[str, Regime], dict[str, Recipe]]:
    table = RegimeTable[Recipe](MEASURED)
    add = table.add
    add(
        "production",
        "production",
        -5.0,
        Recipe("safe_production"),
        "safe gate of shipped models, lower_bound = -5, from bf16 raw gates with A_log within "
        "0.2 of 0 and a per-channel dt_bias; pre-activations centred at zero with unit spread, "
        "so the mean gate is lower_bound / 2",
    )
    add(
        "production_spread",
        "production",
        -5.0,
        Recipe("safe_spread"),
        "the same safe gate with A_log spread evenly over the heads from 0 to log 16, the upper "
        "end of the usual initialisation: steep heads saturate at -5 and at 0 and mix both ends "
        "in one token",
    )
    add(
        "slow",
        "slow",
        -0.01,
        Recipe("safe_slow"),
        "gates about uniform in (-0.01, 0]: heads with long memory, which nothing keeps a model "
        "from learning; drawn as a safe gate at lower_bound = -5 with very negative "
        "pre-activations, so raw-input implementations can be fed the same data",
    )
    for bound in (1, 2, 3, 5):
        add(
            f"sweep_lb{bound}",
            "sweep",
            -float(bound),
            Recipe("safe_plain", level=-float(bound)),
            f"severity sweep: -{bound} * sigmoid(randn), from the mildest bound to production's",
            severity=-float(bound),
        )
    add(
        "constant",
        "edge",
        -5.0,
        Recipe("constant"),
        "every gate exactly -5, the closed end of the production contract: a whole chunk at the "
        "largest exponent that a bounded gate allows",
    )
    add(
        "mixed",
        "edge",
        -5.0,
        Recipe("mixed"),
        "even channels constant -5, odd ones -0.001: an anchor that suits one half does not suit "
        "the other, and the state is remembered where gates at -5 alone would hide its loss",
    )
    add(
        "similar_keys",
        "edge",
        -0.01,
        Recipe("safe_slow", keys="similar", beta_logit=STRONG_BETA),
        "keys with mean cosine 0.91 inside a head, beta near 0.95 and slow gates, with values "
        "that share a part too, as repeated tokens give: powers of the triangular factor grow "
        "like binomials and break power-series inverses",
        tolerances=SIMILAR_KEYS_TOLERANCES,
    )
    add(
        "non_negative_keys",
        "edge",
        -0.01,
        Recipe("safe_slow", keys="non_negative", beta_logit=STRONG_BETA),
        "non-negative keys (cosine about 0.64, as after a ReLU or SiLU feature map), beta near "
        "0.95 and slow gates",
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
        "closed_ends",
        "edge",
        -5.0,
        Recipe("closed", keys="some_zero", beta_logit=(0.0, inf)),
        "every value at an end that its range includes: even channels exactly 0, odd ones exactly "
        "0 or exactly -5, beta exactly 0 or exactly 1, one key in eight exactly zero, as a "
        "saturated sigmoid and a normalised zero vector give",
    )
    for text, level in (("6", -6.0), ("10", -10.0), ("20", -20.0), ("1e4", -1e4), ("inf", -inf)):
        add(
            f"beyond_{text}",
            "edge",
            level,
            Recipe("constant", level=level),
            f"every gate exactly -{text}, below the production bound, as the unbounded "
            "-exp(A_log) * softplus gate can give",
        )
    for text, level in (("1e4", -1e4), ("1e6", -1e6), ("inf", -inf)):
        add(
            f"beyond_single_{text}",
            "edge",
            level,
            Recipe("single_token", level=level),
            f"slow gates but for one token of each sequence and head, where all channels are "
            f"-{text}: a full reset of the memory, as at a document boundary",
        )
    add(
        "beyond_scattered",
        "edge",
        -1e6,
        Recipe("scattered", level=-1e6),
        "slow gates but for one gate in 64, anywhere, of any size from -3 to -1e6 (uniform in its "
        "logarithm): every chunk has some, none is a reset of all channels, and the digits of the "
        "slow gates after a strong one still count",
    )
    add(
        "mild",
        "mild",
        -5.0,
        Recipe("log_sigmoid"),
        "log(sigmoid(randn)), cut at -5: the documented mistake. Three times milder than "
        "production; a kernel tuned on it returned NaN on real gates. It never ranks nor decides",
    )
    return table.regimes, table.recipes


REGIMES, RECIPES = _build()
