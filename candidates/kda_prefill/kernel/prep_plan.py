"""What PREP computes for the scores of a chunk, decided before it is compiled.

The scores of a chunk are a set of 16 x 8 tiles on and below the diagonal.  An anchor rule
cuts the work into *steps*: a step writes scaled copies of q and k (operands) to shared
memory, in blocks of 16 tokens, and multiplies some of them, tile by tile.  Plain Python: this
module must import neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from candidates._delta_rule.kernel.image import HEAD, ImageLayout
from candidates._delta_rule.kernel.tiles import LOWER_BYTES, SM_SMEM_BYTES, TILE

__all__ = [
    "BLOCK_BYTES",
    "GROUP",
    "Job",
    "Plan",
    "Step",
]

GROUP = 8
"""Tokens that one warp scales: it holds their gates, q and k in registers."""

BLOCK_BYTES = 2 * TILE * HEAD
"""An operand block: [2, 16, 64] bf16, two halves of 64 channels in the 128-byte swizzle."""


@dataclass(frozen=True)
class Job:
    """A tile of scores: 16 rows and 8 or, if the step is ``wide``, 16 columns.

    Parameters
    ----------
    query : int
        1 for Aqk, 0 for Akk.
    row, col : int
        Its 16-token blocks.
    half : int
        Which 8 of the 16 columns; 0 if the step is wide.
    a, b : int
        Operand blocks of its rows and columns, numbered in the step's buffer, or by token
        block where the operand is a part of the image itself.
    """

    query: int
    row: int
    col: int
    half: int
    a: int
    b: int


@dataclass(frozen=True)
class Step:
    """Operands that are written together, and the tiles made of them.

    Parameters
    ----------
    kind : {"both", "off", "level"}
        ``both``: every token is a row and a column of its window of ``size`` tokens, with one
        anchor.  ``off``: windows of ``size`` tokens against all that came before, anchored
        where the row's window begins.  ``level``: the right half of every ``2 size`` tokens
        against their left half, anchored between them; ``size`` 0 is a token with itself.
    size : int
        Tokens, see above.
    rule : str
        ``start``, ``mid`` or ``end``; only for ``both``.
    blocks : int
        Operand blocks that it writes.
    jobs : tuple of Job
        One warp each, in rounds of as many as there are warps.
    wide : bool
        Whether a job has all 16 columns of its block.
    """

    kind: str
    size: int
    rule: str
    blocks: int
    jobs: tuple[Job, ...]
    wide: bool

    @property
    def diagonal_level(self) -> bool:
        """Whether it fills a part of the diagonal tiles, which take several steps."""
        return self.kind == "level" and self.size < TILE


@dataclass(frozen=True)
class Plan:
    """Steps and shared memory of one PREP kernel.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.
    anchor : str
        ``start``, ``mid``, ``end``, ``halving`` or ``pairs``.
    block : int or None
        Tokens per sub-block: 16 or 32; only with ``pairs``.
    diagonal : str or None
        Anchor inside sub-blocks; only with ``pairs``.

    Raises
    ------
    ValueError
        Naming the argument and what it may be.
    """

    bt: int
    anchor: str
    block: int | None = None
    diagonal: str | None = None

    def __post_init__(self) -> None:
        if self.bt not in (16, 32, 64):
            raise ValueError(f"bt={self.bt} is not one of [16, 32, 64]")
        rules = ("start", "mid", "end", "halving")
        if self.anchor not in (*rules, "pairs"):
            raise ValueError(f"anchor={self.anchor!r} is not one of {[*rules, 'pairs']}")
        if self.anchor == "pairs":
            if self.block not in (16, 32) or self.block >= self.bt:
                raise ValueError(f"block={self.block} must be 16 or 32 and below bt={self.bt}")
            if self.diagonal not in rules:
                raise ValueError(f"diagonal={self.diagonal!r} is not one of {list(rules)}")
        elif self.block is not None or self.diagonal is not None:
            raise ValueError(f"block and diagonal do not apply beside anchor={self.anchor!r}")

    @property
    def tiles(self) -> int:
        """16-token blocks of a chunk."""
        return self.bt // TILE

    @property
    def groups(self) -> int:
        """8-token groups of a chunk; two warps each, one per 64 channels."""
        return self.bt // GROUP

    @property
    def warps(self) -> int:
        return 2 * self.groups

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def steps(self) -> tuple[Step, ...]:
        """Steps in order.  Every tile on or below the diagonal is in one of them."""
        window = self.block or self.bt
        rule = self.diagonal or self.anchor
        steps = [self._off(window)] if window < self.bt else []
        if rule != "halving":
            steps.append(self._both(window, rule))
            # The order in which ptxas needs the fewest registers.
            return tuple(reversed(steps)) if rule == "start" else tuple(steps)
        sizes = [window >> i for i in range(1, window.bit_length())] + [0]
        return (*steps, *(self._level(size) for size in sizes))

    @property
    def phases(self) -> tuple[tuple[int, ...], ...]:
        """Steps that share a barrier: all of them as long as each has a buffer of its own."""
        indices = tuple(range(len(self.steps)))
        return (indices,) if len(indices) <= 2 else tuple((i,) for i in indices)

    @property
    def anchored(self) -> int:
        """The step that a steep chunk goes another way in; -1 if there is none.

        Windows of 16 or 32 tokens that are anchored in their middle have one.  Other anchors fit
        as many gates of -5 or fewer, and a window of 64 fits none at all.
        """
        for index, step in enumerate(self.steps):
            if step.kind == "both" and step.rule == "mid" and step.size <= 2 * TILE:
                return index
        return -1

    def rounds(self, phase: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """(step, first job) of each round of a phase: one job for every warp, or fewer."""
        return tuple(
            (index, job)
            for index in phase
            for job in range(0, len(self.steps[index].jobs), self.warps)
        )

    def _step(
        self,
        kind: str,
        size: int,
        rule: str,
        blocks: int,
        tiles: list[tuple[int, int, int, int, int]],
    ) -> Step:
        """A step whose tiles are (row, col, a of k, a of q, b)."""
        # 8 columns a job, unless the warps have only one round of work at 16.
        wide = 2 * len(tiles) <= self.warps < 4 * len(tiles)
        jobs = tuple(
            Job(query, row, col, half, aq if query else ak, b)
            for query in (0, 1)
            for row, col, ak, aq, b in tiles
            for half in ((0,) if wide else (0, 1))
        )
        return Step(kind, size, rule, blocks, jobs, wide)

    def _both(self, size: int, rule: str) -> Step:
        # Operands that the image holds anyway are not made twice: rows of k at the chunk's
        # start are Khat, columns at its end are Kbar.
        n, whole = self.tiles, size == self.bt
        k_rows = 0 if rule == "start" and whole else n
        columns = 0 if rule == "end" and whole else n
        window = size // TILE
        tiles = [
            (i, j, i, k_rows + i, j + (k_rows + n if columns else 0))
            for i in range(n)
            for j in range(i // window * window, i + 1)
        ]
        return self._step("both", size, rule, k_rows + n + columns, tiles)

    def _off(self, size: int) -> Step:
        window = size // TILE
        rows = self.tiles - window
        tiles = [
            (i, j, i - window, rows + i - window, 2 * rows + self.column_base(size, i) + j)
            for i in range(window, self.tiles)
            for j in range(i // window * window)
        ]
        last = self.column_base(size, self.tiles)
        return self._step("off", size, "", 2 * rows + last, tiles)

    def column_base(self, size: int, row: int) -> int:
        """Blocks of columns in front of those of the window of ``size`` around block ``row``."""
        window = size // TILE
        return sum(w * window for w in range(1, row // window))

    def _level(self, size: int) -> Step:
        n, half = self.tiles, max(size // TILE, 1)
        if size < TILE:
            tiles = [(i, i, i, n + i, i) for i in range(n)]
        else:
            tiles = [
                (i, j, i, n + i, j)
                for i in range(n)
                if i // half % 2
                for j in range((i // half - 1) * half, i // half * half)
            ]
        return self._step("level", size, "", 2 * n, tiles)

    # ------------------------------------------------------------------ shared memory, bytes

    @property
    def layout(self) -> ImageLayout:
        return ImageLayout(self.bt)

    def buffer(self, step: int) -> int:
        """Offset of a step's operands.

        They begin where U will stand, which V does not enter before all scores are done.  Steps
        alternate between two buffers, so that one is written while the one before is read.
        """
        return self.layout.common + step % 2 * self._buffer_bytes(0)

    def _buffer_bytes(self, parity: int) -> int:
        return max((s.blocks for s in self.steps[parity::2]), default=0) * BLOCK_BYTES

    @property
    def off_x(self) -> int:
        """X diag(beta) in bf16 [BT, BT]: behind the image, over operands that are done with."""
        return self.layout.image

    @property
    def off_l(self) -> int:
        """L, then X, in fp32, by 16 x 16 blocks of the lower triangle."""
        return self.layout.common + self._buffer_bytes(0) + self._buffer_bytes(1)

    @property
    def off_totals(self) -> int:
        """Gate sums of the 8-token groups, fp32 [groups, 128]; over L, which comes later."""
        return self.off_l

    @property
    def off_beta(self) -> int:
        lower = self.tiles * (self.tiles + 1) // 2 * LOWER_BYTES
        return self.off_l + max(lower, 4 * HEAD * self.groups)

    @property
    def off_place(self) -> int:
        """Where the chunk is: first token, rows, slot, head; int32."""
        return self.off_beta + 4 * self.bt

    @property
    def off_steep(self) -> int:
        """Whether the chunk is steep, int32."""
        return self.off_place + 16

    @property
    def smem_bytes(self) -> int:
        return self.off_steep + 16

    @property
    def registers(self) -> int:
        """Registers a thread is held to: the fewest that compile without spills."""
        steps = len(self.steps)
        return 64 if steps == 1 else 80 if steps == 2 else 128

    @property
    def blocks_per_sm(self) -> int:
        """CTAs of an SM by shared memory and registers."""
        by_smem = SM_SMEM_BYTES // (self.smem_bytes + 1024)
        return max(1, min(by_smem, 65536 // (self.registers * self.threads)))
