"""KDA prefill in one kernel: each CTA builds the factors of its chunks and scans them.

A CTA takes a *run* of the chunks of all sequences and heads: one or several *pieces*, each of one
sequence of one head.  Two warpgroups hold the transposed state, 64 value rows each; two or three
more take turns at building chunks of 16 tokens, each from its own asynchronously filled inputs,
into a ring of stages that have the form of the split kernels' images.  Nothing but inputs, outputs
and what exact segments leave moves through global memory.

With b the cumulative gate of a chunk and m its 8th token, scores are made of kR = k e^(b - b_m),
qR = q e^(b - b_m) and kC = k e^(b_m - b).  In the ``middle`` frame the scan uses these too:
with S~ = diag(e^b_m) S,

    W = X diag(beta) kR      Vn = U - W S~      O = scale (qR S~ + lower(qR kC^T) Vn)
    S~' = diag(e^(b_16 - b_m + b'_m)) (S~ + kC^T Vn)

so that two exponentials, three products and three stores per element are all; the decay
spans two half chunks, which bears gates of -5.  The ``boundary`` frame has Qhat, Kbar and W at the
chunk's ends, as the split kernels do, and bears -10.  Chunks with stronger gates are steep, and
right in both: :mod:`.fused_steep`.

A run that begins within a sequence starts a few chunks early from a zero state where
:class:`.fused_guard.Guard` proves that this drops nothing that counts; where it does not, its first
piece becomes part of an exact segment: :mod:`.fused_exact`.  Where runs begin is decided by
:class:`.fused_plan.Cuts`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import memory
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Gates
from candidates._delta_rule.kernel.exact import (
    BEGINS,
    CARRY,
    CONTINUES,
    ENDS,
    FINAL,
    FREE,
    MAP,
    NOWHERE,
)
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.pieces import Scratch
from candidates._delta_rule.kernel.ragged import (
    bounds,
    clear_uncovered,
    in_one_row,
    offset,
    owner,
    survey,
)
from candidates._delta_rule.kernel.step import product
from candidates.kda_prefill.kernel.fused_build import Build
from candidates.kda_prefill.kernel.fused_exact import AGAIN, AS_GUESSED, LAST, NOTHING, OWN
from candidates.kda_prefill.kernel.fused_guard import Guard
from candidates.kda_prefill.kernel.fused_plan import (
    ALIKE,
    BT,
    LINE,
    NEVER,
    RUN,
    SCAN_WARPS,
    SECOND,
    SHORT,
    SHORTER,
    Cuts,
    FusedPlan,
    Numbers,
    first_job,
)
from candidates.kda_prefill.kernel.fused_scan import Scanning

__all__ = ["Fused"]

BF16, I32 = op.BF16, op.I32


class Cut(NamedTuple):
    """Where a run begins.

    Attributes
    ----------
    chain
        Number of the sequence and head in the line of all; as many as there are behind the last.
    n, h, row0, row1
        Sequence, head, rows of the sequence.
    chunk
        First chunk of the run; 0 if it begins where the sequence does.
    """

    chain: Any
    n: Any
    h: Any
    row0: Any
    row1: Any
    chunk: Any


class Fused(Guard, Build, Scanning):
    """The fused kernel, compiled once for every T, N, H and number of runs.

    Parameters
    ----------
    frame : str
        ``middle`` or ``boundary``; see :class:`.fused_plan.FusedPlan`.
    builders : int
        Building warpgroups, 2 or 3.
    options : Options
        The form of the arguments.
    """

    def __init__(self, frame: str, builders: int, options: Options = PLAIN) -> None:
        self.plan = FusedPlan(frame, builders, scales=options.l2norm)
        self.options = options
        self.name = f"kda_fused_{frame}_b{builders}{options.suffix}"

    @cute.jit
    def __call__(
        self,
        Q: cute.Tensor,
        K: cute.Tensor,
        V: cute.Tensor,
        G: cute.Tensor,
        B: cute.Tensor,
        CU: cute.Tensor | None,
        S0: cute.Tensor | None,
        O: cute.Tensor,
        S: cute.Tensor | None,
        X: cute.Tensor,
        scale: cutlass.Float32,
        runs: cutlass.Int32,
        how: cutlass.Int32,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        bound: cutlass.Float32 | None,
        stream: CUstream,
    ):
        """Launch on ``stream``.

        Parameters
        ----------
        Q, K : cute.Tensor
            bf16 [T, H, 128]; these and G, V, B, O with another dimension before T if there is no
            CU.
        V, O : cute.Tensor
            bf16 [T, HV, 128].
        G : cute.Tensor
            [T, HV, 128]: log gates, or what they are made of.
        B : cute.Tensor
            [T, HV].
        CU : cute.Tensor or None
            Offsets [N + 1], any content; None for sequences of equal length.
        S0 : cute.Tensor or None
            Initial states [N, HV, 128, 128], value-major; None is zero.
        S : cute.Tensor or None
            Final states.  Must not overlap S0: the CTA of the last piece writes it while that of
            the first still reads.
        X : cute.Tensor
            Scratch of :class:`candidates._delta_rule.kernel.pieces.Scratch` of ``runs``, fp32; any
            size if ``how`` is NEVER.
        A_log, dt_bias, bound : cute.Tensor, cute.Tensor, Float32 or None
            Of the gate's activation: see :class:`candidates._delta_rule.kernel.activate.Gates`.
        scale : Float32
        runs : Int32
            CTAs, an even number.
        how : Int32
            How sequences may be cut: NEVER, ALIKE, SHORTER or LINE of :mod:`.fused_plan`.
        stream : CUstream
        """
        N, offsets = (CU.shape[0] - 1, CU) if CU is not None else Q.shape[:2]
        if cutlass.const_expr(CU is None):
            Q, K, V, G, B, O = (in_one_row(X) for X in (Q, K, V, G, B, O))
        mma_t = product(OperandMajorMode.K, BT)
        mma_w, mma_s = product(OperandMajorMode.K, 2 * BT), product(OperandMajorMode.MN, HEAD)
        self.kernel.set_name_prefix(self.name, keep_mangled_name=False, remove_cutlass_symbol=True)
        if Q.shape[1] > 0:
            pieces, whole, how = foresee(N, *V.shape[:2], runs, how, CU is None)
            self.kernel(
                Q, K, V, G, B, offsets, S0, O, S, X, scale, runs, how, pieces, whole, A_log,
                dt_bias, bound, mma_t, mma_w, mma_s,
            ).launch(
                grid=(runs, 1, 1),
                block=(self.plan.threads, 1, 1),
                cluster=(2, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,
                preferred_smem_carveout=100,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self, Q, K, V, G, B, CU, S0, O, S, X, scale, runs, how, pieces, whole, A_log, dt_bias,
        bound, mma_t, mma_w, mma_s,
    ):  # fmt: skip
        plan = self.plan
        tidx = cute.arch.thread_idx()[0]
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        T, H = (Q if self.options.compact else V).shape[:2]
        ragged = isinstance(CU, cute.Tensor)
        N = CU.shape[0] - 1 if ragged else T // CU
        G = Gates(G, A_log, dt_bias, bound)
        cta = cute.arch.block_idx()[0]

        smem = memory.SmemAllocator()
        base = smem.allocate_array(BF16, plan.smem_bytes // 2, byte_alignment=1024)
        at = base.toint()
        # What each CTA most likely does is begun before it is decided: its own run, from zero.
        line, base_place, head, line_runs, length, left_over = (I32(0) for _ in range(6))
        if how > ALIKE:
            first, last, rows = survey(CU, T)
            found = Cuts.of(N, H, first, last, over(rows + BT - 1, BT), runs, how, Staged)
            line, base_place, head = found.line, found.base, found.head
            line_runs, length, left_over = found.runs, found.length, found.rest
        cuts = Cuts(line, pieces, whole, base_place, head, line_runs, length, left_over)
        begin, end = self.two_cuts(CU, cta, cuts, N, T, H)
        for m in (mma_t, mma_w, mma_s):
            m.set(warpgroup.Field.ACCUMULATE, True)
        number = first_job(warp_id)
        if warp_id < SCAN_WARPS:
            cute.arch.setmaxregister_increase(plan.scan_registers)
            choice = self.decide(
                CU, K, G, B, X, at, begin, end, cuts, runs, how, N, T, H, cta, warp_id, lane
            )
            if cutlass.const_expr(ragged):  # while the builders are busy
                covered = max(offset(CU, 0, T), 0), max(offset(CU, N, T), 0)
                clear_uncovered(CU, O, T, H, N, cta, covered, warp_id, lane)
            if tidx == 0:
                self.put_choice(at, choice)
            cute.arch.sync_threads()
            choice = cute.arch.make_warp_uniform(choice)
            own, jobs = choice % OWN, over(choice, OWN)
            rest = (S0, O, S, X, scale, base, runs, tidx, warp_id, lane, mma_t, mma_w, mma_s)
            if cutlass.const_expr(self.guesses):
                if own == AGAIN:
                    self.begin_anew(at, warp_id, lane)
            more = self.take_run(at, number, own, lane)
            share, done = I32(0), I32(0)
            while more + jobs > done:  # the pieces of its own run, then what the pair does together
                job = I32(number)
                if more == 0:
                    self.begin_again(at, warp_id, lane, done)
                    job, share, done = done, I32(1), done + 1
                self.scan_job(job, *rest, share)
                if share == 0:
                    more = self.next_piece(CU, at, number, N, T, lane)
            if jobs > 0:
                self.meet_pair()  # nobody leaves while its shared memory may be written
        else:
            cute.arch.setmaxregister_decrease(plan.build_registers)
            if warp_id == SCAN_WARPS:
                self.begin_ring(at, lane, SCAN_WARPS)
            more, jobs = I32(0), I32(0)
            if cutlass.const_expr(self.guesses):
                more = self.guess(at, number, begin, end, lane)
            ops.sync_builders(128 * plan.builders)
            inputs = (Q, K, V, G, B, scale, at, H, cta % 2, warp_id, lane)
            if more == 0:
                more = self.take_run(at, number, self.await_choice(at) % OWN, lane)
                jobs = over(self.choice(at), OWN)
            share, done = I32(0), I32(0)
            while more + jobs > done:
                job = I32(number)
                if more == 0:
                    job, share, done = done, I32(1), done + 1
                self.build(*inputs, job, share)
                if share == 0:
                    if cutlass.const_expr(self.guesses):
                        more = self.after_guess(at, number, warp_id, lane)
                    if more > 0:
                        more = self.next_piece(CU, at, number, N, T, lane)
                    elif more < 0:
                        more = I32(1)
                    jobs = over(self.choice(at), OWN)
            if jobs > 0:
                self.meet_pair()

    @cute.jit
    def two_cuts(self, CU, number, cuts, N, T, H):
        """Where run ``number`` begins, and the next one."""
        begin = end = [I32(0)] * len(Cut._fields)
        if cuts.line == 0:  # first, and short: this is on everybody's way
            begin, end = self.two_alike(CU, number, cuts, N, T, H)
        else:
            begin = self.along(CU, number, cuts, N, T, H)
            end = self.along(CU, number + 1, cuts, N, T, H, begin)
        return uniform(begin), uniform(end)

    @cute.jit
    def cut(self, CU, number, cuts, N, T, H, near):
        """Where run ``number`` begins; ``near`` is another cut, whose sequence may be the same."""
        found = [I32(0)] * len(Cut._fields)
        if cuts.line == 0:
            found = self.alike(CU, number, cuts, N, T, H, near)
        else:
            found = self.along(CU, number, cuts, N, T, H, near)
        return uniform(found)

    @cute.jit
    def two_alike(self, CU, number, cuts, N, T, H):
        """:meth:`two_cuts` where all chains are cut alike, as lists; the second is mostly near."""
        chains = N * H
        chain, piece = cuts.alike(number, Staged)
        n, h, row0, row1, chunk = I32(-1), I32(0), I32(0), I32(0), I32(0)
        end_chain, end_n, end_h = chains, I32(-1), I32(0)
        end_row0, end_row1, end_chunk = I32(0), I32(0), I32(0)
        if chain < chains:
            h = over(chain, N)
            n = chain - h * N
            row0, row1 = bounds(CU, n, T)
            chunks = over(row1 - row0 + BT - 1, BT)
            chunk = cuts.piece(chunks, piece, Staged)
            end_chunk = cuts.piece(chunks, piece + 1, Staged)
            if cuts.whole > 1:
                end_chain, end_n, end_h, end_row0, end_row1, end_chunk = self.alike(
                    CU, number + 1, cuts, N, T, H
                )
            elif piece + 1 < cuts.pieces and (end_chunk == 0 or end_chunk < chunks):
                end_chain, end_n, end_h, end_row0, end_row1 = chain, n, h, row0, row1
            else:
                end_chain, end_chunk = chain + 1, I32(0)
                end_n, end_h, end_row0, end_row1 = self.follow(CU, n, h, row1, N, T)
            if chunk > 0 and chunk == chunks:  # such a piece does not exist
                chain, chunk = chain + 1, I32(0)
        else:
            chain = chains
        return (
            [chain, n, h, row0, row1, chunk],
            [end_chain, end_n, end_h, end_row0, end_row1, end_chunk],
        )

    @cute.jit
    def alike(self, CU, number, cuts, N, T, H, near=None):
        """:meth:`cut` where all chains are cut alike, as a list."""
        chain, piece = cuts.alike(number, Staged)
        n, h, row0, row1, chunk = I32(-1), I32(0), I32(0), I32(0), I32(0)
        if cutlass.const_expr(near is not None):
            _, n, h, row0, row1, _ = near
        if chain < N * H:
            if cutlass.const_expr(near is None):
                h = over(chain, N)
                n = chain - h * N
                row0, row1 = bounds(CU, n, T)
            elif near[0] != chain or near[5] == 0:  # else within the same sequence
                h = over(chain, N)
                before, n = n, chain - h * N
                if n != before:
                    row0, row1 = bounds(CU, n, T)
            chunks = over(row1 - row0 + BT - 1, BT)
            chunk = cuts.piece(chunks, piece, Staged)
            if chunk > 0 and chunk == chunks:  # such a piece does not exist
                chain, chunk = chain + 1, I32(0)
        else:
            chain = N * H
        return [chain, n, h, row0, row1, chunk]

    @cute.jit
    def along(self, CU, number, cuts, N, T, H, near=None):
        """:meth:`cut` along the line, as a list."""
        chain, n, h = N * H, I32(-1), I32(0)
        row0, row1, chunk = I32(0), I32(0), I32(0)
        if cutlass.const_expr(near is not None):
            n, row0, row1 = near[1], near[3], near[4]
        if number < cuts.runs:
            place = cuts.place(number, Staged)
            h = over(place, cuts.head)
            place = place - h * cuts.head + cuts.base
            if cutlass.const_expr(not isinstance(CU, cute.Tensor)):
                # The last one with n CU / BT < place + 1 - SECOND n.
                n = over(place * BT + BT - 1, CU + BT * SECOND)
                row0, row1 = n * CU, n * CU + CU
            elif cutlass.const_expr(near is None):
                n, row0, row1 = owner(CU, place, T, BT, SECOND)
            else:
                first = over(row0, BT) + SECOND * n
                if place < first or place >= over(row1, BT) + SECOND * (n + 1):
                    n, row0, row1 = owner(CU, place, T, BT, SECOND)
            chain = h * N + n
            chunk = cuts.chunk(place - over(row0, BT) - SECOND * n, Staged)
        return [chain, n, h, row0, row1, chunk]

    @cute.jit
    def guess(self, at, number, begin, end, lane):
        """Make the first piece of the CTA's run, a short start early, this warp's job; whether it
        has one."""
        start = max(begin.chunk - SHORT, 0)
        stop = self.stop(begin, end)
        if lane == 0:
            self.put_job(
                at, number, (begin.n, begin.h, begin.row0, begin.row1, start, stop - start, I32(0),
                             I32(0), I32(1), I32(0), I32(0), I32(0)),
            )  # fmt: skip
        ops.sync_warp()
        there = I32(0)
        if begin.chain < end.chain or begin.chunk < end.chunk:
            there = I32(1)
        return there

    @cute.jit
    def after_guess(self, at, number, warp_id, lane):
        """What follows the piece that this builder has made: 1 the next one, if there is one; 0
        nothing; -1, if it was a guess and wrong, the first one of the run, made this warp's job."""
        out = I32(1)
        if self.get_job(at, number)[8] > 0:
            own = self.choice(at) % OWN
            if own == NOTHING:
                out = I32(0)
            if own == AGAIN:
                self.begin_anew(at, warp_id, lane)
                self.take_run(at, number, own, lane)
                out = I32(-1)
        return out

    @cute.jit
    def stop(self, begin, end):
        """Past the last chunk of the piece from one cut on, the next cut being the other."""
        stop = over(begin.row1 - begin.row0 + BT - 1, BT)
        if begin.chain == end.chain:
            stop = end.chunk
        return stop

    @cute.jit
    def follow(self, CU, n, h, row1, N, T):
        """The chain behind one: its sequence, head and rows."""
        T = ops.opaque(T)  # not worth a register through a piece
        n, row0 = n + 1, row1
        if n == N:
            n, h = I32(0), h + 1
            row0 = I32(0)
            if cutlass.const_expr(isinstance(CU, cute.Tensor)):
                row0 = max(offset(CU, 0, T), 0)
        if cutlass.const_expr(isinstance(CU, cute.Tensor)):
            row1 = max(row0, offset(CU, n + 1, T))
        else:
            row1 = row0 + CU
        return n, h, cute.arch.make_warp_uniform(row0), cute.arch.make_warp_uniform(row1)

    @cute.jit
    def next_piece(self, CU, at, number, N, T, lane):
        """Make the next piece of the CTA's run this warp's job; whether there is one."""
        n, h, _, row1, _, count, _, more, guessed, _, _, place = self.get_job(at, number)
        run = self.get_job(at, RUN)
        if guessed > 0:
            more = run[7]
        there = I32(0)
        if more > 0:
            there = I32(1)
            n, h, row0, row1 = self.follow(CU, n, h, row1, N, T)
            count_here, target = over(row1 - row0 + BT - 1, BT), I32(FINAL)
            if more == 1 and run[11] > 0:
                count_here, target = run[11], run[8]
            ops.sync_warp()  # everybody has read
            if lane == 0:
                self.put_job(
                    at, number, (n, h, row0, row1, I32(0), count_here, I32(0), more - 1, I32(0),
                                 target, run[10], place + count + 1),
                )  # fmt: skip
            ops.sync_warp()
        return there

    @cute.jit
    def decide(
        self, CU, K, G, B, X, at, begin, end, cuts, runs, how, N, T, H, cta, warp_id, lane
    ):  # fmt: skip
        """What the CTA does, by the bounds at three cuts; scanning warps.

        Leaves the first piece of its own run and the pair's jobs in shared memory, and its record
        in the scratch.
        """
        # The cuts of the pair: in front of its runs, between them, and behind them.
        rank, own = cta % 2, cta - cta % 2
        near = [op.select(rank > 0, x, y) for x, y in zip(begin, end, strict=True)]
        far = self.cut(CU, own + 2 - 2 * rank, cuts, N, T, H, near)
        a, b, c = begin, end, far
        if rank > 0:
            a, b, c = far, begin, end
        left, inner, right = I32(0), I32(0), I32(0)
        if a.chunk > 0 or b.chunk > 0 or c.chunk > 0:
            asked = [(x.row0, x.h, x.chunk, x.chunk > 0) for x in (a, b, c)]
            left, inner, right = self.guards(K, G, B, at, asked, H, warp_id, lane)
        exact, merged = left < 0, inner < 0
        one = a.chain == b.chain
        # Its own run: without a piece that begins an exact segment or that both take.
        skip, warm, tail = I32(0), max(left, 0), I32(NOWHERE)
        end_chunk = end.chunk
        if rank == 0:
            if exact:
                skip = I32(1)
            if merged:
                end_chunk = I32(0)
        else:
            warm = max(inner, 0)
            if merged:
                skip = I32(1)
            if right < 0:
                tail = I32(CARRY)
        # What the pair does together: these, and the second CTA's last piece where the first one
        # would have nothing to do meanwhile.
        segment = exact and one
        jobs, third, idle = I32(0), I32(0), b.chain - a.chain
        if exact:
            jobs, idle = jobs + 1, idle - 1
        if merged and not segment:
            jobs = jobs + 1
        if b.chunk > 0 and not merged:
            idle = idle + 1
        if jobs > 0 and idle <= 0 and c.chunk > 0 and (c.chain > b.chain or b.chunk == 0):
            third = I32(1)
            if rank > 0:
                end_chunk = I32(0)
        pieces = end.chain - begin.chain - skip
        if end_chunk > 0:
            pieces = pieces + 1
        choice = I32(NOTHING)
        if pieces > 0:
            choice = I32(AS_GUESSED)
            if skip > 0 or warm != min(begin.chunk, SHORT):
                choice = I32(AGAIN)
        n, h, row0, row1, start = begin.n, begin.h, begin.row0, begin.row1, begin.chunk - warm
        if skip > 0:
            warm, start = I32(0), I32(0)
            if pieces > 0:
                n, h, row0, row1 = self.follow(CU, n, h, row1, N, T)
        choice = choice + (jobs + third) * OWN
        if warp_id == 0:
            if lane == 0:
                stop, target = over(row1 - row0 + BT - 1, BT), I32(FINAL)
                if pieces == 1 and end_chunk > 0:
                    stop, target = end_chunk, tail
                entries = Scratch(runs)
                entry = entries.entries + own * entries.ENTRY
                behind = entry + entries.ENTRY
                self.put_job(
                    at, RUN, (n, h, row0, row1, start, stop - start, warm, pieces - 1, tail, target,
                              behind, end_chunk),
                )  # fmt: skip
                last_a = over(a.row1 - a.row0 + BT - 1, BT)
                stop_a, stop_b = last_a, self.stop(b, c)
                if one:
                    stop_a = b.chunk
                    if merged:
                        stop_a = stop_b
                if how > NEVER:
                    flag, chain, row, row_end = I32(FREE), I32(0), I32(0), I32(0)
                    if exact and rank == 0:
                        flag = I32(BEGINS)
                        if stop_a == last_a:
                            flag = I32(BEGINS + ENDS)
                        chain = a.n * H + a.h
                        row = a.row0 + a.chunk * BT
                        row_end = min(a.row0 + stop_a * BT, a.row1)
                    if segment and merged and rank > 0 and a.chain == c.chain:
                        flag = I32(CONTINUES)
                    self.put_record(X, cta, flag, chain, row, row_end)
                role_a, target_a = I32(3), I32(CARRY)
                if rank > 0:
                    target_a = I32(MAP)
                if jobs + third == 1:
                    role_a = I32(3 + LAST)
                role_b, role_c = I32(1) << rank, (I32(1) << rank) + LAST
                if third == 0:
                    role_b = role_c
                start_b, warm_b, target_b = I32(0), I32(0), I32(NOWHERE)
                if one:
                    start_b, warm_b = a.chunk - max(left, 0), max(left, 0)
                if right < 0:
                    target_b = I32(CARRY)
                target_c = target_b
                if b.chain != c.chain:
                    target_b = I32(FINAL)
                job_b = (
                    b.n, b.h, b.row0, b.row1, start_b, stop_b - start_b, warm_b, role_b, I32(0),
                    target_b, behind,
                )  # fmt: skip
                if exact:
                    self.put_job(
                        at, 0, (a.n, a.h, a.row0, a.row1, a.chunk, stop_a - a.chunk, I32(0), role_a,
                                rank, target_a, entry),
                    )  # fmt: skip
                else:
                    self.put_job(at, 0, job_b)
                self.put_job(at, 1, job_b)
                if third > 0:
                    self.put_job(
                        at, jobs, (c.n, c.h, c.row0, c.row1, I32(0), c.chunk, I32(0), role_c,
                                   I32(0), target_c, behind),
                    )  # fmt: skip
        return choice

    @cute.jit
    def scan_job(
        self, number, S0, O, S, X, scale, base, runs, tidx, warp_id, lane, mma_t, mma_w, mma_s,
        share,
    ):  # fmt: skip
        """A scanning warpgroup's part of a job."""
        at = base.toint()
        job = self.get_job(at, number)
        busy = I32(1)
        if share > 0:
            busy = cute.arch.make_warp_uniform((job[7] >> warp_id // 4) & 1)
        if busy == 0:
            self.pass_on(at, job[5], lane)
        else:
            self.scan(
                S0, O, S, X, scale, base, number, runs, tidx, warp_id, mma_t, mma_w, mma_s, share
            )


@cute.jit
def foresee(N, T, H, runs, how, equal: cutlass.Constexpr):
    """``pieces`` and ``whole`` of :class:`.fused_plan.Cuts`, and ``how`` sequences are cut where
    the host can tell: a single one, or several of ``equal`` length.

    On the host, because a CTA would have to wait for each of these divisions before it begins.
    Offsets may be wrong, and a run then longer than it might be.
    """
    pieces, whole = Cuts.shares(N, H, runs, how, Staged)
    known = N == 1
    if cutlass.const_expr(equal):
        known = N > 0
    if how == SHORTER and known:
        chunks = over(over(T, max(N, 1)) + BT - 1, BT)
        line = Cuts.of(N, H, I32(0), T, chunks, runs, how, Staged).line
        how = op.select(line > 0, I32(LINE), I32(ALIKE))
    return pieces, whole, how


def uniform(cut):
    """A cut that is the same for all of a warp."""
    return Cut(*(cute.arch.make_warp_uniform(x) for x in cut))


def over(x, y):
    """x // y of numbers that are not negative, in half the instructions."""
    return I32(cutlass.Uint32(x) // cutlass.Uint32(y))


class Staged(Numbers):
    """Arithmetic of :class:`.fused_plan.Cuts` at run time."""

    @staticmethod
    def over(x, y):
        return over(x, y)

    @staticmethod
    def low(x, y):
        return Staged.pick(x < y, x, y)

    @staticmethod
    def high(x, y):
        return Staged.pick(x > y, x, y)

    @staticmethod
    def pick(condition, x, y):
        return op.select(condition, I32(x), I32(y))
