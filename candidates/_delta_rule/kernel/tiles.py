"""Tiles of a chunk's matrices and how they lie in shared memory; plain Python, no torch, no DSL."""

from __future__ import annotations

from candidates._delta_rule.kernel.image import HEAD

__all__ = [
    "HALF",
    "LOWER_BYTES",
    "LOWER_PITCH",
    "SM_SMEM_BYTES",
    "TILE",
    "lower_block",
    "twist",
]

TILE = 16
"""Tokens per operand block and rows of a score tile (mma.m16n8k16)."""

HALF = HEAD
"""Bytes of a row of 64 channels in bf16: half of the channels."""

LOWER_PITCH = 20
"""fp32 elements per row of a 16 x 16 block of L or X.

A multiple of 4 that keeps fragment reads free of bank conflicts: 20 g + t (and 40 t + g) fall
into 32 different banks for g < 8, t < 4.
"""

LOWER_BYTES = 4 * TILE * LOWER_PITCH

SM_SMEM_BYTES = 228 * 1024
"""Shared memory of an sm_90 SM; each block takes 1 KiB more than it asks for."""


def twist(bt: int, row: int) -> int:
    """What a [BT, BT] bf16 part exchanges the 16-byte pieces of ``row`` with (see ImageLayout).

    Of a run-time row as well.
    """
    return row * bt // 64 % (bt // 8)


def lower_block(row: int, col: int) -> int:
    """Number of block (row, col), col <= row, of a lower triangle; of run-time numbers as well."""
    return row * (row + 1) // 2 + col
