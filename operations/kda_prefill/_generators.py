"""Draws KDA prefill inputs on any device from a regime's recipe."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from operations._base import Regime
from operations.kda_prefill._regimes import PRODUCTION_LOWER_BOUND, RECIPES, Recipe
from operations.kda_prefill._spec import HEAD_DIM
from operations.kda_prefill._workloads import KdaWorkload

__all__ = ["activate_safe_gate", "draw", "seed_of"]

_SIMILAR_NOISE = 0.1
"""Squared length of the noise around a common unit key: mean cosine 1 / (1 + 0.1) = 0.91.

Not smaller: what a head learns beside the common direction shrinks with the
noise while the bf16 rounding of the keys does not, and at a cosine of 0.94 the
state of any bf16 schedule is off by 1e-2 rms, right inverse or not.
"""

_SIMILAR_VALUE_NOISE = 0.25
"""Size of a value's own part beside the common part, where keys are similar."""

_SLOW_BIAS = -8.0
"""dt_bias of the slow gates: keeps bf16 pre-activations near 0, where they are finest."""

_SCATTER = 1 / 64
"""Share of strong gates among scattered ones: a channel is remembered for tens of tokens."""

_SCATTER_LEAST = -3.0
"""Weakest of the scattered strong gates."""

_ZERO_KEYS = 1 / 8
"""Share of zero keys where some are."""

_SLOW_RAW_MAX = 1.78125
"""Largest bf16 pre-activation above the bias that still gives a gate over -0.01."""


def seed_of(seed: int, workload: KdaWorkload, regime: Regime) -> int:
    """A 63-bit generator seed from the names, the same in every process."""
    text = f"{seed}|{workload.name}|{regime.name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


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
    """Draw one input set with every form it has.

    Returns
    -------
    dict
        The arguments of the operation (``q, k, v, g, beta, cu_seqlens,
        initial_state, scale``), always ``q_raw``, ``k_raw`` (bf16, not
        normalised) and ``beta_logits`` (bf16), and for safe-gate regimes
        ``g_raw`` (bf16), ``A_log`` [H], ``dt_bias`` [H, 128] (fp32) and
        ``lower_bound``.

    Raises
    ------
    ValueError
        If the regime is not one of this operation's.
    """
    recipe = RECIPES.get(regime.name)
    if recipe is None:
        raise ValueError(f"unknown kda_prefill regime {regime.name!r}; known: {', '.join(RECIPES)}")
    rng = torch.Generator(device=device).manual_seed(seed_of(seed, workload, regime))
    T, H, N = workload.tokens, workload.heads, workload.sequences

    q_raw = _randn(T, H, HEAD_DIM, rng=rng).bfloat16()
    k_raw = _raw_keys(recipe, T, H, rng)
    v = _values(recipe, T, H, rng)
    mean, std = recipe.beta_logit
    # A draw of exactly 0 times an infinite spread is NaN: a logit like any other's, 0 or 1 later.
    beta_logits = _randn(T, H, rng=rng).mul_(std).add_(mean)
    beta_logits = beta_logits.nan_to_num_(-math.inf, math.inf, -math.inf).bfloat16()
    out: dict[str, Any] = {
        "q": _unit(q_raw),
        "k": _unit(k_raw),
        "v": v,
        "beta": beta_logits.float().sigmoid_(),
        "cu_seqlens": torch.tensor(workload.boundaries, dtype=torch.int32, device=device),
        "initial_state": None,
        "scale": workload.scale,
        "q_raw": q_raw,
        "k_raw": k_raw,
        "beta_logits": beta_logits,
    }
    if recipe.has_raw_form:
        out |= _raw_gate(recipe, T, H, rng)
        out["g"] = activate_safe_gate(
            out["g_raw"], out["A_log"], out["dt_bias"], out["lower_bound"]
        )
    else:
        out["g"] = _plain_gate(recipe, workload, rng)
    if workload.initial_state:
        out["initial_state"] = _state(recipe, N, H, rng)
    return out


def _randn(*shape: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, generator=rng, device=rng.device, dtype=torch.float32)


def _rand(*shape: int, rng: torch.Generator) -> torch.Tensor:
    return torch.rand(*shape, generator=rng, device=rng.device, dtype=torch.float32)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Unit norm per token and head from the bf16 values, rounded to bf16 again; zero stays."""
    y = x.float()
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return y.div_(norm.clamp_(min=torch.finfo(norm.dtype).tiny)).bfloat16()


def _raw_keys(recipe: Recipe, T: int, H: int, rng: torch.Generator) -> torch.Tensor:
    k = _randn(T, H, HEAD_DIM, rng=rng)
    if recipe.keys == "non_negative":
        k.abs_()
    elif recipe.keys == "similar":
        # All channels of the common key have one size; a few large ones would collect the
        # rounding errors of every write in their columns of the state.
        common = _randn(H, HEAD_DIM, rng=rng).sign_()
        k.mul_(math.sqrt(_SIMILAR_NOISE)).add_(common)
    elif recipe.keys == "some_zero":
        k.masked_fill_((_rand(T, H, rng=rng) < _ZERO_KEYS)[..., None], 0.0)
    return k.bfloat16()


def _values(recipe: Recipe, T: int, H: int, rng: torch.Generator) -> torch.Tensor:
    """Values of unit variance; similar keys come with similar values, as equal tokens have."""
    v = _randn(T, H, HEAD_DIM, rng=rng)
    if recipe.keys == "similar":
        # With unrelated values each write cancels the last one, and summing a chunk of such
        # writes in bf16 is off by 1e-2 however exact the inverse is.
        common = _randn(H, HEAD_DIM, rng=rng).sign_()
        v.mul_(_SIMILAR_VALUE_NOISE).add_(common).mul_((1 + _SIMILAR_VALUE_NOISE**2) ** -0.5)
    return v.bfloat16()


def _raw_gate(recipe: Recipe, T: int, H: int, rng: torch.Generator) -> dict[str, Any]:
    """Pre-activation, per-head slope and per-channel bias of the safe-gate regimes."""
    device = rng.device
    A_log = torch.zeros(H, device=device)
    dt_bias = torch.zeros(H, HEAD_DIM, device=device)
    if recipe.gate == "safe_production":
        A_log = _rand(H, rng=rng).mul_(0.4).sub_(0.2)
        dt_bias = _randn(H, HEAD_DIM, rng=rng).mul_(0.3)
        # Variances 0.91 and 0.09: the pre-activation keeps unit spread over a head.
        g_raw = _randn(T, H, HEAD_DIM, rng=rng).mul_(math.sqrt(0.91)).bfloat16()
    elif recipe.gate == "safe_spread":
        top = math.log(16.0)
        A_log = torch.linspace(0.0, top, H, device=device) if H > 1 else A_log + top
        dt_bias = _randn(H, HEAD_DIM, rng=rng).mul_(0.3)
        g_raw = _randn(T, H, HEAD_DIM, rng=rng).mul_(math.sqrt(0.91)).bfloat16()
    elif recipe.gate == "safe_plain":
        g_raw = _randn(T, H, HEAD_DIM, rng=rng).bfloat16()
    elif recipe.gate == "safe_slow":
        dt_bias.fill_(_SLOW_BIAS)
        # logit of a uniform share of 0.01 / 5, so that the activated gate is about uniform.
        share = _rand(T, H, HEAD_DIM, rng=rng).clamp_(min=1e-6).mul_(-0.01 / recipe.level)
        g_raw = share.logit_().sub_(_SLOW_BIAS).clamp_(max=_SLOW_RAW_MAX).bfloat16()
    else:
        raise ValueError(f"gate rule {recipe.gate!r} has no raw form")
    return {"g_raw": g_raw, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": recipe.level}


def _plain_gate(recipe: Recipe, workload: KdaWorkload, rng: torch.Generator) -> torch.Tensor:
    """Activated gates that no safe gate produces exactly."""
    T, H, device = workload.tokens, workload.heads, rng.device
    if recipe.gate == "constant":
        return torch.full((T, H, HEAD_DIM), recipe.level, device=device)
    if recipe.gate == "mixed":
        g = torch.full((T, H, HEAD_DIM), -0.001, device=device)
        g[..., 0::2] = recipe.level
        return g
    if recipe.gate == "closed":
        g = (_rand(T, H, HEAD_DIM, rng=rng) < 0.5).float().mul_(recipe.level)
        g[..., 0::2] = 0.0
        return g
    if recipe.gate == "scattered":
        g = _rand(T, H, HEAD_DIM, rng=rng).mul_(-0.01)
        decades = math.log(recipe.level / _SCATTER_LEAST)
        strong = _rand(T, H, HEAD_DIM, rng=rng).mul_(decades).exp_().mul_(_SCATTER_LEAST)
        return torch.where(_rand(T, H, HEAD_DIM, rng=rng) < _SCATTER, strong, g)
    if recipe.gate == "remembered":
        return _rand(T, H, HEAD_DIM, rng=rng).mul_(-2e-5)
    if recipe.gate == "log_sigmoid":
        x = _randn(T, H, HEAD_DIM, rng=rng)
        return torch.nn.functional.logsigmoid(x).clamp_(min=PRODUCTION_LOWER_BOUND)
    if recipe.gate == "single_token":
        g = _rand(T, H, HEAD_DIM, rng=rng).mul_(-0.01)
        full = [(s, n) for s, n in zip(workload.boundaries, workload.lengths, strict=False) if n]
        if full:
            # Past the middle and off any chunk boundary, at another offset in each head.
            tokens = [[s + (n // 2 + 5 + 7 * h) % n for h in range(H)] for s, n in full]
            g[torch.tensor(tokens, device=device), torch.arange(H, device=device)] = recipe.level
        return g
    raise ValueError(f"gate rule {recipe.gate!r} has a raw form only")


def _state(recipe: Recipe, N: int, H: int, rng: torch.Generator) -> torch.Tensor:
    """Initial states ``[N, H, V, K]``, fp32."""
    if recipe.state == "normal":
        return _randn(N, H, HEAD_DIM, HEAD_DIM, rng=rng)
    state = torch.zeros(N, H, HEAD_DIM, HEAD_DIM, device=rng.device)
    n = torch.arange(N, device=rng.device)[:, None]
    h = torch.arange(H, device=rng.device)[None, :]
    # Row and column differ by 64 modulo 128, so no place is its own transpose.
    row = (17 + 3 * h + 5 * n) % HEAD_DIM
    state[n, h, row, (row + HEAD_DIM // 2) % HEAD_DIM] = 1.0
    return state
