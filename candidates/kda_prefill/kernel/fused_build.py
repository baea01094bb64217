"""The building warpgroups of the fused kernel: chunks into the ring, as the scan wants them.

A warp scales 8 tokens x 64 channels from inputs that it fetched itself a turn ahead.  Products are
mma.sync on bf16 with fp32 sums; X comes from exact 8 x 8 blocks in fp32, merged in tf32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import LOG2E
from candidates._delta_rule.kernel.image import HEAD
from candidates.kda_prefill.kernel.fused_exact import AS_GUESSED, OWN
from candidates.kda_prefill.kernel.fused_load import copy16_once
from candidates.kda_prefill.kernel.fused_plan import (
    BT,
    LOWER_PITCH,
    SCAN_WARPS,
    FusedPlan,
)
from candidates.kda_prefill.kernel.fused_steep import Steep
from candidates.kda_prefill.kernel.steep_plan import STEEP_HALF

__all__ = ["Build"]

F32, I32, I64 = op.F32, op.I32, op.I64

SECOND_X = 2048 - 4 * BT * LOWER_PITCH
"""Bytes in front of X, behind L, where that for U lies if keys are normalised here."""


class Builder(NamedTuple):
    """What stays the same through a job, for a thread of a building warpgroup.

    Attributes
    ----------
    h, row, end, first, pitch, count
        Head, first row and the sequence's last, element of the first row and from row to row,
        chunks.
    own, full, empty, sums
        Addresses: of what the group has of shared memory, and of barriers, one a stage.
    group, w, tokens, half, lane
        Group, warp of it, which 8 tokens and 64 channels the warp scales, lane of it.
    channel, first_channel
        The first of the two channels that the thread sums, and of those that it scales.
    rank, turn
        Which CTA of the pair; from one of the group's chunks to the next.
    share
        Whether each chunk is made for both CTAs of the pair, which build in turns.
    """

    h: Any
    row: Any
    end: Any
    first: Any
    pitch: Any
    count: Any
    own: Any
    full: Any
    empty: Any
    sums: Any
    group: Any
    w: Any
    tokens: Any
    half: Any
    lane: Any
    channel: Any
    first_channel: Any
    rank: Any
    turn: Any
    share: Any


class Build(Steep):
    """The part of the fused kernel that makes W, U, Q, K, Aqk and the decay of chunks."""

    plan: FusedPlan
    await_choice: Any  # of Exact, as the others
    begin_again: Any
    get_job: Any

    @cute.jit
    def build(self, Q, K, V, G, B, scale, at, H, rank, warp_id, lane, number, share):
        """One of the building warpgroups: its turns among the chunks of a job.

        ``share`` is 1 for a job of the pair.  One code for both, because what a CTA comes to late
        is fetched from device memory, instruction by instruction.

        A CTA alone goes on in the ring where its last piece ended, and so do the groups; in a pair
        each builds of every second chunk.  Chunk ``count`` is virtual: it only carries the last
        decay.

        Of a piece that is a guess it is not decided yet whether this is what the CTA does: each
        group builds its first chunk, and then asks.
        """
        _, h, row0, end, start, count, _, _, guessed, _, _, place = self.get_job(at, number)
        lane = own_lane(lane)
        row = row0 + start * BT
        groups = self.plan.groups
        w = warp_id % 4
        group = warp_id // 4 - SCAN_WARPS // 4
        tokens, half = w // 2, w % 2  # 8 tokens x 64 channels; a lane two channels
        own = at + (self.plan.off_group + group * self.plan.size_group)
        sv = own + 16384
        full, empty, sums = (at + (self.plan.off_bar + 8 * self.plan.stages * i) for i in range(3))
        channel = first_channel = half * 64 + lane * 2
        if cutlass.const_expr(not self.plan.boundary):
            first_channel = half * 64 + lane % 16 * 4
            channel = first_channel + lane // 16 * 2

        pitch = H * HEAD
        first = (I64(row) * H + h) * HEAD
        if cutlass.const_expr(not self.plain_rows):
            first, pitch = self.origin(K, G, row, h)
        turn, c0 = (
            I32(groups),
            I32(group * 2 + rank),
        )  # from one of its chunks to the next; the first
        if share > 0:
            turn, place, guessed = I32(2 * groups), I32(0), I32(0)
        else:
            c0 = group - place % groups
            if c0 < 0:
                c0 = c0 + groups
        cursor = self.cursor(Q, K, V, G, c0, first, tokens, half, lane, pitch)
        rows = end - row - c0 * BT
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)  # nothing is on its way to where the next copies go
        if c0 < count:
            self.fetch(Q, K, G, c0, rows, first, own, tokens, half, lane, pitch, cursor)
            if w == 0:
                beta = self.strengths(B, row + c0 * BT, min(rows, BT), h, lane)
                self.put_strengths(own + 23040, beta, lane)
        cute.arch.cp_async_commit_group()
        if c0 < count and tokens == 1:
            self.fetch_values(V, c0, rows, first, sv, half, lane, pitch, cursor)
        cute.arch.cp_async_commit_group()
        if share > 0:  # with inputs on their way
            self.begin_again(at, warp_id, lane, number)
        b = Builder(
            h, row, end, first, pitch, count, own, full, empty, sums, group, w, tokens, half, lane,
            channel, first_channel, rank, turn, share,
        )  # fmt: skip
        # Chunk, stage, and how often the ring went round, mod 2.
        c, s = c0, (place + c0) % self.plan.stages
        parity = (place + c0) // self.plan.stages % 2
        stop = count
        if cutlass.const_expr(not self.guesses):
            while c < stop:
                c, s, parity, cursor = self.chunk(Q, K, V, G, B, scale, at, b, c, s, parity, cursor)
        else:
            more, asks = I32(1), I32(0)
            if guessed > 0:
                stop, asks = min(c0 + 1, count), I32(1)
            while more > 0:  # once, or twice: the loop inside is to know nothing of it
                while c < stop:
                    c, s, parity, cursor = self.chunk(
                        Q, K, V, G, B, scale, at, b, c, s, parity, cursor
                    )
                more = asks
                if asks > 0:
                    stop, asks = count, I32(0)
                    if self.await_choice(at) % OWN != AS_GUESSED:
                        stop = I32(-1)
        if c == stop:
            ops.bar_wait(b.empty + 8 * s, parity ^ 1)
            if cutlass.const_expr(not self.plan.boundary):
                if tokens == 0:
                    self.put_decay(at, b, c, s, parity, [F32(0.0), F32(0.0)])
                elif share == 0 and lane == 0:  # nobody asks, but each turn of the ring counts
                    ops.bar_arrive(b.sums + 8 * s)
            self.publish(b, s)
            if share > 0:
                self.send_chunk(at, b, s)

    @cute.jit
    def chunk(self, Q, K, V, G, B, scale, at, b, c, s, parity, cursor):
        """Chunk ``c`` into stage ``s``; returns ``c, s, parity, cursor`` of the builder's next."""
        plan = self.plan
        tokens, half, w, lane = b.tokens, b.half, b.w, b.lane
        sg, sk, sq, sv = (b.own + x for x in (0, 8192, 12288, 16384))
        sl, sx, sb = (b.own + x for x in (20480, 22528, 23040))
        sp = b.own + 23552  # boundary frame only: qR and kC
        st = b.own + (23552 + 8192 * plan.boundary)  # sums of halves, or exponentials of them
        number = b.group + 1
        stage = at + s * plan.stage
        # Who lets a stage go has seen the chunk behind it: its gate sums are not needed any more.
        ops.bar_wait(b.empty + 8 * s, parity ^ 1)
        width = 2 if plan.boundary else 4
        active = self.gate_constants(G, b.h, b.first_channel, width)
        cute.arch.cp_async_wait_group(1)  # all but the values
        ops.sync_warp()
        if cutlass.const_expr(self.options.raw_gate):
            self.blank(sg, b.end - b.row - c * BT, tokens, half, lane)
        if cutlass.const_expr(self.options.l2norm):
            self.squares(sk, sq, sb, tokens, half, lane)
        if cutlass.const_expr(plan.boundary):
            mine, steep = self.boundary_rows(
                sg, sk, sq, sp, st, stage, number, tokens, half, b.channel, lane, active
            )
            ops.sync_group(number)
        else:
            mine = self.middle_rows(sg, sk, sq, stage, s, at, tokens, half, b.channel, lane, active)
            steep = self.vote(number, mine)
        if cutlass.const_expr(not plan.boundary):
            op.store32(at + s * 16, steep, plan.off_steep)  # the same from everybody
        by = self.row_factors(at, s, sb, scale, w, lane)
        if steep > 0:
            self.steep_chunk(
                G, sg, sk, sq, sp, st, stage, s, b.sums, at, b.h, sl, sb, by, number, mine,
                b.channel, tokens, half, w, lane, b.rank, b.share,
            )  # fmt: skip
            mine = [F32(0.0), F32(0.0)]  # its state is held at its start
        else:
            if cutlass.const_expr(not plan.boundary):
                if tokens == 1:
                    self.tell_sums(at, s, b.sums, half, lane, b.rank, b.share)
            if cutlass.const_expr(not self.plain_rows):
                tile = self.score_tile(stage, sp, w, lane)
                self.keep_scores(tile, stage, sl, sb, by, w, lane)
        # The inputs are read: the next ones.  Before the scores, where registers allow it:
        # a turn is short for what comes from device memory.
        ops.sync_warp()
        later, beta = c + b.turn, self.no_strength
        rows = b.end - b.row - later * BT
        if cutlass.const_expr(self.plain_rows):
            step = I64(b.pitch) * (2 * BT * b.turn)
            cursor = (cursor[0] + 2 * step, cursor[1] + step, *cursor[2:])
        if later < b.count:
            self.fetch(Q, K, G, later, rows, b.first, b.own, tokens, half, lane, b.pitch, cursor)
            if w == 0:
                beta = self.strengths(B, b.row + later * BT, min(rows, BT), b.h, lane)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.plain_rows):
            if steep == 0:
                tile = self.score_tile(stage, sp, w, lane)
                self.keep_scores(tile, stage, sl, sb, by, w, lane)
        ops.sync_group(number)
        if w == b.group:  # not the same one in each group: it weighs on one scheduler
            self.invert(sl, sx, sb, lane)
        if cutlass.const_expr(not plan.boundary):
            if tokens == 0:
                self.put_decay(at, b, c, s, parity, mine)
        by = self.write_strengths(sb, w, lane)  # before the next chunk's may replace them
        cute.arch.cp_async_wait_group(1)  # the values
        ops.sync_group(number)
        if cutlass.const_expr(
            not self.plain_rows or plan.boundary
        ):  # not held any longer: registers are short
            if w == 0:
                self.put_strengths(sb, beta, lane)
        if cutlass.const_expr(plan.boundary):
            self.apply_boundary(stage, sx, sv, st, steep, by, w, lane)
        else:
            self.apply_middle(stage, sx, sv, by, w, lane)
        self.publish(b, s)
        if cutlass.const_expr(self.plain_rows and not plan.boundary):
            if w == 0:  # who reads the last ones is behind the group's last barrier
                self.put_strengths(sb, beta, lane)
        if later < b.count and tokens == 1:
            self.fetch_values(V, later, rows, b.first, sv, half, lane, b.pitch, cursor)
        cute.arch.cp_async_commit_group()
        if b.share > 0:
            self.send_chunk(at, b, s)
        c = later
        s = s + b.turn
        if s >= plan.stages:
            s = s - plan.stages
            parity = parity ^ 1
        return c, s, parity, cursor

    def put_strengths(self, sb, beta, lane):
        """Leave what :meth:`.fused_load.Load.strengths` gave to the group; there is room for 32."""
        op.store_f32(sb + lane * 4, self.activated(beta))

    def once_more(self, lane):
        """:func:`own_lane` where the addresses that it makes are not worth a register beyond their
        use: with three builders, which have few."""
        return own_lane(lane) if self.plan.builders == 3 else lane

    @cute.jit
    def put_decay(self, at, b, c, s, parity, mine):
        """The decay from the last chunk's middle to this one's; ``mine`` is the sum of the first
        half.  Warps of a first half."""
        total = mine
        if c > 0:
            before, before_parity = s - 1, parity
            if s == 0:
                before, before_parity = I32(self.plan.stages - 1), parity ^ 1
            ops.bar_wait(b.sums + 8 * before, before_parity)
            last = op.load_f32x2(at + before * 512 + b.channel * 4, self.plan.off_sum)
            total = [total[i] + last[i] for i in range(2)]
        x = ops.opaque(b.channel)  # not worth a register
        place = (x & 112) + (x & 6) * 2 + (x >> 2 & 2)
        stage = at + s * self.plan.stage
        op.store_f32x2(
            stage + place * 4, op.exp2(total[0]), op.exp2(total[1]), self.plan.layout.off_e
        )

    @cute.jit
    def publish(self, b, s):
        """Let the scan have stage ``s``."""
        ops.fence_async()
        ops.sync_warp()
        if b.lane == 0:
            ops.bar_arrive(b.full + 8 * s)

    @cute.jit
    def send_chunk(self, at, b, s):
        """Let the scan of the other CTA have stage ``s``."""
        ops.sync_group(b.group + 1)  # the whole chunk is there
        if b.lane == 0:
            self.send_quarter(at, s, b.full, b.rank ^ 1, b.w)
        ops.sync_warp()

    def cursor(self, Q, K, V, G, c, first, tokens, half, lane, pitch):
        """Addresses of a lane's first 16 bytes of gates and keys of chunk ``c``, and how far from
        those of the keys queries and values are; plain rows only.

        Keys, queries and values lie alike, but values are those of all tokens.
        """
        if not self.plain_rows:
            return ()
        first = first + I64(c * BT) * pitch
        g_at = (first + I64(tokens * 8 + lane // 16) * pitch) * 4 + (half * 256 + lane % 16 * 16)
        k_at = (first + I64(tokens * 8 + lane // 8) * pitch) * 2 + (half * 128 + lane % 8 * 16)
        keys = K.iterator.toint()
        return (
            G.g.iterator.toint() + g_at,
            keys + k_at,
            Q.iterator.toint() - keys,
            V.iterator.toint() - keys - I64(pitch) * (8 * 2),
        )

    @cute.jit
    def send_quarter(self, at, s, full, other, w):
        """Send a finished chunk to the other CTA; one thread of each warp, a quarter each.

        And what else the scan reads of a stage: one of these things by each of three warps.
        """
        there = ops.in_cta(full + 8 * s, other)
        part = self.plan.stage // 4
        source = at + s * self.plan.stage + w * part
        more = []  # (source, bytes) by warps 0, 1, 2
        if cutlass.const_expr(not self.plan.boundary):
            more += [(at + (s * 16 + self.plan.off_steep), 16)]
            more += [(at + (s * 512 + self.plan.off_end), 4 * HEAD)]
        if cutlass.const_expr(self.plan.scales):
            more += [(at + (s * 4 * BT + self.plan.off_scale), 4 * BT)]
        for i, (place, size) in enumerate(more):
            if w == i:
                ops.bar_expect_in(there, part + size)
                ops.send(ops.in_cta(place, other), place, size, there)
        if w >= len(more):
            ops.bar_expect_in(there, part)
        ops.send(ops.in_cta(source, other), source, part, there)

    @cute.jit
    def fetch(self, Q, K, G, c, rows, first, own, tokens, half, lane, pitch, cursor):
        """Gates, keys and queries of chunk ``c``, of which ``rows`` are left; the rest are 0.

        A warp copies what it alone will read, in pieces of 16 bytes.
        """
        if cutlass.const_expr(not self.plain_rows):
            self.fetch_rows(Q, K, G, c, rows, first, own, tokens, half, lane, pitch)
        else:
            g_at, k_at, to_q, _ = cursor
            lane = ops.opaque(lane)  # targets are found anew each time: registers are short
            # Shifts: of an opaque number it is not known that it is not negative.
            g_row, k_row = tokens * 8 + (lane >> 4), tokens * 8 + (lane >> 3)
            g_dst = own + g_row * 512 + (half * 256 + (lane & 15) * 16)
            k_dst = own + 8192 + k_row * 256 + (half * 128 + (lane & 7) * 16)
            step = I64(pitch) * 8
            if rows >= BT:
                for i in cutlass.range_constexpr(4):
                    copy16_once(g_dst, g_at + step * i, 2 * i * 512)
                for i in cutlass.range_constexpr(2):
                    ops.copy16_whole(k_dst, k_at + step * i, 4 * i * 256)
                    ops.copy16_whole(k_dst, k_at + to_q + step * i, 4096 + 4 * i * 256)
            else:
                for i in cutlass.range_constexpr(4):
                    size = op.select(g_row + 2 * i < rows, I32(16), I32(0))
                    copy16_once(g_dst, g_at + step * i, 2 * i * 512, size)
                for i in cutlass.range_constexpr(2):
                    size = op.select(k_row + 4 * i < rows, I32(16), I32(0))
                    ops.copy16(k_dst, k_at + step * i, size, 4 * i * 256)
                    ops.copy16(k_dst, k_at + to_q + step * i, size, 4096 + 4 * i * 256)

    @cute.jit
    def fetch_values(self, V, c, rows, first, sv, half, lane, pitch, cursor):
        """Values of chunk ``c``, by the warp that will multiply them."""
        if cutlass.const_expr(not self.plain_rows):
            self.fetch_value_rows(V, c, rows, first, sv, half, lane, pitch)
        else:
            v_at = cursor[1] + cursor[3]
            lane = ops.opaque(lane)
            row = lane >> 3
            dst = sv + half * 2048 + row * 128 + ((lane & 7) ^ row) * 16
            for i in cutlass.range_constexpr(4):
                size = op.select(row + 4 * i < rows, I32(16), I32(0))
                ops.copy16(dst ^ (64 * (i % 2)), v_at + I64(pitch) * (8 * i), size, 4 * i * 128)

    @cute.jit
    def middle_rows(self, sg, sk, sq, stage, s, at, tokens, half, channel, lane, active):
        """kR, qR and kC of a warp's 8 tokens; returns the gate sums of a lane's two channels.

        A lane scales 4 tokens x 4 channels: half as many accesses to shared memory as with two
        channels, for four exchanges with the lane that has the other tokens.
        """
        lane = self.once_more(lane)
        layout = self.plan.layout
        # Addresses are a warp's own number and one of the lane, which is exchanged by pieces alone.
        late, quad = lane // 16, lane % 16
        gates, own = [], [F32(0.0) for _ in range(4)]
        inside = late * 1024 + quad * 8
        source = sg + (tokens * 2048 + half * 128) * (self.options.gate_bytes // 2)
        source = source + inside * (self.options.gate_bytes // 2)
        for r in cutlass.range_constexpr(4):
            own = self.add_gates(self.load_gates(source, r, 4), active, own)
            gates.append(tuple(own))
        other = [cute.arch.shuffle_sync_bfly(x, offset=16) for x in own]
        both = [own[i] + other[i] for i in range(4)]
        total = [op.select(late > 0, both[2 + i], both[i]) for i in range(2)]
        if tokens == 1:
            op.store_f32x2(at + s * 512 + channel * 4, total[0], total[1], self.plan.off_sum)
        # Sums count from the middle: back from it in the first half, on from it in the second.
        shift = []
        for i in cutlass.range_constexpr(4):
            back = op.select(late > 0, own[i], both[i])
            on = op.select(late > 0, other[i], F32(0.0))
            shift.append(op.select(tokens == 0, -back, on))
        if cutlass.const_expr(self.options.gate == "safe"):
            again = ops.opaque(lane)  # found anew: what activates gates holds registers
            late, quad = again >> 4, again & 15
            inside = late * 1024 + quad * 8
        k_at = sk + (tokens * 2048 + half * 128) + inside
        q_at = k_at + (sq - sk)
        place = late * 512 + ((quad * 8) ^ (late * 64))
        wide = stage + (half * layout.block_q + tokens * 1024)
        thin = stage + (half * (BT * 128) + tokens * 1024)
        keys, queries = [], []
        for r in cutlass.range_constexpr(4):
            if cutlass.const_expr(r % 2 == 0):  # of two tokens at once: latency, and registers
                keys = [ops.load_shared64(k_at, (r + i) * 256) for i in range(2)]
                queries = [ops.load_shared64(q_at, (r + i) * 256) for i in range(2)]
            k, q = (
                [x for word in words[r % 2] for x in op.unpack(word)] for words in (keys, queries)
            )
            x = [gates[r][i] + shift[i] for i in range(4)]
            up = [op.exp2(y) for y in x]
            down = [op.exp2(-y) for y in x]
            there, column = wide + (place ^ (r << 4)), thin + (place ^ (r << 4))
            pairs = lambda a, b: [op.pack(a[i] * b[i], a[i + 1] * b[i + 1]) for i in (0, 2)]
            ops.store_shared64(there, pairs(k, up), r * 128)
            ops.store_shared64(there, pairs(q, up), layout.off_q + r * 128)
            ops.store_shared64(column, pairs(k, down), layout.off_k + r * 128)
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
    def apply_boundary(self, stage, sx, sv, st, steep, strengths, w, lane):
        """As :meth:`apply_middle`; W also leaves the middle token's frame, if it is not steep."""
        layout = self.plan.layout
        block = w % 2
        left = op.ldmatrix(
            self.factor(sx, w) + lane % 16 * 32 + ((lane // 16) ^ (lane % 16 // 4 % 2)) * 16
        )
        row = lane % 8 + lane // 8 % 2 * 8
        if w < 2:
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
                    acc = op.mma(op.zeros(), left, right[2 * i : 2 * i + 2])
                    for r in cutlass.range_constexpr(2):
                        own = [strengths[r] * x for x in by]
                        out.append(op.pack(acc[2 * r] * own[0], acc[2 * r + 1] * own[1]))
                op.stmatrix(place, out)
        else:
            for slab in cutlass.range_constexpr(4):
                place = block * 2048 + row * 128 + (((2 * slab + lane // 16) ^ (lane % 8)) << 4)
                right = op.ldmatrix(sv + place, transpose=True)
                ops.sync_warp()
                out = []
                for i in cutlass.range_constexpr(2):
                    out += times(op.mma(op.zeros(), left, right[2 * i : 2 * i + 2]), strengths)
                op.stmatrix(stage + place, out, layout.common)

    def vote(self, number, total):
        """``ops.sync_group`` of the group; whether any half of any channel is steep."""
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
        # Pieces of a row are exchanged in the lane's part of an address alone.
        place = lane % 16 * 128 + (((lane // 16) ^ (lane % 8)) << 4)
        b = columns + right * 1024
        column = lane % 8 * 128 + (((lane // 8) ^ (lane % 8)) << 4)
        even, odd = op.zeros(), op.zeros()
        for channels in cutlass.range_constexpr(0, HEAD, 32):
            side, x = channels // 64, channels % 64 * 2
            rows = a_next if side else a
            cols = op.ldmatrix(b + (column ^ x), side * (BT * 128))
            even = op.mma(even, op.ldmatrix(rows + (place ^ x)), cols[:2])
            odd = op.mma(odd, op.ldmatrix(rows + (place ^ (x + 32))), cols[2:])
        return [even[i] + odd[i] for i in range(4)]

    @cute.jit
    def keep_scores(self, tile, stage, sl, sb, by, w, lane):
        """What a warp's tile holds on and below the diagonal: L in fp32, Aqk in the stage.

        ``by`` comes from :meth:`row_factors`.
        """
        lane = self.once_more(lane)
        layout = self.plan.layout
        query, right = w // 2, w % 2
        col = right * 8 + lane % 4 * 2
        for i in cutlass.range_constexpr(2):
            r, x, y = lane // 4 + 8 * i, tile[2 * i], tile[2 * i + 1]
            if query > 0:
                scale = by[i] if self.options.l2norm else by
                x = op.select(col <= r, x * scale, F32(0.0))
                y = op.select(col < r, y * scale, F32(0.0))
                piece = (col // 8) ^ (r // 4 % 2)
                op.store32(stage + r * 32 + piece * 16 + col % 8 * 2, op.pack(x, y), layout.off_a)
            else:
                beta = by if self.options.l2norm else op.load_f32x2(sb + col * 4)
                x = op.select(col < r, x * beta[0], F32(0.0))
                y = op.select(col + 1 < r, y * beta[1], F32(0.0))
                op.store_f32x2(sl + (r * LOWER_PITCH + col) * 4, x, y)

    @cute.jit
    def apply_middle(self, stage, sx, sv, strengths, w, lane):
        """W over kR (warps 0, 1) and U (warps 2, 3), each warp 64 columns.

        ``strengths`` comes from :meth:`.fused_load.Load.write_strengths`.
        """
        layout = self.plan.layout
        is_u, block = w // 2, w % 2
        source = op.select(is_u > 0, sv + block * 2048, stage + block * layout.block_q)
        target = op.select(is_u > 0, stage + (layout.common + block * 2048), source)
        left = op.ldmatrix(
            self.factor(sx, w) + lane % 16 * 32 + ((lane // 16) ^ (lane % 16 // 4 % 2)) * 16
        )
        place = lane % 16 * 128 + (((lane // 16) ^ (lane % 8)) << 4)
        slabs = [op.ldmatrix(source + (place ^ (s << 5)), transpose=True) for s in range(4)]
        ops.sync_warp()  # W replaces its source
        for slab in cutlass.range_constexpr(4):
            right, out = slabs[slab], []
            for i in cutlass.range_constexpr(2):
                out += times(op.mma(op.zeros(), left, right[2 * i : 2 * i + 2]), strengths)
            op.stmatrix(target + (place ^ (slab << 5)), out)

    def factor(self, sx, w):
        """Where X lies that a warp multiplies by: if keys are normalised here, U has its own."""
        if not self.options.l2norm:
            return sx
        return op.select(w > 1, sx - SECOND_X, sx)

    def norms(self, sb, token):
        """Of one token's key: 1 / |k|, and |k|."""
        square = self.square(sb, token, 0)
        rho = ops.rsqrt(square)
        return rho, square * rho

    def invert(self, sl, sx, sb, lane):
        """X of a chunk, (I + strictly lower(kR kC^T) diag(beta))^-1, by one warp.

        Its diagonal is 1, also in bf16: beta comes behind the product, in fp32.  With l2norm there
        are two, as keys are what they came as: W's, and diag(1 / |k|) X diag(|k|) for U.

        Two blocks of 8 x 8 by exact forward substitution, a lane a column, twice; the third is
        -X22 L21 X11 with tf32 operands.  Every intermediate is an entry of the answer, so nothing
        cancels.
        """
        lane = ops.opaque(lane)
        block, j = lane >> 3 & 1, lane & 7
        home = sl + block * (8 * LOWER_PITCH * 4 + 8 * 4)
        x = [op.select(j == 0, F32(1.0), F32(0.0))]
        for i in range(1, 8):
            row = []
            for k in range(0, i, 4):
                row += op.load_f32x4(home, (i * LOWER_PITCH + k) * 4)
            value = op.select(j == i, F32(1.0), F32(0.0))
            for k in range(i):
                value = op.fma(row[k], -x[k], value)
            x.append(value)
        # The blocks' columns in fp32, behind L, for other lanes to read.
        columns = sl + BT * LOWER_PITCH * 4
        for i in range(0, 8, 4):
            op.store_f32x4(columns + (lane & 15) * 32, x[i : i + 4], i * 4)
        ops.sync_warp()
        # The left operands' rows 8 to 15 stay 0.  The order of a summation index is free: that of
        # the second product is what the first one leaves in a lane.
        t, r = lane & 3, lane >> 2
        zero = F32(0.0)
        left = [op.load_f32(columns + 256 + t * 32 + r * 4, 128 * i) for i in range(2)]
        place = sl + (t * LOWER_PITCH + r) * 4
        right = [op.load_f32(place, (8 + 4 * i) * LOWER_PITCH * 4) for i in range(2)]
        inner = op.mma_tf32(
            op.zeros(),
            [op.to_tf32(left[0]), zero, op.to_tf32(left[1]), zero],
            [op.to_tf32(y) for y in right],
        )
        right = op.load_f32x2(columns + r * 32 + t * 8)
        out = op.mma_tf32(
            op.zeros(),
            [op.to_tf32(inner[0]), zero, op.to_tf32(inner[1]), zero],
            [op.to_tf32(y) for y in right],
        )
        ops.sync_warp()  # with l2norm, the second X replaces the columns
        target = sx
        if self.options.l2norm:
            norm = self.norms(sb, lane & 15)[1]
            for i in range(8):
                by = norm * self.norms(sb, block * 8 + i)[0]
                x[i] = x[i] * op.select(lane < 16, F32(1.0), by)
            target = op.select(lane < 16, sx, sx - SECOND_X)
        for i in range(8):
            place = (block * 8 + i) * 32 + (block ^ (i // 4)) * 16 + j * 2
            op.store_bf16(target + place, x[i])
        place = sx + r * 32 + (r >> 2) * 16 + t * 4
        self.put_corner(place, [-out[0], -out[1]])
        if self.options.l2norm:
            rho = self.norms(sb, 8 + r)[0]
            by = [rho * self.norms(sb, t * 2 + i)[1] for i in range(2)]
            self.put_corner(place - SECOND_X, [-out[i] * by[i] for i in range(2)])

    def put_corner(self, place, values):
        """Two elements of X's block below the diagonal ones, and zeros in that above them."""
        op.store32(place, op.pack(*values), 8 * 32)
        op.store32(place ^ 16, I32(0))


def times(acc, by):
    """Two rows of a product, each by its own factor, rounded to bf16."""
    return [op.pack(acc[2 * r] * by[r], acc[2 * r + 1] * by[r]) for r in range(2)]


def own_lane(lane):
    """The lane's number, which ptxas does not know to be that: it would read it anew at each
    use."""
    return op.anew(lane, lane) & 31
