"""Gates and write strengths, activated where they are used; shared by both forms of the kernels.

A sigmoid is 1 / (1 + 2^y), a softplus max(z, 0) + log2(1 + 2^-|z|) in units of ln 2.  Errors of the
approximations are relative, so that slow gates keep their digits.  Both make 0 of minus infinity,
which is what rows past a sequence's end are set to.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.options import LOWEST_BOUND, Options

__all__ = ["LOG2E", "Activation", "Gates"]

F32 = op.F32
LOG2E = math.log2(math.e)

_SLOPE_BITS = 100
"""exp(A_log) is kept between 2^-100 and 2^100: its product with an infinite number is no NaN."""

_SMALL = 1 / 16
_LOG2_1P = (1.44269248, -0.72060912, 0.44889128)
"""log2(1 + t) / t for t up to _SMALL, to 2e-6; the error of the hardware's log2 is absolute."""


class Gates(NamedTuple):
    """g and what activates it.

    Attributes
    ----------
    g : cute.Tensor
        [T, HV, 128], fp32 or bf16.
    A_log : cute.Tensor or None
        fp32 [HV].
    dt_bias : cute.Tensor or None
        fp32 [HV, 128].
    bound : Float32 or None
        Of a safe gate.
    """

    g: cute.Tensor
    A_log: cute.Tensor | None
    dt_bias: cute.Tensor | None
    bound: cutlass.Float32 | None


class Activation:
    """The part of a kernel that knows what g and beta are."""

    options: Options

    def gate_constants(self, G, h, channel, count=2):
        """What activates gates of ``count`` neighbouring channels; None where nothing does."""
        if not self.options.raw_gate:
            return None
        bits = cute.arch.fmin(cute.arch.fmax(G.A_log[h] * LOG2E, -_SLOPE_BITS), _SLOPE_BITS)
        slope = op.exp2(bits)
        by = -slope * LOG2E if self.options.gate == "safe" else F32(LOG2E)
        bias = [F32(0.0)] * count
        if self.options.bias:
            bias = [G.dt_bias[h, channel + i] * by for i in range(count)]
        if self.options.gate == "safe":
            return by, bias, G.bound * LOG2E, None
        return by, bias, -slope, ops.rcp(slope) * F32(-LOWEST_BOUND * LOG2E)

    def add_gates(self, x, constants, total):
        """``total`` and the gates made of ``x``, in units of ln 2; below LOWEST_BOUND as that."""
        if constants is None:
            return [
                op.fma(cute.arch.fmax(x[i], LOWEST_BOUND), F32(LOG2E), total[i])
                for i in range(len(x))
            ]
        by, bias, factor, most = constants
        out = []
        for i in range(len(x)):
            y = op.fma(x[i], by, bias[i])
            if self.options.gate == "safe":
                shape = ops.rcp(op.exp2(y) + F32(1.0))
            else:
                shape = cute.arch.fmin(softplus(y), most)
            out.append(op.fma(shape, factor, total[i]))
        return out

    def gates(self, x, constants):
        """The gates made of ``x``, in natural units; plain ones as they are."""
        if constants is None:
            return list(x)
        return [y * F32(1 / LOG2E) for y in self.add_gates(x, constants, [F32(0.0)] * len(x))]

    def strength(self, B, row, h):
        """beta of one token, or its logit."""
        return F32(B[row, h])

    @property
    def no_strength(self):
        """What stands for beta, or its logit, behind a sequence's end."""
        return F32(-math.inf if self.options.beta_logits else 0.0)

    def activated(self, beta):
        """beta of what was loaded for it."""
        if not self.options.beta_logits:
            return beta
        return ops.rcp(op.exp2(beta * F32(-LOG2E)) + F32(1.0))


def softplus(z):
    """log2(1 + 2^z), to 3e-6 of itself."""
    t = op.exp2(-cute.arch.fmax(z, -z))
    near = op.fma(op.fma(F32(_LOG2_1P[2]), t, F32(_LOG2_1P[1])), t, F32(_LOG2_1P[0])) * t
    tail = op.select(t < F32(_SMALL), near, ops.log2(t + F32(1.0)))
    return cute.arch.fmax(z, F32(0.0)) + tail
