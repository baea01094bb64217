"""Steep chunks of the fused kernel: gates so strong that the middle frame cannot hold them.

A chunk is steep if a half decays below e^STEEP_HALF in any channel; all warps of a building
warpgroup vote on it.  Its scores are made of two products without a large exponent,

* second half by first, both anchored at the middle between them, where no exponent is positive;
* inside a half, anchored at the middle of that, with gates floored so that none is above 80,

and it goes into the ring in the frame of its own start: Qhat = q e^b, Kbar = k e^(b_16 - b),
W = X diag(beta) k e^b.  The scan then needs a second decay, e^b_16, between what the chunk reads
and what it adds.  Nothing here runs, and next to nothing is paid, where no chunk is steep.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates.kda_prefill.kernel.fused_load import Load
from candidates.kda_prefill.kernel.fused_plan import BT, FusedPlan
from candidates.kda_prefill.kernel.steep_plan import RUN, RUN_FLOOR, SINGLE_FLOOR

__all__ = ["Steep"]

F32, I32 = op.F32, op.I32
LOG2E = math.log2(math.e)


class Steep(Load):
    """The part of the fused kernel that builds steep chunks.

    A lane has two channels of 8 tokens throughout.
    """

    plan: FusedPlan
    score_tile: Any  # of Build, as the next
    keep_scores: Any

    @cute.jit
    def steep_chunk(
        self, G, sg, sk, sq, sp, st, stage, s, sums, at, h, sl, sb, scale, number, mine,
        channel, tokens, half, w, lane, rank, share,
    ):  # fmt: skip
        """L, Aqk, Khat, Qhat, Kbar and decay, from the inputs and operands anchored at the middle.

        ``mine`` is the sum of the gates of the warp's half, of a lane's two channels from
        ``channel`` on.
        """
        tokens, half, lane = (op.anew(x, lane) for x in (tokens, half, lane))
        op.store_f32x2(st + tokens * 512 + channel * 4, mine[0], mine[1])
        across = self.score_tile(stage, sp, w, lane)
        ops.sync_group(number)
        lane = op.anew(lane, lane)
        active = self.gate_constants(G, h, half * 64 + lane * 2)
        self.half_rows(sg, sk, sq, stage, sp, tokens, half, lane, active)
        ops.sync_group(number)
        lane = op.anew(lane, lane)
        inside = self.score_tile(stage, sp, w, lane)
        # Rows 0 to 7 and 8 to 15 of a tile of 8 columns: one of the two lies inside a half.
        own = [op.select(w % 2 == i // 2, inside[i], across[i]) for i in range(4)]
        self.keep_scores(own, stage, sl, sb, scale, w, lane)
        ops.sync_group(number)
        lane = op.anew(lane, lane)
        active = self.gate_constants(G, h, half * 64 + lane * 2)
        self.boundary_form(
            sg, sk, sq, st, stage, s, sums, at, tokens, half, lane, active, rank, share
        )

    def half_rows(self, sg, sk, sq, stage, sp, tokens, half, lane, active):
        """kR, qR and kC of 8 tokens, anchored behind the fourth of them."""
        source = self.gate_source(sg, tokens, half * 64 + lane * 2)
        places = self.places(sk, sq, stage, tokens, half, lane)
        if self.plan.boundary:
            near = sp + half * (BT * 128) + tokens * 1024 + lane * 4
            places[3:] = [(near, 0), (near, 4096)]
        for after in (False, True):
            # Outward from the anchor: 4, 5, 6, 7 and 3, 2, 1, 0, of which 3 is at 0 itself.
            rows = range(4, 8) if after else range(3, -1, -1)
            steps = range(4, 8) if after else range(3, 0, -1)
            gates, total = {}, [F32(0.0), F32(0.0)]
            for r in steps:
                g = self.gates(self.load_gates(source, r), active)
                gates[r] = [cute.arch.fmax(x, SINGLE_FLOOR) for x in g]
                total = [total[i] + gates[r][i] for i in range(2)]
            floor = [op.select(total[i] < RUN, F32(RUN_FLOOR), F32(SINGLE_FLOOR)) for i in range(2)]
            x = [F32(0.0), F32(0.0)]
            sign = LOG2E if after else -LOG2E
            for r in rows:
                step = gates.get(r if after else r + 1)
                if step is not None:
                    x = [
                        op.fma(cute.arch.fmax(step[i], floor[i]), F32(sign), x[i]) for i in range(2)
                    ]
                self.put(places, r, [op.exp2(y) for y in x], [op.exp2(-y) for y in x])

    @cute.jit
    def tell_sums(self, at, s, sums, half, lane, rank, share):
        """The sums of a second half are there: say so to who builds the next chunk; one warp.

        In a pair it is the other CTA, which is sent them.
        """
        if share > 0:
            there = ops.in_cta(sums + 8 * s, rank ^ 1)
            place = at + s * 512 + half * 256 + lane * 8 + self.plan.off_sum
            x, y = op.load_f32x2(place)
            if lane == 0:
                ops.bar_expect_in(there, 32 * 8)
            ops.sync_warp()
            ops.send_f32x2(ops.in_cta(place, rank ^ 1), x, y, there)
        else:
            with cute.arch.elect_one():
                ops.bar_arrive(sums + 8 * s)

    @cute.jit
    def boundary_form(
        self, sg, sk, sq, st, stage, s, sums, at, tokens, half, lane, active, rank, share
    ):  # fmt: skip
        """Khat, Qhat and Kbar of 8 tokens, each from an exponent of its own, at most 0; the
        chunk's decay; and 0 as the sum that the next chunk asks for."""
        channel = half * 64 + lane * 2
        source = self.gate_source(sg, tokens, channel)
        head, tail = op.load_f32x2(st + channel * 4), op.load_f32x2(st + channel * 4, 512)
        if tokens == 1:
            place = channel // 16 * 16 + channel // 2 % 4 * 4 + channel // 8 % 2 * 2
            whole = [op.exp2(head[i] + tail[i]) for i in range(2)]
            if cutlass.const_expr(self.plan.boundary):
                op.store_f32x2(stage + place * 4, whole[0], whole[1], self.plan.layout.off_e)
            else:
                here = at + s * 512
                op.store_f32x2(here + place * 4, whole[0], whole[1], self.plan.off_end)
                op.store_f32x2(here + channel * 4, F32(0.0), F32(0.0), self.plan.off_sum)
                ops.sync_warp()
                self.tell_sums(at, s, sums, half, lane, rank, share)
        before = [op.select(tokens == 0, F32(0.0), x) for x in head]
        after = [op.select(tokens == 0, head[i] + tail[i], tail[i]) for i in range(2)]
        places = self.places(sk, sq, stage, tokens, half, lane)
        total = [F32(0.0), F32(0.0)]
        for r in cutlass.range_constexpr(8):
            total = self.add_gates(self.load_gates(source, r), active, total)
            up = [op.exp2(before[i] + total[i]) for i in range(2)]
            down = [op.exp2(after[i] - total[i]) for i in range(2)]
            self.put(places, r, up, down)

    def places(self, sk, sq, stage, tokens, half, lane):
        """Of the lane's first key and query; then, with offsets, of what is made of them: rows of
        k, rows of q and columns in the stage."""
        layout = self.plan.layout
        row = tokens * 1024 + lane * 4
        wide, thin = stage + half * layout.block_q + row, stage + half * (BT * 128) + row
        inputs = [x + tokens * 2048 + half * 128 + lane * 4 for x in (sk, sq)]
        return [*inputs, (wide, 0), (wide, layout.off_q), (thin, layout.off_k)]

    def put(self, places, r, up, down):
        """Token r of the warp's: keys and queries by ``up``, keys by ``down``."""
        k, q = (op.unpack(ops.load_shared32(x, r * 256)) for x in places[:2])
        for (at, offset), x, by in zip(places[2:], (k, q, k), (up, up, down), strict=True):
            value = op.pack(x[0] * by[0], x[1] * by[1])
            op.store32(at ^ (r << 4), value, offset + r * 128)
