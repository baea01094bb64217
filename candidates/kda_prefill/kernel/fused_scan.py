"""The scanning warpgroups of the fused kernel: each holds 64 value rows of the transposed state."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from candidates.kda_prefill.kernel import fused_ops as ops
from candidates.kda_prefill.kernel import prep_ops as op
from candidates.kda_prefill.kernel.fused_load import Load
from candidates.kda_prefill.kernel.fused_plan import BT, PITCH, SCAN_WARPS, FusedPlan
from candidates.kda_prefill.kernel.image import HEAD
from candidates.kda_prefill.kernel.step import narrow, widen, zero

__all__ = ["Scanning"]

BF16, F32, I32, I64 = op.BF16, op.F32, op.I32, op.I64
ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR


class Scanning(Load):
    """The part of the fused kernel that walks the chunks."""

    plan: FusedPlan

    @cute.jit
    def pass_on(self, at, count, lane):
        """A scanning warpgroup whose rows another CTA takes: let every chunk go."""
        full, empty = at + self.plan.off_bar, at + self.plan.off_bar + 8 * self.plan.stages
        s, phase = I32(0), I32(0)
        for _ in cutlass.range(count, unroll=1):
            ops.bar_wait(full + 8 * s, phase)
            if lane == 0:
                ops.bar_arrive(empty + 8 * s)
            s = s + 1
            if s == self.plan.stages:
                s = I32(0)
                phase = phase ^ 1

    @cute.jit
    def scan(
        self, S0, O, S, scale, base, n, h, row0, row1, start, count, warm, last, tidx, warp_id,
        mma_t, mma_w, mma_s,
    ):  # fmt: skip
        """One of the two warpgroups that hold the state."""
        layout, stages = self.plan.layout, self.plan.stages
        wg, t = warp_id // 4, tidx % 128
        at = base.toint()
        full, empty = at + self.plan.off_bar, at + self.plan.off_bar + 8 * stages

        def view(byte, sl):  # (rows, cols, stages) of one part of the image
            p = cute.recast_ptr(base + byte // 2, sl.inner, BF16)
            ring = cute.make_layout(stages, stride=self.plan.stage // 2)
            return cute.make_tensor(p, cute.append(cute.slice_(sl.outer, (None, None, 0)), ring))

        b_sl = lambda order, rows, k: sm90.make_smem_layout_b(order, (64, rows, k), BF16, 1)
        sWQ, sA = view(0, b_sl(ROW, 2 * BT, HEAD)), view(layout.off_a, b_sl(ROW, BT, BT))
        sK = view(layout.off_k, b_sl(COL, HEAD, BT))
        sU = view(layout.common, sm90.make_smem_layout_epi(BF16, COL, (HEAD, BT), 1))
        sO = cute.make_tensor(
            (base + self.plan.off_o // 2).align(128),
            cute.make_layout(((16, SCAN_WARPS), BT), stride=((1, PITCH * BT), PITCH)),
        )
        for m, accumulate in ((mma_t, True), (mma_w, True), (mma_s, True)):
            m.set(warpgroup.Field.ACCUMULATE, accumulate)
        thr_t, thr_w, thr_s = mma_t.get_slice(t), mma_w.get_slice(t), mma_s.get_slice(t)
        frag = lambda mma, thr, x: mma.make_fragment_B(thr.partition_B(x))  # descriptors
        rW, rK, rA = frag(mma_w, thr_w, sWQ), frag(mma_s, thr_s, sK), frag(mma_t, thr_t, sA)
        sUw = cute.local_tile(sU, (64, BT), (wg, 0, None))

        acc = lambda mma, cols: cute.make_rmem_tensor(mma.partition_shape_C((64, cols)), F32)
        a_op = lambda k: cute.make_rmem_tensor(mma_t.partition_shape_A((64, k)), BF16)
        accS, accW, accO = acc(mma_s, HEAD), acc(mma_w, 2 * BT), acc(mma_t, BT)
        aS, aV = a_op(HEAD), a_op(BT)
        accV = cute.make_tensor(accW.iterator, accO.layout)
        accQ = cute.make_tensor(accW.iterator + BT // 2, accO.layout)
        u, o = [cute.make_rmem_tensor(accV.layout, BF16) for _ in range(2)]
        ld = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_t
        )
        sto = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16), mma_t
        )
        ld_s = ld.get_slice(t).partition_S(sUw)
        st_d = sto.get_slice(t).partition_D(cute.local_tile(sO, (64, BT), (wg, 0)))
        # O leaves warp by warp: a lane takes token l % 8 + 8 (l / 16), 8 values at 8 (l / 8 % 2).
        tok, v = t % 8 + t % 32 // 16 * 8, t % 32 // 8 % 2 * 8
        o_s = cute.make_tensor(
            (sO.iterator + warp_id * PITCH * BT + tok * PITCH + v).align(16), cute.make_layout(8)
        )
        pitch = I64(O.stride[0])
        o_at = (
            I64(row0 + (start - 1) * BT + tok) * pitch + h * HEAD + warp_id * 16 + v
        )  # of chunk -1
        o_at = O.iterator.toint() + o_at * 2
        o_step = pitch * (2 * BT)
        o_row = -(warm + 1) * BT
        o_end = max(row1 - row0 - (start + warm) * BT - tok, 0)
        state = lambda X: thr_s.partition_C(
            cute.local_tile(X[n, h, None, None], (64, HEAD), (wg, 0))
        )

        zero(accS)
        if cutlass.const_expr(S0 is not None):
            if start == 0:
                load_state(state(S0), accS)
        e_at = at + t % 4 * 16
        s = I32(0)
        phase = I32(0)
        ops.bar_wait(full, I32(0))
        cute.copy(ld, ld_s[None, None, None, 0], ld.retile(u))
        widen(u, accV)
        accO.store(accV.load())  # any value but a constant, as in zero()
        for _ in cutlass.range(count, unroll=1):
            for i in cutlass.range_constexpr(BT // 2):
                accQ[i] = op.ptx("mov.f32 {$w0}, 0f00000000;", [F32])
            steep = I32(0)
            if cutlass.const_expr(not self.plan.boundary):
                steep = ops.load_shared32(at + s * 4, self.plan.off_steep)
                steep = cute.arch.make_warp_uniform(steep)
                self.decay(e_at + s * self.plan.stage, accS)
            narrow(accS, aS)
            if cutlass.const_expr(not self.plan.boundary):
                if steep > 0:  # held at its start: decays between what it reads and what it adds
                    self.decay(at + (self.plan.off_end - layout.off_e) + t % 4 * 16 + s * 512, accS)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(HEAD // 16):  # Vn^T on top of U^T | S Q^T
                cute.gemm(mma_w, accW, aS[None, None, kb], rW[None, None, kb, s], accW)
            warpgroup.commit_group()
            if cutlass.const_expr(self.plan.boundary):
                cute.arch.sync_warp()  # keeps what follows behind the products
                warpgroup.wait_group(1)
                self.decay(e_at + s * self.plan.stage, accS)
            warpgroup.wait_group(1)  # O of the last chunk
            narrow(accO, o)
            warpgroup.wait_group(0)
            narrow(accV, aV)
            if cutlass.const_expr(self.options.l2norm):
                by = self.output_scales(at, s, t % 32)
                for i in cutlass.range_constexpr(BT // 2):
                    accO[i] = accQ[i] * by[i // 4 * 2 + i % 2]
            else:
                accO.store(accQ.load() * scale)
            warpgroup.fence()
            cute.gemm(mma_s, accS, aV[None, None, 0], rK[None, None, 0, s], accS)
            warpgroup.commit_group()
            cute.gemm(mma_t, accO, aV[None, None, 0], rA[None, None, 0, s], accO)
            warpgroup.commit_group()
            here = empty + 8 * s
            s = s + 1
            if s == stages:
                s = I32(0)
                phase = phase ^ 1
            ops.bar_wait(full + 8 * s, phase)
            cute.copy(ld, ld_s[None, None, None, s], ld.retile(u))
            widen(u, accV)
            self.emit(o_row, o_end, o, sto, st_d, o_s, o_at)
            o_at = o_at + o_step
            o_row = o_row + BT
            warpgroup.wait_group(0)
            cute.arch.sync_warp()
            if tidx % 32 == 0:
                ops.bar_arrive(here)
        narrow(accO, o)
        self.emit(o_row, o_end, o, sto, st_d, o_s, o_at)
        if cutlass.const_expr(S is not None):
            if last:
                if cutlass.const_expr(not self.plan.boundary):
                    self.decay(e_at + s * self.plan.stage, accS)
                store_state(accS, state(S))

    def decay(self, place, accS):
        """Scale the key channels of the state by what stands in a stage."""
        for j in range(8):
            values = op.load_f32x4(place, self.plan.layout.off_e + 64 * j)
            for i in range(4):
                for r in range(2):
                    at = (2 * j + i // 2) * 4 + 2 * r + i % 2
                    accS[at] = accS[at] * values[i]

    @cute.jit
    def emit(self, row, end, o, sto, st_d, o_s, at):
        """Store O^T of a chunk through the warp's slab, 16 bytes a lane."""
        cute.copy(sto, sto.retile(o), st_d)
        cute.arch.sync_warp()
        x = cute.make_rmem_tensor(o_s.layout.shape, BF16)
        cute.autovec_copy(o_s, x)
        below(row, end, x, at)
        cute.arch.sync_warp()


def load_state(source, acc):
    """A state of either dtype."""
    if source.element_type is F32:
        cute.autovec_copy(source, acc)
        return
    narrow_one = cute.make_rmem_tensor(acc.layout, source.element_type)
    cute.autovec_copy(source, narrow_one)
    acc.store(narrow_one.load().to(F32))


def store_state(acc, target):
    """A state in the dtype of ``target``, rounded once."""
    if target.element_type is F32:
        cute.autovec_copy(acc, target)
        return
    narrow_one = cute.make_rmem_tensor(acc.layout, target.element_type)
    narrow_one.store(acc.load().to(target.element_type))
    cute.autovec_copy(narrow_one, target)


def below(row, end, values, at):
    """Store 16 bytes at address ``at`` if ``0 <= row < end``, predicated."""
    words = cute.recast_tensor(values, I32)
    op.ptx(
        "{ .reg .pred p; setp.lo.u32 p, {$r0}, {$r1};"
        " @p st.global.v4.b32 [{$r2}], {{$r3}, {$r4}, {$r5}, {$r6}}; }",
        inputs=[row, end, at, *(words[i] for i in range(4))],
    )
