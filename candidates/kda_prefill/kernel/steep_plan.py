"""What kernels and emulation agree on about steep chunks; needs neither torch nor the DSL.

A chunk is steep where factors around its usual anchor would leave the exponents that fp32 and bf16
can hold.  Scores inside 8 tokens are then anchored in the middle of these, with gates floored
as said here; all other exponents of a steep chunk are at most 0.
"""

from __future__ import annotations

__all__ = ["RUN", "RUN_FLOOR", "SINGLE_FLOOR", "STEEP_HALF", "STEEP_WINDOW"]

STEEP_HALF = -40.25
"""The fused kernel: a chunk is steep if the gates of one of its halves sum to less in any channel.

Eight gates of -5 are just not.  The decay from one chunk's middle to the next one's spans two
halves, and stays above e^-80.5: see EXPONENT_BUDGET in :mod:`..space`."""

STEEP_WINDOW = -80.5
"""PREP: a chunk is steep if the gates of half a window sum to less in any channel."""

SINGLE_FLOOR = -75.0
"""Inside 8 tokens gates are at least this where scores of a steep chunk are made."""

RUN, RUN_FLOOR = -80.0, -20.0
"""Where those on one side of the anchor, up to four, sum to less than RUN, each is RUN_FLOOR at
least.

What precedes a gate of -20 among its 8 tokens then counts by e^-20 = 2e-9 instead of less, a
thirtieth of the last digit of an fp32 sum; and no exponent is above 80."""
