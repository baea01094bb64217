"""What GDN's PREP does and where it keeps it, decided before it is compiled.

Plain Python: this module must import neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from candidates._delta_rule.kernel.image import ImageLayout
from candidates._delta_rule.kernel.tiles import LOWER_BYTES, SM_SMEM_BYTES, TILE

__all__ = ["Job", "Plan"]


@dataclass(frozen=True)
class Job:
    """A tile of scores: 16 rows and 8 or, if the plan is ``wide``, 16 columns.

    Parameters
    ----------
    query : int
        1 for Aqk, 0 for Akk.
    row, col : int
        Its 16-token blocks.
    half : int
        Which 8 of the 16 columns; 0 if the plan is wide.
    """

    query: int
    row: int
    col: int
    half: int


@dataclass(frozen=True)
class Plan:
    """Score tiles and shared memory of one PREP kernel.

    Shared memory begins with the image itself.  q, k and v are fetched into the places of Qhat,
    W and U, in the swizzle that these have, and are scaled or multiplied there: no operand is
    held twice.  What :func:`candidates._delta_rule.kernel.prep_inverse.invert` reads of a plan
    has the names that it has there.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.

    Raises
    ------
    ValueError
        If there is no such kernel.
    """

    bt: int

    def __post_init__(self) -> None:
        if self.bt not in (16, 32, 64):
            raise ValueError(f"bt={self.bt} is not one of [16, 32, 64]")

    @property
    def tiles(self) -> int:
        """16-token blocks of a chunk."""
        return self.bt // TILE

    @property
    def warps(self) -> int:
        return self.bt // 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def diagonal_warps(self) -> int:
        """The first warps, which substitute: two 16 x 16 blocks each."""
        return (self.tiles + 1) // 2

    # ------------------------------------------------------------------------------ scores

    @property
    def wide(self) -> bool:
        """Whether a job has all 16 columns of its block: where it makes one round of two."""
        tiles = self.tiles * (self.tiles + 1) // 2
        return 2 * tiles <= self.warps < 4 * tiles

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Every tile on or below the diagonal, of q and of k; one for a warp at a time."""
        return tuple(
            Job(query, row, col, half)
            for query in (0, 1)
            for row in range(self.tiles)
            for col in range(row + 1)
            for half in ((0,) if self.wide else (0, 1))
        )

    @property
    def rounds(self) -> tuple[tuple[Job, ...], ...]:
        """The jobs, one for each warp or fewer at a time."""
        jobs = self.jobs
        return tuple(jobs[i : i + self.warps] for i in range(0, len(jobs), self.warps))

    # ------------------------------------------------------------------ shared memory, bytes

    @property
    def layout(self) -> ImageLayout:
        return ImageLayout(self.bt)

    @property
    def off_x(self) -> int:
        """X diag(beta) in bf16 [BT, BT], a matrix operand; behind the image."""
        return self.layout.image

    @property
    def off_l(self) -> int:
        """L, then X, in fp32, by 16 x 16 blocks of the lower triangle."""
        return self.off_x + 2 * self.bt * self.bt

    @property
    def off_beta(self) -> int:
        """Write strengths, fp32 [BT]; five more numbers of each token follow likewise."""
        return self.off_l + self.tiles * (self.tiles + 1) // 2 * LOWER_BYTES

    @property
    def off_sum(self) -> int:
        """b, the inclusive sum of the gates, in units of ln 2."""
        return self.off_beta + 4 * self.bt

    @property
    def off_into(self) -> int:
        """e^b: what is left of the incoming state."""
        return self.off_beta + 8 * self.bt

    @property
    def off_onto(self) -> int:
        """e^(b_BT - b): what is left of a token at the chunk's end."""
        return self.off_beta + 12 * self.bt

    @property
    def off_key(self) -> int:
        """1 / |k|, where PREP normalises."""
        return self.off_beta + 16 * self.bt

    @property
    def off_query(self) -> int:
        """1 / |q|, likewise."""
        return self.off_beta + 20 * self.bt

    @property
    def off_place(self) -> int:
        """Where the chunk is: first token, rows, slot, value head; int32."""
        return self.off_beta + 24 * self.bt

    @property
    def off_steep(self) -> int:
        """A word that ``find_place`` clears; here nothing reads it."""
        return self.off_place + 16

    @property
    def smem_bytes(self) -> int:
        return self.off_steep + 16

    @property
    def registers(self) -> int:
        """Registers a thread is held to."""
        return 64

    @property
    def blocks_per_sm(self) -> int:
        """CTAs of an SM by shared memory, registers and threads."""
        by_smem = SM_SMEM_BYTES // (self.smem_bytes + 1024)
        return max(1, min(by_smem, 65536 // (self.registers * self.threads), 2048 // self.threads))
