"""KDA prefill in one kernel: each CTA builds the factors of its chunks and scans them.

A CTA takes a *piece*, a run of chunks of one sequence of one head.  Two warpgroups hold the
transposed state, 64 value rows each; two or three more take turns at building chunks of 16
tokens, each from its own asynchronously filled inputs, into a ring of stages that have the
form of the split kernels' images.  Nothing but inputs and outputs moves through global memory.

With b the cumulative gate of a chunk and m its 8th token, scores are made of kR = k e^(b - b_m),
qR = q e^(b - b_m) and kC = k e^(b_m - b).  In the ``middle`` frame the scan uses these too:
with S~ = diag(e^b_m) S,

    W = X diag(beta) kR      Vn = U - W S~      O = scale (qR S~ + lower(qR kC^T) Vn)
    S~' = diag(e^(b_16 - b_m + b'_m)) (S~ + kC^T Vn)

so that two exponentials, three products and three stores per element are all; the decay
spans two half chunks, so that gates of -5 are the strongest it bears.  The ``boundary`` frame has
Qhat, Kbar and W at the chunk's ends, as the split kernels do, and bears -10.

A piece starts a few chunks early from a zero state where :class:`.fused_guard.Guard` proves that
this drops nothing that counts; where it does not, it becomes part of an exact segment:
:mod:`.fused_exact`.
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
from candidates._delta_rule.kernel.exact import BEGINS, CARRY, CONTINUES, FINAL, FREE, MAP, NOWHERE
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.pieces import Scratch
from candidates._delta_rule.kernel.ragged import bounds, clear_uncovered, in_one_row, offset
from candidates._delta_rule.kernel.step import product
from candidates.kda_prefill.kernel.fused_build import Build
from candidates.kda_prefill.kernel.fused_exact import AGAIN, AS_GUESSED, GUESS, NOTHING, PAIR
from candidates.kda_prefill.kernel.fused_guard import Guard
from candidates.kda_prefill.kernel.fused_plan import BT, SCAN_WARPS, SHORT, FusedPlan
from candidates.kda_prefill.kernel.fused_scan import Scanning

__all__ = ["Fused"]

BF16, I32 = op.BF16, op.I32


class Piece(NamedTuple):
    """A piece of a sequence of one head.

    Attributes
    ----------
    n, h, p
        Sequence, head, which of its pieces.
    row0, row1, chunks, parts
        Rows of the sequence, its chunks, and its pieces as many as there are.
    begin, stop
        First chunk, and past the last.
    there
        Whether it exists.
    """

    n: Any
    h: Any
    p: Any
    row0: Any
    row1: Any
    chunks: Any
    parts: Any
    begin: Any
    stop: Any
    there: Any


class Fused(Guard, Build, Scanning):
    """The fused kernel, compiled once for every T, N, H and number of pieces.

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
        pieces: cutlass.Int32,
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
            Scratch of :class:`candidates._delta_rule.kernel.pieces.Scratch`, fp32; any size if
            ``pieces`` is 1.
        A_log, dt_bias, bound : cute.Tensor, cute.Tensor, Float32 or None
            Of the gate's activation: see :class:`candidates._delta_rule.kernel.activate.Gates`.
        scale : Float32
        pieces : Int32
            Pieces per sequence, at most; 1 or more.
        stream : CUstream
        """
        N, offsets = (CU.shape[0] - 1, CU) if CU is not None else Q.shape[:2]
        if cutlass.const_expr(CU is None):
            Q, K, V, G, B, O = (in_one_row(X) for X in (Q, K, V, G, B, O))
        mma_t = product(OperandMajorMode.K, BT)
        mma_w, mma_s = product(OperandMajorMode.K, 2 * BT), product(OperandMajorMode.MN, HEAD)
        self.kernel.set_name_prefix(self.name, keep_mangled_name=False, remove_cutlass_symbol=True)
        if Q.shape[1] > 0:
            total = max(N, 1) * pieces * V.shape[1]
            self.kernel(
                Q, K, V, G, B, offsets, S0, O, S, X, scale, pieces, A_log, dt_bias, bound,
                mma_t, mma_w, mma_s,
            ).launch(
                grid=((total + 1) // 2 * 2, 1, 1),
                block=(self.plan.threads, 1, 1),
                cluster=(2, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,
                preferred_smem_carveout=100,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        Q: cute.Tensor,
        K: cute.Tensor,
        V: cute.Tensor,
        G: cute.Tensor,
        B: cute.Tensor,
        CU: cute.Tensor | cutlass.Int32,
        S0: cute.Tensor | None,
        O: cute.Tensor,
        S: cute.Tensor | None,
        X: cute.Tensor,
        scale: cutlass.Float32,
        pieces: cutlass.Int32,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        bound: cutlass.Float32 | None,
        mma_t: cute.TiledMma,
        mma_w: cute.TiledMma,
        mma_s: cute.TiledMma,
    ):
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
        # What each CTA most likely does is begun before it is decided: its own piece, from zero.
        mine = self.piece(CU, cta, pieces, N, T, H)
        guess = max(mine.begin - SHORT, 0)
        for m in (mma_t, mma_w, mma_s):
            m.set(warpgroup.Field.ACCUMULATE, True)
        if warp_id < SCAN_WARPS:
            cute.arch.setmaxregister_increase(plan.scan_registers)
            total = N * H * pieces
            choice = I32(NOTHING)
            if pieces == 1:
                if mine.there:
                    choice = I32(AS_GUESSED)
                    if tidx == 0:
                        self.put_job(
                            at, 0, (mine.n, mine.h, mine.row0, mine.row1, I32(0), mine.chunks,
                                    I32(0), I32(3), I32(0), I32(FINAL), I32(0)),
                        )  # fmt: skip
            else:
                choice = self.decide(
                    CU, K, G, B, X, at, mine, pieces, guess, N, T, H, cta, warp_id, lane
                )
            if cutlass.const_expr(ragged):  # while the builders are busy
                covered = max(offset(CU, 0, T), 0), max(offset(CU, N, T), 0)
                clear_uncovered(CU, O, T, H, N, cta, covered, warp_id, lane)
            if tidx == 0:
                self.put_choice(at, choice)
            cute.arch.sync_threads()
            choice = cute.arch.make_warp_uniform(choice)
            rest = (S0, O, S, X, scale, base, total, tidx, warp_id, lane, mma_t, mma_w, mma_s)
            if choice < PAIR:  # first, so that its code follows
                if cutlass.const_expr(self.guesses):
                    if choice == AGAIN:
                        self.begin_anew(at, warp_id, lane)
                if choice > NOTHING:
                    self.scan_job(0, *rest, False)
            else:
                for j in cutlass.range(choice - PAIR + 1, unroll=1):
                    self.begin_again(at, warp_id, lane)
                    self.scan_job(j, *rest, True)
                ops.sync_cluster()  # nobody leaves while its shared memory may be written
        else:
            cute.arch.setmaxregister_decrease(plan.build_registers)
            if warp_id == SCAN_WARPS:
                if lane == 0:
                    self.begin_ring(at)
                    self.put_job(
                        at, GUESS, (mine.n, mine.h, mine.row0, mine.row1, guess, mine.stop - guess)
                    )
            ops.sync_builders(128 * plan.builders)
            inputs = (Q, K, V, G, B, scale, at, H, cta % 2, warp_id, lane)
            if cutlass.const_expr(self.guesses):
                number = I32(GUESS)
                if not mine.there:
                    self.await_choice(at)
                    number = I32(-1)
                while number >= 0:
                    self.build(*inputs, number, False)
                    choice = self.choice(at)
                    if choice == AGAIN and number == GUESS:
                        self.begin_anew(at, warp_id, lane)
                        number = I32(0)
                    else:
                        number = I32(-1)
                choice = self.choice(at)
            else:
                choice = self.await_choice(at)
                if choice > NOTHING and choice < PAIR:
                    self.build(*inputs, 0, False)
            if choice >= PAIR:
                for j in cutlass.range(choice - PAIR + 1, unroll=1):
                    self.begin_again(at, warp_id, lane)
                    self.build(*inputs, j, True)
                ops.sync_cluster()

    @cute.jit
    def piece(self, CU, number, pieces, N, T, H, near=None):
        """Piece ``number`` of all; ``near`` is one beside it, if that is at hand."""
        chain = over(number, pieces)
        n = over(chain, H)
        h, p = chain - n * H, number - chain * pieces
        row0, row1 = I32(0), I32(0)
        if cutlass.const_expr(near is not None):
            row0, row1 = near.row0, near.row1
            if n != near.n:
                row0, row1 = I32(0), I32(0)
                if n < N:
                    row0, row1 = bounds(CU, n, T)
        elif n < N:
            row0, row1 = bounds(CU, n, T)
        row0, row1 = cute.arch.make_warp_uniform(row0), cute.arch.make_warp_uniform(row1)
        chunks = over(row1 - row0 + BT - 1, BT)
        parts = max(min(pieces, over(chunks, 2)), 1)
        begin = over(chunks * min(p, parts), parts)
        stop = over(chunks * min(p + 1, parts), parts)
        there = n < N and p < parts
        return Piece(n, h, p, row0, row1, chunks, parts, begin, stop, there)

    @cute.jit
    def decide(
        self, CU, K, G, B, X, at, mine, pieces, guess, N, T, H, cta, warp_id, lane
    ):  # fmt: skip
        """What the CTA does, by the bounds at three boundaries; scanning warps.

        Leaves its jobs in shared memory and its flag in the scratch.
        """
        # The pair's pieces: a, and b behind it, of the same chain or of the next.
        rank, total = cta % 2, N * H * pieces
        own = cta - rank
        other = self.piece(CU, cta + 1 - 2 * rank, pieces, N, T, H, mine)
        a, b = mine, other
        if rank > 0:
            a, b = other, mine
        same = b.p > 0
        asked = (
            (a.row0, a.h, a.begin, a.there and a.p > 0),
            (a.row0, a.h, b.begin, same and b.there),
            (b.row0, b.h, b.stop, b.there and b.p + 1 < b.parts),
        )
        left, inner, right = I32(0), I32(0), I32(0)
        if asked[0][3] or asked[1][3] or asked[2][3]:
            left, inner, right = self.guards(K, G, B, at, asked, H, warp_id, lane)
        exact, merged = left < 0, same and inner < 0
        flag = I32(FREE)
        if rank == 0:
            if exact:
                flag = I32(BEGINS)
        elif merged:
            flag = I32(CONTINUES)
        # Its own piece; or both a, or a and b as one, and then b.
        from_a, from_b = a.begin - max(left, 0), b.begin
        if same:
            from_b = b.begin - max(inner, 0)
        choice = I32(AS_GUESSED)
        first_b, role, is_map = rank > 0, I32(3), I32(0)
        if exact or merged:
            choice, first_b = I32(PAIR), rank > 1
            role = I32(1) << rank
            if exact:
                role, is_map = I32(3), rank
            if b.there and not merged:
                choice = I32(PAIR + 1)
        elif rank > 0:
            if from_b != guess:
                choice = I32(AGAIN)
            if not b.there:
                choice = I32(NOTHING)
        else:
            if from_a != guess:
                choice = I32(AGAIN)
            if not a.there:
                choice = I32(NOTHING)
        if warp_id == 0:
            if lane == 0:
                self.put_flag(X, cta, flag)
                end_a = a.stop
                target = I32(NOWHERE)
                if merged:
                    end_a = b.stop
                    if right < 0:
                        target = I32(CARRY)
                if end_a == a.chunks:
                    target = I32(FINAL)
                if exact:
                    target = I32(CARRY)
                    if rank > 0:
                        target = I32(MAP)
                entries = Scratch(total)
                entry = entries.entries + own * entries.ENTRY
                job_a = (
                    a.n, a.h, a.row0, a.row1, from_a, end_a - from_a, a.begin - from_a, role,
                    is_map, target, entry,
                )  # fmt: skip
                target_b = I32(NOWHERE)
                if right < 0:
                    target_b = I32(CARRY)
                if b.stop == b.chunks:
                    target_b = I32(FINAL)
                role_b = I32(3)
                if exact or merged:
                    role_b = I32(1) << rank
                job_b = (
                    b.n, b.h, b.row0, b.row1, from_b, b.stop - from_b, b.begin - from_b, role_b,
                    I32(0), target_b, entry + entries.ENTRY,
                )  # fmt: skip
                if first_b:
                    self.put_job(at, 0, job_b)
                else:
                    self.put_job(at, 0, job_a)
                self.put_job(at, 1, job_b)
        return choice

    @cute.jit
    def scan_job(
        self, number, S0, O, S, X, scale, base, total, tidx, warp_id, lane, mma_t, mma_w, mma_s,
        share: cutlass.Constexpr,
    ):  # fmt: skip
        """A scanning warpgroup's part of a job."""
        at = base.toint()
        job = self.get_job(at, number)
        busy = I32(1)
        if cutlass.const_expr(share):
            busy = cute.arch.make_warp_uniform((job[7] >> warp_id // 4) & 1)
        if busy == 0:
            self.pass_on(at, job[5], lane, share)
        else:
            self.scan(
                S0, O, S, X, scale, base, number, total, tidx, warp_id, mma_t, mma_w, mma_s, share
            )


def over(x, y):
    """x // y of numbers that are not negative, in half the instructions."""
    return I32(cutlass.Uint32(x) // cutlass.Uint32(y))
