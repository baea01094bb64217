"""Sizes of the fused kernel, decided before it is compiled.

Needs neither torch nor the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from candidates._delta_rule.kernel.image import HEAD, ImageLayout
from candidates._delta_rule.kernel.pieces import JOB_WORDS, PIECE

__all__ = [
    "BT",
    "LOWER_PITCH",
    "PITCH",
    "SCAN_WARPS",
    "SHORT",
    "FusedPlan",
]

BT = PIECE
"""Tokens per chunk."""

SCAN_WARPS = 8
"""Warps that hold the state, two warpgroups; the first of the CTA."""

PITCH = 24
"""Elements per row of an output slab: 16 values, padded against bank conflicts."""

LOWER_PITCH = 20
"""fp32 elements per row of L, free of bank conflicts as in :mod:`.prep_plan`."""

SHORT = 2
"""Chunks of a short warm-up; a long one is twice that."""

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
        """Output slabs, one per scanning warp, behind the ring."""
        return self.stages * self.stage

    @property
    def off_group(self) -> int:
        """Per builder: g, k, q, v of its next chunk, L, X and beta; in the boundary frame, q and k
        scaled to the middle token; and the two halves' sums, or exponentials of them."""
        return self.off_o + SCAN_WARPS * PITCH * BT * 2

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
        return self.off_end + self.stages * 4 * HEAD

    @property
    def off_jobs(self) -> int:
        """Up to two jobs, and one that is only guessed."""
        return self.off_guard + 192

    @property
    def off_bar(self) -> int:
        """Barriers: full, empty, sums known; one of each per stage."""
        return self.off_jobs + 3 * 4 * JOB_WORDS

    @property
    def off_steep(self) -> int:
        """Whether the chunk in each stage is steep, int32 in 16 bytes."""
        return self.off_bar + (3 * 8 * self.stages + 15) // 16 * 16

    @property
    def off_scale(self) -> int:
        """Factors of the outputs of each chunk in the ring, if there are some."""
        return self.off_steep + 16 * self.stages

    @property
    def smem_bytes(self) -> int:
        return self.off_scale + 4 * BT * self.stages * self.scales
