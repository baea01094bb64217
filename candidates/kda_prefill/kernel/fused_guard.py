"""Where a piece of a sequence may start from zero: a bound computed from the data.

A piece may begin some chunks early, from a zero state, if what it drops by that has decayed below
e^GUARD of the state that it ignores.  Nothing is promised by the caller: the bound takes the
actual gates, keys and write strengths of the tokens in between.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute

from candidates.kda_prefill.kernel import fused_ops as ops
from candidates.kda_prefill.kernel import prep_ops as op
from candidates.kda_prefill.kernel.fused_load import Load
from candidates.kda_prefill.kernel.fused_plan import BT, GUARD, SCAN_WARPS, SHORT, FusedPlan
from candidates.kda_prefill.kernel.image import HEAD
from candidates.kda_prefill.kernel.options import L2NORM_EPS
from candidates.kda_prefill.kernel.ragged import bounds

__all__ = ["Guard"]

F32, I32, I64 = op.F32, op.I32, op.I64
LOG2E = math.log2(math.e)


class Guard(Load):
    """The part of the fused kernel that decides which chunks a CTA takes."""

    plan: FusedPlan

    @cute.jit
    def clear_uncovered(self, CU, O, T, H, N, job, h, covered, warp_id, lane):
        """Clear this CTA's share of the rows of O that no sequence covers."""
        begin = covered[0]
        end = max(covered[1], begin)
        if begin > 0 or end < T:
            if N > 0:
                end = bounds(CU, N - 1, T)[1]
            every = cute.arch.grid_dim()[0] // H * SCAN_WARPS
            if warp_id < SCAN_WARPS:
                for row in cutlass.range(job * SCAN_WARPS + warp_id, T, every, unroll=1):
                    if row < begin or row >= end:
                        place = ((I64(row) * H + h) * HEAD + lane * 4) * 2
                        op.ptx(
                            "st.global.v2.b32 [{$r0}], {{$r1}, {$r1}};",
                            inputs=[O.iterator.toint() + place, I32(0)],
                        )

    @cute.jit
    def prefetch(self, Q, K, V, G, row, end, h, H, w, lane):
        """The first inputs on their way to L2: a warp takes every fourth row, a lane 128 bytes."""
        if cutlass.const_expr(not self.plain_rows):
            heads = self.origin(K, G, row, h)[1]
            lines = self.options.gate_bytes + 6
            for r in cutlass.range_constexpr(12):
                here = row + w + 4 * r
                if lane < lines and here < end:
                    op.prefetch(self.prefetch_row(Q, K, V, G, here, heads, lane))
        else:
            self.prefetch_plain(Q, K, V, G.g, row, end, h, H, w, lane)

    @cute.jit
    def prefetch_plain(self, Q, K, V, G, row, end, h, H, w, lane):
        """:meth:`prefetch` of contiguous tensors."""
        for r in cutlass.range_constexpr(12):
            here = row + w + 4 * r
            line = (I64(here) * H + h) * (2 * HEAD)
            at = G.iterator.toint() + line * 2 + lane * 128
            if lane >= 4:
                at = K.iterator.toint() + line + lane % 2 * 128
            if lane >= 6:
                at = Q.iterator.toint() + line + lane % 2 * 128
            if lane >= 8:
                at = V.iterator.toint() + line + lane % 2 * 128
            if lane < 10 and here < end:
                op.ptx("prefetch.global.L2 [{$r0}];", inputs=[at])

    @cute.jit
    def guards(self, K, G, B, at, row0, chunks, parts, p0, p1, h, H, warp_id, lane):
        """Chunks of warm-up that pieces p0 and p1 need; -1 where only the exact state will do.

        Two tokens map a state by A2 D2 A1 D1, with D = diag(e^g) and A = I - beta k k^T.
        |A| <= 1 where 0 <= beta |k|^2 <= 2, so that the map's norm is at most
        ``max_d e^(g1 + g2)_d + beta1 |D2 k1| |D1 k1|`` and that of a window at most the product
        over its pairs.  All threads; the same arithmetic whoever asks, so that neighbouring
        pieces agree.
        """
        b0, b1 = chunks * min(p0, parts) // parts, chunks * min(p1, parts) // parts
        near = self.windows(
            K, G, B, at, row0, b0 - SHORT, b1 - SHORT, p0 < parts, p1 < parts, h, H, warp_id, lane
        )
        far = [F32(0.0), F32(0.0)]
        wide = [
            (p0, p1)[i] < parts
            and near[i] > GUARD
            and near[i] <= GUARD / 4
            and (b0, b1)[i] > 2 * SHORT
            for i in range(2)
        ]
        if wide[0] or wide[1]:
            far = self.windows(
                K,
                G,
                B,
                at,
                row0,
                b0 - 2 * SHORT,
                b1 - 2 * SHORT,
                wide[0],
                wide[1],
                h,
                H,
                warp_id,
                lane,
            )
        out = []
        for i in cutlass.range_constexpr(2):
            b = (b0, b1)[i]
            need = I32(-1)
            if wide[i] and near[i] + far[i] <= GUARD:
                need = I32(2 * SHORT)
            if b <= 2 * SHORT:
                need = I32(b)
            if b <= SHORT:
                need = I32(b)
            elif near[i] <= GUARD:
                need = I32(SHORT)
            if (p0, p1)[i] >= parts:
                need = I32(0)
            out.append(need)
        return out[0], out[1]

    @cute.jit
    def windows(self, K, G, B, at, row0, c0, c1, used0, used1, h, H, warp_id, lane):
        """Logarithms of the bounds of the SHORT chunks from c0 and from c1 on."""
        c, used = c0, used0
        if warp_id // 8 > 0:
            c, used = c1, used1
        if warp_id < 16:
            logs = [F32(0.0), F32(0.0)]
            if used and c > 0:
                row = row0 + c * BT + warp_id % 8 * 4
                gates, keys, betas = [], [], []
                for r in cutlass.range_constexpr(4):
                    read = self.guard_row(K, G, B, row, r, h, H, lane)
                    for list_, x in zip((gates, keys, betas), read, strict=True):
                        list_.append(x)
                sums, tops = [], []
                for j in cutlass.range_constexpr(2):
                    g1, g2 = gates[2 * j], gates[2 * j + 1]
                    k1 = [x for pair in keys[2 * j] for x in op.unpack(pair)]
                    k2 = [x for pair in keys[2 * j + 1] for x in op.unpack(pair)]
                    top = [g1[i] + g2[i] for i in range(4)]
                    tops.append(
                        cute.arch.fmax(
                            cute.arch.fmax(top[0], top[1]), cute.arch.fmax(top[2], top[3])
                        )
                    )
                    n1, n2, w1, w2 = (F32(0.0) for _ in range(4))
                    for i in cutlass.range_constexpr(4):
                        square = k1[i] * k1[i]
                        n1, n2 = n1 + square, op.fma(k2[i], k2[i], n2)
                        w1 = op.fma(square, op.exp2(g1[i] * F32(2 * LOG2E)), w1)
                        w2 = op.fma(square, op.exp2(g2[i] * F32(2 * LOG2E)), w2)
                    sums += [n1, n2, w1, w2]
                for d in (16, 8, 4, 2, 1):
                    for j in cutlass.range_constexpr(2):
                        tops[j] = cute.arch.fmax(
                            tops[j], cute.arch.shuffle_sync_bfly(tops[j], offset=d)
                        )
                # Eight sums in nine exchanges: lane l is left with sum l / 4.
                for d in (16, 8, 4):
                    upper = (lane & d) > 0
                    n = len(sums) // 2
                    sums = [
                        op.select(upper, sums[n + i], sums[i])
                        + cute.arch.shuffle_sync_bfly(
                            op.select(upper, sums[i], sums[n + i]), offset=d
                        )
                        for i in range(n)
                    ]
                total = sums[0]
                for d in (2, 1):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=d)
                for j in cutlass.range_constexpr(2):
                    n1, n2, w1, w2 = (
                        cute.arch.shuffle_sync(total, offset=16 * j + 4 * i) for i in range(4)
                    )
                    if cutlass.const_expr(self.options.l2norm):
                        rho1, rho2 = (ops.rcp(n + F32(L2NORM_EPS)) for n in (n1, n2))
                        n1, n2, w1, w2 = n1 * rho1, n2 * rho2, w1 * rho1, w2 * rho1
                    beta1, beta2 = betas[2 * j], betas[2 * j + 1]
                    tame = beta1 >= 0.0 and beta2 >= 0.0 and beta1 * n1 <= 2.0 and beta2 * n2 <= 2.0
                    bound = op.exp2(tops[j] * F32(LOG2E)) + beta1 * ops.sqrt(w1) * ops.sqrt(w2)
                    logs[j] = op.select(
                        tame, cute.arch.fmax(ops.log2(bound) * F32(1 / LOG2E), F32(-1e3)), F32(1e30)
                    )
            if lane == 0:
                op.store_f32x2(at + warp_id * 8, logs[0], logs[1], self.plan.off_guard)
        cute.arch.sync_threads()
        out = [F32(0.0), F32(0.0)]
        for i in cutlass.range_constexpr(2):
            for w in cutlass.range_constexpr(16):
                out[i] = out[i] + op.load_f32(at, self.plan.off_guard + 64 * i + 4 * w)
        cute.arch.sync_threads()
        return out
