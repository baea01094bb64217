"""How configurations of kernels are read, and what the split form needs of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

from candidates._delta_rule.kernel.image import (
    ImageLayout,
    boundary_words,
    segment_entries,
    slots,
)

__all__ = ["Split", "named", "whole", "workspace"]


class Split(Protocol):
    """What is asked of a configuration of PREP and SCAN, or of a schedule of them.

    Attributes
    ----------
    bt : int
        Tokens per chunk.
    rows : int
        Value rows per scan CTA.
    segments : int
        Pieces a long sequence is cut into.
    unroll : int
        Chunks per turn of the scan's loop; sequences are padded to whole turns.
    """

    @property
    def bt(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def segments(self) -> int: ...

    @property
    def unroll(self) -> int: ...


def named(
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


def whole(config: Any, name: str, known: tuple[int, ...] = ()) -> None:
    """A field that is a positive int, one of ``known`` where there are some."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is no positive int")
    if known and value not in known:
        raise ValueError(f"{name}={value} is not one of {list(known)}")


def workspace(config: Split, T: int, N: int, H: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Scratch tensors of one call, as (shape, torch dtype name), in the order of the ABI.

    Bounded by the arguments: images of about ``9 T H 128`` bytes and one padded turn for each
    sequence; with more than one segment, 96 KiB for each inner boundary and head.
    """
    images = (slots(T, N, config.bt, config.unroll), H, ImageLayout(config.bt).elements)
    if config.segments == 1:
        return ((images, "bfloat16"),)
    entries = segment_entries(T, N, config.bt, config.unroll, config.segments)
    return (images, "bfloat16"), ((max(entries, 1), H, boundary_words(config.segments)), "float32")
