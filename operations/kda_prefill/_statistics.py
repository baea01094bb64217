"""Measured statistics of the regimes, and how they are measured.

The numbers in :data:`MEASURED` were read from :func:`measure` on
:data:`SAMPLE` with seed 0 on a CPU; a test reads them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from operations._base import Inputs

__all__ = ["MEASURED", "SAMPLE_HEADS", "SAMPLE_TOKENS", "measure"]

SAMPLE_TOKENS = 2048
SAMPLE_HEADS = 8
"""One sequence of 2048 tokens and 8 heads: 2.1 million gates."""


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
        ``sum32_min``, ``sum64_min``: most negative sum of one channel over
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

# fmt: off
_ROWS: dict[str, tuple[float, ...]] = {
    "production": (
        -2.506, 1.056, -4.983, -0.02058, -64.06, -121.6, -233.5,
        0.0001373, 0.0001426, 0.0, 0.4969, 0.0004419, -0.3284,
    ),
    "production_spread": (
        -2.501, 1.916, -5.0, -1.481e-30, -79.84, -152.4, -290.2,
        0.1795, 0.1781, 0.0, 0.5033, -1.116e-05, -0.3664,
    ),
    "slow": (
        -0.005, 0.002887, -0.009939, -1.031e-08, -0.1272, -0.2277, -0.409,
        0.0, 1.0, 0.0, 0.5004, 0.001534, -0.3184,
    ),
    "sweep_lb1": (
        -0.5, 0.2082, -0.9943, -0.007577, -11.69, -21.46, -38.41,
        0.0, 0.01408, 0.0, 0.4993, 6.371e-05, -0.3278,
    ),
    "sweep_lb2": (
        -0.9994, 0.4165, -1.989, -0.01469, -22.84, -41.62, -76.94,
        0.0, 0.001618, 0.0, 0.5004, 1.294e-06, -0.3413,
    ),
    "sweep_lb3": (
        -1.501, 0.6248, -2.981, -0.01341, -35.1, -62.91, -116.5,
        0.0, 0.0003705, 0.0, 0.5006, 0.0004743, -0.3376,
    ),
    "sweep_lb5": (
        -2.5, 1.041, -4.974, -0.03049, -57.92, -102.9, -191.8,
        4.53e-05, 4.673e-05, 0.0, 0.4998, -9.429e-05, -0.3204,
    ),
    "constant": (
        -5.0, 0.0, -5.0, -5.0, -80.0, -160.0, -320.0,
        1.0, 0.0, 0.0, 0.4998, -0.0001507, -0.3266,
    ),
    "mixed": (
        -2.501, 2.5, -5.0, -0.001, -80.0, -160.0, -320.0,
        0.5, 0.5, 0.0, 0.5004, 0.0004802, -0.333,
    ),
    "similar_keys": (
        -0.005, 0.002886, -0.009939, -1.409e-08, -0.1257, -0.2247, -0.4117,
        0.0, 1.0, 0.0, 0.95, 0.9097, 0.8561,
    ),
    "non_negative_keys": (
        -0.005001, 0.002886, -0.009939, -1.031e-08, -0.1313, -0.2288, -0.419,
        0.0, 1.0, 0.0, 0.9501, 0.6393, 0.4997,
    ),
    "one_hot_state": (
        -9.993e-06, 5.776e-06, -2e-05, -4.768e-12, -0.0002524, -0.0004673, -0.0008242,
        0.0, 1.0, 0.0, 0.002485, -0.0004415, -0.3194,
    ),
    "closed_ends": (
        -1.25, 2.165, -5.0, -0.0, -75.0, -135.0, -240.0,
        0.25, 0.75, 0.0, 0.4993, -0.0004882, -0.3661,
    ),
    "beyond_6": (
        -6.0, 0.0, -6.0, -6.0, -96.0, -192.0, -384.0,
        1.0, 0.0, 0.0, 0.5028, -0.0003635, -0.3462,
    ),
    "beyond_10": (
        -10.0, 0.0, -10.0, -10.0, -160.0, -320.0, -640.0,
        1.0, 0.0, 0.0, 0.5041, 0.0004584, -0.3617,
    ),
    "beyond_20": (
        -20.0, 0.0, -20.0, -20.0, -320.0, -640.0, -1280.0,
        1.0, 0.0, 0.0, 0.5005, -0.0001815, -0.3366,
    ),
    "beyond_1e4": (
        -10000.0, 0.0, -10000.0, -10000.0, -160000.0, -320000.0, -640000.0,
        1.0, 0.0, 0.0, 0.5022, 0.001438, -0.341,
    ),
    "beyond_inf": (
        0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
        0.0, 1.0, 1.0, 0.5015, -0.0009061, -0.3311,
    ),
    "beyond_single_1e4": (
        -4.888, 220.9, -10000.0, -6.557e-09, -10000.0, -10000.0, -10000.0,
        0.0004883, 0.9995, 0.0, 0.4997, -0.0005457, -0.3842,
    ),
    "beyond_single_1e6": (
        -488.3, 22090.0, -1000000.0, -7.153e-09, -1000000.0, -1000000.0, -1000000.0,
        0.0004883, 0.9995, 0.0, 0.4993, 0.0002202, -0.3424,
    ),
    "beyond_single_inf": (
        -0.004996, 0.002887, -0.01, -0.0, -0.1267, -0.2289, -0.4036,
        0.0, 1.0, 0.0004883, 0.5008, 0.0003654, -0.3128,
    ),
    "beyond_scattered": (
        -1202.0, 24290.0, -999200.0, -2.384e-09, -1883000.0, -1883000.0, -2026000.0,
        0.01496, 0.9844, 0.0, 0.4979, -0.0003168, -0.3824,
    ),
    "mild": (
        -0.8062, 0.5208, -5.0, -0.006613, -24.18, -38.98, -70.8,
        4.768e-07, 0.01213, 0.0, 0.498, -0.0004134, -0.3524,
    ),
}
# fmt: on

MEASURED: Mapping[str, Mapping[str, float]] = {
    name: dict(zip(_COLUMNS, row, strict=True)) for name, row in _ROWS.items()
}
