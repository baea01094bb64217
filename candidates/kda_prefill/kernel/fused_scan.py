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
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.pieces import Scratch
from candidates._delta_rule.kernel.step import load_state, narrow, store_state, widen, zero
from candidates.kda_prefill.kernel.fused_exact import LAST, OWN, Exact
from candidates.kda_prefill.kernel.fused_load import Load
from candidates.kda_prefill.kernel.fused_plan import BT, SLAB, FusedPlan

__all__ = ["Scanning", "store_state"]

BF16, F32, I32, I64 = op.BF16, op.F32, op.I32, op.I64
ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR

OUTPUTS = 6
"""Named barrier of the first scanning warpgroup, and one more that of the second.  0 is all
threads', 1 to 3 are a builder's each, 4 all builders' and 5 all scanning warps'."""


class Scanning(Exact, Load):
    """The part of the fused kernel that walks the chunks."""

    plan: FusedPlan

    @cute.jit
    def release(self, here, odd, share):
        """Let a chunk go; one lane.  In a pair the CTA that builds this stage wants to know."""
        if share > 0:
            ops.bar_arrive_in(ops.in_cta(here, odd))
        else:
            ops.bar_arrive(here)

    @cute.jit
    def pass_on(self, at, count, lane):
        """A scanning warpgroup whose rows the pair's other CTA takes: let every chunk go."""
        full, empty = at + self.plan.off_bar, at + self.plan.off_bar + 8 * self.plan.stages
        s, phase = I32(0), I32(0)
        for _ in cutlass.range(count, unroll=1):
            ops.bar_wait(full + 8 * s, phase)
            if lane == 0:
                self.release(empty + 8 * s, s & 1, I32(1))
            s = s + 1
            if s == self.plan.stages:
                s = I32(0)
                phase = phase ^ 1

    @cute.jit
    def scan(
        self, S0, O, S, X, scale, base, job, runs, tidx, warp_id, mma_t, mma_w, mma_s, share
    ):  # fmt: skip
        """One of the two warpgroups that hold the state, through job number ``job``; ``share`` is 1
        for one of the pair."""
        n, h, row0, row1, start, count, warm, _, is_map, _, _, place = self.get_job(
            base.toint(), job
        )
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
        thr_t, thr_w, thr_s = mma_t.get_slice(t), mma_w.get_slice(t), mma_s.get_slice(t)
        frag = lambda mma, thr, x: mma.make_fragment_B(thr.partition_B(x))  # descriptors
        rW, rK, rA = frag(mma_w, thr_w, sWQ), frag(mma_s, thr_s, sK), frag(mma_t, thr_t, sA)

        acc = lambda mma, cols: cute.make_rmem_tensor(mma.partition_shape_C((64, cols)), F32)
        a_op = lambda k: cute.make_rmem_tensor(mma_t.partition_shape_A((64, k)), BF16)
        accS, accW, accO = acc(mma_s, HEAD), acc(mma_w, 2 * BT), acc(mma_t, BT)
        aS, aV = a_op(HEAD), a_op(BT)
        accV = cute.make_tensor(accW.iterator, accO.layout)
        accQ = cute.make_tensor(accW.iterator + BT // 2, accO.layout)
        u, o = [cute.make_rmem_tensor(accV.layout, BF16) for _ in range(2)]
        factors = cute.make_rmem_tensor(HEAD // 4, F32)
        # A lane names a token of one of four 8 x 8 matrices of U, which stands transposed.
        token, piece = t % 8 + t % 32 // 16 * 8, t // 32 * 2 + t % 16 // 8
        u_at = at + wg * (BT * 128) + token * 128 + ((piece ^ (token % 8)) << 4)
        # O leaves as rows of 128 bytes, of which a lane takes 16: token t / 8, values 8 (t % 8) on.
        tok, v = t // 8, t % 8
        slab = at + self.plan.off_o + wg * (2 * SLAB)
        into = slab + token * 128 + ((piece ^ (token % 8)) << 4)
        out_of = slab + tok * 128 + ((v ^ (tok % 8)) << 4)
        u_step = I32(self.plan.stage)
        if is_map > 0:  # without values
            u_at, u_step = at + self.plan.off_zero - layout.common, I32(0)
        # In registers, not found anew in each turn of the loop.
        u_at, into, out_of = (ops.opaque(x) for x in (u_at, into, out_of))
        pitch = I64(O.stride[0])
        o_at = (
            I64(row0 + (start - 1) * BT + tok) * pitch + h * HEAD + wg * 64 + v * 8
        )  # of chunk -1
        out = O.iterator.toint()
        if is_map > 0:
            out = X.iterator.toint() + I64(Scratch(runs).outputs) * 4
        o_at = out + o_at * 2
        o_step = pitch * (2 * BT)
        o_row = -(warm + 1) * BT
        o_end = max(row1 - row0 - (start + warm) * BT - tok, 0)
        state = lambda X: thr_s.partition_C(
            cute.local_tile(X[n, h, None, None], (64, HEAD), (wg, 0))
        )

        zero(accS)
        if cutlass.const_expr(S0 is not None):
            if start == 0 and is_map == 0:
                load_state(state(S0), accS)
        if is_map > 0:
            self.identity(accS, wg, t)
        e_at = ops.opaque(at + t % 4 * 16)
        if share > 0:
            place = I32(0)  # a pair's rings begin anew with each job
        s = place % stages
        phase = place // stages % 2
        ops.bar_wait(full + 8 * s, phase)
        self.load_values(u_at + s * u_step, u)
        widen(u, accV)
        if cutlass.const_expr(not self.plan.boundary):
            self.load_decay(e_at + s * self.plan.stage, factors)
        steep = self.steepness(at + s * 16)
        accO.store(accV.load())  # any value but a constant, as in zero()
        for _ in cutlass.range(count, unroll=1):
            for i in cutlass.range_constexpr(BT // 2):
                accQ[i] = op.ptx("mov.f32 {$w0}, 0f00000000;", [F32])
            if cutlass.const_expr(not self.plan.boundary):
                decay(factors, accS)
            narrow(accS, aS)
            if cutlass.const_expr(not self.plan.boundary):
                if steep > 0:  # held at its start: decays between what it reads and what it adds
                    ends = at + (self.plan.off_end - layout.off_e) + t % 4 * 16 + s * 512
                    self.load_decay(ends, factors)
                    decay(factors, accS)
            warpgroup.fence()
            for kb in cutlass.range_constexpr(HEAD // 16):  # Vn^T on top of U^T | S Q^T
                cute.gemm(mma_w, accW, aS[None, None, kb], rW[None, None, kb, s], accW)
            warpgroup.commit_group()
            if cutlass.const_expr(self.plan.boundary):
                cute.arch.sync_warp()  # keeps what follows behind the products
                warpgroup.wait_group(1)
                self.load_decay(e_at + s * self.plan.stage, factors)
                decay(factors, accS)
            if cutlass.const_expr(self.options.l2norm):
                by = self.output_scales(at, s, t % 32)
            warpgroup.wait_group(1)  # O of the last chunk
            narrow(accO, o)
            warpgroup.wait_group(0)
            narrow(accV, aV)
            if cutlass.const_expr(self.options.l2norm):
                for i in cutlass.range_constexpr(BT // 2):
                    accO[i] = accQ[i] * by[i // 4 * 2 + i % 2]
            else:
                accO.store(accQ.load() * scale)
            warpgroup.fence()
            cute.gemm(mma_s, accS, aV[None, None, 0], rK[None, None, 0, s], accS)
            warpgroup.commit_group()
            cute.gemm(mma_t, accO, aV[None, None, 0], rA[None, None, 0, s], accO)
            warpgroup.commit_group()
            values = self.turn_over(o, into, out_of, s, wg)  # while S's product runs
            here = empty + 8 * s
            s = s + 1
            if s == stages:
                s = I32(0)
                phase = phase ^ 1
            # Made before the wait, since what follows it is on the path.
            u_here = ops.opaque(u_at + s * u_step)
            e_here = ops.opaque(e_at + s * self.plan.stage)
            ops.bar_wait(full + 8 * s, phase)
            self.load_values(u_here, u)
            if cutlass.const_expr(not self.plan.boundary):
                self.load_decay(e_here, factors)
            steep = self.steepness(at + s * 16)
            widen(u, accV)
            ops.below(o_row, o_end, values, o_at)
            o_at = o_at + o_step
            o_row = o_row + BT
            warpgroup.wait_group(0)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                self.release(here, (s & 1) ^ 1, share)
        # Read again, not kept: registers.
        n, h, *_, more, _, target, entry, _ = self.get_job(at, job)
        last = I32(0)
        if share > 0:
            if more >= LAST:
                last = I32(1)
        else:
            if more == 0 and self.choice(at) < OWN:
                last = I32(1)
            # The virtual chunk is read.
            cute.arch.sync_warp()
            if tidx % 32 == 0:
                ops.bar_arrive(empty + 8 * s)
        if last > 0:
            # The fix-up may come, and waits for what is left here.  Not sooner: it would only stand
            # about, and who adds up the times of kernels would count that.
            cute.arch.griddepcontrol_launch_dependents()
        narrow(accO, o)
        ops.below(o_row, o_end, self.turn_over(o, into, out_of, s, wg), o_at)
        state = lambda X: thr_s.partition_C(
            cute.local_tile(X[n, h, None, None], (64, HEAD), (wg, 0))
        )
        if target > 0:
            if cutlass.const_expr(not self.plan.boundary):
                decay(factors, accS)
            if target == FINAL:
                if cutlass.const_expr(S is not None):
                    store_state(accS, state(S))
            else:
                self.leave(X, entry, target, accS, wg, t)

    def load_values(self, place, u):
        """A lane's elements of U^T, from a stage."""
        words = cute.recast_tensor(u, I32)
        values = op.ldmatrix(place, self.plan.layout.common, transpose=True)
        for i in range(4):
            words[i] = values[i]

    def steepness(self, place):
        """Whether the chunk of a stage is steep, for all lanes; in the middle frame."""
        if self.plan.boundary:
            return I32(0)
        return cute.arch.make_warp_uniform(ops.load_shared32(place, self.plan.off_steep))

    def load_decay(self, place, factors):
        """What the key channels of a lane's accumulators decay by, from a stage."""
        for j in range(8):
            values = op.load_f32x4(place, self.plan.layout.off_e + 64 * j)
            for i in range(4):
                factors[4 * j + i] = values[i]

    @cute.jit
    def turn_over(self, o, into, out_of, s, wg):
        """O^T of the chunk before that in stage ``s`` through a slab of the warpgroup: a lane's 16
        bytes of O.

        A warp holds 16 values of each token, and stores four tokens of 64: so many lines of the
        cache take a quarter of the time.  Stages of chunks in turn are odd and even in turn, and so
        are the slabs: who writes to one has met everybody since they read it.
        """
        words, slab = cute.recast_tensor(o, I32), (s & 1) * SLAB
        op.stmatrix(into + slab, [words[i] for i in range(4)], transpose=True)
        ops.sync_group(OUTPUTS + wg)
        return op.load_i32x4(out_of + slab)


def decay(factors, accS):
    """Scale the key channels of the state."""
    for j in range(HEAD // 4):
        for r in range(2):
            at = j // 2 * 4 + 2 * r + j % 2
            accS[at] = accS[at] * factors[j]
