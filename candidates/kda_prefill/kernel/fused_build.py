"""The building warpgroups of the fused kernel: chunks into the ring, as the scan wants them.

A warp scales 8 tokens x 64 channels, a lane two of these, from inputs that it fetched itself a turn
ahead.  Products are mma.sync on bf16 with fp32 sums; X comes from exact substitution in fp32.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates.kda_prefill.kernel import fused_ops as ops
from candidates.kda_prefill.kernel import prep_ops as op
from candidates.kda_prefill.kernel.fused_load import LOG2E, Load
from candidates.kda_prefill.kernel.fused_plan import (
    BT,
    LOWER_PITCH,
    SCAN_WARPS,
    FusedPlan,
)
from candidates.kda_prefill.kernel.fused_steep import Steep
from candidates.kda_prefill.kernel.image import HEAD
from candidates.kda_prefill.kernel.steep_plan import STEEP_HALF

__all__ = ["Build"]

F32, I32, I64 = op.F32, op.I32, op.I64

SECOND_X = 2048 - 4 * BT * LOWER_PITCH
"""Bytes in front of X diag(beta), behind L, where that for U lies if keys are normalised here."""


class Build(Steep, Load):
    """The part of the fused kernel that makes W, U, Q, K, Aqk and the decay of chunks."""

    plan: FusedPlan

    @cute.jit
    def build(self, Q, K, V, G, B, scale, at, h, H, row, end, count, warp_id, lane):
        """One of the building warpgroups: chunks ``group``, ``group + groups``, ... of ``count``.

        Chunk ``count`` is virtual: it only carries the last decay.
        """
        plan, layout = self.plan, self.plan.layout
        stages, groups = plan.stages, plan.groups
        w = warp_id % 4
        group = warp_id // 4 - SCAN_WARPS // 4
        tokens, half = w // 2, w % 2  # 8 tokens x 64 channels; a lane two channels
        own = at + (self.plan.off_group + group * self.plan.size_group)
        sg, sk, sq, sv = own, own + 8192, own + 12288, own + 16384
        sl, sx, sb = own + 20480, own + 22528, own + 23040
        sp = own + 23552  # boundary frame only: qR and kC
        st = own + (23552 + 8192 * self.plan.boundary)  # sums of halves, or exponentials of them
        number = group + 1
        full, empty, sums = (at + (self.plan.off_bar + 8 * stages * i) for i in range(3))
        channel = half * 64 + lane * 2

        pitch = H * HEAD
        first = (I64(row) * H + h) * HEAD
        if cutlass.const_expr(not self.plain_rows):
            first, pitch = self.origin(K, G, row, h)
        beta = self.no_strength
        if group < count:
            rows = end - row - group * BT
            self.fetch(Q, K, G, group, rows, first, own, tokens, half, lane, pitch)
            self.fetch_values(V, group, rows, first, sv, half, tokens, lane, pitch)
            if lane < min(rows, BT):
                beta = self.strength(B, row + group * BT + lane, h)
        s, parity = I32(group), I32(0)  # stage of chunk c and how often the ring went round, mod 2
        for c in cutlass.range(group, count + 1, groups, unroll=1):
            stage = at + s * self.plan.stage
            ops.bar_wait(empty + 8 * s, parity ^ 1)
            mine, steep = [F32(0.0), F32(0.0)], I32(0)
            if c < count:
                cute.arch.cp_async_wait_group(0)
                if tokens == 0 and half == 0:
                    if lane < BT:
                        op.store_f32(sb + lane * 4, self.activated(beta))
                ops.sync_warp()
                if cutlass.const_expr(self.options.raw_gate):
                    self.blank(sg, end - row - c * BT, tokens, half, lane)
                if cutlass.const_expr(self.options.l2norm):
                    self.squares(sk, sq, sb, tokens, half, lane)
                active = self.gate_constants(G, h, channel)
                if cutlass.const_expr(self.plan.boundary):
                    mine, steep = self.boundary_rows(
                        sg, sk, sq, sp, st, stage, number, tokens, half, channel, lane, active
                    )
                    ops.sync_group(number)
                else:
                    mine = self.middle_rows(
                        sg, sk, sq, stage, s, at, tokens, half, channel, lane, active
                    )
                    steep = self.vote(number, mine)
                    op.store32(at + s * 4, steep, self.plan.off_steep)  # the same from everybody
                if cutlass.const_expr(self.options.l2norm):
                    self.put_output_scales(at, s, sb, scale, w, lane)
                if steep > 0:
                    self.steep_chunk(
                        G, sg, sk, sq, sp, st, stage, s, sums, at, h, sl, sb, scale, number, mine,
                        tokens, half, w, lane,
                    )  # fmt: skip
                    mine = [F32(0.0), F32(0.0)]  # its state is held at its start
                else:
                    if cutlass.const_expr(not self.plan.boundary):
                        if tokens == 1:
                            with cute.arch.elect_one():
                                ops.bar_arrive(sums + 8 * s)
                    tile = self.score_tile(stage, sp, w, lane)
                    self.keep_scores(tile, stage, sl, sb, scale, w, lane)
                ops.sync_warp()  # the inputs are read
                later = c + groups
                rows = end - row - later * BT
                if later < count:
                    self.fetch(Q, K, G, later, rows, first, own, tokens, half, lane, pitch)
                    beta = self.no_strength
                    if lane < min(rows, BT):
                        beta = self.strength(B, row + later * BT + lane, h)
                ops.sync_group(number)
                if w == 3:
                    self.substitute(sl, sx, sb, lane)
            if (
                cutlass.const_expr(not self.plan.boundary) and tokens == 0
            ):  # decay from the last chunk's middle to this one's
                total = mine
                if c > 0:
                    before, before_parity = s - 1, parity
                    if s == 0:
                        before, before_parity = I32(stages - 1), parity ^ 1
                    ops.bar_wait(sums + 8 * before, before_parity)
                    last = op.load_f32x2(at + before * 512 + channel * 4, self.plan.off_sum)
                    total = [total[i] + last[i] for i in range(2)]
                place = channel // 16 * 16 + channel // 2 % 4 * 4 + channel // 8 % 2 * 2
                op.store_f32x2(
                    stage + place * 4, op.exp2(total[0]), op.exp2(total[1]), layout.off_e
                )
            if c < count:
                ops.sync_group(number)
                if cutlass.const_expr(self.plan.boundary):
                    self.apply_boundary(stage, sx, sv, st, steep, w, lane)
                else:
                    self.apply_middle(stage, sx, sv, w, lane)
                later = c + groups
                if later < count:
                    self.fetch_values(
                        V, later, end - row - later * BT, first, sv, half, tokens, lane, pitch
                    )
            ops.fence_async()
            ops.sync_warp()
            if lane == 0:
                ops.bar_arrive(full + 8 * s)
            s = s + groups
            if s >= stages:
                s = s - stages
                parity = parity ^ 1

    @cute.jit
    def fetch(self, Q, K, G, c, rows, first, own, tokens, half, lane, pitch):
        """Gates, keys and queries of chunk ``c``, of which ``rows`` are left; the rest are 0.

        A warp copies what it alone will read, in pieces of 16 bytes.  Addresses are made anew each
        time, from a lane number that the compiler cannot hoist: registers are what is short here.
        """
        if cutlass.const_expr(not self.plain_rows):
            self.fetch_rows(Q, K, G, c, rows, first, own, tokens, half, lane, pitch)
        else:
            self.fetch_plain(Q, K, G.g, c, rows, first, own, tokens, half, lane, pitch)

    @cute.jit
    def fetch_plain(self, Q, K, G, c, rows, first, own, tokens, half, lane, pitch):
        """:meth:`fetch` of contiguous tensors."""
        lane = ops.opaque(lane)
        g_row, k_row = tokens * 8 + lane // 16, tokens * 8 + lane // 8
        g_col, k_col = half * 256 + lane % 16 * 16, half * 128 + lane % 8 * 16
        g_dst, k_dst = own + g_row * 512 + g_col, own + 8192 + k_row * 256 + k_col
        q_dst = k_dst + 4096
        g_at = G.iterator.toint() + (first + I64(c * BT + g_row) * pitch) * 4 + g_col
        off = (first + I64(c * BT + k_row) * pitch) * 2 + k_col
        k_at, q_at = K.iterator.toint() + off, Q.iterator.toint() + off
        if rows >= BT:
            for i in cutlass.range_constexpr(4):
                ops.copy16_whole(g_dst, op.mad_wide(pitch, I32(8 * i), g_at), 2 * i * 512)
            for i in cutlass.range_constexpr(2):
                ops.copy16_whole(k_dst, op.mad_wide(pitch, I32(8 * i), k_at), 4 * i * 256)
                ops.copy16_whole(q_dst, op.mad_wide(pitch, I32(8 * i), q_at), 4 * i * 256)
        else:
            for i in cutlass.range_constexpr(4):
                size = op.select(g_row + 2 * i < rows, I32(16), I32(0))
                ops.copy16(g_dst, op.mad_wide(pitch, I32(8 * i), g_at), size, 2 * i * 512)
            for i in cutlass.range_constexpr(2):
                size = op.select(k_row + 4 * i < rows, I32(16), I32(0))
                ops.copy16(k_dst, op.mad_wide(pitch, I32(8 * i), k_at), size, 4 * i * 256)
                ops.copy16(q_dst, op.mad_wide(pitch, I32(8 * i), q_at), size, 4 * i * 256)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch_values(self, V, c, rows, first, sv, half, tokens, lane, pitch):
        """Values of chunk ``c``, by the warp that will multiply them."""
        if cutlass.const_expr(not self.plain_rows):
            self.fetch_value_rows(V, c, rows, first, sv, half, tokens, lane, pitch)
        elif tokens == 1:
            lane = ops.opaque(lane)
            row = lane // 8
            source = (
                V.iterator.toint()
                + (first + I64(c * BT + row) * pitch) * 2
                + half * 128
                + lane % 8 * 16
            )
            dst = sv + half * 2048 + row * 128 + ((lane % 8) ^ row) * 16
            for i in cutlass.range_constexpr(4):
                size = op.select(row + 4 * i < rows, I32(16), I32(0))
                ops.copy16(
                    dst ^ (64 * (i % 2)), op.mad_wide(pitch, I32(8 * i), source), size, 4 * i * 128
                )
            cute.arch.cp_async_commit_group()

    @cute.jit
    def middle_rows(self, sg, sk, sq, stage, s, at, tokens, half, channel, lane, active):
        """kR, qR and kC of 8 tokens in a lane's two channels; returns the sum of their gates.

        In a steep chunk right where exponents are not positive: the rows of its second half and
        the columns of its first.
        """
        layout = self.plan.layout
        gates, total = [], [F32(0.0), F32(0.0)]
        source = self.gate_source(sg, tokens, channel)
        for r in cutlass.range_constexpr(8):
            total = self.add_gates(self.load_gates(source, r), active, total)
            gates.append(tuple(total))
        if tokens == 1:
            op.store_f32x2(at + s * 512 + channel * 4, total[0], total[1], self.plan.off_sum)
        # Sums count from the middle: back from it in the first half, on from it in the second.
        middle = [op.select(tokens == 0, x, F32(0.0)) for x in total]
        k_at, q_at = sk + tokens * 2048 + channel * 2, sq + tokens * 2048 + channel * 2
        keys, queries = [], []
        wide = stage + half * layout.block_q + tokens * 1024 + lane * 4
        thin = stage + half * (BT * 128) + tokens * 1024 + lane * 4
        for r in cutlass.range_constexpr(8):
            if cutlass.const_expr(
                r % 4 == 0
            ):  # half of them at once: their latency, and not too many registers
                keys = [ops.load_shared32(k_at, (r + i) * 256) for i in range(4)]
                queries = [ops.load_shared32(q_at, (r + i) * 256) for i in range(4)]
            k, q = op.unpack(keys[r % 4]), op.unpack(queries[r % 4])
            x = [gates[r][i] - middle[i] for i in range(2)]
            up = [op.exp2(y) for y in x]
            down = [op.exp2(-y) for y in x]
            op.store32(wide ^ (r << 4), op.pack(k[0] * up[0], k[1] * up[1]), r * 128)
            op.store32(wide ^ (r << 4), op.pack(q[0] * up[0], q[1] * up[1]), layout.off_q + r * 128)
            op.store32(
                thin ^ (r << 4), op.pack(k[0] * down[0], k[1] * down[1]), layout.off_k + r * 128
            )
        return total

    @cute.jit
    def boundary_rows(self, sg, sk, sq, sp, st, stage, number, tokens, half, channel, lane, active):
        """As :meth:`middle_rows`, with Qhat and Kbar beside qR and kC, and the chunk's decay.

        Also returns whether the chunk is steep.
        """
        layout = self.plan.layout
        gates, total = [], [F32(0.0), F32(0.0)]
        source = self.gate_source(sg, tokens, channel)
        for r in cutlass.range_constexpr(8):
            total = self.add_gates(self.load_gates(source, r), active, total)
            gates.append(tuple(total))
        op.store_f32x2(st + tokens * 512 + channel * 4, op.exp2(total[0]), op.exp2(total[1]))
        middle = [op.select(tokens == 0, x, F32(0.0)) for x in total]
        steep = self.vote(number, total)
        start = op.load_f32x2(st + channel * 4)
        end = op.load_f32x2(st + channel * 4, 512)
        if tokens == 0:
            place = channel // 16 * 16 + channel // 2 % 4 * 4 + channel // 8 % 2 * 2
            op.store_f32x2(stage + place * 4, start[0] * end[0], start[1] * end[1], layout.off_e)
        k_at, q_at = sk + tokens * 2048 + channel * 2, sq + tokens * 2048 + channel * 2
        wide = stage + half * layout.block_q + tokens * 1024 + lane * 4
        thin = stage + half * (BT * 128) + tokens * 1024 + lane * 4
        near = sp + half * (BT * 128) + tokens * 1024 + lane * 4
        for r in cutlass.range_constexpr(8):
            k = op.unpack(ops.load_shared32(k_at, r * 256))
            q = op.unpack(ops.load_shared32(q_at, r * 256))
            x = [gates[r][i] - middle[i] for i in range(2)]
            up = [op.exp2(y) for y in x]
            down = [op.exp2(-y) for y in x]
            queries = [q[i] * up[i] for i in range(2)]
            columns = [k[i] * down[i] for i in range(2)]
            w_at, t_at, n_at = wide ^ (r << 4), thin ^ (r << 4), near ^ (r << 4)
            op.store32(w_at, op.pack(k[0] * up[0], k[1] * up[1]), r * 128)
            op.store32(n_at, op.pack(queries[0], queries[1]), r * 128)
            op.store32(n_at, op.pack(columns[0], columns[1]), 4096 + r * 128)
            op.store32(
                w_at, op.pack(queries[0] * start[0], queries[1] * start[1]), layout.off_q + r * 128
            )
            op.store32(
                t_at, op.pack(columns[0] * end[0], columns[1] * end[1]), layout.off_k + r * 128
            )
        return total, steep

    @cute.jit
    def apply_boundary(self, stage, sx, sv, st, steep, w, lane):
        """As :meth:`apply_middle`; W also leaves the middle token's frame, if it is not steep."""
        layout = self.plan.layout
        block = w % 2
        left = op.ldmatrix(
            self.factor(sx, w) + lane % 16 * 32 + ((lane // 16) ^ (lane % 16 // 4 % 2)) * 16
        )
        row = lane % 8 + lane // 8 % 2 * 8
        if w < 2:
            minus = [x ^ I32(-(2**31) + 2**15) for x in left]  # W is stored negated
            source = stage + block * layout.block_q
            for slab in cutlass.range_constexpr(4):
                place = source + row * 128 + (((2 * slab + lane // 16) ^ (lane % 8)) << 4)
                right = op.ldmatrix(place, transpose=True)
                ops.sync_warp()
                out = []
                for i in cutlass.range_constexpr(2):
                    by = op.load_f32x2(
                        st + (block * 64 + lane % 4 * 2) * 4, (slab * 16 + i * 8) * 4
                    )
                    by = [op.select(steep > 0, F32(1.0), x) for x in by]
                    acc = op.mma(op.zeros(), minus, right[2 * i : 2 * i + 2])
                    out += [op.pack(acc[2 * r] * by[0], acc[2 * r + 1] * by[1]) for r in range(2)]
                op.stmatrix(place, out)
        else:
            for slab in cutlass.range_constexpr(4):
                place = block * 2048 + row * 128 + (((2 * slab + lane // 16) ^ (lane % 8)) << 4)
                right = op.ldmatrix(sv + place, transpose=True)
                ops.sync_warp()
                out = []
                for i in cutlass.range_constexpr(2):
                    acc = op.mma(op.zeros(), left, right[2 * i : 2 * i + 2])
                    out += [op.pack(acc[2 * r], acc[2 * r + 1]) for r in range(2)]
                op.stmatrix(stage + place, out, layout.common)

    def vote(self, number, total):
        """:func:`.fused_ops.sync_group` of the group; whether any half of any channel is steep."""
        return ops.sync_group_below(
            number, cute.arch.fmin(total[0], total[1]), F32(STEEP_HALF * LOG2E)
        )

    @cute.jit
    def score_tile(self, stage, sp, w, lane):
        """A 16 x 8 tile of scores per warp: rows of k or q by columns 0 to 7 or 8 to 15."""
        layout = self.plan.layout
        query, right = w // 2, w % 2
        a, a_next = stage, stage + layout.block_q
        if cutlass.const_expr(self.plan.boundary):
            queries, columns, q_block = sp, sp + 4096, 2048
        else:
            queries, columns, q_block = stage + layout.off_q, stage + layout.off_k, layout.block_q
        if query > 0:
            a, a_next = queries, queries + q_block
        place = lane % 16 * 128 + (((lane // 16) ^ (lane % 8)) << 4)
        a, a_next = a + place, a_next + place
        b = columns + (right * 8 + lane % 8) * 128 + (((lane // 8) ^ (lane % 8)) << 4)
        even, odd = op.zeros(), op.zeros()
        for channels in cutlass.range_constexpr(0, HEAD, 32):
            side, x = channels // 64, channels % 64 * 2
            rows = a_next if side else a
            cols = op.ldmatrix(b ^ x, side * (BT * 128))
            even = op.mma(even, op.ldmatrix(rows ^ x), cols[:2])
            odd = op.mma(odd, op.ldmatrix(rows ^ (x + 32)), cols[2:])
        return [even[i] + odd[i] for i in range(4)]

    @cute.jit
    def keep_scores(self, tile, stage, sl, sb, scale, w, lane):
        """What a warp's tile holds on and below the diagonal: L in fp32, Aqk in the stage."""
        layout = self.plan.layout
        query, right = w // 2, w % 2
        col = right * 8 + lane % 4 * 2
        for i in cutlass.range_constexpr(2):
            r, x, y = lane // 4 + 8 * i, tile[2 * i], tile[2 * i + 1]
            if query > 0:
                by = self.output_scale(sb, r, scale)
                x = op.select(col <= r, x * by, F32(0.0))
                y = op.select(col < r, y * by, F32(0.0))
                piece = (col // 8) ^ (r // 4 % 2)
                op.store32(stage + r * 32 + piece * 16 + col % 8 * 2, op.pack(x, y), layout.off_a)
            else:
                beta = self.write_strength(sb, r)
                x = op.select(col < r, x * beta, F32(0.0))
                y = op.select(col + 1 < r, y * beta, F32(0.0))
                op.store_f32x2(sl + (r * LOWER_PITCH + col) * 4, x, y)

    @cute.jit
    def apply_middle(self, stage, sx, sv, w, lane):
        """W over kR (warps 0, 1) and U (warps 2, 3), each warp 64 columns."""
        layout = self.plan.layout
        is_u, block = w // 2, w % 2
        source = op.select(is_u > 0, sv + block * 2048, stage + block * layout.block_q)
        target = op.select(is_u > 0, stage + (layout.common + block * 2048), source)
        sign = op.select(is_u > 0, I32(0), I32(-(2**31) + 2**15))  # W is stored negated
        left = op.ldmatrix(
            self.factor(sx, w) + lane % 16 * 32 + ((lane // 16) ^ (lane % 16 // 4 % 2)) * 16
        )
        left = [x ^ sign for x in left]
        row = lane % 8 + lane // 8 % 2 * 8
        for slab in cutlass.range_constexpr(4):
            place = row * 128 + (((2 * slab + lane // 16) ^ (lane % 8)) << 4)
            right = op.ldmatrix(source + place, transpose=True)
            ops.sync_warp()
            out = []
            for i in cutlass.range_constexpr(2):
                acc = op.mma(op.zeros(), left, right[2 * i : 2 * i + 2])
                out += [op.pack(acc[2 * r], acc[2 * r + 1]) for r in range(2)]
            op.stmatrix(target + place, out)

    def factor(self, sx, w):
        """Where X diag(beta) lies that a warp multiplies by: keys not normalised, U has its own."""
        if not self.options.l2norm:
            return sx
        return op.select(w > 1, sx - SECOND_X, sx)

    def substitute(self, sl, sx, sb, lane):
        """X diag(beta) of one 16 x 16 block by exact forward substitution, a lane a column, twice.

        With l2norm the second lane of a column leaves it for values, the first for keys.
        """
        col = lane % 16
        x = [op.select(col == 0, F32(1.0), F32(0.0))]
        for i in range(1, 16):
            row = []
            for k in range(0, i, 4):
                row += op.load_f32x4(sl, (i * LOWER_PITCH + k) * 4)
            value = op.select(col == i, F32(1.0), F32(0.0))
            for k in range(i):
                value = op.fma(row[k], -x[k], value)
            x.append(value)
        beta = op.load_f32(sb + col * 4)
        if self.options.l2norm:
            rho = ops.rsqrt(self.square(sb, col, 0))
            beta = beta * op.select(lane < 16, rho * rho, rho)
            sx = op.select(lane < 16, sx, sx - SECOND_X)
        for i in range(16):
            scaled = x[i] * beta
            place = i * 32 + ((col // 8) ^ (i // 4 % 2)) * 16 + col % 8 * 2
            op.store_bf16(sx + place, scaled)
