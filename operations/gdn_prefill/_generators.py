"""Draws GDN prefill inputs on any device from a regime's recipe."""

from __future__ import annotations

import math
from typing import Any

import torch

from operations._base import Regime
from operations._delta_rule import generators
from operations._delta_rule.generators import plain_gate, rand, randn
from operations.gdn_prefill._regimes import RECIPES, Recipe
from operations.gdn_prefill._workloads import GdnWorkload

__all__ = ["activate_gate", "draw"]

_A_MAX = 16.0
"""Upper end of ``exp(A_log)`` in the usual initialisation; the lower one is 0."""

_DT = (0.001, 0.1)
"""Range of ``softplus(dt_bias)`` in the usual initialisation, uniform in its logarithm."""

_CUT = 4.0
"""Largest size of a pre-activation of unit spread, so that a regime has a steepest gate."""

_SLOW_BIAS = -8.0
"""dt_bias of the slow gates: keeps bf16 pre-activations near 0, where they are finest."""

_SLOW_RAW_MAX = 3.390625
"""Largest bf16 pre-activation above the bias that still gives a gate over -0.01."""


def activate_gate(g_raw: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """The gate ``-exp(A_log) * softplus(g_raw + dt_bias)`` in fp32.

    Parameters
    ----------
    g_raw : Tensor [T, HV], bf16
    A_log, dt_bias : Tensor [HV], fp32

    Returns
    -------
    Tensor [T, HV], fp32, at most 0.
    """
    x = g_raw.float().add_(dt_bias)
    return torch.nn.functional.softplus(x).mul_(A_log.exp().neg_())


def draw(workload: GdnWorkload, regime: Regime, *, seed: int, device: str) -> dict[str, Any]:
    """Draw one input set with every form it has; see :meth:`GdnPrefill.draw`."""
    recipe = RECIPES[regime.name]

    def gate(rng: torch.Generator) -> dict[str, Any]:
        if not recipe.raw:
            return {"g": _plain_gate(recipe, workload, rng)}
        raw = _raw_gate(recipe, workload.tokens, workload.value_heads, rng)
        return raw | {"g": activate_gate(**raw)}

    return generators.draw(workload, regime, recipe, gate, seed=seed, device=device)


def _strata(HV: int, rng: torch.Generator) -> torch.Tensor:
    """A draw from each of HV equal parts of (0, 1), in random order: few heads span it too."""
    order = torch.randperm(HV, generator=rng, device=rng.device)
    return order.float().add_(rand(HV, rng=rng)).div_(HV).clamp_(2**-12, 1 - 2**-12)


def _raw_gate(recipe: Recipe, T: int, HV: int, rng: torch.Generator) -> dict[str, Any]:
    """Pre-activation, slope and bias per value head of the softplus regimes."""
    A_log = torch.zeros(HV, device=rng.device)
    dt_bias = torch.zeros(HV, device=rng.device)
    if recipe.gate == "softplus_slow":
        dt_bias.fill_(_SLOW_BIAS)
        # Inverse softplus of a uniform share of 0.01, so that the activated gate is about uniform.
        share = rand(T, HV, rng=rng).clamp_(min=1e-6).mul_(0.01)
        g_raw = share.expm1_().log_().sub_(_SLOW_BIAS).clamp_(max=_SLOW_RAW_MAX)
        return {"g_raw": g_raw.bfloat16(), "A_log": A_log, "dt_bias": dt_bias}
    if recipe.gate == "softplus_plain":
        A_log.fill_(math.log(recipe.level))
    elif recipe.gate == "softplus_unit_bias":
        A_log = _strata(HV, rng).mul_(_A_MAX).log_()
        dt_bias.fill_(1.0)
    elif recipe.gate == "softplus_initial":
        A_log = _strata(HV, rng).mul_(_A_MAX).log_()
        low, high = (math.log(x) for x in _DT)
        dt = _strata(HV, rng).mul_(high - low).add_(low).exp_()
        dt_bias = dt.expm1_().log_()
    else:
        raise ValueError(f"gate rule {recipe.gate!r} has no raw form")
    g_raw = randn(T, HV, rng=rng).clamp_(-_CUT, _CUT).bfloat16()
    return {"g_raw": g_raw, "A_log": A_log, "dt_bias": dt_bias}


def _plain_gate(recipe: Recipe, workload: GdnWorkload, rng: torch.Generator) -> torch.Tensor:
    """Activated gates that no softplus gate produces exactly."""
    if recipe.gate == "log_sigmoid_of_uniform":
        x = rand(workload.tokens, workload.value_heads, rng=rng)
        return torch.nn.functional.logsigmoid(x)
    return plain_gate(recipe, workload, (), rng)
