"""Tables of the pages about operations, from the operation itself."""

from __future__ import annotations

import math

from docs.data.pages import table
from operations import Operation, Tolerance, Workload

__all__ = ["blocks"]

_STATISTICS = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "sum16_min": "sum 16",
    "sum32_min": "sum 32",
    "sum64_min": "sum 64",
    "near_floor": "near floor",
    "near_zero": "near 0",
    "beta_mean": "beta",
    "key_cosine_mean": "cosine",
}


def blocks(op: Operation) -> dict[str, str]:
    """Tables by the comment in front of them."""
    regimes = op.regimes.values()
    statistics = [s for s in _STATISTICS if all(s in r.statistics for r in regimes)]
    own = [(f"{r.name}: {n}", t) for r in regimes for n, t in (r.tolerances or {}).items()]
    return {
        "tensors": table(
            "tensor | shape | type | role | meaning",
            (
                [f"`{t.name}`", f"[{', '.join(map(str, t.dims))}]", t.dtype, t.role, t.doc]
                for t in op.tensors
            ),
        ),
        "regimes": table(
            "regime | role | steepest gate | source",
            ([f"`{r.name}`", r.role, f"{r.gate_floor:g}", r.source] for r in regimes),
        ),
        "statistics": table(
            "regime | " + " | ".join(_STATISTICS[s] for s in statistics),
            ([f"`{r.name}`", *(_number(r.statistics[s]) for s in statistics)] for r in regimes),
        ),
        "tuned": table(
            "workload | sequences of | floor, MB",
            ([f"`{w.name}`", _equal(w), f"{op.floor_bytes(w) / 1e6:.1f}"] for w in op.tuned()),
        ),
        "held-out": table(
            "workload | lengths | initial state | scale",
            ([f"`{w.name}`", _lengths(w), *_given(w)] for w in op.held_out()),
        ),
        "tolerances": table(
            "output | max | rms | source",
            ([f"`{n}`", *_bound(t)] for n, t in [*op.tolerances.items(), *own]),
        ),
    }


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def _bound(t: Tolerance) -> list[str]:
    return [f"{t.max_rel:g}", f"{t.rms_rel:g}", t.source]


def _lengths(w: Workload) -> str:
    lengths: tuple[int, ...] = w.lengths  # type: ignore[attr-defined]
    if len(lengths) > 12:
        return f"{len(lengths)} from {min(lengths)} to {max(lengths)}"
    return ", ".join(map(str, lengths))


def _equal(w: Workload) -> str:
    """Tokens of each sequence; one number where they are equal."""
    lengths = set(w.lengths)  # type: ignore[attr-defined]
    return str(*lengths) if len(lengths) == 1 else _lengths(w)


def _given(w: Workload) -> list[str]:
    scale: float = w.scale  # type: ignore[attr-defined]
    usual = math.isclose(scale, 128**-0.5)
    return ["yes" if w.initial_state else "none", "1/sqrt(128)" if usual else f"{scale:g}"]  # type: ignore[attr-defined]
