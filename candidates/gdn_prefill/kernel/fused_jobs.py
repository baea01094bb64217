"""What each CTA does: the jobs of a pair, as in KDA's fused form but for the sharing of chunks.

All pieces of the sequences of a head stand in one line, then those of the next head; which of them
are a sequence's is found from the offsets (:func:`.fused_plan.span_of`).  CTAs 2 i and 2 i + 1 are
a pair and own pieces 2 i and 2 i + 1.  Where the guard lets both start from zero, each CTA takes
its own.
Otherwise both are one *job* if the guard fails between them, else the second is the next one.  A
job that the guard lets begin from zero is cut: 64 value rows for each CTA.  One that it does not is
an exact segment: the first CTA scans values from zero, which gives C and O, the second the map of
states, which gives M and P; the fix-up composes and corrects.

The CTAs of a pair do not talk: each builds what it scans.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.exact import (
    BEGINS,
    CARRY,
    CONTINUES,
    ENDS,
    FINAL,
    FREE,
    MAP,
    NOWHERE,
    Segments,
)
from candidates._delta_rule.kernel.pieces import Scratch
from candidates._delta_rule.kernel.ragged import bounds, owner
from candidates.gdn_prefill.kernel.fused_plan import PIECE, FusedPlan, parts_of, span_of, windows_of

__all__ = ["Jobs"]

I32 = op.I32


class Jobs(Segments):
    """The part of the fused kernel that knows jobs.

    A job is (sequence, head, first row, rows, rows of the early start, which half of the value
    rows if the CTA has 64, warpgroups that scan, map or not, where the last state goes, entry of
    the scratch, whether it begins where the sequence does, rows of the sequence in front of an
    early start, or 0 of a job that does not have one).
    """

    plan: FusedPlan

    @cute.jit
    def job(self, at, turn):
        """The job of a turn, how many chunks it has, and whether there is one: jobs 0 and 1, and
        then, if a key was out of bounds, those of them that started early once more, from where
        their sequences begin."""
        n, h, first, rows, warm, *others, start, back = self.get_job(at, turn & 1)
        there = (turn & 1) < self.word(at, 0)
        if cutlass.const_expr(self.plan.cuts):
            if turn > 1:
                there = there and back > 0 and self.word(at, 1) > 0
                first, rows, warm = first - back, rows + back, warm + back
                start, back = I32(1), I32(0)
        chunks = op.select(there, (rows + self.plan.bt - 1) >> self.plan.shift, I32(0))
        return [n, h, first, rows, warm, *others, start, back], chunks, there

    @cute.jit
    def chunks_before(self, at, turn):
        """Chunks of all turns before one."""
        total = I32(0)
        for before in cutlass.range_constexpr(self.turns - 1):
            if before < turn:
                total = total + self.job(at, I32(before))[1]
        return cute.arch.make_warp_uniform(total)

    @property
    def turns(self) -> int:
        """Of each CTA, whether it has as many jobs or not."""
        return 4 if self.plan.cuts else 2

    @cute.jit
    def meet(self, turn):
        """Where the first jobs are done with: whatever was seen of their keys is known now."""
        if cutlass.const_expr(self.plan.cuts):
            if turn == 2:
                cute.arch.sync_threads()

    def word(self, at, i: cutlass.Constexpr):
        """How many jobs there are; or whether a key is out of bounds."""
        word = ops.load_shared32(at, self.plan.off_count + 4 * i)
        return cute.arch.make_warp_uniform(word)

    def put_count(self, at, jobs):
        """Write how many jobs there are, and that no key is out of bounds yet; one thread."""
        op.store32(at, jobs, self.plan.off_count)
        op.store32(at, I32(0), self.plan.off_count + 4)

    @cute.jit
    def whole(self, at, number, n, h, half, row0, row1, put):
        """Job ``number`` of a CTA that owns whole sequences of a head."""
        if put:
            self.put_job(
                at,
                number,
                (
                    n, h, row0, row1 - row0, I32(0), half, I32(3), I32(0), I32(FINAL), I32(0),
                    I32(1), I32(0),
                ),
            )  # fmt: skip

    @cute.jit
    def share(self, G, CU, X, at, pieces, N, T, H, cta, warp_id, lane):
        """Describe the jobs of a CTA of a pair; all threads.  How many there are."""
        rank, own = cta & 1, cta & -2
        # Divisions are long, and this is on everybody's way: no more of them than it takes.
        h, span = own // pieces, span_of(pieces, T, N)
        place = own - h * pieces
        h_b, place_b, inside_line = h, place + 1, own + 1 < H * pieces
        if place_b == pieces:
            h_b = min(h + 1, H - 1)  # gates are read of it, be there a piece or not
            place_b = I32(0)
        n, row0, row1, first, length, parts = self.owned(CU, place, span, N, T)
        n_b, row0_b, row1_b, first_b, length_b, parts_b = n, row0, row1, first, length, parts
        if N > 1:
            n_b, row0_b, row1_b, first_b, length_b, parts_b = self.owned(CU, place_b, span, N, T)
        # Places in front of the first sequence are nobody's; others may be left over.
        p, p_b = place - first, place_b - first_b
        there = p >= 0 and p < parts
        there_b = inside_line and p_b >= 0 and p_b < parts_b
        last, last_b, inside_b = p + 1 == parts, p_b + 1 == parts_b, there_b and p_b > 0
        begin, stop = (length * min(max(p + i, 0), parts) // parts for i in range(2))
        begin_b = op.select(p_b > 0, stop, I32(0))
        stop_b = length_b * min(max(p_b + 1, 0), parts_b) // parts_b
        same = inside_b
        asked = (
            (row0, h, begin, there and p > 0),
            (row0_b, h_b, begin_b, there_b and inside_b),
            (row0_b, h_b, stop_b, there_b and not last_b),
        )
        left, inner, right = self.guards(G, at, asked, windows_of(span), warp_id, lane)
        exact, merged = left < 0, same and inner < 0
        flag, jobs, only_b = I32(FREE), I32(1), rank > 0
        role, role_b, is_map = I32(3), I32(3), I32(0)
        if rank == 0:
            if exact:
                flag = I32(BEGINS)
        elif merged:
            flag = I32(CONTINUES)
        if exact or merged:
            only_b = rank > 1
            role = I32(1) << rank
            role_b = role
            if exact:
                role, is_map = I32(3), rank
            if there_b and not merged:
                jobs = I32(2)
        elif not there_b and rank > 0:
            jobs = I32(0)
        elif not there and rank == 0:
            jobs = I32(0)
        if warp_id == 0:
            if lane == 0:
                entries = Scratch(H * pieces)
                entry = entries.entries + own * entries.ENTRY
                from_a, end_a, final = begin - max(left, 0), stop, last
                target = I32(NOWHERE)
                if merged:
                    end_a, final = stop_b, last_b
                    if right < 0:
                        target = I32(CARRY)
                if final:
                    target = I32(FINAL)
                    if flag == BEGINS:
                        flag = I32(BEGINS + ENDS)
                self.put_record(
                    X, cta, flag, n * H + h, row0 + begin * PIECE, min(row0 + end_a * PIECE, row1)
                )
                if exact:
                    target = I32(CARRY)
                    if rank > 0:
                        target = I32(MAP)
                job_a = self.run(
                    n, h, row0, row1, from_a, begin, end_a, role, is_map, target, entry
                )
                target_b = I32(NOWHERE)
                if right < 0:
                    target_b = I32(CARRY)
                if last_b:
                    target_b = I32(FINAL)
                job_b = self.run(
                    n_b, h_b, row0_b, row1_b, begin_b - max(inner, 0), begin_b, stop_b, role_b,
                    I32(0), target_b, entry + entries.ENTRY,
                )  # fmt: skip
                if only_b:
                    self.put_job(at, 0, job_b)
                else:
                    self.put_job(at, 0, job_a)
                self.put_job(at, 1, job_b)
        return jobs

    @cute.jit
    def run(self, n, h, row0, row1, start, begin, end, role, is_map, target, entry):
        """A job over PIECEs ``start`` to ``end`` of a sequence, whose outputs count from ``begin``
        on."""
        first = row0 + start * PIECE
        rows = max(min(row0 + end * PIECE, row1) - first, 0)
        at_start = op.select(start == 0, I32(1), I32(0))
        warm = (begin - start) * PIECE
        back = op.select(begin > start, start * PIECE, I32(0))
        return n, h, first, rows, warm, I32(0), role, is_map, target, entry, at_start, back

    @cute.jit
    def owned(self, CU, place, span, N, T):
        """The sequence that a place of the line of a head is, or is behind, or -1: number, first
        row and row behind its last, first place, PIECEs, and pieces of it."""
        n, row0, row1 = I32(0), I32(0), I32(0)
        if N == 1:
            row0, row1 = bounds(CU, n, T)
        else:
            n, row0, row1 = owner(CU, place, T, span, 1)
        n, row0, row1 = (cute.arch.make_warp_uniform(x) for x in (n, row0, row1))
        length = (row1 - row0 + PIECE - 1) // PIECE
        parts = max(min(parts_of(row0, row1, span), length // 2), 1)
        first = row0 // span + n
        if n < 0:
            first = place + 1  # nobody's
        return n, row0, row1, first, length, parts
