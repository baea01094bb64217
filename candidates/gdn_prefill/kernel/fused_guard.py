"""Where a piece of a sequence may start from zero: a bound computed from the data.

With one gate a token the norm of what a run of tokens does to a state is at most e^(sum of its
gates), if ``0 <= beta |k|^2 <= 2`` for each of its keys.  A piece may begin with a run of which
this is below e^GUARD, from a zero state.  Nothing is promised by the caller: gates are summed and
keys are measured.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Activation
from candidates._delta_rule.kernel.options import L2NORM_EPS, Options
from candidates._delta_rule.kernel.pieces import GUARD
from candidates.gdn_prefill.kernel.fused_ops import diagonal, prefix_sum
from candidates.gdn_prefill.kernel.fused_plan import PIECE, WINDOW, WINDOWS, FusedPlan

__all__ = ["Guard"]

F32, I32, I64 = op.F32, op.I32, op.I64

_SHIFT = WINDOWS.bit_length() - 1
"""WINDOWS is a power of two."""


class Guard(Activation):
    """The part of the fused kernel that decides which chunks a CTA takes."""

    plan: FusedPlan
    options: Options

    @cute.jit
    def guards(self, K, G, B, at, boundaries, most, warp_id, lane):
        """How many tokens before each of three boundaries a piece has to start, by PIECE; -1 where
        only the exact state will do.

        A boundary is (first row of its sequence, head, PIECEs from there, whether to ask at all);
        0 where one does not ask.  ``most``: windows of an early start.  All threads; the same arithmetic whoever asks, so that
        neighbouring pieces agree.
        """
        fmin = cute.arch.fmin
        half: cutlass.Constexpr = WINDOWS // 2
        if warp_id < half:
            gates = []
            for i in cutlass.range_constexpr(3):
                row0, h, begin, asked = boundaries[i]
                for k in cutlass.range_constexpr(2):
                    token = begin * PIECE - (warp_id + k * half + 1) * WINDOW + lane
                    inside = asked and token >= 0
                    row = op.select(inside, row0 + token, I32(0))  # row0 may be behind the last
                    gate = self.gates([F32(G.g[row, h])], self.gate_constants(G, h, 0, 1))[0]
                    gates.append(op.select(inside, gate, F32(0.0)))
            for i in cutlass.range_constexpr(3):
                for k in cutlass.range_constexpr(2):
                    total = fmin(gates[2 * i + k], F32(0.0))
                    for d in (16, 8, 4, 2, 1):
                        total = total + cute.arch.shuffle_sync_bfly(total, offset=d)
                    if lane == 0:
                        place = self.plan.off_guard + 4 * (WINDOWS * i + half * k)
                        op.store_f32(at + warp_id * 4, total, place)
        cute.arch.sync_threads()
        reach = [self.reach(at, i, boundaries[i], most, lane) for i in range(3)]
        # Keys of window w before boundary i, by all warps; w = 0 is the last one before it.
        warps: cutlass.Constexpr = self.plan.threads // 32
        for turn in cutlass.range_constexpr((3 * WINDOWS + warps - 1) // warps):
            unit = turn * warps + warp_id
            i, w = unit >> _SHIFT, unit & (WINDOWS - 1)
            pick = lambda values: op.select(i == 0, values[0], op.select(i == 1, *values[1:]))
            row0, h, begin = (pick([boundaries[k][part] for k in range(3)]) for part in range(3))
            asked = pick(reach)
            # From a sequence's start on nothing is dropped, so nothing has to be known.
            wild = I32(0)
            if i < 3 and w < asked and asked * WINDOW < begin * PIECE:
                wild = self.wild(K, B, row0 + begin * PIECE - (w + 1) * WINDOW, h, G, lane)
            if lane == 0 and i < 3:
                op.store32(at + unit * 4, wild, self.plan.off_guard + 4 * 3 * WINDOWS)
        cute.arch.sync_threads()
        out = []
        for i in cutlass.range_constexpr(3):
            _, _, begin, asked = boundaries[i]
            place = at + (lane & (WINDOWS - 1)) * 4
            wild = op.load_i32(place, self.plan.off_guard + 4 * WINDOWS * (3 + i))
            wild = cute.arch.warp_redux_sync(wild, "max")
            need = min(reach[i] * (WINDOW // PIECE), begin)
            if reach[i] < 0 or wild > 0:
                need = I32(-1)
            if not asked:
                need = I32(0)
            out.append(cute.arch.make_warp_uniform(need))
        return out

    @cute.jit
    def reach(self, at, i: cutlass.Constexpr, boundary, most, lane):
        """Windows over which gates forget enough, or that reach the start, ``most`` of them and
        WINDOWS at most; or -1.  A lane looks at as many windows as its number and one more."""
        begin = boundary[2]
        place = at + (lane & (WINDOWS - 1)) * 4
        total = prefix_sum(op.load_f32(place, self.plan.off_guard + 4 * WINDOWS * i))
        enough = total <= GUARD or (lane + 1) * WINDOW >= begin * PIECE
        found = op.select(enough and lane < min(most, WINDOWS), lane, I32(WINDOWS))
        found = cute.arch.warp_redux_sync(found, "min")
        return op.select(found < WINDOWS, found + 1, I32(-1))

    @cute.jit
    def wild(self, K, B, row, h, G, lane):
        """Whether ``beta |k|^2`` is out of 0 to 2 for a token of a window from ``row`` on; a warp.

        A token's channels are spread over four lanes, as operands of mma are: the products of 8
        tokens with themselves have the squares on their diagonal, whatever the order of channels.
        """
        key_head = h // (G.g.shape[1] // K.shape[1])
        token, quarter = lane >> 2, lane & 3
        skipped = I64(K.stride[1]) * I64(key_head * 2) + I64(quarter * 64)
        source = K.iterator.toint() + skipped
        own = quarter == token >> 1  # holds the diagonal in column ``token & 1``
        found = I32(0)
        words, strengths = [], []
        for i in cutlass.range_constexpr(WINDOW // 8):
            here = row + 8 * i + token
            place = op.mad_wide(here, I32(K.stride[0]) * 2, source)
            words.append([load16(place, 16 * j) for j in range(4)])
            strengths.append(self.activated(self.strength(B, here, h)))
        for i in cutlass.range_constexpr(WINDOW // 8):
            square = diagonal(words[i], token)
            if cutlass.const_expr(self.options.l2norm):
                square = square * ops.rcp(square + F32(L2NORM_EPS))
            strength = strengths[i] * square
            tame = strengths[i] >= 0.0 and strength <= 2.0
            if own and not tame:
                found = I32(1)
        return cute.arch.warp_redux_sync(found, "max")


def load16(address, at: int):
    """16 bytes of global memory, as four registers."""
    code = "ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}+" + f"{at}];"
    return op.ptx(code, [I32] * 4, [address])
