"""Where a piece of a sequence may start from zero: a bound computed from the data.

With one gate a token the norm of what a run of tokens does to a state is at most e^(sum of its
gates), if ``0 <= beta |k|^2 <= 2`` for each of its keys.  A piece may begin with a run of which
this is below e^GUARD, from a zero state.  Nothing is promised by the caller.  Gates are summed
here, before anything is begun.  Keys are measured by who builds the run's chunks, which has their
squares at hand (:meth:`.fused_build.Build.keys`): to read them twice would cost every call several
microseconds.  A CTA that has met a key out of bounds scans its pieces again, from where their
sequences begin: then nothing is dropped, and nobody else has to know.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Activation
from candidates._delta_rule.kernel.options import Options
from candidates._delta_rule.kernel.pieces import GUARD
from candidates.gdn_prefill.kernel.fused_ops import prefix_sum
from candidates.gdn_prefill.kernel.fused_plan import PIECE, WINDOW, WINDOWS, FusedPlan

__all__ = ["Guard"]

F32, I32 = op.F32, op.I32


class Guard(Activation):
    """The part of the fused kernel that decides which chunks a CTA takes."""

    plan: FusedPlan
    options: Options

    @cute.jit
    def guards(self, G, at, boundaries, most, warp_id, lane):
        """How many tokens before each of three boundaries a piece has to start, by PIECE; -1 where
        only the exact state will do.

        A boundary is (first row of its sequence, head, PIECEs from there, whether to ask at all);
        0 where one does not ask.  ``most``: windows of an early start.  All threads; the same
        arithmetic whoever asks, so that neighbouring pieces agree.
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
        out = []
        for i in cutlass.range_constexpr(3):
            _, _, begin, asked = boundaries[i]
            reach = self.reach(at, i, begin, most, lane)
            need = min(reach * (WINDOW // PIECE), begin)
            if reach < 0:
                need = I32(-1)
            if not asked:
                need = I32(0)
            out.append(cute.arch.make_warp_uniform(need))
        return out

    @cute.jit
    def reach(self, at, i: cutlass.Constexpr, begin, most, lane):
        """Windows over which gates forget enough, or that reach the start, ``most`` of them and
        WINDOWS at most; or -1.  A lane looks at as many windows as its number and one more."""
        place = at + (lane & (WINDOWS - 1)) * 4
        total = prefix_sum(op.load_f32(place, self.plan.off_guard + 4 * WINDOWS * i))
        enough = total <= GUARD or (lane + 1) * WINDOW >= begin * PIECE
        found = op.select(enough and lane < min(most, WINDOWS), lane, I32(WINDOWS))
        found = cute.arch.warp_redux_sync(found, "min")
        return op.select(found < WINDOWS, found + 1, I32(-1))
