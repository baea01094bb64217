"""Gated DeltaNet prefill in one kernel: each CTA makes the matrices of its chunks and scans them.

The gate is one number for each token and value head, so that nothing of the size of an input has
to be rescaled: tiles of K, Q and V are operands as they lie in memory, and chunks are of 32 or 64
tokens whatever the gates.  With b the inclusive sum of a chunk's log gates,

    Akk = K K^T e^(b_i - b_j)      Aqk = Q K^T e^(b_i - b_j)      (on and below the diagonal)
    X = (I + strict_lower(diag(beta) Akk))^-1
    X' = diag(e^(b_BT - b)) X diag(beta)          A' = scale Aqk X diag(beta)

are made by the building warpgroups, and the scanning ones walk

    R = V - diag(e^b) (K S)        O = scale diag(e^b) (Q S) + A' R
    S <- e^b_BT S + K^T (X' R)

so that both matrices act on R.  No exponent is positive.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import memory
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Gates
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.ragged import bounds, clear_uncovered, offset
from candidates._delta_rule.kernel.step import product
from candidates.gdn_prefill.kernel.fused_build import Build
from candidates.gdn_prefill.kernel.fused_guard import Guard
from candidates.gdn_prefill.kernel.fused_plan import HEAD, FusedPlan
from candidates.gdn_prefill.kernel.fused_scan import Scan

__all__ = ["Fused"]

BF16, F32, I32 = op.BF16, op.F32, op.I32


class Fused(Build, Scan, Guard):
    """The fused kernel, compiled once for every T, N, H and HV.

    Parameters
    ----------
    bt, rows, builders : int
        Tokens of a chunk, value rows of a CTA, building warpgroups; see
        :class:`.fused_plan.FusedPlan`.
    options : Options
        The form of the arguments.
    """

    def __init__(self, bt: int, rows: int, builders: int, options: Options = PLAIN) -> None:
        self.plan = FusedPlan(bt, rows, builders, options.l2norm)
        self.options = options
        self.name = f"gdn_fused_t{bt}_r{rows}_b{builders}{options.suffix}"

    @cute.jit
    def __call__(
        self,
        Q: cute.Tensor,
        K: cute.Tensor,
        V: cute.Tensor,
        G: cute.Tensor,
        B: cute.Tensor,
        CU: cute.Tensor,
        S0: cute.Tensor | None,
        O: cute.Tensor,
        S: cute.Tensor | None,
        X: cute.Tensor,
        scale: cutlass.Float32,
        pieces: cutlass.Int32,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        stream: CUstream,
    ):
        """Launch on ``stream``.

        Parameters
        ----------
        Q, K : cute.Tensor
            bf16 [T, H, 128].
        V, O : cute.Tensor
            bf16 [T, HV, 128], HV a multiple of H.
        G, B : cute.Tensor
            [T, HV]: log gates, and write strengths; or what they are made of.
        CU : cute.Tensor
            Offsets [N + 1], any content.
        S0 : cute.Tensor or None
            Initial states [N, HV, 128, 128], value-major; None is zero.
        S : cute.Tensor or None
            Final states; may be S0 if nothing is cut.
        X : cute.Tensor
            Scratch of :class:`candidates._delta_rule.kernel.pieces.Scratch`, fp32; any size if
            nothing is cut.
        scale : Float32
        pieces : Int32
            Pieces of all sequences of a head, at most.  As many as sequences or fewer is not to
            cut: then CTAs take whole sequences, two each if there are half as many.
        A_log, dt_bias : cute.Tensor or None
            Of the gate's activation: fp32 [HV] and [HV, 1].
        stream : CUstream
        """
        plan = self.plan
        mma_t, mma_t0 = (product(OperandMajorMode.K, plan.bt) for _ in range(2))
        mma_s = product(OperandMajorMode.MN, HEAD)
        mma_b, mma_b0 = (
            sm90.make_trivial_tiled_mma(
                BF16, BF16, OperandMajorMode.K, OperandMajorMode.K, F32, (1, 1, 1), (64, plan.bt)
            )
            for _ in range(2)
        )
        self.kernel.set_name_prefix(self.name, keep_mangled_name=False, remove_cutlass_symbol=True)
        if V.shape[1] > 0:
            N = CU.shape[0] - 1
            ctas = max(pieces, 1) * V.shape[1] * (HEAD // plan.rows)
            if pieces > N:
                ctas = (ctas + 1) // 2 * 2
            self.kernel(
                Q, K, V, G, B, CU, S0, O, S, X, scale, pieces, A_log, dt_bias, mma_t,
                mma_t0, mma_s, mma_b, mma_b0,
            ).launch(
                grid=(ctas, 1, 1),
                block=(plan.threads, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,
                preferred_smem_carveout=100,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self, Q, K, V, G, B, CU, S0, O, S, X, scale, pieces, A_log, dt_bias, mma_t, mma_t0, mma_s,
        mma_b, mma_b0,
    ):  # fmt: skip
        plan = self.plan
        tidx = cute.arch.thread_idx()[0]
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        T, H = V.shape[:2]
        N = CU.shape[0] - 1
        cta = cute.arch.block_idx()[0]
        G = Gates(G, A_log, dt_bias, None)

        smem = memory.SmemAllocator()
        base = smem.allocate_array(BF16, plan.smem_bytes // 2, byte_alignment=1024)
        at = base.toint()
        scan_warps = 4 * plan.scanners
        if warp_id == scan_warps:
            if lane == 0:
                for i, arrivals in enumerate((4, scan_warps)):  # full, empty
                    for s in cutlass.range_constexpr(plan.stages):
                        place = at + (plan.off_bar + 8 * (plan.stages * i + s))
                        ops.bar_init(place, arrivals)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        self.clear_slots(at, tidx, plan.threads)
        clearing = CU, O, T, H, N, cta, warp_id, lane
        total = H * pieces
        jobs = I32(0)
        if pieces <= N:
            # The halves of a head are neighbours, and so are the value heads of a key head: what
            # they share is read at the same time.
            parts = HEAD // plan.rows
            half, h, place = cta % parts, cta // parts % H, cta // parts // H
            each = (N + pieces - 1) // max(pieces, 1)
            for j in cutlass.range_constexpr(2):
                n = place * each + j
                if j < each and n < N:
                    row0, row1 = bounds(CU, n, T)
                    self.whole(at, j, n, h, half, row0, row1, tidx == 0)
                    jobs = I32(j + 1)
        elif cutlass.const_expr(plan.cuts):
            jobs = self.share(G, CU, X, at, pieces, N, T, H, cta, warp_id, lane)
        if tidx == 0:
            self.put_count(at, jobs)  # not kept: a register
        for mma, add in ((mma_t, True), (mma_t0, False), (mma_s, True), (mma_b, True),
                         (mma_b0, False)):  # fmt: skip
            mma.set(warpgroup.Field.ACCUMULATE, add)
        cute.arch.sync_threads()
        if warp_id < scan_warps:
            cute.arch.setmaxregister_increase(plan.scan_registers)
            wg = warp_id // 4
            if cutlass.const_expr(plan.scanners > 1):  # while the builders are busy
                self.clear(*clearing)
            for turn in cutlass.range(self.turns, unroll=1):
                self.meet(turn)
                job, _, there = self.job(at, turn)
                if there:
                    if (job[6] >> wg) & 1 == 0:
                        self.pass_on(at, turn, lane)
                    else:
                        self.scan(
                            S0, O, S, X, base, turn, total, tidx % 128, wg, mma_t, mma_t0, mma_s
                        )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(plan.build_registers)
            self.build(Q, K, V, G, B, scale, base, warp_id, lane, mma_b, mma_b0)
        if cutlass.const_expr(plan.scanners == 1):  # by eight warps, of which only four scan
            self.clear(*clearing)

    @cute.jit
    def clear(self, CU, O, T, H, N, cta, warp_id, lane):
        """This CTA's share of the rows of O that no sequence covers; all warps that scan, and
        eight at least."""
        covered = max(offset(CU, 0, T), 0), max(offset(CU, N, T), 0)
        clear_uncovered(CU, O, T, H, N, cta, covered, warp_id, lane)
