"""What the scan's kernels share: their work item, and fragments in registers.

A work item is a *piece*: a segment of one sequence of one head.  Fragments are accumulators of
one warpgroup that holds 64 rows of the transposed state.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .image import HEAD
from .ragged import bounds

__all__ = [
    "MAP_WORDS",
    "MAX_STAGES",
    "SMEM_LIMIT",
    "STATE_WORDS",
    "bulk_pipeline",
    "entry_fragment",
    "load_state",
    "narrow",
    "product",
    "segment_chunks",
    "sequence_entry",
    "sequence_parts",
    "sequence_slots",
    "store_below",
    "store_state",
    "widen",
    "zero",
]

BF16, F32, I32 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32
SMEM_LIMIT = 227 * 1024
MAX_STAGES = 12
STATE_WORDS = HEAD * HEAD  # fp32 words of an entry: a state in fragment order,
MAP_WORDS = HEAD * HEAD // 2  # then the bf16 map of the segment in front of it


# ------------------------------------------------------------------------------- work items


def sequence_slots(CU, n, T, bt, unroll):
    """Rows, padded chunk count and first slot of sequence n.

    Uniform values: ptxas would take a loop over them for divergent otherwise, and serialise its
    products (C7519).
    """
    row0, row1 = (cute.arch.make_warp_uniform(r) for r in bounds(CU, n, T))
    turn = bt * unroll
    chunks = (row1 - row0 + turn - 1) // turn * unroll
    return row0, row1, chunks, (row0 // turn + n) * unroll


@cute.jit
def sequence_parts(chunks, segments: cutlass.Constexpr, unroll: cutlass.Constexpr):
    """:func:`.image.segments_of` on the device."""
    parts = I32(segments)
    for _ in cutlass.range_constexpr(segments.bit_length() - 1):
        if chunks < 2 * unroll * parts:
            parts = parts // 2
    return parts


@cute.jit
def sequence_entry(
    row0, n, T, N, bt: cutlass.Constexpr, unroll: cutlass.Constexpr, segments: cutlass.Constexpr
):
    """:func:`.image.entry_base` on the device."""
    entry = row0 // (2 * bt * unroll)
    if N * (segments - 1) <= T // (2 * bt * unroll):
        entry = n * (segments - 1)
    return entry


@cute.jit
def segment_chunks(chunks, segment, parts, unroll: cutlass.Constexpr):
    """First chunk and chunk count of a segment: :func:`.image.segment_turns` on the device.

    Nothing, at the sequence's start, for a segment that the sequence does not have.
    """
    turns = chunks // unroll
    first, count = I32(0), I32(0)
    if segment < parts:
        first = turns * segment // parts * unroll
        count = turns * (segment + 1) // parts * unroll - first
    return first, count


def bulk_pipeline(bars, stages, stage_bytes, warps):
    """A ring of stages filled by one producer warp, released by ``warps`` consumer warps."""
    threads = lambda count: pipeline.CooperativeGroup(pipeline.Agent.Thread, count)
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=bars,
        num_stages=stages,
        tx_count=stage_bytes,
        producer_group=threads(1),
        consumer_group=threads(warps),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )


# -------------------------------------------------------------------------------- fragments


def product(b_major, n):
    """A 64 x n product of one warpgroup, left operand bf16 in registers, fp32 accumulators."""
    return sm90.make_trivial_tiled_mma(
        BF16,
        BF16,
        OperandMajorMode.K,
        b_major,
        F32,
        (1, 1, 1),
        (64, n),
        warpgroup.OperandSource.RMEM,
    )


def narrow(acc, dst):
    """Round an fp32 accumulator to bf16 in the same order.

    As PTX, so that LLVM leaves it where it is written: a plain conversion moves over the loop's
    back edge, from the shadow of a product into the open.
    """
    pairs = cute.recast_tensor(dst, I32)
    for i in range(cute.size(pairs)):
        pairs[i] = cute.arch.inline_ptx(
            "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
            write_only_types=[I32],
            read_only_args=[acc[2 * i], acc[2 * i + 1]],
        )


def widen(src, acc, keep=None):
    """Widen bf16 to an fp32 accumulator in the same order; as PTX for the same reason.

    ``keep``, all ones or 0, selects what was read or zeros; None is all ones.
    """
    pairs = cute.recast_tensor(src, I32)
    for i in range(cute.size(pairs)):
        if keep is None:
            acc[2 * i], acc[2 * i + 1] = cute.arch.inline_ptx(
                "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;",
                write_only_types=[F32, F32],
                read_only_args=[pairs[i]],
            )
        else:
            acc[2 * i], acc[2 * i + 1] = cute.arch.inline_ptx(
                "{ .reg .b32 x; and.b32 x, {$r0}, {$r1}; shl.b32 {$w0}, x, 16;"
                " and.b32 {$w1}, x, 0xffff0000; }",
                write_only_types=[F32, F32],
                read_only_args=[pairs[i], keep],
            )


def zero(acc):
    """Fill an accumulator with a 0 that LLVM does not know to be one.

    It folds arithmetic on a known constant through the loop and hoists the rest above waits.
    """
    acc.fill(cute.arch.inline_ptx("mov.f32 {$w0}, 0f00000000;", write_only_types=[F32]))


def entry_fragment(BUF, entry, h, block, t):
    """This thread's 64 state elements of an entry, 64-row block ``block``, as (4, 16).

    In the order of the accumulator, so that 128 threads move 2 KiB with each access.
    """
    at = BUF[entry, h, None].iterator + block * (STATE_WORDS // 2) + t * 4
    return cute.make_tensor(at.align(16), cute.make_layout((4, 16), stride=(1, 512)))


def store_below(row, end, values, at):
    """Store 16 bytes if ``0 <= row < end``, predicated: no branch for ptxas to schedule around."""
    words = cute.recast_tensor(values, I32)
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lo.u32 p, {$r0}, {$r1};"
        " @p st.global.v4.b32 [{$r2}], {{$r3}, {$r4}, {$r5}, {$r6}}; }",
        read_only_args=[row, end, at.toint(), *(words[i] for i in range(4))],
    )


def load_state(source, acc):
    """A state of either dtype."""
    if source.element_type is F32:
        cute.autovec_copy(source, acc)
        return
    narrow_one = cute.make_rmem_tensor(acc.layout, source.element_type)
    cute.autovec_copy(source, narrow_one)
    acc.store(narrow_one.load().to(F32))


def store_state(acc, target):
    """A state in the dtype of ``target``, rounded once."""
    if target.element_type is F32:
        cute.autovec_copy(acc, target)
        return
    narrow_one = cute.make_rmem_tensor(acc.layout, target.element_type)
    narrow_one.store(acc.load().to(target.element_type))
    cute.autovec_copy(narrow_one, target)
