"""Where a chunk lies in a ragged batch, and which rows no sequence covers, found on the device.

Lengths are device data and may be wrong: offsets are clamped into 0..T and made monotone, so
that sequence n is rows ``[m_n, m_{n+1})`` with ``m_n = max over i <= n of clamp(cu[i], 0, T)``.
What finds rows or sequences is called by a whole, converged warp and gives all its lanes the same.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.image import HEAD

__all__ = ["bounds", "clear_uncovered", "in_one_row", "locate", "offset", "owner", "survey"]

I32, I64 = cutlass.Int32, cutlass.Int64

CLEARING = 8
"""Warps of a CTA that clear rows."""

PER_LANE = 4
"""Offsets a lane loads at once: a long batch is bound by the latency of its loads."""


@cute.jit
def offset(CU: cute.Tensor, i, T):
    """Offset ``i``, at most T; one of 64 bits is cut to -1..T before it loses its upper half."""
    at = CU[i]
    if cutlass.const_expr(CU.element_type is I64):
        at = I32(max(min(at, I64(T)), I64(-1)))
    else:
        at = min(at, T)
    return at


@cute.jit
def bounds(CU, n, T):
    """Rows ``[m_n, m_{n+1})`` of sequence ``n``, 0 <= n < N; CU may be the length of all."""
    if cutlass.const_expr(not isinstance(CU, cute.Tensor)):
        lo, hi = n * CU, n * CU + CU
    else:
        lo, hi = ragged_bounds(CU, n, T)
    return lo, hi


@cute.jit
def ragged_bounds(CU: cute.Tensor, n, T):
    """:func:`bounds` by offsets."""
    lane = cute.arch.lane_idx()
    lo = I32(0)
    for first in cutlass.range(0, n + 1, 32 * PER_LANE, unroll=1):
        for k in cutlass.range_constexpr(PER_LANE):
            # Beyond n, read n once more: the maximum does not change.
            lo = max(lo, offset(CU, min(first + 32 * k + lane, n), T))
    lo = cute.arch.warp_redux_sync(lo, "max")
    return lo, max(lo, offset(CU, n + 1, T))


@cute.jit
def read(CU: cute.Tensor, first, reach, T):
    """The offsets from ``first`` on, PER_LANE a lane, and each lane's m of the one before its own.

    ``reach`` is m of the offset before ``first``.  Beyond N, N is read once more.
    """
    lane = cute.arch.lane_idx()
    N = CU.shape[0] - 1
    ends = [I32(0)] * PER_LANE
    for k in cutlass.range_constexpr(PER_LANE):
        ends[k] = offset(CU, min(first + lane * PER_LANE + k, N), T)
    highest = I32(0)
    for k in cutlass.range_constexpr(PER_LANE):
        highest = max(highest, ends[k])
    # Inclusive over lanes, then what the lanes before have.
    for d in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync_up(highest, offset=d, mask_and_clamp=0)
        if lane >= d:
            highest = max(highest, below)
    m = cute.arch.shuffle_sync_up(highest, offset=1, mask_and_clamp=0)
    if lane == 0:
        m = I32(0)
    return ends, max(reach, m), max(reach, cute.arch.shuffle_sync(highest, offset=31))


@cute.jit
def survey(CU, T):
    """First row of the first sequence, row past the last one's last, rows of the longest one."""
    if cutlass.const_expr(not isinstance(CU, cute.Tensor)):
        first, last, longest = I32(0), I32(T), I32(CU)
    else:
        first, last, longest = ragged_survey(CU, T)
    return first, last, longest


@cute.jit
def ragged_survey(CU: cute.Tensor, T):
    """:func:`survey` by offsets."""
    N = CU.shape[0] - 1
    start = max(offset(CU, 0, T), 0)
    reach, longest = start, I32(0)
    for first in cutlass.range(0, N + 1, 32 * PER_LANE, unroll=1):
        ends, m, reach = read(CU, first, reach, T)
        for k in cutlass.range_constexpr(PER_LANE):
            behind = max(m, ends[k])
            longest = max(longest, behind - m)
            m = behind
    return start, reach, cute.arch.warp_redux_sync(longest, "max")


@cute.jit
def owner(CU: cute.Tensor, place, T, span, weight: cutlass.Constexpr):
    """The last sequence n that begins at or before ``place``, its first row and that past its last.

    Sequence n is rows ``[m_n, m_{n+1})`` and begins at ``m_n // span + weight n``.  -1 if there is
    none.
    """
    lane = cute.arch.lane_idx()
    N = CU.shape[0] - 1
    found = I32(-1)
    lo = I32(0)
    hi = I32(-1)  # m of the offset behind it, once seen
    reach = I32(0)  # m of the last offset seen
    first = I32(0)
    while first <= N:
        index = first + lane * PER_LANE
        ends, m, reach = read(CU, first, reach, T)
        mine, m_mine, m_next = I32(-1), I32(0), T
        for k in cutlass.range_constexpr(PER_LANE):
            m = max(m, ends[k])
            if index + k < N and m // span + weight * (index + k) <= place:
                mine = index + k
                m_mine = m
            else:
                m_next = min(m_next, m)
        found = max(found, cute.arch.warp_redux_sync(mine, "max"))
        lo = max(lo, cute.arch.warp_redux_sync(m_mine, "max"))
        hi = cute.arch.warp_redux_sync(m_next, "min")
        first += 32 * PER_LANE
        if found + 1 < first:  # the offset behind the owner has been seen: places only grow
            first = N + 1
    return found, lo, hi


@cute.jit
def locate(CU: cute.Tensor, slot, T, bt: cutlass.Constexpr, unroll: cutlass.Constexpr):
    """The chunk that owns ``slot``: ``(n, lo, hi, chunk)``.

    Sequence n is rows ``[lo, hi)`` and owns the slots from
    ``base_n = unroll * (m_n // (bt * unroll) + n)`` on, one for each of its chunks (padded to a
    multiple of ``unroll``); ``chunk`` is counted from its start.  ``n`` is N where the slot
    belongs to nobody.
    """
    span = bt * unroll
    n, lo, hi = owner(CU, slot // unroll, T, span, 1)
    chunk = I32(0)
    if n >= 0:
        chunk = slot - unroll * (lo // span + n)
    # A slot between the last chunk of one sequence and the base of the next is nobody's.
    if n < 0 or chunk >= unroll * ((hi - lo + span - 1) // span):
        n = CU.shape[0] - 1
    return n, lo, hi, chunk


def in_one_row(X):
    """[B, T, ...] as [B T, ...]; sequences follow each other without a gap."""
    shape = (X.shape[0] * X.shape[1], *X.shape[2:])
    return cute.make_tensor(X.iterator, cute.make_layout(shape, stride=X.stride[1:]))


@cute.jit
def clear_uncovered(CU, O, T, H, N, cta, covered, warp_id, lane):
    """Clear this CTA's share of the rows of O that no sequence covers; its first warps do."""
    begin = covered[0]
    end = max(covered[1], begin)
    if begin > 0 or end < T:
        if N > 0:
            end = bounds(CU, N - 1, T)[1]
        every = cute.arch.grid_dim()[0] * CLEARING
        if warp_id < CLEARING:
            for row in cutlass.range(cta * CLEARING + warp_id, T, every, unroll=1):
                if row < begin or row >= end:
                    place = I64(row) * H * (HEAD * 2) + lane * 8
                    for h in cutlass.range(H, unroll=1):
                        op.ptx(
                            "st.global.v2.b32 [{$r0}], {{$r1}, {$r1}};",
                            inputs=[O.iterator.toint() + place + h * (HEAD * 2), I32(0)],
                        )
