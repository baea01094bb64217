"""Draws KDA prefill inputs on any device from a regime's recipe."""

from __future__ import annotations

import math
from typing import Any

import torch

from operations._base import Regime
from operations._delta_rule import generators
from operations._delta_rule.generators import plain_gate, rand, randn
from operations._delta_rule.spec import HEAD_DIM
from operations.kda_prefill._regimes import PRODUCTION_LOWER_BOUND, RECIPES, Recipe
from operations.kda_prefill._workloads import KdaWorkload

__all__ = ["activate_safe_gate", "draw"]

_SLOW_BIAS = -8.0
"""dt_bias of the slow gates: keeps bf16 pre-activations near 0, where they are finest."""

_SLOW_RAW_MAX = 1.78125
"""Largest bf16 pre-activation above the bias that still gives a gate over -0.01."""


def activate_safe_gate(
    g_raw: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float
) -> torch.Tensor:
    """The safe gate ``lower_bound * sigmoid(exp(A_log) * (g_raw + dt_bias))`` in fp32.

    Parameters
    ----------
    g_raw : Tensor [T, H, 128], bf16
    A_log : Tensor [H], fp32
    dt_bias : Tensor [H, 128], fp32
    lower_bound : float

    Returns
    -------
    Tensor [T, H, 128], fp32, between ``lower_bound`` and 0.
    """
    x = g_raw.float().add_(dt_bias).mul_(A_log.exp()[:, None])
    return x.sigmoid_().mul_(lower_bound)


def draw(workload: KdaWorkload, regime: Regime, *, seed: int, device: str) -> dict[str, Any]:
    """Draw one input set with every form it has; see :meth:`KdaPrefill.draw`."""
    recipe = RECIPES[regime.name]

    def gate(rng: torch.Generator) -> dict[str, Any]:
        if not recipe.raw:
            return {"g": _plain_gate(recipe, workload, rng)}
        raw = _raw_gate(recipe, workload.tokens, workload.heads, rng)
        return raw | {"g": activate_safe_gate(**raw)}

    return generators.draw(workload, regime, recipe, gate, seed=seed, device=device)


def _raw_gate(recipe: Recipe, T: int, H: int, rng: torch.Generator) -> dict[str, Any]:
    """Pre-activation, per-head slope and per-channel bias of the safe-gate regimes."""
    device = rng.device
    A_log = torch.zeros(H, device=device)
    dt_bias = torch.zeros(H, HEAD_DIM, device=device)
    if recipe.gate == "safe_production":
        A_log = rand(H, rng=rng).mul_(0.4).sub_(0.2)
        dt_bias = randn(H, HEAD_DIM, rng=rng).mul_(0.3)
        # Variances 0.91 and 0.09: the pre-activation keeps unit spread over a head.
        g_raw = randn(T, H, HEAD_DIM, rng=rng).mul_(math.sqrt(0.91)).bfloat16()
    elif recipe.gate == "safe_spread":
        top = math.log(16.0)
        A_log = torch.linspace(0.0, top, H, device=device) if H > 1 else A_log + top
        dt_bias = randn(H, HEAD_DIM, rng=rng).mul_(0.3)
        g_raw = randn(T, H, HEAD_DIM, rng=rng).mul_(math.sqrt(0.91)).bfloat16()
    elif recipe.gate == "safe_plain":
        g_raw = randn(T, H, HEAD_DIM, rng=rng).bfloat16()
    elif recipe.gate == "safe_slow":
        dt_bias.fill_(_SLOW_BIAS)
        # logit of a uniform share of 0.01 / 5, so that the activated gate is about uniform.
        share = rand(T, H, HEAD_DIM, rng=rng).clamp_(min=1e-6).mul_(-0.01 / recipe.level)
        g_raw = share.logit_().sub_(_SLOW_BIAS).clamp_(max=_SLOW_RAW_MAX).bfloat16()
    else:
        raise ValueError(f"gate rule {recipe.gate!r} has no raw form")
    return {"g_raw": g_raw, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": recipe.level}


def _plain_gate(recipe: Recipe, workload: KdaWorkload, rng: torch.Generator) -> torch.Tensor:
    """Activated gates that no safe gate produces exactly."""
    if recipe.gate == "log_sigmoid":
        x = randn(workload.tokens, workload.heads, HEAD_DIM, rng=rng)
        return torch.nn.functional.logsigmoid(x).clamp_(min=PRODUCTION_LOWER_BOUND)
    return plain_gate(recipe, workload, (HEAD_DIM,), rng)
