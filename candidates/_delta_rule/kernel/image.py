"""What PREP and SCAN agree on: the image of one chunk, its slot, and the segments of a sequence.

PREP leaves one contiguous image of shared memory for each (slot, head); a slot is one
chunk of BT tokens of one sequence.  SCAN fetches it with 1-D bulk copies and never moves
an element of it.  Plain integers only: this module must import neither torch nor the DSL,
because cost models, emulations and tests use it as well.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "HEAD",
    "ImageLayout",
    "boundary_words",
    "chunks_of",
    "entry_base",
    "segment_entries",
    "segment_turns",
    "segments_of",
    "slot_base",
    "slots",
    "swizzled_offset",
    "unroll_of",
]

HEAD = 128
"""Head size: key channels K and value channels V."""


@dataclass(frozen=True)
class ImageLayout:
    """Byte offsets in the image of one (slot, head).

    ``-W over Qhat [2 BT, 128] | Kbar [BT, 128] | Aqk [BT, BT] | decay [128] fp32 | pad to
    1 KiB | U [BT, 0:64] | U [BT, 64:128]``, all bf16 but the decay.  A bf16 part is stored in
    blocks of up to 64 columns, one whole block after the other, each row-major with its
    16-byte pieces exchanged by :func:`swizzled_offset`.  ``-W over Qhat`` is *one* part of
    2 BT rows: Qhat is rows BT to 2 BT of both of its blocks.  The decay ``exp(b_BT)`` is in
    the order in which the threads of an accumulator read it (:meth:`decay_position`).

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.

    Attributes
    ----------
    off_q, off_k, off_a, off_e : int
        Bytes from the image's start to Qhat's rows in the first block, Kbar, Aqk, decay.
    block_q : int
        Bytes from one block of ``-W over Qhat`` to the next.
    common : int
        Bytes in front of U: what every CTA of a head reads.
    image : int
        Bytes of the whole image, a multiple of 1 KiB.
    elements : int
        The same in bf16 elements: the last extent of X.
    """

    bt: int

    def __post_init__(self) -> None:
        if self.bt not in (16, 32, 64):
            raise ValueError(f"bt={self.bt} is not one of [16, 32, 64]")

    @property
    def off_q(self) -> int:
        return self.bt * HEAD

    @property
    def block_q(self) -> int:
        return 2 * self.bt * HEAD

    @property
    def off_k(self) -> int:
        return 4 * self.bt * HEAD

    @property
    def off_a(self) -> int:
        return 6 * self.bt * HEAD

    @property
    def off_e(self) -> int:
        return self.off_a + 2 * self.bt * self.bt

    @property
    def common(self) -> int:
        return (self.off_e + 4 * HEAD + 1023) // 1024 * 1024

    @property
    def image(self) -> int:
        return self.common + 2 * self.bt * HEAD

    @property
    def elements(self) -> int:
        return self.image // 2

    @staticmethod
    def decay_position(channel: int) -> int:
        """Index among the 128 decays at which the decay of key channel ``channel`` stands.

        Thread q of a quad holds columns ``8 j + 2 q + {0, 1}`` of an accumulator; it reads
        the four values of two neighbouring j at once.
        """
        pair, half, quad, low = channel // 16, channel // 8 % 2, channel // 2 % 4, channel % 2
        return 16 * pair + 4 * quad + 2 * half + low


def swizzled_offset(row: int, col: int, rows: int, cols: int) -> int:
    """Element offset of (row, col) in a bf16 part of ``rows`` x ``cols``.

    Blocks of ``w = min(64, cols)`` columns; inside a block the 16-byte piece ``p`` of row
    ``r`` stands at piece ``p ^ ((r w / 64) % (w / 8))``: the 128-byte swizzle for w = 64.
    """
    width = min(64, cols)
    piece = (col % width) // 8 ^ (row * width // 64) % (width // 8)
    return col // width * rows * width + row * width + piece * 8 + col % 8


def unroll_of(bt: int, rows: int) -> int:
    """Chunks per turn of the scan's loop, the fastest measured on an H200.

    Parameters
    ----------
    bt : int
        Tokens per chunk.
    rows : int
        Value rows per CTA, 64 or 128.
    """
    return {16: 1, 32: 4, 64: 128 // rows}[bt]


def chunks_of(length: int, bt: int, unroll: int) -> int:
    """Chunks of a sequence of ``length`` tokens, padded to whole turns of the scan's loop."""
    return -(-length // (bt * unroll)) * unroll


def slot_base(start: int, n: int, bt: int, unroll: int) -> int:
    """First slot of sequence ``n``, whose first row is ``start``.

    Needs no prefix sum over sequences, at the price of at most one unused turn for each.
    """
    return unroll * (start // (bt * unroll) + n)


def slots(T: int, N: int, bt: int, unroll: int) -> int:
    """Slots to allocate for N sequences in T rows: an upper bound of every :func:`slot_base`."""
    return unroll * (T // (bt * unroll) + N)


def segments_of(chunks: int, segments: int, unroll: int) -> int:
    """Segments a sequence of ``chunks`` chunks is really cut into.

    The largest of ``segments``, ``segments / 2``, ... , 1 that leaves at least two turns
    of ``unroll`` chunks to each segment.

    Parameters
    ----------
    chunks : int
        From :func:`chunks_of`.
    segments : int
        The schedule's count, a power of two.
    unroll : int
        Chunks per turn.
    """
    p = segments
    while p > 1 and chunks < 2 * p * unroll:
        p //= 2
    return p


def segment_turns(chunks: int, segment: int, parts: int, unroll: int) -> tuple[int, int]:
    """First and past-the-last chunk of one of the ``parts`` segments of a sequence.

    Whole turns, spread as evenly as they go.
    """
    turns = chunks // unroll
    return turns * segment // parts * unroll, turns * (segment + 1) // parts * unroll


def segment_entries(T: int, N: int, bt: int, unroll: int, segments: int) -> int:
    """Inner segment boundaries to allocate for: an upper bound of those of any N sequences.

    A sequence of p segments has p - 1 of them and at least 2 p turns, so that neither the
    sequences nor their rows alone make the buffer large.
    """
    return min(N * (segments - 1), T // (2 * bt * unroll))


def entry_base(start: int, n: int, T: int, N: int, bt: int, unroll: int, segments: int) -> int:
    """First of the p - 1 entries of sequence ``n``, whose first row is ``start``."""
    if N * (segments - 1) <= T // (2 * bt * unroll):
        return n * (segments - 1)
    return start // (2 * bt * unroll)


def boundary_words(segments: int) -> int:
    """fp32 words of one inner segment boundary: a state, and with a carry a bf16 map as well."""
    return HEAD * HEAD + (HEAD * HEAD // 2 if segments > 2 else 0)
