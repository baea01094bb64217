"""Where a piece of a sequence may start from zero: a bound computed from the data.

A piece may begin some chunks early, from a zero state, if what it drops by that has decayed below
e^GUARD of the state that it ignores.  Nothing is promised by the caller: the bound takes the
actual gates, keys and write strengths of the tokens in between.

The bound is on the map of one chunk, of two the sum of the logarithms.  With D = diag(e^g) and
D_ij = D_i ... D_j the tokens 1 to n map a state by

    M = D_n1 - sum_i beta_i (D_n,i+1 k_i) u_i^T
    u_i = D_i1 k_i - sum_(j < i) beta_j s_ij u_j        s_ij = k_i^T D_i,j+1 k_j

which is no more than what the steps say, so that it holds whatever k and beta are.  Hence

    |M| <= max D_n1 + sum_i |beta_i| |D_n,i+1 k_i| v_i
    v_i = |D_i1 k_i| + sum_(j < i) |beta_j| |s_ij| v_j

Of s only those within pairs of tokens are found.  For the others the tokens stand in a tree: with m
the boundary between the halves of the smallest part of it that has both,
|s_ij| <= |D_i,m+1 k_i| |D_m,j+1 k_j|.  So a token needs five norms and the half of a product.
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
from candidates.kda_prefill.kernel.fused_plan import (
    BT,
    GUARD_CUT,
    GUARD_DECAYS,
    GUARD_MARGIN,
    SHORT,
    FusedPlan,
)

__all__ = ["Guard"]

F32, I32, I64 = op.F32, op.I32, op.I64
LOG2E = math.log2(math.e)

PAIRS = BT // 2
LEVELS = 3
"""Of the tree above pairs: of each two, of each four, of the two halves."""

SUMS = 13
"""What is summed of a pair over channels: s, |k1|^2, |k2|^2, and of both tokens the squares of the
norms to the boundaries of the three levels, from the window's begin and to its end."""


class Guard(Load):
    """The part of the fused kernel that decides which chunks a CTA takes."""

    plan: FusedPlan

    @cute.jit
    def guards(self, K, G, B, at, boundaries, H, warp_id, lane):
        """Chunks of warm-up that each of three boundaries needs; -1 where only the exact state
        will do.

        A boundary is (first row of its sequence, head, chunk, whether to ask at all); 0 chunks
        where one does not ask.

        Scanning warps; the same arithmetic whoever asks and in whichever of the three places, so
        that neighbouring CTAs agree.
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
        """Logarithms of the bounds of the chunks at three places, a pair of each a warp.

        May be called again at once: who writes for the second time has met everybody since they
        read.
        """
        gates, keys, heads, beta = self.read_pairs(K, G, B, places, H, warp_id, lane)
        fore, back, sums = self.pair(G, at, gates, keys, heads, warp_id, lane)
        ops.sync_scanners()
        if warp_id < 3:
            self.whole_decay(at, warp_id, lane)
        sums = self.tree(at, fore, back, sums, warp_id, lane)
        self.leave_sums(at, sums, self.activated(beta), warp_id, lane)
        ops.sync_scanners()
        log = self.total(at, lane)
        return [cute.arch.shuffle_sync(log, offset=i) for i in range(3)]

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
    def pair(self, G, at, gates, keys, heads, pair, lane):
        """What of a pair's tokens needs no other pair; leaves what each channel decays by.

        Returns squares of four channels of keys that have decayed from the pair's begin and to its
        end, ``[place][token][channel]``, and of each place the first three of SUMS, of a lane.
        """
        fore, back, sums = [], [], []
        for i in cutlass.range_constexpr(3):
            active = self.gate_constants(G, heads[i], lane * 4, 4)
            e1, e2 = (
                [op.exp2(x * F32(LOG2E)) for x in self.guard_gates(gates[2 * i + r], active)]
                for r in range(2)
            )
            k1, k2 = ([x for p in keys[2 * i + r] for x in op.unpack(p)] for r in range(2))
            s, n1, n2 = (F32(0.0) for _ in range(3))
            both = [e1[d] * e2[d] for d in range(4)]
            first = [k1[d] * e1[d] for d in range(4)], [k2[d] * both[d] for d in range(4)]
            last = [k1[d] * e2[d] for d in range(4)], k2
            for d in cutlass.range_constexpr(4):
                s = op.fma(k2[d], last[0][d], s)
                n1, n2 = op.fma(k1[d], k1[d], n1), op.fma(k2[d], k2[d], n2)
            fore += [ops.mul(x, x) for token in first for x in token]
            back += [ops.mul(x, x) for token in last for x in token]
            sums.append([s, n1, n2])
            words = [op.pack(both[d] * both[d], both[d + 1] * both[d + 1]) for d in (0, 2)]
            ops.store_shared64(self.decays(at, pair, lane), words, i * PAIRS * GUARD_DECAYS)
        return fore, back, sums

    def decays(self, at, pair, lane):
        """Where the squared decays of a lane's channels by a pair stand, of the first place."""
        return at + (pair * GUARD_DECAYS + lane * 8 + self.plan.off_o)

    @cute.jit
    def tree(self, at, fore, back, sums, pair, lane):
        """All SUMS of each place, of a lane: ``sums`` and the norms that end outside of the pair.

        At each level a pair looks on to the boundary between halves from the first one, and back to
        it from the second.  Behind that boundary it looks on through all of the other half.
        """
        for level in cutlass.range_constexpr(LEVELS):
            near = [F32(0.0)] * 6
            by = []
            for i in cutlass.range_constexpr(3):
                by += self.decay_of(at, pair, level, i, lane)
            if (pair & (1 << level)) > 0:
                near, fore = face(fore, by)
            else:
                near, back = face(back, by)
            sums = [x + near[2 * i : 2 * i + 2] for i, x in enumerate(sums)]
        for side in (fore, back):
            ends = whole(side)
            sums = [x + ends[2 * i : 2 * i + 2] for i, x in enumerate(sums)]
        return sums

    def decay_of(self, at, pair, level, i, lane):
        """What a lane's four channels decay by, squared, in the other half of a level's part."""
        others = [
            ops.load_shared64(self.decays(at, pair ^ x, lane), i * PAIRS * GUARD_DECAYS)
            for x in range(1 << level, 2 << level)
        ]
        return [x for word in product(others) for x in op.unpack(word)]

    @cute.jit
    def whole_decay(self, at, i, lane):
        """Leave the largest decay of a channel over a whole window, squared; place ``i``, a warp
        each."""
        fmax = cute.arch.fmax
        place = self.decays(at, i * PAIRS, lane)
        pairs = [ops.load_shared64(place, p * GUARD_DECAYS) for p in range(PAIRS)]
        x = [y for word in product(pairs) for y in op.unpack(word)]
        top = ops.largest(fmax(fmax(x[0], x[1]), fmax(x[2], x[3])))
        if lane == 0:
            op.store_f32(at + i * GUARD_CUT, top, self.plan.off_guard + 64 * PAIRS)

    @cute.jit
    def leave_sums(self, at, sums, beta, pair, lane):
        """Sum over lanes, and leave a row of a pair for each place: s, two squares, ten norms and
        two write strengths."""
        # Number by number, each of three places, and as if there were 16: four exchanges halve
        # what a lane has, until it has the number lane / 2.
        parts = [x for number in zip(*sums, strict=True) for x in number]
        parts += [F32(0.0)] * (48 - len(parts))
        for d in (16, 8, 4, 2):
            upper = (lane & d) > 0
            n = len(parts) // 2
            parts = [
                op.select(upper, parts[n + i], parts[i])
                + cute.arch.shuffle_sync_bfly(op.select(upper, parts[i], parts[n + i]), offset=d)
                for i in range(n)
            ]
        parts = [x + cute.arch.shuffle_sync_bfly(x, offset=1) for x in parts]
        parts = [op.select(lane // 2 > 2, ops.sqrt(x), x) for x in parts]
        if lane % 2 == 0 and lane < 2 * SUMS:
            place = at + (lane * 2 + pair * 64)
            for i in cutlass.range_constexpr(3):
                op.store_f32(place, parts[i], self.plan.off_guard + i * GUARD_CUT)
        if lane < 6:
            place = at + (lane // 2 * GUARD_CUT + lane % 2 * 4 + pair * 64)
            op.store_f32(place, beta, self.plan.off_guard + 4 * SUMS)

    @cute.jit
    def total(self, at, lane):
        """The logarithm of a place's bound, of which three lanes have one each."""
        i = min(lane, 2)
        tame = (self.tame(at, lane) >> i * PAIRS & ((1 << PAIRS) - 1)) == (1 << PAIRS) - 1
        place = at + i * GUARD_CUT
        out = ops.sqrt(op.load_f32(place, self.plan.off_guard + 64 * PAIRS))
        carried = [F32(0.0)] * LEVELS
        for p in cutlass.range_constexpr(PAIRS):
            s, n1, n2, *rest = (
                x
                for w in range(4)
                for x in op.load_f32x4(place, self.plan.off_guard + 64 * p + 16 * w)
            )
            norms, b1, b2 = rest[:10], rest[10], rest[11]
            b1, b2 = self.by_length(b1, n1), self.by_length(b2, n2)
            v1, v2 = norms[6], norms[7]
            for level in cutlass.range_constexpr(LEVELS):
                if cutlass.const_expr(p >> level & 1):
                    v1 = op.fma(norms[2 * level], carried[level], v1)
                    v2 = op.fma(norms[2 * level + 1], carried[level], v2)
            w1 = ops.mul(b1, v1)
            w2 = ops.mul(b2, op.fma(cute.arch.fmax(s, -s), w1, v2))
            for level in cutlass.range_constexpr(LEVELS):
                if cutlass.const_expr(p >> level & 1 == 0):
                    if cutlass.const_expr(p % (1 << level) == 0):
                        carried[level] = F32(0.0)
                    carried[level] = op.fma(norms[2 * level], w1, carried[level])
                    carried[level] = op.fma(norms[2 * level + 1], w2, carried[level])
            out = op.fma(norms[8], w1, out)
            out = op.fma(norms[9], w2, out)
        log = op.fma(ops.log2(out), F32(1 / LOG2E), F32(GUARD_MARGIN))
        return op.select(tame, log, F32(1e30))

    def by_length(self, beta, square):
        """A write strength as what multiplies keys as they came."""
        if not self.options.l2norm:
            return beta
        return ops.mul(beta, ops.rcp(square + F32(L2NORM_EPS)))

    @cute.jit
    def tame(self, at, lane):
        """A bit for each place's pairs: whether neither of its tokens can make a state longer."""
        row = min(lane, 3 * PAIRS - 1)
        place = at + (row // PAIRS * GUARD_CUT + row % PAIRS * 64)
        _, n1, n2, _ = op.load_f32x4(place, self.plan.off_guard)
        _, b1, b2, _ = op.load_f32x4(place, self.plan.off_guard + 48)
        b1, b2 = self.by_length(b1, n1), self.by_length(b2, n2)
        tame = b1 >= 0.0 and b2 >= 0.0 and ops.mul(b1, n1) <= 2.0 and ops.mul(b2, n2) <= 2.0
        return ops.ballot(op.select(tame, I32(1), I32(0)))


def product(words):
    """The products of packed numbers, two words of each factor, by a tree."""
    while len(words) > 1:
        words = [
            [ops.mul_bf16x2(x, y) for x, y in zip(a, b, strict=True)]
            for a, b in zip(words[::2], words[1::2], strict=True)
        ]
    return words[0]


def whole(squares):
    """Sums over a lane's channels, ``[place][token]``."""
    return [a + b + c + d for a, b, c, d in zip(*(squares[i::4] for i in range(4)), strict=True)]


def face(squares, by):
    """:func:`whole`, and what is left of the squares behind what the channels decay ``by``."""
    return whole(squares), [ops.mul(x, by[i // 8 * 4 + i % 4]) for i, x in enumerate(squares)]
