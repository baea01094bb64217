"""Sizes of the fused kernel, decided before it is compiled, and where its runs begin.

Needs neither torch nor the DSL.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from candidates._delta_rule.kernel.image import HEAD, ImageLayout
from candidates._delta_rule.kernel.pieces import JOB_WORDS, PIECE

__all__ = [
    "ALIKE",
    "BT",
    "GUARD_CUT",
    "GUARD_DECAYS",
    "GUARD_MARGIN",
    "LEAST",
    "LINE",
    "LOWER_PITCH",
    "NEVER",
    "RUN",
    "SCAN_WARPS",
    "SECOND",
    "SHORT",
    "SHORTER",
    "SLAB",
    "Cuts",
    "FusedPlan",
    "Numbers",
    "cuts_of",
    "first_job",
    "runs_of",
]

BT = PIECE
"""Tokens per chunk."""

SCAN_WARPS = 8
"""Warps that hold the state, two warpgroups; the first of the CTA."""

SLAB = BT * HEAD
"""Bytes of an output slab: a chunk's outputs of 64 value rows, in bf16."""

LOWER_PITCH = 20
"""fp32 elements per row of L, free of bank conflicts as in :mod:`.prep_plan`."""

SHORT = 1
"""Chunks of a short warm-up; a long one is twice that."""

GUARD_DECAYS = 2 * HEAD
"""Bytes of what the channels decay by in a pair of tokens, as the guard leaves it."""

GUARD_CUT = 64 * BT // 2 + 16
"""Bytes that the guard leaves of a cut: a row for each pair of tokens, and the largest decay.  No
two cuts begin in the same bank."""

GUARD_MARGIN = 1 / 32
"""What is added to the logarithm of a bound for roundings: up to 15 to bf16 of squared decays, each
of 2^-9, make 0.015 of it."""

NEVER, ALIKE, SHORTER, LINE = 0, 1, 2, 3
"""How sequences may be cut: not at all; all into equally many pieces; so, or along the line of all
chains where the longest run is shorter by that; always along the line."""

SECOND = 2
"""Chunks that it is worth to begin another piece; at least 1, or lengths would need a sum."""

LEAST = 4
"""Places of a run of the line, at least."""

GAIN = 16
"""Runs of the line have to be shorter by one of so many parts: each of them may end within a
sequence, and exact segments cost more than whole ones."""

RUN = 3
"""Number of the job that is the first of a CTA's own pieces: where its last one ends if that is
within a sequence, and where its state goes then, are in the last word and in place of the map."""

_REGISTERS = {(3, False): (152, 56), (2, False): (168, 88), (2, True): (168, 88)}
"""Registers of a scanning and a building thread, by (builders, boundary frame)."""


@dataclass(frozen=True)
class FusedPlan:
    """Sizes of one fused kernel.

    Parameters
    ----------
    frame : str
        Where the state is held between chunks: ``boundary``, or ``middle`` of the next chunk, which
        spares two operands but decays the state on the dependent path.
    builders : int
        Warpgroups that take turns at building chunks: 2 or 3.
    stages : int
        Chunks in the ring, an even number: the CTAs of a pair build every second one.
    scales : bool
        Whether the outputs of a chunk's tokens have factors of their own.

    Raises
    ------
    ValueError
        If no such kernel is offered.
    """

    frame: str
    builders: int
    stages: int = 8
    scales: bool = False

    def __post_init__(self) -> None:
        if self.frame not in ("middle", "boundary"):
            raise ValueError(f"frame={self.frame!r} is not one of ['middle', 'boundary']")
        if (self.builders, self.boundary) not in _REGISTERS:
            raise ValueError(f"builders={self.builders} with frame={self.frame} would spill")

    @property
    def boundary(self) -> bool:
        return self.frame == "boundary"

    @property
    def groups(self) -> int:
        return self.builders

    @property
    def scan_registers(self) -> int:
        return _REGISTERS[self.builders, self.boundary][0]

    @property
    def build_registers(self) -> int:
        return _REGISTERS[self.builders, self.boundary][1]

    @property
    def threads(self) -> int:
        return 32 * SCAN_WARPS + 128 * self.builders

    @property
    def layout(self) -> ImageLayout:
        return ImageLayout(BT)

    # ------------------------------------------------------------------ shared memory, bytes

    @property
    def stage(self) -> int:
        """A chunk in the ring has the form of the split kernels' images."""
        return self.layout.image

    @property
    def off_o(self) -> int:
        """Output slabs behind the ring: two for each scanning warpgroup, in turns."""
        return self.stages * self.stage

    @property
    def off_group(self) -> int:
        """Per builder: g, k, q, v of its next chunk, L, X and beta; in the boundary frame, q and k
        scaled to the middle token; and the two halves' sums, or exponentials of them."""
        return self.off_o + SCAN_WARPS // 4 * 2 * SLAB

    @property
    def size_group(self) -> int:
        own = 8192 + 3 * 4096 + 2048 + 1024 + 1024
        return own + 2 * 4096 if self.boundary else own

    @property
    def off_sum(self) -> int:
        """Gate sums of the second half of each chunk in the ring."""
        return self.off_group + self.builders * self.size_group

    @property
    def off_end(self) -> int:
        """Of a steep chunk: its whole decay, in the order of a stage's."""
        return self.off_sum + self.stages * 4 * HEAD

    @property
    def off_guard(self) -> int:
        """What the guard knows of three cuts: in the ring's last stage, which no builder takes
        before that is decided.  Decays stand where outputs do later."""
        return (self.stages - 1) * self.stage

    @property
    def off_jobs(self) -> int:
        """Up to three jobs of a pair, the CTA's own run, and the piece that each warp is at."""
        return self.off_end + self.stages * 4 * HEAD

    @property
    def off_bar(self) -> int:
        """Barriers: full, empty, sums known; one of each per stage."""
        return self.off_jobs + 4 * JOB_WORDS * (first_job(0) + self.threads // 32)

    @property
    def off_steep(self) -> int:
        """Whether the chunk in each stage is steep, int32 in 16 bytes."""
        return self.off_bar + (3 * 8 * self.stages + 15) // 16 * 16

    @property
    def off_scale(self) -> int:
        """Factors of the outputs of each chunk in the ring, if there are some."""
        return self.off_zero + 16

    @property
    def off_zero(self) -> int:
        """16 bytes of zeros: the values of a map."""
        return self.off_steep + 16 * self.stages

    @property
    def smem_bytes(self) -> int:
        return self.off_scale + 4 * BT * self.stages * self.scales


def first_job(warp: Any) -> Any:
    """Number of the job that is the piece a warp is at."""
    return RUN + 1 + warp


# ------------------------------------------------------------------------------------- cuts


class Numbers:
    """Arithmetic of whole numbers that are not negative; a kernel brings its own."""

    @staticmethod
    def over(x: Any, y: Any) -> Any:
        return x // y

    @staticmethod
    def low(x: Any, y: Any) -> Any:
        return min(x, y)

    @staticmethod
    def high(x: Any, y: Any) -> Any:
        return max(x, y)

    @staticmethod
    def pick(condition: Any, x: Any, y: Any) -> Any:
        return x if condition else y


class Cuts(NamedTuple):
    """Where the runs of CTAs begin.

    Chains, the sequences of each head, stand in a line: all sequences of the first head, then of
    the second.  Run r goes from cut r to cut r + 1.  A cut is a chain and a chunk of it, from which
    on it is cut off; chunk 0 is the chain's begin, and of a chunk behind it its CTA starts a few
    chunks early or has the begin of an exact segment.

    *Alike*: each chain in ``pieces``, or ``whole`` chains for each run if there are fewer runs than
    chains.  Along the *line*: runs of equally many places, in which a sequence that begins at row m
    begins at ``m // BT + SECOND n``.  So the first SECOND places of a chain are worth what it costs
    to begin it, no lengths have to be summed, and each chunk has a place of its own but maybe the
    chain's last, which may have none.

    Attributes
    ----------
    line : bool
        Whether runs are cut along the line.
    pieces, whole
        Pieces of a chain, and chains of a run, if they are cut alike; one of them is 1.
    base, head
        Place of the first sequence's begin, and places of a head.
    runs, length, rest
        Runs of the line, places of each, and places that are left, which the runs share.
    """

    line: Any
    pieces: Any
    whole: Any
    base: Any
    head: Any
    runs: Any
    length: Any
    rest: Any

    @classmethod
    def shares(cls, sequences: Any, heads: Any, runs: Any, how: Any, by: Any = Numbers) -> Any:
        """``pieces`` and ``whole``, which lengths have no part in.

        Parameters
        ----------
        sequences, heads, runs, how, by
            As for :meth:`of`.
        """
        chains = by.high(sequences * heads, 1)
        pieces = by.pick(how == NEVER, 1, by.high(by.over(runs, chains), 1))
        return pieces, by.over(chains + runs - 1, runs)

    @classmethod
    def of(
        cls,
        sequences: Any,
        heads: Any,
        first: Any,
        last: Any,
        longest: Any,
        runs: Any,
        how: Any,
        by: Any = Numbers,
    ) -> Cuts:
        """Decide.

        Parameters
        ----------
        sequences, heads : int
        first, last : int
            First row of the first sequence, and the row past the last one's last.
        longest : int
            Chunks of the longest sequence.
        runs : int
            CTAs.
        how : int
            NEVER, ALIKE, SHORTER or LINE.
        by : Numbers
        """
        pieces, whole = cls.shares(sequences, heads, runs, how, by)
        parts = by.high(by.low(pieces, by.over(longest, 2)), 1)
        alike = (by.over(longest + parts - 1, parts) + SECOND) * whole - SECOND
        alike = alike + by.pick(parts > 1, SHORT, 0)
        base = by.over(first, BT)
        head = by.high(by.over(last, BT) - base + SECOND * sequences, 1)
        places = head * heads
        line_runs = by.low(runs, by.high(by.over(places, LEAST), 1))
        length = by.over(places, line_runs)
        longer = by.over(places + line_runs - 1, line_runs) + SHORT
        shorter = by.pick(longer * GAIN <= alike * (GAIN - 1), 1, 0)
        line = by.pick(how == SHORTER, shorter, by.pick(how == LINE, 1, 0))
        return cls(line, pieces, whole, base, head, line_runs, length, places - length * line_runs)

    def place(self, number: Any, by: Any = Numbers) -> Any:
        """Where cut ``number``, at most ``runs``, lies on the line."""
        return self.length * number + by.over(self.rest * number, self.runs)

    def chunk(self, inside: Any, by: Any = Numbers) -> Any:
        """Chunk of a cut along the line that is ``inside`` places behind its chain's begin.

        A begin that a start a few chunks early would reach is not cut off.
        """
        return by.pick(inside > SECOND + SHORT, inside - SECOND, 0)

    def alike(self, number: Any, by: Any = Numbers) -> tuple[Any, Any]:
        """Chain of cut ``number`` of those cut alike, and which of its pieces begins there."""
        chain = by.over(number * self.whole, self.pieces)
        return chain, number * self.whole - chain * self.pieces

    def piece(self, chunks: Any, number: Any, by: Any = Numbers) -> Any:
        """First chunk of piece ``number`` of a chain of so many; as many as there are for one that
        does not exist."""
        parts = by.high(by.low(self.pieces, by.over(chunks, 2)), 1)
        return by.over(chunks * by.low(number, parts), parts)


def runs_of(waves: int, sms: int) -> int:
    """Runs that the chunks of all sequences and heads are cut into: ``waves`` for each SM, an even
    number."""
    return -(-waves * sms // 2) * 2


def cuts_of(
    lengths: Sequence[int], heads: int, runs: int, how: int = SHORTER
) -> list[tuple[int, int]]:
    """Chain and chunk of each cut, the end of all included, as the kernel finds them."""
    begins = list(itertools.accumulate(lengths, initial=0))
    counts = [-(-length // BT) for length in lengths]
    N = len(lengths)
    cuts = Cuts.of(N, heads, 0, begins[-1], max(counts, default=0), runs, how)
    found = []
    for number in range(runs + 1):
        chain, chunk = N * heads, 0
        if cuts.line:
            if number < cuts.runs:
                head, place = divmod(cuts.place(number), cuts.head)
                n = max(i for i in range(N) if begins[i] // BT + SECOND * i <= place)
                chain = head * N + n
                chunk = cuts.chunk(place - begins[n] // BT - SECOND * n)
        else:
            own, piece = cuts.alike(number)
            if own < N * heads:
                chain, chunk = own, cuts.piece(counts[own % N], piece)
                if chunk > 0 and chunk == counts[own % N]:
                    chain, chunk = own + 1, 0
        found.append((chain, chunk))
    return found
