"""What every PREP does beside a chunk's scores: find its place, and apply the inverse."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.image import HEAD, ImageLayout
from candidates._delta_rule.kernel.ragged import bounds, locate, offset
from candidates._delta_rule.kernel.tiles import HALF, TILE, twist

__all__ = ["ChunkPrep", "positions"]

I32, I64 = op.I32, op.I64


class ChunkPrep:
    """The part of PREP that does not see the gate.

    Attributes
    ----------
    bt, unroll : int
        Tokens per chunk, and chunks per turn of the scan's loop.
    plan : object
        With ``warps``, ``tiles``, and ``off_place``, ``off_steep`` and ``off_x`` of shared memory.
    layout : ImageLayout
    """

    bt: int
    unroll: int
    plan: Any
    layout: ImageLayout

    @cute.jit
    def find_place(self, CU, O, T, H, base, lane):
        """One warp: leave first token, rows (-1: nothing to do), slot and head for the others.

        Clears this CTA's share of the rows of O that no sequence covers, too.
        """
        cta = cute.arch.block_idx()[0]
        slot, head = cta // H, cta % H
        N = CU.shape[0] - 1
        begin = max(offset(CU, 0, T), 0)
        end = max(offset(CU, N, T), begin)
        n, lo, hi, chunk = locate(CU, slot, T, self.bt, self.unroll)
        start, rows = lo + chunk * self.bt, I32(-1)
        if n < N:
            rows = max(min(hi - start, self.bt), 0)
        if lane == 0:
            op.store_i32x4(base, (start, rows, slot, head), self.plan.off_place)
            op.store32(base, I32(0), self.plan.off_steep)
        if begin > 0 or end < T:
            if N > 0:
                end = bounds(CU, N - 1, T)[1]
            every = cute.arch.grid_dim()[0] // H
            for row in cutlass.range(slot, T, every, unroll=1):
                if row < begin or row >= end:
                    at = ((I64(row) * H + head) * HEAD + lane * 4) * 2
                    op.ptx(
                        "st.global.v2.b32 [{$r0}], {{$r1}, {$r1}};",
                        inputs=[O.iterator.toint() + at, I32(0)],
                    )

    def apply_inverse(self, base, warp, lane):
        """W and U over Khat and V: each warp its own columns, so that it may do it in place."""
        plan, layout, bt, n = self.plan, self.layout, self.bt, self.plan.tiles
        slabs = TILE // plan.warps if plan.warps < TILE else 1  # 16 slabs of 16 columns
        is_u = warp >= plan.warps // 2
        block = op.select(is_u, I32(bt * HALF), I32(layout.block_q))
        home = base + op.select(is_u, I32(layout.common), I32(0))
        sign = op.select(is_u, I32(0), I32(-(2**31) + 2**15))  # W is stored negated
        left = {}
        for i in range(n):
            for k in range(i + 1):
                row = lane % 16 + i * TILE
                piece = (lane // 16 + 2 * k) ^ twist(bt, row)
                left[i, k] = op.ldmatrix(base + row * (2 * bt) + piece * 16, plan.off_x)
        for s in range(slabs):
            slab = (warp * slabs + s) % 8
            place = home + slab // 4 * block
            first = slab % 4 * 2
            row = lane % 8 + lane // 8 % 2 * 8
            from_ = place + row * HALF + (((first + lane // 16) ^ (lane % 8)) << 4)
            right = [op.ldmatrix(from_, k * TILE * HALF, transpose=True) for k in range(n)]
            cute.arch.sync_warp()
            for i in range(n):
                acc = [op.zeros(), op.zeros()]
                for k in range(i + 1):
                    for half in range(2):
                        acc[half] = op.mma(acc[half], left[i, k], right[k][2 * half : 2 * half + 2])
                out = [
                    op.pack(acc[half][2 * r], acc[half][2 * r + 1]) ^ sign
                    for half in range(2)
                    for r in range(2)
                ]
                op.stmatrix(from_, out, i * TILE * HALF)


def positions(jobs, warp, lane):
    """Rows (two) and first column (of two) of the chunk that a lane holds of a tile."""
    row = op.table([j.row for j in jobs], warp) * TILE + lane // 4
    col = op.table([2 * j.col + j.half for j in jobs], warp) * 8 + lane % 4 * 2
    return row, col
