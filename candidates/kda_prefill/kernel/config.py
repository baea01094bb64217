"""Which kernels: the configurations that are compiled in, and what they need of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .fused_plan import FusedPlan
from .image import HEAD, ImageLayout, segment_entries, slots, unroll_of
from .prep_plan import Plan

__all__ = ["DEFAULT", "Config", "FusedConfig", "boundary_words", "schedule_of", "workspace"]


def _named(
    cls: Any, values: Mapping[str, Any], form: str, needed: tuple[str, ...]
) -> dict[str, Any]:
    """The fields of ``cls`` among ``values``, of which every name must be known."""
    chosen = dict(values)
    if chosen.pop("form", form) != form:
        raise ValueError(f"schedule has form={values['form']!r}, not {form!r}")
    known = [f.name for f in fields(cls)]
    if unknown := sorted(str(name) for name in chosen if name not in known):
        names = ", ".join(sorted(known))
        raise ValueError(f"schedule has no {unknown[0]!r}; it knows {names}")
    if missing := [name for name in needed if name not in chosen]:
        raise ValueError(f"schedule needs {missing[0]!r}")
    return chosen


def _whole(config: Any, name: str, known: tuple[int, ...] = ()) -> None:
    """A field that is a positive int, one of ``known`` where there are some."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is no positive int")
    if known and value not in known:
        raise ValueError(f"{name}={value} is not one of {list(known)}")


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
        _whole(self, "bt", (16, 32, 64))
        _whole(self, "rows", (64, 128))
        _whole(self, "segments", (1, 2, 4, 8))
        if self.block is not None:
            _whole(self, "block", (16, 32))
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
        return cls(**_named(cls, values, "split", ("bt", "anchor")))

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
        _whole(self, "builders")
        _whole(self, "waves")
        FusedPlan(self.frame, self.builders)  # refuses what does not exist

    @classmethod
    def of(cls, values: Mapping[str, Any] | FusedConfig) -> FusedConfig:
        """As :meth:`Config.of`; ``form``, if given, is ``fused``."""
        if isinstance(values, FusedConfig):
            return values
        return cls(**_named(cls, values, "fused", ("frame", "builders")))


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


def workspace(config: Config, T: int, N: int, H: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Scratch tensors of one call, as (shape, torch dtype name), in the order of the ABI.

    Bounded by the arguments: images of about ``9 T H 128`` bytes and one padded turn for each
    sequence; with more than one segment, 96 KiB for each inner boundary and head.
    """
    images = (slots(T, N, config.bt, config.unroll), H, ImageLayout(config.bt).elements)
    if config.segments == 1:
        return ((images, "bfloat16"),)
    entries = segment_entries(T, N, config.bt, config.unroll, config.segments)
    return (images, "bfloat16"), ((max(entries, 1), H, boundary_words(config.segments)), "float32")


def boundary_words(segments: int) -> int:
    """fp32 words of one inner segment boundary: a state, and with a carry a bf16 map as well."""
    return HEAD * HEAD + (HEAD * HEAD // 2 if segments > 2 else 0)
