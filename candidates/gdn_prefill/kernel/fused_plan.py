"""Sizes of the fused Gated DeltaNet kernel, decided before it is compiled.

Needs neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.pieces import JOB_WORDS, PIECE
from candidates._delta_rule.kernel.tiles import LOWER_PITCH, TILE, lower_block

__all__ = [
    "BUILDERS",
    "HEAD",
    "LOWER_PITCH",
    "PIECE",
    "TILE",
    "TILE_BYTES",
    "WINDOW",
    "WINDOWS",
    "FusedPlan",
    "lower_block",
    "parts_of",
    "pieces_of",
    "span_of",
    "strict_block",
    "windows_of",
]

WINDOW, WINDOWS = 32, 16
"""Tokens that an early start is a multiple of, and how many of them it has at most."""

EARLY = 2
"""Tokens of an early start, in halves of a piece, at most: an exact segment costs 2 of them."""

SHORTEST = 4
"""Chunks of a piece, on the average: fewer are not worth an early start."""

MANY = 6
"""Sequences and heads for each SM from which on a CTA takes two: fewer would leave SMs idle."""

TILE_BYTES = 2 * TILE * TILE
"""A block of L or X in fp16; diagonal blocks of L are in fp32, of ``LOWER_PITCH`` a row."""

_REGISTERS = {
    (64, 64, 2): (232, 136),
    (64, 128, 1): (208, 88),
    (32, 128, 2): (168, 88),
    (32, 128, 3): (168, 48),
}
"""Registers of a scanning and a building thread, by (tokens of a chunk, value rows, builders)."""

_SLOTS = {64: 2, 32: 4}
"""Pairs of matrices that are being read or made, by tokens of a chunk."""

BUILDERS = {(bt, rows): builders for bt, rows, builders in _REGISTERS}
"""The most building warpgroups that there are, by tokens of a chunk and value rows."""


def strict_block(i: int, j: int) -> int:
    """Number of block (i, j), j < i, of what is below the diagonal blocks."""
    return lower_block(i - 1, j)


@dataclass(frozen=True)
class FusedPlan:
    """Sizes of one fused kernel.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 32 or 64.
    rows : int
        Value rows of a CTA: 128, or 64, which halves the work of a step and builds each
        chunk twice; with 64 tokens alone.
    builders : int
        Warpgroups that take turns at building chunks.
    l2norm : bool
        Whether keys and queries are normalised in the kernel.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """

    bt: int
    rows: int
    builders: int
    l2norm: bool = False

    def __post_init__(self) -> None:
        if (self.bt, self.rows, self.builders) not in _REGISTERS:
            there = ", ".join("bt={} rows={} builders={}".format(*key) for key in _REGISTERS)
            raise ValueError(
                f"bt={self.bt!r} rows={self.rows!r} builders={self.builders!r} is not one of "
                + there
            )

    @property
    def shift(self) -> int:
        """``x >> shift`` is ``x // bt``."""
        return self.bt.bit_length() - 1

    @property
    def tiles(self) -> int:
        """Blocks of rows of a matrix."""
        return self.bt // TILE

    @property
    def cuts(self) -> bool:
        """Whether sequences may be cut into pieces."""
        return self.rows == HEAD

    @property
    def scanners(self) -> int:
        """Warpgroups that hold the state, 64 value rows each; the first of the CTA."""
        return self.rows // 64

    @property
    def fetchers(self) -> int:
        """Warps of a builder that take inputs, its last ones: those that do not invert if there
        are some."""
        return 4 if self.tiles == 4 else 4 - self.tiles

    @property
    def first_fetcher(self) -> int:
        return 4 - self.fetchers

    @property
    def threads(self) -> int:
        return 128 * (self.scanners + self.builders)

    @property
    def scan_registers(self) -> int:
        return _REGISTERS[self.bt, self.rows, self.builders][0]

    @property
    def build_registers(self) -> int:
        return _REGISTERS[self.bt, self.rows, self.builders][1]

    @property
    def slots(self) -> int:
        """Pairs of matrices that are being read or made."""
        return _SLOTS[self.bt]

    @property
    def stages(self) -> int:
        """Chunks whose inputs are in shared memory.

        Before a builder writes the matrices of chunk c it asks for chunk c + builders, so it waits
        until chunk c - slots is done with; the same wait frees the slot of c's matrices.
        """
        return self.builders + self.slots

    # ------------------------------------------------------------------ shared memory, bytes

    @property
    def half(self) -> int:
        """Of a stage: keys over queries, 2 BT rows, in halves of 64 channels; rows of 128 bytes,
        swizzled."""
        return 2 * self.off_q

    @property
    def off_q(self) -> int:
        """Of queries in a half."""
        return 128 * self.bt

    @property
    def off_v(self) -> int:
        """Then V, in the same form; O on its way out takes its place."""
        return 2 * self.half

    @property
    def stage(self) -> int:
        return self.off_v + 2 * self.bt * self.rows

    @property
    def off_slot(self) -> int:
        """Behind the stages, the slots: two [BT, BT] matrices, swizzled as operands are."""
        return self.stages * self.stage

    @property
    def slot(self) -> int:
        return 4 * self.bt * self.bt

    @property
    def off_group(self) -> int:
        """What a builder needs: blocks of L and of X in fp16, diagonal blocks of L in fp32, and
        for each warp sums of gates, where they are over more than 32."""
        return self.off_slot + self.slots * self.slot

    @property
    def off_lower(self) -> int:
        """Of a builder's own: blocks of L behind those of X."""
        return lower_block(self.tiles, 0) * TILE_BYTES

    @property
    def off_diagonal(self) -> int:
        return self.off_lower + strict_block(self.tiles, 0) * TILE_BYTES

    @property
    def diagonal(self) -> int:
        return TILE * LOWER_PITCH * 4

    @property
    def off_sums(self) -> int:
        return self.off_diagonal + self.tiles * self.diagonal

    @property
    def size_group(self) -> int:
        return self.off_sums + 4 * 4 * self.bt * (self.bt > 32)

    @property
    def off_table(self) -> int:
        """For each stage: gates and write strengths of its tokens; factors of what they read of
        the state, for new values and for outputs; the whole decay, padded; and where keys are
        normalised here, their inverse norms and those of queries."""
        return self.off_group + self.builders * self.size_group

    @property
    def off_strength(self) -> int:
        return 4 * self.bt

    @property
    def off_decay(self) -> int:
        return 8 * self.bt

    @property
    def off_read(self) -> int:
        return 12 * self.bt

    @property
    def off_last(self) -> int:
        return 16 * self.bt

    @property
    def off_norms(self) -> int:
        return self.off_last + 16

    @property
    def table(self) -> int:
        return self.off_norms + 8 * self.bt * self.l2norm

    @property
    def off_guard(self) -> int:
        """Sums of gates before three boundaries."""
        return self.off_table + self.stages * self.table

    @property
    def off_jobs(self) -> int:
        """Up to two jobs."""
        return self.off_guard + 3 * 4 * WINDOWS

    @property
    def off_count(self) -> int:
        """How many jobs there are; then whether a key was out of bounds."""
        return self.off_jobs + 2 * 4 * JOB_WORDS

    @property
    def off_bar(self) -> int:
        """Barriers: full, empty; one of each per stage."""
        return self.off_count + 8

    @property
    def smem_bytes(self) -> int:
        return self.off_bar + 2 * 8 * self.stages


def pieces_of(bt: int, rows: int, waves: int, T: int, N: int, HV: int, sms: int) -> int:
    """Pieces that N sequences of T tokens in all are cut into, at most, for each head.

    As many as all tokens would be cut into for ``waves`` CTAs on each SM, without being short, and
    one more for each sequence but the first, because a sequence ends in a piece of its own.  N,
    which is not to cut, where there are CTAs enough without, or where one has 64 rows.  Half of N
    where sequences are so many that a CTA takes two: the second one's chunks are begun behind the
    first one's.
    """
    if rows < HEAD:
        return N
    if N * HV >= MANY * sms:
        return (N + 1) // 2
    share = min(waves * sms // max(HV, 1), T // (SHORTEST * bt))
    return share + N - 1 if share > N else N


def span_of(pieces: Any, T: Any, N: Any) -> Any:
    """Tokens that a piece has at most, if N sequences of T tokens are cut into so many, N or more.

    A sequence that begins at row m owns the pieces of its head from ``m // span + n`` on: as many
    as its share of all tokens is worth, and no lengths have to be summed.  Run-time integers too.
    """
    return T // (pieces - N + 1) + 1


def windows_of(span: Any) -> Any:
    """WINDOWs that an early start has at most: no more tokens than a piece of ``span`` has, because
    an exact segment costs these once more.  Run-time integers too."""
    return (span * EARLY // 2 + WINDOW - 1) // WINDOW


def parts_of(row: Any, end: Any, span: Any) -> Any:
    """Pieces that a sequence from ``row`` to ``end`` owns; those of less than two PIECEs are left
    without tokens."""
    return end // span - row // span + 1
