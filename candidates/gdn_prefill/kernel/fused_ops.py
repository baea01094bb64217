"""Instructions of the fused Gated DeltaNet kernel that the KDA kernels do without."""

from __future__ import annotations

from candidates._delta_rule.kernel import prep_ops as op

__all__ = ["as_operand", "diagonal", "mma16", "pack16", "prefix_sum", "sync_threads_of"]

F32, I32 = op.F32, op.I32


def pack16(low, high):
    """Two fp32 to fp16, rounded to nearest even, in one register."""
    return op.ptx("cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", [I32], [low, high])


def mma16(acc, a, b):
    """``acc + A B`` of fp16 A [16, 16] and B [16, 16]; acc in two lists of four registers."""
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
        " {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    return [
        list(op.ptx(code, [F32] * 4, [*a, *b[2 * half : 2 * half + 2], *acc[half]]))
        for half in range(2)
    ]


def as_operand(acc, pack=pack16):
    """A 16 x 16 accumulator as left operand, which is also what stmatrix takes."""
    return [pack(acc[half][2 * i], acc[half][2 * i + 1]) for half in range(2) for i in range(2)]


def diagonal(words, token):
    """|x|^2 of 8 tokens' rows, of each of which four lanes hold four times 16 bytes; the lane that
    has ``token >> 1`` for its own number among the four gets that of its token."""
    zero, sums = I32(0), [op.zeros(), op.zeros()]
    for x in words:
        for k in range(2):
            pair = x[2 * k : 2 * k + 2]
            sums[k] = op.mma(sums[k], [pair[0], zero, pair[1], zero], pair)
    squares = [sums[0][e] + sums[1][e] for e in range(2)]
    return op.select(token & 1 == 0, squares[0], squares[1])


def prefix_sum(x):
    """Inclusive sums over a warp's lanes."""
    code = "".join(
        f" shfl.sync.up.b32 before|p, sum, {d}, 0, -1; @p add.f32 sum, sum, before;"
        for d in (1, 2, 4, 8, 16)
    )
    code = "{ .reg .pred p; .reg .f32 before, sum; mov.f32 sum, {$r0};" + code
    return op.ptx(code + " mov.f32 {$w0}, sum; }", [F32], [x])


def sync_threads_of(number, count: int):
    """``count`` threads at named barrier ``number``."""
    op.ptx("bar.sync {$r0}, " + f"{count};", inputs=[number])
