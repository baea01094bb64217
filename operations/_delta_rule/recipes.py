"""How a regime is drawn, as data; the drawing is in ``generators``.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from operations._base import Regime, RegimeRole, Tolerance

__all__ = ["STRONG_BETA", "WEAK_BETA", "Recipe", "RegimeTable"]

R = TypeVar("R", bound="Recipe")

STRONG_BETA = (2.95, 0.1)
"""Write-strength logits: sigmoid(2.95) = 0.950, writes almost replace what the key recalls."""

WEAK_BETA = (-6.0, 0.1)
"""Write-strength logits: sigmoid(-6) = 0.0025, an initial state outlives 32768 tokens."""

Keys = Literal["independent", "silu", "similar", "non_negative", "some_zero"]


@dataclass(frozen=True)
class Recipe:
    """How one regime is drawn.

    Parameters
    ----------
    gate : str
        The operation's own rule of the gate.
    level : float
        The rule's number, for example the value of a constant gate.
    keys : {"independent", "silu", "similar", "non_negative", "some_zero"}
        Distribution of the keys before normalisation; ``silu`` is independent
        ones through SiLU, and queries too; ``some_zero`` is independent ones,
        one in eight of them zero.
    beta_logit : tuple of float
        Mean and standard deviation of the write-strength logit.  An infinite
        deviation makes every write strength exactly 0 or exactly 1.
    state : {"normal", "one_hot"}
        Initial state, where the workload has one.
    """

    gate: str
    level: float = 0.0
    keys: Keys = "independent"
    beta_logit: tuple[float, float] = (0.0, 1.0)
    state: Literal["normal", "one_hot"] = "normal"

    @property
    def raw(self) -> bool:
        """Whether the gate comes from a pre-activation, so that a raw form exists."""
        return False


class RegimeTable(Generic[R]):
    """Collects an operation's regimes and the recipe of each.

    Parameters
    ----------
    measured : Mapping of str to Mapping
        Statistics by regime name; a regime without any is refused.

    Attributes
    ----------
    regimes : dict of str to Regime
    recipes : dict of str to Recipe
    """

    def __init__(self, measured: Mapping[str, Mapping[str, float]]) -> None:
        self._measured = measured
        self.regimes: dict[str, Regime] = {}
        self.recipes: dict[str, R] = {}

    def add(
        self,
        name: str,
        role: RegimeRole,
        gate_floor: float,
        recipe: R,
        source: str,
        *,
        severity: float | None = None,
        tolerances: Mapping[str, Tolerance] | None = None,
    ) -> None:
        """Add one regime; see :class:`operations.Regime` for the arguments."""
        statistics = self._measured[name]
        self.regimes[name] = Regime(
            name, role, gate_floor, source, statistics, severity, tolerances
        )
        self.recipes[name] = recipe
