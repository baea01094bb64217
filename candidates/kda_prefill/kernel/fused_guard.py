"""Where a piece of a sequence may start from zero: a bound computed from the data.

A piece may begin some chunks early, from a zero state, if what it drops by that has decayed below
e^GUARD of the state that it ignores.  Nothing is promised by the caller: the bound takes the
actual gates, keys and write strengths of the tokens in between.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.options import L2NORM_EPS
from candidates._delta_rule.kernel.pieces import GUARD
from candidates.kda_prefill.kernel.fused_load import Load
from candidates.kda_prefill.kernel.fused_plan import BT, SHORT, FusedPlan

__all__ = ["Guard"]

F32, I32, I64 = op.F32, op.I32, op.I64
LOG2E = math.log2(math.e)


class Guard(Load):
    """The part of the fused kernel that decides which chunks a CTA takes."""

    plan: FusedPlan

    @cute.jit
    def guards(self, K, G, B, at, boundaries, H, warp_id, lane):
        """Chunks of warm-up that each of three boundaries needs; -1 where only the exact state
        will do.

        A boundary is (first row of its sequence, head, chunk, whether to ask at all); 0 chunks
        where one does not ask.

        Two tokens map a state by A2 D2 A1 D1, with D = diag(e^g) and A = I - beta k k^T.
        |A| <= 1 where 0 <= beta |k|^2 <= 2, so that the map's norm is at most
        ``max_d e^(g1 + g2)_d + beta1 |D2 k1| |D1 k1|`` and that of a window at most the product
        over its pairs.  Scanning warps; the same arithmetic whoever asks, so that neighbouring
        pieces agree.
        """
        short = [(r, h, b - SHORT, u and b > SHORT) for r, h, b, u in boundaries]
        near = self.windows(K, G, B, at, short, H, warp_id, lane)
        wide = [
            boundaries[i][3]
            and near[i] > GUARD
            and near[i] <= GUARD / 4
            and boundaries[i][2] > 2 * SHORT
            for i in range(3)
        ]
        far = [F32(0.0)] * 3
        if wide[0] or wide[1] or wide[2]:
            ops.sync_scanners()  # everybody has read the first sums
            long = [(r, h, b - 2 * SHORT, wide[i]) for i, (r, h, b, _) in enumerate(boundaries)]
            far = self.windows(K, G, B, at, long, H, warp_id, lane)
        out = []
        for i in cutlass.range_constexpr(3):
            b = boundaries[i][2]
            need = I32(-1)
            if wide[i] and near[i] + far[i] <= GUARD:
                need = I32(2 * SHORT)
            if b <= 2 * SHORT:
                need = I32(b)
            if b <= SHORT:
                need = I32(b)
            elif near[i] <= GUARD:
                need = I32(SHORT)
            if not boundaries[i][3]:
                need = I32(0)
            out.append(cute.arch.make_warp_uniform(need))
        return out

    @cute.jit
    def windows(self, K, G, B, at, places, H, warp_id, lane):
        """Logarithms of the bounds of the SHORT chunks at three places, two pairs a warp."""
        # All loads are on their way before the first is used.
        read = [self.read_pairs(K, G, B, places, H, warp_id + 8 * i, lane) for i in range(2)]
        for i in cutlass.range_constexpr(2):
            self.bound_pairs(G, at, *read[i], warp_id + 8 * i, lane)
        ops.sync_scanners()
        out = [F32(0.0)] * 3
        for i in cutlass.range_constexpr(3):
            for w in cutlass.range_constexpr(0, 16, 4):
                for x in op.load_f32x4(at, self.plan.off_guard + 64 * i + 4 * w):
                    out[i] = out[i] + x
        return out

    @cute.jit
    def read_pairs(self, K, G, B, places, H, pair, lane):
        """Gates, keys and write strengths of a pair of tokens at each of three places.

        Unasked places read rows of an asked one, or of the batch's begin: nothing branches.
        """
        gates, keys, heads = [], [], []
        row, head, beta_row, beta_head = I32(0), I32(0), I32(0), I32(0)
        for i in cutlass.range_constexpr(3):
            first, h, c, asked = places[i]
            if asked:
                row, head = first + c * BT + pair * 2, h
            if lane // 2 == i:
                beta_row, beta_head = row + lane % 2, head
            for r in cutlass.range_constexpr(2):
                read = self.guard_row(K, G, row, r, head, H, lane)
                gates.append(read[0])
                keys.append(read[1])
            heads.append(head)
        # Lane l has beta of token l % 2 of place l / 2.
        return gates, keys, heads, self.strength(B, beta_row, beta_head)

    @cute.jit
    def bound_pairs(self, G, at, gates, keys, heads, beta, pair, lane):
        """Leave the logarithms of the bounds of what :meth:`read_pairs` gave."""
        fmax = cute.arch.fmax
        beta = self.activated(beta)
        tops, sums = [], []
        for i in cutlass.range_constexpr(3):
            active = self.gate_constants(G, heads[i], lane * 4, 4)
            g1, g2 = (self.guard_gates(gates[2 * i + r], active) for r in range(2))
            k1, k2 = ([x for p in keys[2 * i + r] for x in op.unpack(p)] for r in range(2))
            top = [g1[d] + g2[d] for d in range(4)]
            tops.append(fmax(fmax(top[0], top[1]), fmax(top[2], top[3])))
            n1, n2, w1, w2 = (F32(0.0) for _ in range(4))
            for d in cutlass.range_constexpr(4):
                square = k1[d] * k1[d]
                n1, n2 = n1 + square, op.fma(k2[d], k2[d], n2)
                w1 = op.fma(square, op.exp2(g1[d] * F32(2 * LOG2E)), w1)
                w2 = op.fma(square, op.exp2(g2[d] * F32(2 * LOG2E)), w2)
            sums += [n1, n2, w1, w2]
        for d in (16, 8, 4, 2, 1):
            tops = [fmax(x, cute.arch.shuffle_sync_bfly(x, offset=d)) for x in tops]
        # Twelve sums in eighteen exchanges: the lanes of eight are left with three.
        for d in (16, 8):
            upper = (lane & d) > 0
            n = len(sums) // 2
            sums = [
                op.select(upper, sums[n + i], sums[i])
                + cute.arch.shuffle_sync_bfly(op.select(upper, sums[i], sums[n + i]), offset=d)
                for i in range(n)
            ]
        for d in (4, 2, 1):
            sums = [x + cute.arch.shuffle_sync_bfly(x, offset=d) for x in sums]
        for i in cutlass.range_constexpr(3):
            n1, n2, w1, w2 = (
                cute.arch.shuffle_sync(sums[j % 3], offset=j // 3 * 8)
                for j in range(4 * i, 4 * i + 4)
            )
            if cutlass.const_expr(self.options.l2norm):
                rho1, rho2 = (ops.rcp(n + F32(L2NORM_EPS)) for n in (n1, n2))
                n1, n2, w1, w2 = n1 * rho1, n2 * rho2, w1 * rho1, w2 * rho1
            beta1, beta2 = (cute.arch.shuffle_sync(beta, offset=2 * i + r) for r in range(2))
            tame = beta1 >= 0.0 and beta2 >= 0.0 and beta1 * n1 <= 2.0 and beta2 * n2 <= 2.0
            bound = op.exp2(tops[i] * F32(LOG2E)) + beta1 * ops.sqrt(w1) * ops.sqrt(w2)
            log = op.select(tame, fmax(ops.log2(bound) * F32(1 / LOG2E), F32(-1e3)), F32(1e30))
            if lane == 0:
                op.store_f32(at + pair * 4, log, self.plan.off_guard + 64 * i)
