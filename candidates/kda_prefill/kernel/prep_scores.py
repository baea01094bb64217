"""The score tiles of a chunk: Akk and Aqk by mma.sync on the anchored operands of a step.

L = strict_lower(diag(beta) Akk) goes to shared memory in fp32, Aqk to its place in the image.
What is masked is replaced by a select: above the diagonal the factors' product may be infinite,
and 0 times that is no 0.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.prep import positions
from candidates._delta_rule.kernel.tiles import HALF, LOWER_BYTES, LOWER_PITCH, TILE, twist
from candidates.kda_prefill.kernel.prep_plan import BLOCK_BYTES

__all__ = ["finish", "keep", "multiply"]

F32 = op.F32


def multiply(plan, index, jobs, base, warp, lane):
    """This warp's tile of ``jobs``, rows times columns over 128 channels: one accumulator
    for each 8 columns."""
    layout = plan.layout
    step, buffer = plan.steps[index], plan.buffer(index)
    whole = step.kind == "both" and step.size == plan.bt
    far = BLOCK_BYTES // 2  # the other 64 channels
    place = lane % 16 * HALF + (((lane // 16) ^ (lane % 8)) << 4)
    a = base + place + buffer + op.table([j.a for j in jobs], warp) * BLOCK_BYTES
    a_far = a + far
    if whole and step.rule == "start":  # rows of k are Khat, in the image
        query = op.table([j.query for j in jobs], warp)
        khat = base + place + op.table([j.row for j in jobs], warp) * (TILE * HALF)
        a = op.select(query > 0, a, khat)
        a_far = op.select(query > 0, a_far, khat + layout.block_q)
    b, b_block = base, op.table([j.b for j in jobs], warp)
    if whole and step.rule == "end":  # columns are Kbar
        b, far = b + layout.off_k + b_block * (TILE * HALF), plan.bt * HALF
    else:
        b = b + buffer + b_block * BLOCK_BYTES
    if step.wide:
        b = b + (lane // 16 * 8 + lane % 8) * HALF + (((lane // 8 % 2) ^ (lane % 8)) << 4)
    else:
        half = op.table([j.half for j in jobs], warp)
        b = b + (half * 8 + lane % 8) * HALF + (((lane // 8) ^ (lane % 8)) << 4)
    acc = [op.zeros(), op.zeros()]
    for channels in range(0, HEAD, 16):
        # Exchanging pieces of a row flips bits of the address: nothing is added.
        side, at = channels // 64, channels % 64 * 2
        rows = op.ldmatrix((a_far if side else a) ^ at)
        if step.wide:
            cols = op.ldmatrix(b ^ at, side * far)
            acc = [op.mma(acc[i], rows, cols[2 * i : 2 * i + 2]) for i in range(2)]
        else:  # two chains hide half of the latency
            i = channels // 16 % 2
            if i == 0:
                cols = op.ldmatrix(b ^ at, side * far)
            acc[i] = op.mma(acc[i], rows, cols[2 * i : 2 * i + 2])
    return acc if step.wide else [[x + y for x, y in zip(*acc, strict=True)]]


def keep(size, jobs, tile, kept, warp, lane):
    """Of a level's tile, the pairs that it is right for; of all others, what is kept."""
    row, col = positions(jobs, warp, lane)
    out = []
    for i in range(4):
        r, c = row + i // 2 * 8, col + i % 2
        # The highest bit in which two tokens differ is the level that parts them.
        parted = (r ^ c) // size == 1 if size else r == c
        out.append(op.select(parted, tile[i], kept[i]))
    return out


@cute.jit
def finish(plan, jobs, tiles, base, warp, lane, scale):
    """Mask by selection; beta or the scale in fp32; L to fp32, Aqk to the image."""
    layout = plan.layout
    query = op.table([j.query for j in jobs], warp)
    row, first = positions(jobs, warp, lane)
    for i in cutlass.range_constexpr(2):
        r = row + 8 * i
        if query > 0:
            for half in cutlass.range_constexpr(len(tiles)):
                col, (x, y) = first + 8 * half, tiles[half][2 * i : 2 * i + 2]
                x = op.select(col <= r, x * scale, F32(0.0))
                y = op.select(col < r, y * scale, F32(0.0))
                piece = (col // 8) ^ twist(plan.bt, r)
                op.store32(
                    base + r * (2 * plan.bt) + piece * 16 + col % 8 * 2,
                    op.pack(x, y),
                    layout.off_a,
                )
        else:
            beta = op.load_f32(base + r * 4, plan.off_beta)
            block = row // TILE * (row // TILE + 1) // 2 + first // TILE
            place = base + block * LOWER_BYTES + (r % TILE * LOWER_PITCH + first % TILE) * 4
            for half in cutlass.range_constexpr(len(tiles)):
                col, (x, y) = first + 8 * half, tiles[half][2 * i : 2 * i + 2]
                x = op.select(col < r, x * beta, F32(0.0))
                y = op.select(col + 1 < r, y * beta, F32(0.0))
                op.store_f32x2(place, x, y, plan.off_l + 32 * half)
