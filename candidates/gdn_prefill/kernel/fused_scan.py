"""The scanning warpgroups of the fused kernel: each holds 64 value rows of the transposed state."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.exact import FINAL
from candidates._delta_rule.kernel.pieces import Scratch
from candidates._delta_rule.kernel.step import load_state, narrow, store_state, zero
from candidates.gdn_prefill.kernel.fused_build import ring
from candidates.gdn_prefill.kernel.fused_jobs import Jobs
from candidates.gdn_prefill.kernel.fused_plan import HEAD, FusedPlan

__all__ = ["Scan"]

BF16, F32, I32, I64 = op.BF16, op.F32, op.I32, op.I64
ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR


class Scan(Jobs):
    """The part of the fused kernel that walks the chunks."""

    plan: FusedPlan

    @cute.jit
    def scan(
        self, S0, O, S, X, base, turn, total, t, wg, mma_t, mma_t0, mma_s
    ):  # fmt: skip
        """One of the warpgroups that hold the state, through the job of a turn.

        Parameters
        ----------
        total : Int32
            Pieces of all sequences and heads.
        t, wg : Int32
            Thread of the warpgroup, and which one.
        """
        plan, BT = self.plan, self.plan.bt
        at = base.toint()
        (n, h, first, rows, warm, half, _, is_map, _, _, start, _), count, _ = self.job(at, turn)
        begin = self.chunks_before(at, turn)
        full, empty = at + plan.off_bar, at + (plan.off_bar + 8 * plan.stages)
        stages = lambda byte, sl: ring(base, byte, sl, plan.stages, plan.stage)
        slots = lambda byte, sl: ring(base, plan.off_slot + byte, sl, plan.slots, plan.slot)
        b_sl = lambda order, cols, k: sm90.make_smem_layout_b(order, (64, cols, k), BF16, 1)
        thr_t, thr_s = mma_t.get_slice(t), mma_s.get_slice(t)
        frag = lambda mma, thr, x: mma.make_fragment_B(thr.partition_B(x))  # descriptors
        both = stages(0, b_sl(ROW, 2 * BT, HEAD))  # keys over queries
        rK, rQ = (
            frag(mma_t, thr_t, cute.local_tile(both, (BT, HEAD, plan.stages), (part, 0, 0)))
            for part in range(2)
        )
        rX, rA = (frag(mma_t, thr_t, slots(x, b_sl(ROW, BT, BT))) for x in (0, plan.slot // 2))
        rT = frag(mma_s, thr_s, stages(0, b_sl(COL, HEAD, 2 * BT)))  # tokens summed over

        acc = lambda mma, cols: cute.make_rmem_tensor(mma.partition_shape_C((64, cols)), F32)
        a_op = lambda k: cute.make_rmem_tensor(mma_t.partition_shape_A((64, k)), BF16)
        accS, accK, accQ = acc(mma_s, HEAD), acc(mma_t, BT), acc(mma_t, BT)
        aS, aR, aV = a_op(HEAD), a_op(BT), a_op(BT)
        residual, out = cute.recast_tensor(aR, I32), cute.make_rmem_tensor(accQ.layout, BF16)
        out_words = cute.recast_tensor(out, I32)
        values = cute.make_rmem_tensor(BT // 4, I32)
        factors = cute.make_rmem_tensor(BT // 4, F32)

        # A lane names a token of one of four 8 x 8 matrices of V, which stands transposed, and
        # the same 16 bytes of O: token l % 8 + 8 (l / 16), 8 values at 8 (l / 8 % 2).
        warp, token, piece = t >> 5, (t & 7) + (t >> 4 & 1) * 8, t >> 3 & 1
        mine = at + (plan.off_v + wg * (BT * 128))
        mine = mine + token * 128 + (((warp * 2 + piece) ^ (token & 7)) << 4)
        mine = ops.opaque(mine)
        table = ops.opaque(at + plan.off_table + (t & 3) * 8)
        pitch = I32(O.stride[0]) * 2
        block = half + wg  # 64 value rows
        o_at = O.iterator.toint()
        if is_map > 0:
            o_at = X.iterator.toint() + I64(Scratch(total).outputs) * 4
        o_at = op.mad_wide(first + token, pitch, o_at)
        o_at = o_at + I64((h * HEAD + block * 64 + warp * 16 + piece * 8) * 2)
        o_row, o_end = -warm, max(rows - warm - token, 0)

        state = lambda X: thr_s.partition_C(
            cute.local_tile(X[n, h, None, None], (64, HEAD), (block, 0))
        )
        zero(accS)
        if cutlass.const_expr(S0 is not None):
            if start > 0 and is_map == 0:
                load_state(state(S0), accS)
        if is_map > 0:
            self.identity(accS, wg, t)
        s, m, phase = begin % plan.stages, begin % plan.slots, begin // plan.stages & 1
        narrow(accS, aS)
        for _ in cutlass.range(count, unroll=1):
            ops.bar_wait(full + 8 * s, phase)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(HEAD // 16):
                mma = mma_t if kb else mma_t0
                cute.gemm(mma, accK, aS[None, None, kb], rK[None, None, kb, s], accK)
            warpgroup.commit_group()
            for kb in cutlass.range_constexpr(HEAD // 16):
                mma = mma_t if kb else mma_t0
                cute.gemm(mma, accQ, aS[None, None, kb], rQ[None, None, kb, s], accQ)
            warpgroup.commit_group()
            # For nothing: tells the compiler that the state is there, and keeps it from putting
            # what waits for shared memory between the products.
            warpgroup.wait_group(2)
            # In the shadow of these: what else the step needs.
            here, row = mine + s * plan.stage, table + s * plan.table
            self.load_values(here, values)
            self.load_factors(row, factors, plan.off_decay)
            last = op.load_f32(at + s * plan.table, plan.off_table + plan.off_last)
            for i in cutlass.range_constexpr(HEAD // 2):
                accS[i] = accS[i] * last
            warpgroup.wait_group(1)  # K S
            for i in cutlass.range_constexpr(BT // 4):  # R^T = V^T - (K S)^T diag(e^b)
                x, y = op.unpack(values[i])
                j = i // 2 * 2
                x = op.fma(accK[2 * i], -factors[j], x)
                y = op.fma(accK[2 * i + 1], -factors[j + 1], y)
                residual[i] = op.pack(x, y)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(BT // 16):
                mma = mma_t if kb else mma_t0
                cute.gemm(mma, accK, aR[None, None, kb], rX[None, None, kb, m], accK)
            warpgroup.commit_group()
            self.load_factors(row, factors, plan.off_read)
            warpgroup.wait_group(1)  # Q S
            for i in cutlass.range_constexpr(BT // 4):
                j = i // 2 * 2
                accQ[2 * i] = accQ[2 * i] * factors[j]
                accQ[2 * i + 1] = accQ[2 * i + 1] * factors[j + 1]
            warpgroup.fence()
            for kb in cutlass.range_constexpr(BT // 16):
                cute.gemm(mma_t, accQ, aR[None, None, kb], rA[None, None, kb, m], accQ)
            warpgroup.commit_group()
            warpgroup.wait_group(1)  # new values, decayed to the chunk's end
            narrow(accK, aV)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(BT // 16):
                cute.gemm(mma_s, accS, aV[None, None, kb], rT[None, None, kb, s], accS)
            warpgroup.commit_group()
            warpgroup.wait_group(1)  # O
            narrow(accQ, out)
            for i in cutlass.range_constexpr(BT // 16):
                words = [out_words[4 * i + k] for k in range(4)]
                op.stmatrix(here, words, 2048 * i, transpose=True)
            cute.arch.sync_warp()
            words = [op.load_i32x4(here, 2048 * i) for i in range(BT // 16)]
            warpgroup.wait_group(0)
            narrow(accS, aS)  # while these words come
            for i in cutlass.range_constexpr(BT // 16):
                ops.below(o_row + 16 * i, o_end, words[i], op.mad_wide(pitch, I32(16 * i), o_at))
            o_row, o_at = o_row + BT, op.mad_wide(pitch, I32(BT), o_at)
            freed = empty + 8 * s
            s, m = s + 1, m + 1
            if m == plan.slots:
                m = I32(0)
            if s == plan.stages:
                s = I32(0)
                phase = phase ^ 1
            cute.arch.sync_warp()
            with cute.arch.elect_one():  # to compare with a thread's number is to wait for it
                ops.bar_arrive(freed)
        if cutlass.const_expr(plan.cuts):
            if turn + 1 >= self.word(at, 0):
                # The fix-up may come, and waits for what is left here.  Not sooner: it would only
                # stand about, and who adds up the times of kernels would count that.
                cute.arch.griddepcontrol_launch_dependents()
        # Read again, not kept: registers.
        n, h, _, _, _, half, _, _, target, entry, *_ = self.get_job(at, turn & 1)
        last = lambda X: thr_s.partition_C(
            cute.local_tile(X[n, h, None, None], (64, HEAD), (half + wg, 0))
        )
        if target == FINAL:
            if cutlass.const_expr(S is not None):
                store_state(accS, last(S))
        elif target > 0:
            self.leave(X, entry, target, accS, wg, t)

    @cute.jit
    def pass_on(self, at, turn, lane):
        """A scanning warpgroup whose rows another CTA takes: let every chunk go."""
        plan = self.plan
        _, count, _ = self.job(at, turn)
        begin = self.chunks_before(at, turn)
        s, phase = begin % plan.stages, begin // plan.stages & 1
        for _ in cutlass.range(count, unroll=1):
            ops.bar_wait(at + plan.off_bar + 8 * s, phase)
            if lane == 0:
                ops.bar_arrive(at + (plan.off_bar + 8 * plan.stages) + 8 * s)
            s = s + 1
            if s == plan.stages:
                s = I32(0)
                phase = phase ^ 1

    def load_factors(self, place, factors, at):
        """Those of the tokens that a lane's elements are of."""
        for i in range(self.plan.bt // 8):
            factors[2 * i], factors[2 * i + 1] = op.load_f32x2(place, at + 32 * i)

    def load_values(self, place, values):
        """A lane's elements of V^T, two tokens in a register."""
        for i in range(self.plan.bt // 16):
            words = op.ldmatrix(place, 2048 * i, transpose=True)
            for k in range(4):
                values[4 * i + k] = words[k]
