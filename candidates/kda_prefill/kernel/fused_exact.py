"""Where a run may not start from zero: exact segments, made by pairs of CTAs.

All runs stand in one line; CTAs 2 i and 2 i + 1 are a pair and own runs 2 i and 2 i + 1.  Where the
guard lets both start from zero, each CTA takes the pieces of its own.  A piece at whose cut it
fails becomes a *job* of the pair: each CTA builds every second chunk and sends it to the other as
well, and both scan all chunks.  There are three at most, which come behind the CTAs' own pieces:

* The first piece of the pair, if the guard fails where it begins, is an exact segment.  The state
  it leaves is ``M S_in + C`` and its outputs are ``O + P S_in``.  C and O come from the scan of
  the first CTA, from zero; M and P are the same scan in the second, from the identity and with
  U = 0: 128 rows of a state more, and P stands where O would.
* The two pieces at the cut between the runs are one if the guard fails there.  If that is not the
  first one, each CTA takes half of its value rows.
* So they do with the second CTA's last piece, if it ends within a sequence and the first CTA has no
  piece of its own, which would be idle.

:class:`.fixup.Fixup` composes segments and corrects outputs afterwards.  What this needs of shared
and global memory is in :mod:`.fused_plan`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates.kda_prefill.kernel import fused_ops as ops
from candidates.kda_prefill.kernel import prep_ops as op
from candidates.kda_prefill.kernel.fused_plan import (
    JOB_WORDS,
    RUN,
    SCAN_WARPS,
    FusedPlan,
    Scratch,
)
from candidates.kda_prefill.kernel.image import HEAD
from candidates.kda_prefill.kernel.step import STATE_WORDS, narrow

__all__ = [
    "AGAIN",
    "AS_GUESSED",
    "BEGINS",
    "CARRY",
    "CONTINUES",
    "ENDS",
    "FINAL",
    "FREE",
    "LAST",
    "MAP",
    "NOTHING",
    "NOWHERE",
    "OWN",
    "Exact",
]

F32, I32, I64 = op.F32, op.I32, op.I64

FREE, BEGINS, CONTINUES, ENDS = 0, 1, 2, 4
"""Flags of a CTA: needs no carry; an exact segment begins, and, added to that, also ends the
sequence; of the second CTA of a pair, that this segment is all of both."""

NOWHERE, FINAL, CARRY, MAP = 0, 1, 2, 3
"""Where a scan leaves its last state."""

NOTHING, AS_GUESSED, AGAIN = 0, 1, 2
"""What a CTA does alone: nothing; its own run, as its builders began it, or from another chunk."""

OWN = 4
"""What a CTA does is one of these and OWN times the jobs of its pair."""

LAST = 4
"""Of the word that says which warpgroups scan: the job is its CTA's last."""


class Exact:
    """The part of the fused kernel that knows jobs and the scratch."""

    plan: FusedPlan

    @cute.jit
    def begin_ring(self, at):
        """Initialise the barriers of a CTA alone; one thread."""
        stages = self.plan.stages
        for i, arrivals in enumerate((4, SCAN_WARPS, 2)):  # full, empty, sums
            for s in cutlass.range_constexpr(stages):
                ops.bar_init(at + (self.plan.off_bar + 8 * (stages * i + s)), arrivals)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def begin_pair(self, at, warp_id, lane):
        """The same for a pair: the scanning warps of both let a stage go.  All threads."""
        if warp_id == SCAN_WARPS:
            if lane == 0:
                for s in cutlass.range_constexpr(self.plan.stages):
                    place = at + (self.plan.off_bar + 8 * (self.plan.stages + s))
                    ops.bar_end(place)
                    ops.bar_init(place, 2 * SCAN_WARPS)
                cute.arch.mbarrier_init_fence()
            ops.sync_warp()
        ops.sync_cluster()

    @cute.jit
    def renew_ring(self, at, warp_id, lane):
        """Make all barriers anew, by one warp; nobody uses them at the time."""
        if warp_id == SCAN_WARPS:
            if lane == 0:
                for i in cutlass.range_constexpr(3 * self.plan.stages):
                    ops.bar_end(at + (self.plan.off_bar + 8 * i))
                self.begin_ring(at)
            ops.sync_warp()

    @cute.jit
    def begin_anew(self, at, warp_id, lane):
        """Throw away what was built; a CTA alone.  All threads."""
        cute.arch.sync_threads()
        self.renew_ring(at, warp_id, lane)
        cute.arch.sync_threads()

    @cute.jit
    def begin_again(self, at, warp_id, lane):
        """Before a pair's jobs: nothing is in flight, then all barriers are new.  All threads."""
        ops.sync_cluster()
        self.renew_ring(at, warp_id, lane)
        self.begin_pair(at, warp_id, lane)

    @cute.jit
    def take_diagonal(self, address, accS, row, t):
        """Write the diagonal of rows ``row`` and 8 more, and leave zeros in its place.

        In bf16 each segment would round it, and at slow gates all of them alike.
        """
        for r in cutlass.range_constexpr(2):
            value = F32(0.0)
            for j in cutlass.range_constexpr(HEAD // 8):
                for e in cutlass.range_constexpr(2):
                    own = row + 8 * r == 8 * j + (t & 3) * 2 + e
                    value = op.select(own, accS[4 * j + 2 * r + e], value)
                    accS[4 * j + 2 * r + e] = op.select(own, F32(0.0), accS[4 * j + 2 * r + e])
            c = row + 8 * r
            if (c >> 1) & 3 == t & 3:
                place = (c & -16) + ((c >> 1) & 3) * 4 + ((c >> 3) & 1) * 2 + (c & 1)
                op.ptx("st.global.f32 [{$r0}], {$r1};", inputs=[address + I64(place * 4), value])

    @cute.jit
    def put_job(self, at, number, values):
        """Write the description of a job to shared memory; one thread."""
        place = at + number * (4 * JOB_WORDS)
        for i, value in enumerate(values):
            op.store32(place, value, self.plan.off_jobs + 4 * i)

    @cute.jit
    def get_job(self, at, number):
        """What :meth:`put_job` wrote; uniform values."""
        place = at + number * (4 * JOB_WORDS)
        return [
            cute.arch.make_warp_uniform(ops.load_shared32(place, self.plan.off_jobs + 4 * i))
            for i in range(JOB_WORDS)
        ]

    @cute.jit
    def take_run(self, at, number, own, lane):
        """Make the first piece of the CTA's run this warp's job; whether it has one."""
        there = I32(0)
        if own > NOTHING:
            there = I32(1)
            run = self.get_job(at, RUN)
            run[8] = run[11] = I32(0)
            if lane == 0:
                self.put_job(at, number, run)
            ops.sync_warp()
        return there

    def put_choice(self, at, choice):
        """Tell the builders what the CTA does; one thread, before all meet."""
        op.store32(at, choice, self.plan.off_jobs + 4 * (JOB_WORDS - 1))

    def await_choice(self, at):
        """Meet the scanning warps; what the CTA does."""
        cute.arch.sync_threads()
        return self.choice(at)

    def choice(self, at):
        """What the CTA does, once that is decided."""
        word = ops.load_shared32(at, self.plan.off_jobs + 4 * (JOB_WORDS - 1))
        return cute.arch.make_warp_uniform(word)

    @cute.jit
    def put_record(self, X, cta, flag, chain, row, end):
        """Say what the fix-up has to do about this CTA: a flag, and of an exact segment sequence
        and head, first row and the one past its last; one thread."""
        place = X.iterator.toint() + I64(cta) * (4 * Scratch.RECORD)
        op.ptx(
            "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            inputs=[place, flag, chain, row, end],
        )

    @cute.jit
    def identity(self, accS, block, t):
        """This thread's part of rows ``64 block`` on of the identity."""
        row = block * 64 + t // 32 * 16 + t % 32 // 4  # and row + 8
        for j in cutlass.range_constexpr(HEAD // 8):
            for i in cutlass.range_constexpr(4):  # elements in columns 8 j to 8 j + 7
                if row + i // 2 * 8 == 8 * j + t % 4 * 2 + i % 2:
                    accS[4 * j + i] = F32(1.0)

    @cute.jit
    def leave(self, X, entry, target, accS, block, t):
        """Write C, or M as the image of an operand, to an entry of the scratch."""
        begin, t = X.iterator + entry, ops.opaque(t)
        if target == MAP:
            # Row-major halves of 64 columns in the 128-byte swizzle: image.swizzled_offset.
            row = block * 64 + (t >> 5) * 16 + ((t >> 2) & 7)
            out = cute.recast_ptr((begin + STATE_WORDS).align(16), dtype=I32) + row * 32 + (t & 3)
            self.take_diagonal((begin + Scratch.DIAGONAL).toint(), accS, row, t)
            a = cute.make_rmem_tensor(accS.layout, op.BF16)
            narrow(accS, a)
            pairs = cute.recast_tensor(a, I32)
            for i in cutlass.range_constexpr(HEAD // 4):
                piece = (i // 2 % 8) ^ ((t >> 2) & 7)
                word = i // 16 * HEAD * 32 + i % 2 * 8 * 32 + piece * 4
                cute.make_tensor(out + word, cute.make_layout(1))[0] = pairs[i]
        else:
            to = (begin + block * (STATE_WORDS // 2) + t * 4).align(16)
            cute.autovec_copy(
                cute.make_tensor(accS.iterator, cute.make_layout((4, 16))),
                cute.make_tensor(to, cute.make_layout((4, 16), stride=(1, 512))),
            )
