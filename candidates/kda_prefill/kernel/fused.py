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

Pieces of one sequence do not talk.  Each starts a few chunks early from a zero state where
:class:`.fused_guard.Guard` proves that this drops nothing that counts; where it does not, the
piece before walks on through it, exactly, and the CTA that is free takes half of its value rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import memory
from cutlass.cute.nvgpu import OperandMajorMode

from candidates.kda_prefill.kernel import fused_ops as ops
from candidates.kda_prefill.kernel import prep_ops as op
from candidates.kda_prefill.kernel.activate import Gates
from candidates.kda_prefill.kernel.fused_build import Build
from candidates.kda_prefill.kernel.fused_guard import Guard
from candidates.kda_prefill.kernel.fused_plan import BT, SCAN_WARPS, SHORT, FusedPlan
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
            self.kernel(
                Q,
                K,
                V,
                G,
                B,
                offsets,
                S0,
                O,
                S,
                scale,
                pieces,
                A_log,
                dt_bias,
                bound,
                mma_t,
                mma_w,
                mma_s,
            ).launch(
                grid=(max(N, 1) * pieces * V.shape[1], 1, 1),
                block=(self.plan.threads, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,
                preferred_smem_carveout=100,
            )

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
        scale: cutlass.Float32,
        pieces: cutlass.Int32,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        bound: cutlass.Float32 | None,
        mma_t: cute.TiledMma,
        mma_w: cute.TiledMma,
        mma_s: cute.TiledMma,
    ):
        plan, stages = self.plan, self.plan.stages
        tidx = cute.arch.thread_idx()[0]
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        T, H = (Q if self.options.compact else V).shape[:2]
        ragged = isinstance(CU, cute.Tensor)
        N = CU.shape[0] - 1 if ragged else T // CU
        G = Gates(G, A_log, dt_bias, bound)
        cta = cute.arch.block_idx()[0]
        h, job = cta % H, cta // H
        piece, n = job % pieces, job // pieces

        smem = memory.SmemAllocator()
        base = smem.allocate_array(BF16, plan.smem_bytes // 2, byte_alignment=1024)
        at = base.toint()
        if warp_id == 0:
            if lane == 0:
                for s in cutlass.range_constexpr(stages):
                    ops.bar_init(at + (plan.off_bar + 8 * s), 4)  # full
                    ops.bar_init(at + (plan.off_bar + 8 * (stages + s)), SCAN_WARPS)  # empty
                    ops.bar_init(at + (plan.off_bar + 8 * (2 * stages + s)), 2)  # sums
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        if cutlass.const_expr(ragged):
            covered = max(offset(CU, 0, T), 0), max(offset(CU, N, T), 0)
            cute.arch.sync_threads()
            self.clear_uncovered(CU, O, T, H, N, job, h, covered, warp_id, lane)
        else:
            cute.arch.sync_threads()

        if n < N:
            row0, row1 = (cute.arch.make_warp_uniform(r) for r in bounds(CU, n, T))
            all_chunks = (row1 - row0 + BT - 1) // BT
            parts = max(min(pieces, all_chunks // 2), 1)
            active = piece < parts
            leader, following, warm, role = piece, piece + 1, I32(0), I32(3)
            if parts > 1 and active:
                # Two boundaries at once: this piece's and the next one's.
                if warp_id >= 16:
                    here = max(all_chunks * piece // parts - SHORT, 0) * BT
                    self.prefetch(Q, K, V, G, row0 + here, row1, h, H, warp_id - 16, lane)
                warm, other = self.guards(
                    K, G, B, at, row0, all_chunks, parts, piece, piece + 1, h, H, warp_id, lane
                )
                seek = I32(0)
                if warm < 0:
                    # The pieces up to the next free boundary are one.  The first CTA of these takes
                    # value rows 0 to 63, the second the others; more would not make it faster.
                    leader, role = piece - 1, I32(2)
                    warm, other = self.guards(
                        K,
                        G,
                        B,
                        at,
                        row0,
                        all_chunks,
                        parts,
                        piece - 1,
                        piece - 1,
                        h,
                        H,
                        warp_id,
                        lane,
                    )
                    active = warm >= 0
                    if active:
                        seek = I32(1)
                elif other < 0:
                    role = I32(1)
                    seek = I32(1)
                if seek > 0:
                    following = leader + 2
                while seek > 0:
                    first, second = self.guards(
                        K, G, B, at, row0, all_chunks, parts, following, following + 1,
                        h, H, warp_id, lane,
                    )  # fmt: skip
                    if first >= 0:
                        seek = I32(0)
                    else:
                        following = following + 1
                        if second >= 0:
                            seek = I32(0)
                        else:
                            following = following + 1
            if active:
                begin = all_chunks * leader // parts
                stop = all_chunks * min(following, parts) // parts
                start = begin - warm
                count = cute.arch.make_warp_uniform(stop - start)
                start = cute.arch.make_warp_uniform(start)
                busy = cute.arch.make_warp_uniform((role >> warp_id // 4) & 1)
                if warp_id < SCAN_WARPS:
                    cute.arch.setmaxregister_increase(plan.scan_registers)
                    if busy == 0:
                        self.pass_on(at, count, lane)
                    else:
                        self.scan(
                            S0, O, S, scale, base, n, h, row0, row1, start, count, warm,
                            stop == all_chunks, tidx, warp_id, mma_t, mma_w, mma_s,
                        )  # fmt: skip
                else:
                    cute.arch.setmaxregister_decrease(plan.build_registers)
                    self.build(
                        Q, K, V, G, B, scale, at, h, H, row0 + start * BT, row1, count,
                        warp_id, lane,
                    )  # fmt: skip


def in_one_row(X):
    """[B, T, ...] as [B T, ...]; sequences follow each other without a gap."""
    shape = (X.shape[0] * X.shape[1], *X.shape[2:])
    return cute.make_tensor(X.iterator, cute.make_layout(shape, stride=X.stride[1:]))
