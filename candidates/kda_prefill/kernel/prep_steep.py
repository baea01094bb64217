"""Scores of steep chunks in PREP: gates so strong that an anchor in the middle cannot split them.

A chunk whose window is anchored in its middle is steep if half a window decays below
e^STEEP_WINDOW in any channel; all warps vote on it.  What the anchored operands are right for,
the second half of a window against the first, is kept.  What lies inside a half is multiplied
anew, with operands that take the places of the anchored ones: halves of 16 tokens are parted once
more, and 8 tokens are anchored in their own middle, with gates floored so that no exponent is
above 80.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Activation
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import LOWEST_BOUND
from candidates._delta_rule.kernel.prep import positions
from candidates._delta_rule.kernel.tiles import HALF, LOWER_BYTES, LOWER_PITCH, TILE, twist
from candidates.kda_prefill.kernel.prep_plan import BLOCK_BYTES, GROUP, Plan
from candidates.kda_prefill.kernel.prep_scores import multiply
from candidates.kda_prefill.kernel.steep_plan import (
    RUN,
    RUN_FLOOR,
    SINGLE_FLOOR,
    STEEP_WINDOW,
)

__all__ = ["SteepScores"]

F32, I64 = op.F32, op.I64
LOG2E = math.log2(math.e)


class SteepScores(Activation):
    """The part of PREP that makes the scores of steep chunks."""

    plan: Plan

    def vote(self, base, group, channel, total):
        """Leave a mark for everybody behind the next barrier if half a window is steep.

        ``total`` is the sum of the gates of the lane's 8 tokens in two channels.
        """
        plan = self.plan
        if plan.steps[plan.anchored].size == 2 * TILE:
            other = op.load_f32x2(base + ((group ^ 1) * HEAD + channel) * 4, plan.off_totals)
            total = [x + y for x, y in zip(total, other, strict=True)]
        op.ptx(
            "{ .reg .pred p; setp.lt.f32 p, {$r0}, {$r1}; @p st.shared.b32 [{$r2}+"
            f"{plan.off_steep}], 1; }}",
            inputs=[cute.arch.fmin(total[0], total[1]), F32(STEEP_WINDOW * LOG2E), base],
        )

    @cute.jit
    def steep_tiles(self, Q, K, G, base, warp, lane, scale):
        """Tiles of the step that is anchored in the middle, of a steep chunk; all warps.

        Inputs are loaded and addresses made anew: held since their first use they would cost
        every chunk registers.
        """
        plan, index = self.plan, self.plan.anchored
        spec = plan.steps[index]
        base, warp, lane = (op.anew(x, lane) for x in (base, warp, lane))
        start, rows, _, head = op.load_i32x4(base, plan.off_place)
        H = Q.shape[1]
        first = (I64(start) * H + head) * HEAD
        if warp < len(spec.jobs):
            tiles = multiply(plan, index, spec.jobs, base, warp, lane)
            finish_part(plan, spec.jobs, tiles, base, warp, lane, scale, spec.size // GROUP // 2)
        for apart in cutlass.range_constexpr(spec.size // (2 * TILE), -1, -1):
            cute.arch.sync_threads()
            lane = op.anew(lane, lane)
            group, half = warp // 2, warp % 2
            channel = half * 64 + lane * 2
            active = self.gate_constants(G, head, channel)
            load = self.loader(Q, K, G.g, first + channel, H, group * GROUP, rows, active)
            targets = self.targets(base, group, half, lane)
            if cutlass.const_expr(apart == 0):
                write_inside(load, targets)
            elif group % 2 == 1:
                write_onward(load, targets[:2])
            else:
                write_up_to(load, targets[2])
            cute.arch.sync_threads()
            if warp < len(spec.jobs):
                tiles = multiply(plan, index, spec.jobs, base, warp, lane)
                finish_part(plan, spec.jobs, tiles, base, warp, lane, scale, apart)

    def targets(self, base, group, half, lane):
        """Addresses, with offsets, of the lane's first rows of k and of q and first column."""
        block = self.plan.tiles * BLOCK_BYTES
        place = base + group // 2 * BLOCK_BYTES + half * (BLOCK_BYTES // 2)
        place = place + group % 2 * (GROUP * HALF) + lane * 4
        return [(place, self.plan.buffer(self.plan.anchored) + i * block) for i in range(3)]

    def addresses(self, Q, K, G, at):
        """Of element ``at`` of g, k and q."""
        size = self.options.gate_bytes
        return [x.iterator.toint() + at * n for x, n in ((G, size), (K, 2), (Q, 2))]

    def load_row(self, addresses, H, row, rows):
        """What the gates of a lane's two channels are made of, its keys and its queries; of a row
        beyond the end what makes 0 of all."""
        g_at, k_at, q_at = addresses
        size = self.options.gate_bytes
        g_row = op.mad_wide(row, H * (size * HEAD), g_at)
        k_row, q_row = (op.mad_wide(row, H * (2 * HEAD), x) for x in (k_at, q_at))
        if size == 4:
            beyond = "0fFF800000" if self.options.raw_gate else "0f00000000"
            *gates, key, query = op.load_row(g_row, k_row, q_row, row, rows, beyond)
            return gates, key, query
        beyond = "0xFF80FF80" if self.options.raw_gate else "0x00000000"
        pair, key, query = op.load_row16(g_row, k_row, q_row, row, rows, beyond)
        return op.unpack(pair), key, query

    def loader(self, Q, K, G, at, H, row, rows, active):
        """A function that loads given ones of the 8 tokens from ``row`` on: two floored gates in
        units of log 2, two keys and two queries of each."""
        addresses = self.addresses(Q, K, G, at)

        def load(tokens, floor):
            out = []
            for r in tokens:
                x, k, q = self.load_row(addresses, H, row + r, rows)
                gates = [cute.arch.fmax(g, floor) * F32(LOG2E) for g in self.gates(x, active)]
                out.append((r, gates, op.unpack(k), op.unpack(q)))
            return out

        return load


@cute.jit
def finish_part(plan, jobs, tiles, base, warp, lane, scale, apart: cutlass.Constexpr):
    """As :func:`.prep_scores.finish`, where the 8-token groups of row and column are the same
    (``apart`` 0), the two of a pair (1), or two pairs' (2)."""
    query = op.table([j.query for j in jobs], warp)
    row, first = positions(jobs, warp, lane)
    for i in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(len(tiles)):
            r, col = row + 8 * i, first + 8 * half
            if min((r ^ col) // GROUP, 2) == apart:
                store_pair(plan, query, r, col, tiles[half][2 * i : 2 * i + 2], base, scale)


@cute.jit
def store_pair(plan, query, r, col, pair, base, scale):
    """Two scores of row ``r``: to L, or to Aqk in the image."""
    x, y = pair
    if query > 0:
        low, high = (
            op.select(col <= r, x * scale, F32(0.0)),
            op.select(col < r, y * scale, F32(0.0)),
        )
        piece = (col // 8) ^ twist(plan.bt, r)
        place = base + r * (2 * plan.bt) + piece * 16 + col % 8 * 2
        op.store32(place, op.pack(low, high), plan.layout.off_a)
    else:
        beta = op.load_f32(base + r * 4, plan.off_beta)
        low, high = (op.select(col + i < r, (x, y)[i] * beta, F32(0.0)) for i in range(2))
        block = r // TILE * (r // TILE + 1) // 2 + col // TILE
        place = base + block * LOWER_BYTES + (r % TILE * LOWER_PITCH + col % TILE) * 4
        op.store_f32x2(place, low, high, plan.off_l)


def put(target, r, pair, exponent):
    """Token r of 8: two channels by 2^exponent."""
    at, offset = target
    value = op.pack(*(x * op.exp2(y) for x, y in zip(pair, exponent, strict=True)))
    op.store32(at ^ (r << 4), value, offset + r * HALF)


def write_onward(load, targets):
    """Rows of k and q, anchored in front of the 8 tokens."""
    x = [F32(0.0), F32(0.0)]
    for tokens in ((0, 1, 2, 3), (4, 5, 6, 7)):
        for r, gates, *pairs in load(tokens, LOWEST_BOUND):
            x = [x[i] + gates[i] for i in range(2)]
            for target, pair in zip(targets, pairs, strict=True):
                put(target, r, pair, x)


def write_up_to(load, target):
    """Columns, anchored behind the 8 tokens."""
    x = [F32(0.0), F32(0.0)]
    for tokens in ((7, 6, 5, 4), (3, 2, 1, 0)):
        for r, gates, key, _ in load(tokens, LOWEST_BOUND):
            put(target, r, key, x)
            x = [x[i] + gates[i] for i in range(2)]


def write_inside(load, targets):
    """Rows of k and q and columns, anchored behind the fourth of the 8 tokens."""
    for tokens in ((4, 5, 6, 7), (3, 2, 1, 0)):  # outward from the anchor
        ahead = tokens[0] == 4
        found = load(tokens, SINGLE_FLOOR)
        counted = found if ahead else found[:-1]  # the first token's own gate is outside
        total = [F32(0.0), F32(0.0)]
        for _, gates, *_ in counted:
            total = [total[i] + gates[i] for i in range(2)]
        floor = [
            op.select(x < RUN * LOG2E, F32(RUN_FLOOR * LOG2E), F32(SINGLE_FLOOR * LOG2E))
            for x in total
        ]
        x = [F32(0.0), F32(0.0)]
        for r, gates, key, query in found:
            step = [cute.arch.fmax(gates[i], floor[i]) for i in range(2)]
            if ahead:
                x = [x[i] + step[i] for i in range(2)]
            for target, pair in zip(targets, (key, query), strict=False):
                put(target, r, pair, x)
            put(targets[2], r, key, [-y for y in x])
            if not ahead:
                x = [x[i] - step[i] for i in range(2)]
