"""Exact segments: what of them is left in scratch for the fix-up, and the jobs of CTAs.

A segment whose first state is not known leaves the state as ``M S_in + C`` and its outputs as
``O + P S_in``: C and O are its scan from zero, M and P the same from the identity, without
values.  :class:`.fixup.Fixup` composes segments and corrects outputs; where they stand is in
:mod:`.pieces`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.pieces import JOB_WORDS, Scratch
from candidates._delta_rule.kernel.step import STATE_WORDS, narrow

__all__ = [
    "BEGINS",
    "CARRY",
    "CONTINUES",
    "ENDS",
    "FINAL",
    "FREE",
    "MAP",
    "NOWHERE",
    "Segments",
]

F32, I32, I64 = op.F32, op.I32, op.I64

FREE, BEGINS, CONTINUES, ENDS = 0, 1, 2, 4
"""Flags of a CTA: needs no carry; an exact segment begins, and, added to that, also ends the
sequence; of the second CTA of a pair, that this segment is all of both."""

NOWHERE, FINAL, CARRY, MAP = 0, 1, 2, 3
"""Where a scan leaves its last state."""


class Segments:
    """The part of a fused kernel that knows jobs and the scratch.

    Attributes
    ----------
    plan : object
        With ``off_jobs``, where jobs are described in shared memory.
    """

    plan: Any

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
