"""X = (I + L)^-1 of a chunk: exact 16 x 16 blocks, merged in tf32; never a power series.

L stands in shared memory in fp32, by 16 x 16 blocks of the lower triangle; X diag(beta) is left
there in bf16, as a matrix operand.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.tiles import (
    LOWER_BYTES,
    LOWER_PITCH,
    TILE,
    lower_block,
    twist,
)

__all__ = ["blank", "invert"]

F32, I32 = op.F32, op.I32


@cute.jit
def invert(plan: cutlass.Constexpr, base, warp, lane):
    """Called by all warps of the CTA; ends without a barrier."""
    n = plan.tiles
    diagonal_warps = (n + 1) // 2
    if warp < diagonal_warps:
        substitute(plan, base, warp, lane)
        if cutlass.const_expr(n > 1):
            cute.arch.sync_warp()
            # Siblings (1, 0) of warp 0 and (3, 2) of warp 1: both blocks are its own.
            first = warp * 2
            block = merge(plan, base, lane, first, first, 1)
            store_operand(plan, base, lane, first + 1, first, block)
            if cutlass.const_expr(n > 2):
                cute.arch.sync_warp()
                store_block(plan, base, lane, first + 1, first, block)
    if cutlass.const_expr(n > 2):
        cute.arch.sync_threads()
        if warp < 4:
            row, col = 2 + warp // 2, warp % 2
            if row == 2 and col == 1:
                store_operand(plan, base, lane, 2, 1, merge_at(plan, base, lane, 2, 1))
            elif row == 2:
                store_operand(plan, base, lane, 2, 0, merge_at(plan, base, lane, 2, 0))
            elif col == 1:
                store_operand(plan, base, lane, 3, 1, merge_at(plan, base, lane, 3, 1))
            else:
                store_operand(plan, base, lane, 3, 0, merge_at(plan, base, lane, 3, 0))


def lower(plan, base, row, col):
    """Address of a block of L or X; block numbers at compile time or run time."""
    return base + lower_block(row, col) * LOWER_BYTES + plan.off_l


def substitute(plan, base, warp, lane):
    """Exact inverse of two diagonal blocks by forward substitution in fp32, a lane a column."""
    block = warp * 2 + lane // TILE if plan.tiles > 1 else I32(0)
    col = lane % TILE
    home = base + (block * (block + 3) // 2) * LOWER_BYTES
    x = [op.select(col == 0, F32(1.0), F32(0.0))]
    for i in range(1, TILE):
        row = []
        for k in range(0, i, 4):
            row += op.load_f32x4(home, plan.off_l + (i * LOWER_PITCH + k) * 4)
        # The newest entry last: it is what the row before was waiting for.
        value = op.select(col == i, F32(1.0), F32(0.0))
        for k in range(i):
            value = op.fma(row[k], -x[k], value)
        x.append(value)
    beta = op.load_f32(base + (block * TILE + col) * 4, plan.off_beta)
    cute.arch.sync_warp()  # the block is read whole
    bt = plan.bt
    operand = base + block * (TILE * 2 * bt) + col % 8 * 2
    piece = block * 2 + col // 8
    for i in range(TILE):
        if plan.tiles > 1:
            op.store_f32(home + col * 4, x[i], plan.off_l + i * LOWER_PITCH * 4)
        # The swizzle of row 16 block + i is that of row i.
        place = operand + ((piece ^ twist(bt, i)) << 4)
        op.store_bf16(place, x[i] * beta, plan.off_x + i * 2 * bt)


def operand_place(plan, row, col):
    """Byte offset in the bf16 [BT, BT] operand, swizzled like Aqk."""
    return row * (2 * plan.bt) + ((col // 8) ^ twist(plan.bt, row)) * 16 + col % 8 * 2


def store_operand(plan, base, lane, row, col, block):
    """Block (row, col) of X, negated from ``block``, times beta of its columns, to bf16."""
    for half in range(2):
        c = col * TILE + half * 8 + lane % 4 * 2
        beta = op.load_f32x2(base + c * 4, plan.off_beta)
        for i in range(2):
            r = row * TILE + lane // 4 + 8 * i
            x, y = (-block[half][2 * i + j] * beta[j] for j in range(2))
            op.store32(base + operand_place(plan, r, c), op.pack(x, y), plan.off_x)


def store_block(plan, base, lane, row, col, block):
    """The same in fp32, for the next merge."""
    home = lower(plan, base, row, col) + (lane // 4 * LOWER_PITCH + lane % 4 * 2) * 4
    for half in range(2):
        for i in range(2):
            x, y = (-block[half][2 * i + j] for j in range(2))
            op.store_f32x2(home, x, y, (8 * i * LOWER_PITCH + half * 8) * 4)


def merge(plan, base, lane, first, col, width):
    """``X[first + 1, first + 1] L[first + 1, col] X[col, col]``, the neighbours of width 1."""
    inner = product(
        plan,
        lane,
        load_rows(lane, lower(plan, base, first + 1, first + 1)),
        lower(plan, base, first + 1, col),
        blank(),
    )
    return product(plan, lane, as_rows(inner), lower(plan, base, col, col), blank())


def merge_at(plan, base, lane, row, col):
    """Block (row, col) of ``X[2:4, 2:4] L[2:4, 0:2] X[0:2, 0:2]``, numbers in blocks of 16."""
    total = blank()
    for q in range(col, 2):
        inner = blank()
        for p in range(2, row + 1):
            rows = load_rows(lane, lower(plan, base, row, p))
            inner = product(plan, lane, rows, lower(plan, base, p, q), inner)
        total = product(plan, lane, as_rows(inner), lower(plan, base, q, col), total)
    return total


def blank():
    """A cleared 16 x 16 accumulator: two of 16 x 8."""
    return [op.zeros(), op.zeros()]


def load_rows(lane, home):
    """A 16 x 16 fp32 block as left operand, in two steps of 8 columns.

    The order of the summation index is free as long as both operands agree: thread t of a
    quad takes columns 2 t and 2 t + 1 for the t and t + 4 of the instruction.  That is
    what it holds of an accumulator, so that a product can be the next one's left operand.
    """
    place = home + (lane // 4 * LOWER_PITCH + lane % 4 * 2) * 4
    out = []
    for k in range(2):
        top = op.load_f32x2(place, k * 32)
        bottom = op.load_f32x2(place, 8 * LOWER_PITCH * 4 + k * 32)
        out.append([op.to_tf32(x) for x in (top[0], bottom[0], top[1], bottom[1])])
    return out


def as_rows(acc):
    """A 16 x 16 accumulator as left operand."""
    return [[op.to_tf32(half[i]) for i in (0, 2, 1, 3)] for half in acc]


def product(plan, lane, rows, home, acc):
    """``acc + rows B`` with B the 16 x 16 fp32 block at ``home``."""
    place = home + (lane % 4 * 2 * LOWER_PITCH + lane // 4) * 4
    out = []
    for half in range(2):
        part = acc[half]
        for k in range(2):
            at = (8 * k * LOWER_PITCH + 8 * half) * 4
            b = [op.to_tf32(op.load_f32(place, at + i * LOWER_PITCH * 4)) for i in range(2)]
            part = op.mma_tf32(part, rows[k], b)
        out.append(part)
    return out
