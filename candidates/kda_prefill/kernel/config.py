"""Which kernels: the configurations that are compiled in, and what they need of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from candidates._delta_rule.kernel.config import named, whole, workspace
from candidates._delta_rule.kernel.image import (
    unroll_of,
)

from .fused_plan import FusedPlan
from .prep_plan import Plan

__all__ = ["DEFAULT", "Config", "FusedConfig", "schedule_of", "workspace"]


@dataclass(frozen=True)
class Config:
    """What one compiled kernel pair is built for; everything else is a run-time value.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.
    anchor : str
        Reference of the exponents: ``start``, ``mid``, ``end``, ``halving`` or ``pairs``.
    rows : int
        Value rows per scan CTA: 64 or 128.
    segments : int
        Pieces a long sequence is cut into: 1, 2, 4 or 8.
    block : int or None
        For ``pairs``: tokens per sub-block.
    diagonal : str or None
        For ``pairs``: anchor inside a diagonal block.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """

    bt: int
    anchor: str
    rows: int = 64
    segments: int = 1
    block: int | None = None
    diagonal: str | None = None

    def __post_init__(self) -> None:
        whole(self, "bt", (16, 32, 64))
        whole(self, "rows", (64, 128))
        whole(self, "segments", (1, 2, 4, 8))
        if self.block is not None:
            whole(self, "block", (16, 32))
        Plan(self.bt, self.anchor, self.block, self.diagonal)  # refuses what does not exist

    @classmethod
    def of(cls, values: Mapping[str, Any] | Config) -> Config:
        """Make one of named choices; ``form``, if given, is ``split``.

        Raises
        ------
        ValueError
            If a name is unknown, a necessary one is missing, or there is no such kernel.
        """
        if isinstance(values, Config):
            return values
        return cls(**named(cls, values, "split", ("bt", "anchor")))

    @property
    def unroll(self) -> int:
        """Chunks per turn of the scan's loop; sequences are padded to whole turns."""
        return unroll_of(self.bt, self.rows)


@dataclass(frozen=True)
class FusedConfig:
    """What one compiled fused kernel is built for, and how it cuts sequences.

    Parameters
    ----------
    frame : str
        ``middle`` or ``boundary``; see :class:`.fused_plan.FusedPlan`.
    builders : int
        Warpgroups that build chunks.
    waves : int
        CTAs per SM that the chunks of all sequences are shared among; not compiled in.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """

    frame: str
    builders: int
    waves: int = 1

    def __post_init__(self) -> None:
        whole(self, "builders")
        whole(self, "waves")
        FusedPlan(self.frame, self.builders)  # refuses what does not exist

    @classmethod
    def of(cls, values: Mapping[str, Any] | FusedConfig) -> FusedConfig:
        """As :meth:`Config.of`; ``form``, if given, is ``fused``."""
        if isinstance(values, FusedConfig):
            return values
        return cls(**named(cls, values, "fused", ("frame", "builders")))


DEFAULT = FusedConfig("middle", 3)
"""What an entry point without a schedule runs: fastest on most shapes at production gates."""


def schedule_of(values: Config | FusedConfig | Mapping[str, Any] | None) -> Config | FusedConfig:
    """The configuration that a caller names.

    Parameters
    ----------
    values : Config, FusedConfig, Mapping or None
        None is :data:`DEFAULT`.  A mapping holds choices of the space; where it has no ``form``,
        it is of the fused one if it has a ``frame``.

    Raises
    ------
    TypeError
        If it is nothing of that kind.
    ValueError
        If it names something that does not exist.
    """
    if values is None:
        return DEFAULT
    if isinstance(values, (Config, FusedConfig)):
        return values
    if not isinstance(values, Mapping):
        raise TypeError(
            f"schedule must be a Config, a FusedConfig or a mapping, not {type(values).__name__}"
        )
    form = values.get("form", "fused" if "frame" in values else "split")
    if form == "fused":
        return FusedConfig.of(values)
    if form == "split":
        return Config.of(values)
    raise ValueError(f"schedule has form={form!r}, which is not one of ['split', 'fused']")
