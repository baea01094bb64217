"""Statistics that say how hard a regime is, and how they are measured.

What was measured stands with each operation, in its ``_statistics``; importing this imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from operations._base import Inputs

__all__ = ["SAMPLE_HEADS", "SAMPLE_TOKENS", "measure", "named"]

SAMPLE_TOKENS = 2048
SAMPLE_HEADS = 8
"""The sample is one sequence of 2048 tokens and 8 heads that have a state."""


def measure(inputs: Inputs) -> dict[str, float]:
    """Statistics that decide how hard a regime is.

    Parameters
    ----------
    inputs : Mapping
        One sequence, at least 64 tokens.

    Returns
    -------
    dict
        ``mean``, ``std``, ``min``, ``max`` of the gates; ``sum16_min``,
        ``sum32_min``, ``sum64_min``: most negative sum of one gate over
        aligned windows of that many tokens (what an anchor has to span);
        ``near_floor``, ``near_zero``: share of gates below -4.9 and above
        -0.1; ``minus_inf``: share that is -inf, left out of everything else
        (where it is all of them, measured as gates of 0);
        ``beta_mean``; ``key_cosine_mean``, ``key_cosine_min``: cosine of
        neighbouring keys of one head.
    """
    import torch

    g = inputs["g"].double()
    infinite = g == -inf
    kept = g[~infinite]
    if not kept.numel():
        kept = g.new_zeros(2)
    out = {
        "mean": kept.mean().item(),
        "std": kept.std().item(),
        "min": kept.min().item(),
        "max": kept.max().item(),
    }
    filled = torch.where(infinite, 0.0, g)
    for window in (16, 32, 64):
        whole = filled[: len(g) // window * window]
        sums = whole.reshape(-1, window, *g.shape[1:]).sum(1)
        out[f"sum{window}_min"] = sums.min().item()
    out["near_floor"] = (kept < -4.9).double().mean().item()
    out["near_zero"] = (kept > -0.1).double().mean().item()
    out["minus_inf"] = infinite.double().mean().item()
    out["beta_mean"] = inputs["beta"].double().mean().item()
    k = torch.nn.functional.normalize(inputs["k"].double(), dim=-1)
    cosine = (k[1:] * k[:-1]).sum(-1)
    out["key_cosine_mean"] = cosine.mean().item()
    out["key_cosine_min"] = cosine.min().item()
    return out


_COLUMNS = (
    "mean",
    "std",
    "min",
    "max",
    "sum16_min",
    "sum32_min",
    "sum64_min",
    "near_floor",
    "near_zero",
    "minus_inf",
    "beta_mean",
    "key_cosine_mean",
    "key_cosine_min",
)


def named(rows: Mapping[str, tuple[float, ...]]) -> dict[str, dict[str, float]]:
    """Rows of values, in the order that :func:`measure` returns them, with their names."""
    return {name: dict(zip(_COLUMNS, row, strict=True)) for name, row in rows.items()}
