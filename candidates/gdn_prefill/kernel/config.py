"""Which kernels: the configurations that are compiled in, and what they need of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from candidates._delta_rule.kernel.config import named, whole, workspace
from candidates._delta_rule.kernel.image import (
    unroll_of,
)
from candidates.gdn_prefill.kernel.fused_plan import BUILDERS, FusedPlan, pieces_of

__all__ = ["DEFAULT", "Config", "FusedConfig", "schedule_of", "workspace"]


@dataclass(frozen=True)
class Config:
    """What one compiled kernel pair is built for; everything else is a run-time value.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.
    rows : int
        Value rows per scan CTA: 64 or 128.
    segments : int
        Pieces a long sequence is cut into: 1, 2, 4 or 8.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """

    bt: int
    rows: int = 64
    segments: int = 1

    def __post_init__(self) -> None:
        whole(self, "bt", (16, 32, 64))
        whole(self, "rows", (64, 128))
        whole(self, "segments", (1, 2, 4, 8))

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
        return cls(**named(cls, values, "split", ("bt",)))

    @property
    def in_place(self) -> bool:
        """Whether each CTA reads its part of the initial state before it writes the final one."""
        return self.segments == 1

    @property
    def unroll(self) -> int:
        """Chunks per turn of the scan's loop; sequences are padded to whole turns."""
        return unroll_of(self.bt, self.rows)


@dataclass(frozen=True)
class FusedConfig:
    """What one compiled fused kernel is built for, and how it cuts sequences.

    Parameters
    ----------
    rows : int
        Value rows per CTA: 64 or 128.
    waves : int
        CTAs per SM that sequences are cut into pieces for, 1 with 64 rows; not compiled in.
    bt : int
        Tokens per chunk: 32 or 64.
    builders : int, optional
        Building warpgroups; as many as there can be if absent.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """

    rows: int
    waves: int = 1
    bt: int = 64
    builders: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "waves", "bt"):
            whole(self, name)
        if self.builders == 0:
            object.__setattr__(self, "builders", BUILDERS.get((self.bt, self.rows), 1))
        whole(self, "builders")
        plan = self.plan  # refuses what does not exist
        if self.waves > 1 and not plan.cuts:
            raise ValueError(f"waves={self.waves} beside rows={self.rows}, which does not cut")

    @classmethod
    def of(cls, values: Mapping[str, Any] | FusedConfig) -> FusedConfig:
        """As :meth:`Config.of`; ``form``, if given, is ``fused``."""
        if isinstance(values, FusedConfig):
            return values
        return cls(**named(cls, values, "fused", ("rows",)))

    @property
    def plan(self) -> FusedPlan:
        """Its sizes."""
        return FusedPlan(self.bt, self.rows, self.builders)

    @property
    def in_place(self) -> bool:
        """As :attr:`Config.in_place`."""
        return not self.plan.cuts

    def pieces(self, T: int, N: int, HV: int, sms: int) -> int:
        """See :func:`.fused_plan.pieces_of`."""
        return pieces_of(self.bt, self.rows, self.waves, T, N, HV, sms)


DEFAULT = FusedConfig(128, bt=32)
"""What an entry point without a schedule runs.

The fastest of those measured on an H200 on 2026-11-30, in the geomean over the tuned shapes
(production gates, graphs of ten calls): 84 us, where chunks of 64 tokens took 120 and, at 64 value
rows, 215.  It cuts sequences, and so may not write final states over initial ones.
"""


def schedule_of(values: Config | FusedConfig | Mapping[str, Any] | None) -> Config | FusedConfig:
    """The configuration that a caller names.

    Parameters
    ----------
    values : Config, FusedConfig, Mapping or None
        None is :data:`DEFAULT`; a mapping holds choices of the space, of the split form where it
        does not say ``form``.

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
    return FusedConfig.of(values) if values.get("form") == "fused" else Config.of(values)
