"""How the fused kernel takes its inputs: strides, gates to activate, logits, keys to normalise.

The plain form is what the builders' own code has; the rest of a call's
:class:`candidates._delta_rule.kernel.options.Options` is here.

* **Gates** come into shared memory as they are, 2 or 4 bytes an element, and are activated where
  they are summed: :mod:`candidates._delta_rule.kernel.activate`.
* **l2norm** never touches an element of q or k.  With rho = 1 / (|k|^2 + eps) and k taken as it is,
  the chunk is that of ``beta rho`` in beta's place and of values divided by sqrt(rho), of which the
  latter only shows in the factor that makes U.  q's norm scales rows of Aqk and of the output.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Activation
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import L2NORM_EPS
from candidates.kda_prefill.kernel.fused_plan import BT, FusedPlan

__all__ = ["Load", "copy16_once"]

BF16, F32, I32, I64 = op.BF16, op.F32, op.I32, op.I64
INFINITY = math.inf

EVICT_FIRST = "0x12F0000000000000"
"""What ``createpolicy.fractional.L2::evict_first`` makes of 1.0, without its four instructions."""


def copy16_once(address, source, at=0, size=None):
    """Global to shared, 16 bytes that are read once: the first to leave the L2 cache.

    Of them ``size``, if that is given, are read, and the rest are 0.  For gates, 40% of what comes
    in: outputs, and what the fix-up reads and runs through, stay where it finds them.
    """
    given = [] if size is None else [size]
    count = ", {$r2}" if given else ""
    op.ptx(
        f"{{ .reg .b64 once; mov.b64 once, {EVICT_FIRST};"
        f" cp.async.cg.shared.global.L2::cache_hint [{{$r0}}+{at}], [{{$r1}}], 16{count}, once; }}",
        inputs=[address, source, *given],
    )


class Load(Activation):
    """The part of the fused kernel that knows in which form its inputs come."""

    plan: FusedPlan
    once_more: Any  # of Build

    # ------------------------------------------------------------------------- addresses

    @property
    def guesses(self) -> bool:
        """Whether builders begin before it is decided what the CTA does: strides, and the boundary
        frame, take the registers that this needs."""
        return self.options.compact and not self.plan.boundary

    @property
    def plain_rows(self) -> bool:
        """Whether a row of every tensor is found by one number, and gates have 4 bytes."""
        return self.options.compact and self.options.gate_bytes == 4

    def origin(self, K, G, row, h):
        """A sequence's first row for :meth:`fetch`, and heads: of values, and of keys."""
        if self.options.compact:
            return row, (h, h)
        return row, (h, h // (G.g.shape[1] // K.shape[1]))

    def row_at(self, X, row, h):
        """Address of a row's first channel, by the tensor's own strides."""
        size = X.element_type.width // 8
        at = X.iterator.toint() + I64(X.stride[1]) * I64(h * size)
        return op.mad_wide(row, I32(X.stride[0]) * size, at)

    @cute.jit
    def fetch_rows(self, Q, K, G, c, rows, row, own, tokens, half, lane, heads):
        """As :meth:`.fused_build.Build.fetch`, whatever the strides and the width of gates."""
        lane = ops.opaque(lane)
        for X, h, first in ((G.g, heads[0], 0), (K, heads[1], 8192), (Q, heads[1], 12288)):
            size = X.element_type.width // 8
            pieces = 64 * size // 16  # of 16 bytes, of one row's half
            at_once = 32 // pieces  # rows
            r, col = tokens * 8 + lane // pieces, half * (64 * size) + lane % pieces * 16
            source = self.row_at(X, row + (c * BT + r), h) + I64(col)
            target = own + first + r * (HEAD * size) + col
            step = I32(X.stride[0]) * (size * at_once)
            for i in cutlass.range_constexpr(8 // at_once):
                valid = op.select(r + i * at_once < rows, I32(16), I32(0))
                here = op.mad_wide(step, I32(i), source)
                place = i * at_once * HEAD * size
                if cutlass.const_expr(first == 0):
                    copy16_once(target, here, place, valid)
                else:
                    ops.copy16(target, here, valid, place)

    @cute.jit
    def fetch_value_rows(self, V, c, rows, row, sv, half, lane, heads):
        """As :meth:`.fused_build.Build.fetch_values`, whatever the strides."""
        lane = ops.opaque(lane)
        r = lane // 8
        source = self.row_at(V, row + (c * BT + r), heads[0]) + I64(half * 128 + lane % 8 * 16)
        dst = sv + half * 2048 + r * 128 + ((lane % 8) ^ r) * 16
        step = I32(V.stride[0]) * 8
        for i in cutlass.range_constexpr(4):
            valid = op.select(r + 4 * i < rows, I32(16), I32(0))
            here = op.mad_wide(step, I32(i), source)
            ops.copy16(dst ^ (64 * (i % 2)), here, valid, 4 * i * 128)

    # ----------------------------------------------------------------------------- gates

    def gate_source(self, sg, tokens, channel):
        """Where a lane's two gates of its warp's first token lie in shared memory."""
        size = self.options.gate_bytes
        return sg + tokens * (8 * HEAD * size) + channel * size

    def load_gates(self, source, r, count=2):
        """A lane's two or four neighbouring numbers, ``r`` tokens on."""
        if self.options.gate_bytes == 2:
            load = ops.load_shared32 if count == 2 else ops.load_shared64
            words = load(source, r * 2 * HEAD)
            words = [words] if count == 2 else words
            return [x for word in words for x in op.unpack(word)]
        load = op.load_f32x2 if count == 2 else op.load_f32x4
        return load(source, r * 4 * HEAD)

    @cute.jit
    def blank(self, sg, rows, tokens, half, lane):
        """Of a warp's gates to activate, those of tokens from ``rows`` on: no decay."""
        size = self.options.gate_bytes
        if rows < BT:
            row = self.gate_source(sg, tokens, half * 64 + lane * 2)
            for r in cutlass.range_constexpr(8):
                if tokens * 8 + r >= rows:
                    if cutlass.const_expr(size == 2):
                        op.store32(row, I32(-8323200), r * HEAD * size)  # twice bf16 -inf
                    else:
                        op.store_f32x2(row, F32(-INFINITY), F32(-INFINITY), r * HEAD * size)
            ops.sync_warp()

    def strengths(self, B, row, rows, h, lane):
        """Those of a chunk, of which ``rows`` are left, a lane a token; nobody diverges."""
        inside = lane < rows
        beta = self.strength(B, row + op.select(inside, lane, I32(0)), h)
        return op.select(inside, beta, self.no_strength)

    # ---------------------------------------------------------------------------- l2norm

    def squares(self, sk, sq, sb, tokens, half, lane):
        """Sums of squares of a warp's 8 tokens over its 64 channels, of k and of q.

        A token's channels are spread over four lanes, as operands of mma are: the products of 8
        tokens with themselves have the sums on their diagonal, whatever the order of channels.
        """
        token, quarter = lane // 4, lane % 4
        first = (tokens * 8 + token) * (2 * HEAD) + half * 128 + quarter * 32
        near = token % 2 * 16  # neighbours start with different halves: no bank conflict
        words = [
            op.load_i32x4(source + (first + offset))
            for source in (sk, sq)
            for offset in (near, 16 - near)
        ]
        zero = I32(0)
        sums = [op.zeros() for _ in words]  # four chains, so that they hide each other's latency
        for j in range(0, 4, 2):
            sums = [
                op.mma(acc, [x[j], zero, x[j + 1], zero], x[j : j + 2])
                for acc, x in zip(sums, words, strict=True)
            ]
        for i in range(2):
            near_sum, far_sum = sums[2 * i : 2 * i + 2]
            diagonal = [near_sum[j] + far_sum[j] for j in range(2)]
            own = op.select(token % 2 == 0, diagonal[0], diagonal[1])
            self.store_square(sb, own, (tokens * 8 + token) * 16 + i * 8 + half * 4, lane)

    @cute.jit
    def store_square(self, sb, value, place, lane):
        if lane % 4 == lane // 8:  # columns 2 (lane % 4) and one more: the token itself
            op.store_f32(sb + place, value, 128)

    def square(self, sb, token, query):
        """|x|^2 + eps of a token's k or q."""
        x, y = op.load_f32x2(sb + token * 16, 128 + 8 * query)
        return x + y + F32(L2NORM_EPS)

    @cute.jit
    def row_factors(self, at, s, sb, scale, w, lane):
        """What a warp's scores are multiplied by: k's two columns by beta / |k|^2, q's two rows by
        scale / |q|, which is left for the scan as well.  Without l2norm just the scale."""
        by = scale
        if cutlass.const_expr(self.options.l2norm):
            by, lane = [], self.once_more(lane)
            for i in cutlass.range_constexpr(2):
                token = op.select(w > 1, lane // 4 + 8 * i, w * 8 + lane % 4 * 2 + i)
                rho = ops.rsqrt(self.square(sb + w // 2 * 8, token, 0))
                beta = op.load_f32(sb + token * 4)
                by.append(rho * op.select(w > 1, scale, rho * beta))
                if w == 2 and lane % 4 == 0:
                    op.store_f32(at + s * 64 + token * 4, by[i], self.plan.off_scale)
        return by

    def write_strengths(self, sb, w, lane):
        """What a warp's rows ``lane // 4`` and 8 more of W, which is stored negated, or of U are
        multiplied by: beta, with l2norm by 1 / |k|^2 or 1 / |k| of it."""
        out, lane = [], self.once_more(lane)
        for i in range(2):
            token = lane // 4 + 8 * i
            beta = op.load_f32(sb + token * 4)
            if self.options.l2norm:
                rho = ops.rsqrt(self.square(sb, token, 0))
                beta = beta * op.select(w > 1, rho, rho * rho)
            out.append(op.select(w > 1, beta, -beta))
        return out

    def output_scales(self, at, s, lane):
        """The four that an accumulator of 16 token columns needs: of 2 (lane % 4), and 8 on."""
        place = at + s * 64 + lane % 4 * 8
        return [
            *op.load_f32x2(place, self.plan.off_scale),
            *op.load_f32x2(place, self.plan.off_scale + 32),
        ]

    # ---------------------------------------------------------------------------- guard

    def guard_row(self, K, G, row, r, h, H, lane):
        """Row ``row + r`` as the guard reads it: gates as they come, keys; of four channels."""
        size = self.options.gate_bytes
        if self.options.compact:
            src = (I64(row) * H + h) * HEAD + lane * 4 + r * H * HEAD
            at = lambda X, _, size: X.iterator.toint() + src * size
        else:
            heads = self.origin(K, G, row, h)[1]
            at = lambda X, i, size: self.row_at(X, row + r, heads[i]) + I64(lane * 4 * size)
        if size == 4:
            code = "ld.global.nc.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
            gates = op.ptx(code, [F32] * 4, [at(G.g, 0, size)])
        else:
            gates = load_pairs(at(G.g, 0, size))
        return gates, load_pairs(at(K, 1, 2))

    def guard_gates(self, gates, active):
        """The gates of what :meth:`guard_row` read; apart from it, so that all loads come first."""
        if self.options.gate_bytes == 2:
            gates = [x for pair in gates for x in op.unpack(pair)]
        return self.gates(gates, active)


def load_pairs(address):
    """Four bf16 of global memory."""
    return op.ptx("ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];", [I32] * 2, [address])
