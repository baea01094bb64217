"""Pieces of sequences: how many there are, and where exact segments stand in scratch.

Needs neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from candidates._delta_rule.kernel.image import HEAD

__all__ = ["GUARD", "JOB_WORDS", "MAPS", "PIECE", "Scratch", "pieces_of"]

PIECE = 16
"""Pieces of a sequence begin at multiples of so many tokens."""

GUARD = -12.0
"""A piece may start from zero where what it drops is below e^GUARD (6e-6) of the state: a 600th of
what rounding the state to bf16, for a product, takes from it."""

JOB_WORDS = 12
"""Words that describe a job; what they say is each kernel's own."""

MAPS = 4
"""Maps of exact segments that the fix-up has in shared memory at once."""


@dataclass(frozen=True)
class Scratch:
    """Where things stand in the scratch of one fused call, in fp32 words.

    One record and one entry for each CTA.  A record is what the fix-up has to do about it: a flag,
    and of an exact segment that begins there the sequence and head, its first row and the one past
    its last.  An entry holds C of that segment, fp32 in the order of accumulator fragments; its M
    without the diagonal, bf16, as the shared-memory image that the fix-up multiplies with; the
    diagonal of M, fp32, in the order of :meth:`.ImageLayout.decay_position`.  Behind them P, bf16
    shaped like the outputs.  Works on run-time integers too.

    Parameters
    ----------
    total : int
        CTAs, those that have nothing to do included.
    """

    total: Any

    RECORD = 4
    MAP = HEAD * HEAD
    DIAGONAL = MAP + HEAD * HEAD // 2
    ENTRY = DIAGONAL + HEAD

    @property
    def entries(self) -> Any:
        """Begin of the entries, a multiple of 1 KiB."""
        return (self.RECORD * self.total + 255) // 256 * 256

    @property
    def outputs(self) -> Any:
        """Begin of P."""
        return self.entries + self.total * self.ENTRY

    def words(self, T: int, H: int) -> int:
        """Size of the scratch of T rows of H heads."""
        return int(self.outputs + T * H * (HEAD // 2))


def pieces_of(waves: int, N: int, H: int, sms: int) -> int:
    """Pieces that each sequence is cut into, at most: ``waves`` CTAs for each SM, no fewer than one
    for each sequence and head."""
    return max(1, waves * sms // max(N * H, 1))
