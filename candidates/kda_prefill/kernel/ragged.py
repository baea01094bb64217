"""Where a chunk lies in a ragged batch, found on the device from the raw offsets.

Lengths are device data and may be wrong: offsets are clamped into 0..T and made monotone, so
that sequence n is rows ``[m_n, m_{n+1})`` with ``m_n = max over i <= n of clamp(cu[i], 0, T)``.
Every function here is called by a whole, converged warp and gives all its lanes the same.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

__all__ = ["bounds", "locate"]

I32 = cutlass.Int32

PER_LANE = 4
"""Offsets a lane loads at once: a long batch is bound by the latency of its loads."""


@cute.jit
def bounds(CU: cute.Tensor, n, T):
    """Rows ``[m_n, m_{n+1})`` of sequence ``n``, 0 <= n < N."""
    lane = cute.arch.lane_idx()
    lo = I32(0)
    for first in cutlass.range(0, n + 1, 32 * PER_LANE, unroll=1):
        for k in cutlass.range_constexpr(PER_LANE):
            # Beyond n, read n once more: the maximum does not change.
            lo = max(lo, min(CU[min(first + 32 * k + lane, n)], T))
    lo = cute.arch.warp_redux_sync(lo, "max")
    return lo, max(lo, min(CU[n + 1], T))


@cute.jit
def locate(CU: cute.Tensor, slot, T, bt: cutlass.Constexpr, unroll: cutlass.Constexpr):
    """The chunk that owns ``slot``: ``(n, lo, hi, chunk)``.

    Sequence n is rows ``[lo, hi)`` and owns the slots from
    ``base_n = unroll * (m_n // (bt * unroll) + n)`` on, one for each of its chunks (padded to a
    multiple of ``unroll``); ``chunk`` is counted from its start.  ``n`` is N where the slot
    belongs to nobody.
    """
    lane = cute.arch.lane_idx()
    N = CU.shape[0] - 1
    span = bt * unroll
    turn = slot // unroll
    owner = I32(-1)  # the last sequence whose base is at or before the slot
    lo = I32(0)
    hi = I32(-1)  # m of the offset behind it, once seen
    reach = I32(0)  # m of the last offset seen
    first = I32(0)
    while first <= N:
        index = first + lane * PER_LANE
        offset = [I32(0)] * PER_LANE
        for k in cutlass.range_constexpr(PER_LANE):
            offset[k] = min(CU[min(index + k, N)], T)  # beyond N: N once more
        highest = I32(0)
        for k in cutlass.range_constexpr(PER_LANE):
            highest = max(highest, offset[k])
        # Inclusive over lanes, then what the lanes before have.
        for d in (1, 2, 4, 8, 16):
            below = cute.arch.shuffle_sync_up(highest, offset=d, mask_and_clamp=0)
            if lane >= d:
                highest = max(highest, below)
        m = cute.arch.shuffle_sync_up(highest, offset=1, mask_and_clamp=0)
        if lane == 0:
            m = I32(0)
        m = max(reach, m)
        mine, m_mine, m_next = I32(-1), I32(0), T
        for k in cutlass.range_constexpr(PER_LANE):
            m = max(m, offset[k])
            if index + k < N and m // span + index + k <= turn:
                mine = index + k
                m_mine = m
            else:
                m_next = min(m_next, m)
        owner = max(owner, cute.arch.warp_redux_sync(mine, "max"))
        lo = max(lo, cute.arch.warp_redux_sync(m_mine, "max"))
        hi = cute.arch.warp_redux_sync(m_next, "min")
        reach = max(reach, cute.arch.shuffle_sync(highest, offset=31))
        first += 32 * PER_LANE
        if owner + 1 < first:  # the offset behind the owner has been seen: bases only grow
            first = N + 1
    chunk = I32(0)
    if owner >= 0:
        chunk = slot - unroll * (lo // span + owner)
    # A slot between the last chunk of one sequence and the base of the next is nobody's.
    if owner < 0 or chunk >= unroll * ((hi - lo + span - 1) // span):
        owner = N
    return owner, lo, hi, chunk
