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

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import memory
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from candidates.kda_prefill.kernel import fused_ops as ops
from candidates.kda_prefill.kernel import prep_ops as op
from candidates.kda_prefill.kernel.activate import Gates
from candidates.kda_prefill.kernel.fused_build import Build
from candidates.kda_prefill.kernel.fused_exact import (
    BEGINS,
    CARRY,
    CONTINUES,
    FINAL,
    FREE,
    MAP,
    NOWHERE,
)
from candidates.kda_prefill.kernel.fused_guard import Guard
from candidates.kda_prefill.kernel.fused_plan import BT, SCAN_WARPS, SHORT, FusedPlan, Scratch
from candidates.kda_prefill.kernel.fused_scan import Scanning
from candidates.kda_prefill.kernel.image import HEAD
from candidates.kda_prefill.kernel.options import PLAIN, Options
from candidates.kda_prefill.kernel.ragged import bounds, offset
from candidates.kda_prefill.kernel.step import product

__all__ = ["Fused"]

BF16, I32 = op.BF16, op.I32


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
            Scratch of :class:`.fused_plan.Scratch`, fp32; any size if ``pieces`` is 1.
        A_log, dt_bias, bound : cute.Tensor, cute.Tensor, Float32 or None
            Of the gate's activation: see :class:`.activate.Gates`.
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
        rank, pair_id = cta % 2, cta // 2

        smem = memory.SmemAllocator()
        base = smem.allocate_array(BF16, plan.smem_bytes // 2, byte_alignment=1024)
        at = base.toint()
        if warp_id == SCAN_WARPS:
            if lane == 0:
                self.begin_ring(at)
            cute.arch.sync_warp()
        if cutlass.const_expr(ragged):
            covered = max(offset(CU, 0, T), 0), max(offset(CU, N, T), 0)
            self.clear_uncovered(CU, O, T, H, N, cta, covered, warp_id, lane)

        # The pair's pieces: a, and b behind it, of the same chain or of the next.
        total = N * H * pieces
        own = cta
        if pieces > 1:
            own = pair_id * 2
        n, h, p = own // pieces // H, own // pieces % H, own % pieces
        row0, row1 = I32(0), I32(0)
        if n < N:
            row0, row1 = bounds(CU, n, T)
        row0, row1 = cute.arch.make_warp_uniform(row0), cute.arch.make_warp_uniform(row1)
        chunks = (row1 - row0 + BT - 1) // BT
        parts = max(min(pieces, chunks // 2), 1)
        begin, stop = chunks * p // parts, chunks * min(p + 1, parts) // parts
        jobs, pair = I32(0), I32(0)
        ahead_row, ahead_h = I32(-1), I32(0)
        if pieces == 1:
            if n < N:
                jobs = I32(1)
                if warp_id == 0:
                    if lane == 0:
                        self.put_job(
                            at, 0, (n, h, row0, row1, I32(0), chunks, I32(0), I32(3), I32(0),
                                    I32(FINAL), I32(0)),
                        )  # fmt: skip
        else:
            n_b, h_b = (own + 1) // pieces // H, (own + 1) // pieces % H
            p_b = (own + 1) % pieces
            row0_b, row1_b = row0, row1
            if n_b != n:
                row0_b, row1_b = I32(0), I32(0)
                if n_b < N:
                    row0_b, row1_b = bounds(CU, n_b, T)
            row0_b = cute.arch.make_warp_uniform(row0_b)
            row1_b = cute.arch.make_warp_uniform(row1_b)
            chunks_b = (row1_b - row0_b + BT - 1) // BT
            parts_b = max(min(pieces, chunks_b // 2), 1)
            begin_b = chunks_b * min(p_b, parts_b) // parts_b
            stop_b = chunks_b * min(p_b + 1, parts_b) // parts_b
            there, there_b = n < N and p < parts, n_b < N and p_b < parts_b
            same = p_b > 0
            asked = (
                (row0, h, begin, there and p > 0),
                (row0, h, begin_b, same and there_b),
                (row0_b, h_b, stop_b, there_b and p_b + 1 < parts_b),
            )
            # What each CTA most likely begins with is on its way while it decides.
            wanted, first, first_row, end, ahead_h = there, begin, row0, row1, h
            if rank > 0:
                wanted, first, first_row, end, ahead_h = there_b, begin_b, row0_b, row1_b, h_b
            if wanted:
                ahead_row = first_row + max(first - SHORT, 0) * BT
                if warp_id >= SCAN_WARPS:
                    self.fetch_ahead(Q, K, V, G, at, ahead_row, end, ahead_h, H, warp_id, lane)
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
            # What each CTA does: its own piece; or both a, or a and b as one, and then b.
            jobs = I32(1)
            first_b, role = rank > 0, I32(3)
            is_map = I32(0)
            if exact or merged:
                pair, first_b = I32(1), rank > 1
                role = I32(1) << rank
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
                    self.put_flag(X, cta, flag)
                    end_a, from_a = stop, begin - max(left, 0)
                    target = I32(NOWHERE)
                    if merged:
                        end_a = stop_b
                        if right < 0:
                            target = I32(CARRY)
                    if end_a == chunks:
                        target = I32(FINAL)
                    if exact:
                        target = I32(CARRY)
                        if rank > 0:
                            target = I32(MAP)
                    entries = Scratch(total)
                    entry = entries.entries + own * entries.ENTRY
                    job_a = (
                        n, h, row0, row1, from_a, end_a - from_a, begin - from_a, role, is_map,
                        target, entry,
                    )  # fmt: skip
                    from_b = begin_b
                    if same:
                        from_b = begin_b - max(inner, 0)
                    target_b = I32(NOWHERE)
                    if right < 0:
                        target_b = I32(CARRY)
                    if stop_b == chunks_b:
                        target_b = I32(FINAL)
                    role_b = I32(3)
                    if pair > 0:
                        role_b = I32(1) << rank
                    job_b = (
                        n_b, h_b, row0_b, row1_b, from_b, stop_b - from_b, begin_b - from_b,
                        role_b, I32(0), target_b, entry + entries.ENTRY,
                    )  # fmt: skip
                    if first_b:
                        self.put_job(at, 0, job_b)
                    else:
                        self.put_job(at, 0, job_a)
                    self.put_job(at, 1, job_b)
            jobs = cute.arch.make_warp_uniform(jobs)
            pair = cute.arch.make_warp_uniform(pair)
        for m in (mma_t, mma_w, mma_s):
            m.set(warpgroup.Field.ACCUMULATE, True)
        cute.arch.sync_threads()
        rest = (
            Q, K, V, G, B, S0, O, S, X, scale, base, H, total, rank, tidx, warp_id, lane,
            mma_t, mma_w, mma_s,
        )  # fmt: skip
        if pair == 0:  # first, so that its code follows
            if jobs > 0:
                self.work(jobs, *rest, (ahead_row, ahead_h), False)
        else:
            self.begin_pair(at, warp_id, lane)
            self.work(jobs, *rest, (ahead_row, ahead_h), True)
            ops.sync_cluster()  # nobody leaves while its shared memory may be written

    @cute.jit
    def work(
        self, jobs, Q, K, V, G, B, S0, O, S, X, scale, base, H, total, rank, tidx, warp_id, lane,
        mma_t, mma_w, mma_s, ahead, share: cutlass.Constexpr,
    ):  # fmt: skip
        """Up to two jobs of a pair, or the one of a CTA of its own, in code that knows no pairs."""
        at = base.toint()
        if cutlass.const_expr(not share):
            jobs = 1
        if warp_id < SCAN_WARPS:
            cute.arch.setmaxregister_increase(self.plan.scan_registers)
            for j in cutlass.range(jobs, unroll=1):
                if cutlass.const_expr(share):
                    if j > 0:
                        self.begin_again(at, warp_id, lane)
                job = self.get_job(at, j)
                busy = I32(1)
                if cutlass.const_expr(share):
                    busy = cute.arch.make_warp_uniform((job[7] >> warp_id // 4) & 1)
                if busy == 0:
                    self.pass_on(at, job[5], lane, share)
                else:
                    self.scan(
                        S0, O, S, X, scale, base, j, total, tidx, warp_id, mma_t, mma_w, mma_s,
                        share,
                    )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(self.plan.build_registers)
            for j in cutlass.range(jobs, unroll=1):
                if cutlass.const_expr(share):
                    if j > 0:
                        self.begin_again(at, warp_id, lane)
                job = self.get_job(at, j)
                self.build(Q, K, V, G, B, scale, at, job, H, rank, ahead, warp_id, lane, share)


def in_one_row(X):
    """[B, T, ...] as [B T, ...]; sequences follow each other without a gap."""
    shape = (X.shape[0] * X.shape[1], *X.shape[2:])
    return cute.make_tensor(X.iterator, cute.make_layout(shape, stride=X.stride[1:]))
