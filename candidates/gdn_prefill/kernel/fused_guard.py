"""Where a piece of a sequence may start from zero: a bound computed from the data.

With one gate a token the norm of what a run of tokens does to a state is at most e^(sum of its
gates), if ``0 <= beta |k|^2 <= 2`` for each of its keys.  A piece may begin with a run of which
this is below e^GUARD, from a zero state.  Nothing is promised by the caller: gates are summed and
keys are measured.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates.gdn_prefill.kernel.fused_plan import BT, PIECE, REACHES, FusedPlan
from candidates.kda_prefill.kernel import prep_ops as op
from candidates.kda_prefill.kernel.fused_load import load_pairs
from candidates.kda_prefill.kernel.fused_plan import GUARD

__all__ = ["Guard"]

F32, I32, I64 = op.F32, op.I32, op.I64

_WARPS = REACHES[-1]
"""Each sums the gates of BT tokens, and measures their keys."""


class Guard:
    """The part of the fused kernel that decides which chunks a CTA takes."""

    plan: FusedPlan

    @cute.jit
    def guards(self, K, G, B, at, boundaries, warp_id, lane):
        """How many tokens before each of three boundaries a piece has to start, by PIECE; -1 where
        only the exact state will do.

        A boundary is (first row of its sequence, head, PIECEs from there, whether to ask at all);
        0 where one does not ask.  All threads; the same arithmetic whoever asks, so that
        neighbouring pieces agree.
        """
        fmin = cute.arch.fmin
        if warp_id < _WARPS:
            gates = []
            for i in cutlass.range_constexpr(3):
                row0, h, begin, asked = boundaries[i]
                for half in cutlass.range_constexpr(2):
                    token = begin * PIECE - (warp_id + 1) * BT + 32 * half + lane
                    inside = asked and token >= 0
                    row = row0 + op.select(inside, token, I32(0))
                    gates.append(op.select(inside, self.number(G, row, h), F32(0.0)))
            for i in cutlass.range_constexpr(3):
                total = fmin(gates[2 * i], F32(0.0)) + fmin(gates[2 * i + 1], F32(0.0))
                for d in (16, 8, 4, 2, 1):
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=d)
                if lane == 0:
                    op.store_f32(at + warp_id * 4, total, self.plan.off_guard + 4 * _WARPS * i)
        cute.arch.sync_threads()
        reach = [self.reach(at, i, boundaries[i]) for i in range(3)]
        if warp_id < _WARPS:
            for i in cutlass.range_constexpr(3):
                row0, h, begin, _ = boundaries[i]
                # From a sequence's start nothing is dropped, so nothing has to be known.
                wild = I32(0)
                if warp_id < reach[i] and reach[i] * BT < begin * PIECE:
                    wild = self.wild(K, B, row0 + begin * PIECE - (warp_id + 1) * BT, h, G, lane)
                if lane == 0:
                    place = self.plan.off_guard + 4 * _WARPS * (3 + i)
                    op.store32(at + warp_id * 4, wild, place)
        cute.arch.sync_threads()
        out = []
        for i in cutlass.range_constexpr(3):
            _, _, begin, asked = boundaries[i]
            wild = I32(0)
            for w in cutlass.range_constexpr(_WARPS):
                wild = wild | op.load_i32(at, self.plan.off_guard + 4 * (_WARPS * (3 + i) + w))
            need = min(reach[i] * (BT // PIECE), begin)
            if reach[i] < 0 or wild > 0:
                need = I32(-1)
            if not asked:
                need = I32(0)
            out.append(cute.arch.make_warp_uniform(need))
        return out

    @cute.jit
    def reach(self, at, i: cutlass.Constexpr, boundary):
        """Chunks of BT tokens over which gates forget enough, or that reach the start; or -1."""
        begin = boundary[2]
        out, total = I32(-1), F32(0.0)
        for w in cutlass.range_constexpr(_WARPS):
            total = total + op.load_f32(at, self.plan.off_guard + 4 * (_WARPS * i + w))
            if cutlass.const_expr(w + 1 in REACHES):
                if out < 0:
                    if total <= GUARD or (w + 1) * BT >= begin * PIECE:
                        out = I32(w + 1)
        return out

    @cute.jit
    def wild(self, K, B, row, h, G, lane):
        """Whether ``beta |k|^2`` is out of 0 to 2 for any of BT tokens from ``row`` on; a warp."""
        key_head = h // (G.shape[1] // K.shape[1])
        skipped = I64(K.stride[1]) * I64(key_head * 2) + I64((lane & 15) * 16)
        source = K.iterator.toint() + skipped
        found = I32(0)
        for first in cutlass.range(0, BT, 16, unroll=1):
            words = []
            for i in cutlass.range_constexpr(8):  # two tokens at once
                token = row + first + 2 * i + (lane >> 4)
                here = op.mad_wide(token, I32(K.stride[0]) * 2, source)
                words.append([*load_pairs(here), *load_pairs(here + 8)])
            for i in cutlass.range_constexpr(8):
                square = F32(0.0)
                for word in words[i]:
                    for x in op.unpack(word):
                        square = op.fma(x, x, square)
                for d in (8, 4, 2, 1):
                    square = square + cute.arch.shuffle_sync_bfly(square, offset=d)
                beta = self.number(B, row + first + 2 * i + (lane >> 4), h)
                if not (beta >= 0.0 and beta * square <= 2.0):
                    found = I32(1)
        return cute.arch.warp_redux_sync(found, "max")

    def number(self, X, row, h):
        """A gate, or a write strength."""
        place = op.mad_wide(row, I32(X.stride[0]) * 4, X.iterator.toint() + I64(h) * 4)
        return op.ptx("ld.global.nc.f32 {$w0}, [{$r0}];", [F32], [place])
