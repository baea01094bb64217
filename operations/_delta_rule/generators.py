"""Draws what the inputs of all gated delta rules have in common, on any device.

The gate is drawn by the operation, between the write strengths and the state, from the same
stream of random numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch

from operations._base import Regime
from operations._delta_rule.recipes import Recipe
from operations._delta_rule.spec import HEAD_DIM
from operations._delta_rule.workloads import DeltaRuleWorkload

__all__ = ["draw", "plain_gate", "rand", "randn", "seed_of"]

_SIMILAR_NOISE = 0.1
"""Squared length of the noise around a common unit key: mean cosine 1 / (1 + 0.1) = 0.91.

Not smaller: what a head learns beside the common direction shrinks with the
noise while the bf16 rounding of the keys does not, and at a cosine of 0.94 the
state of any bf16 schedule is off by 1e-2 rms, right inverse or not.
"""

_SIMILAR_VALUE_NOISE = 0.25
"""Size of a value's own part beside the common part, where keys are similar."""

_ZERO_KEYS = 1 / 8
"""Share of zero keys where some are."""

_SCATTER = 1 / 64
"""Share of strong gates among scattered ones: a gate's state is remembered for tens of tokens."""

_SCATTER_LEAST = -3.0
"""Weakest of the scattered strong gates."""


def seed_of(seed: int, workload: DeltaRuleWorkload, regime: Regime) -> int:
    """A 63-bit generator seed from the names, the same in every process."""
    text = f"{seed}|{workload.name}|{regime.name}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def draw(
    workload: DeltaRuleWorkload,
    regime: Regime,
    recipe: Recipe,
    gate: Callable[[torch.Generator], dict[str, Any]],
    *,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """Draw one input set with every form it has.

    Parameters
    ----------
    workload : DeltaRuleWorkload
    regime : Regime
    recipe : Recipe
        The regime's.
    gate : callable
        Given the generator, returns ``g`` and whatever it was made from.
    seed : int
    device : str

    Returns
    -------
    dict
        The arguments of the operation (:data:`~operations._delta_rule.spec.ARGUMENTS`), always
        ``q_raw``, ``k_raw`` (bf16, not normalised) and ``beta_logits`` (bf16), and what
        ``gate`` returned.
    """
    rng = torch.Generator(device=device).manual_seed(seed_of(seed, workload, regime))
    T, H, N = workload.tokens, workload.heads, workload.sequences
    HV = workload.state_heads

    q_raw = _raw_queries(recipe, T, H, rng)
    k_raw = _raw_keys(recipe, T, H, rng)
    v = _values(recipe, T, HV, rng)
    mean, std = recipe.beta_logit
    # A draw of exactly 0 times an infinite spread is NaN: a logit like any other's, 0 or 1 later.
    beta_logits = randn(T, HV, rng=rng).mul_(std).add_(mean)
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
    out |= gate(rng)
    if workload.initial_state:
        out["initial_state"] = _state(recipe, N, HV, rng)
    return out


def randn(*shape: int, rng: torch.Generator) -> torch.Tensor:
    """Normal draws in fp32 on the generator's device."""
    return torch.randn(*shape, generator=rng, device=rng.device, dtype=torch.float32)


def rand(*shape: int, rng: torch.Generator) -> torch.Tensor:
    """Uniform draws from [0, 1) in fp32 on the generator's device."""
    return torch.rand(*shape, generator=rng, device=rng.device, dtype=torch.float32)


def plain_gate(
    recipe: Recipe, workload: DeltaRuleWorkload, channels: tuple[int, ...], rng: torch.Generator
) -> torch.Tensor:
    """Activated gates of the rules that hold for a gate of any shape.

    Where even and odd differ, it is along the last axis: channels, or heads that have none.

    Parameters
    ----------
    recipe : Recipe
    workload : DeltaRuleWorkload
    channels : tuple of int
        Gates of one token and state head: ``(128,)``, or ``()`` for a single one.
    rng : Generator

    Returns
    -------
    Tensor [T, HV, *channels], fp32, at most 0.

    Raises
    ------
    ValueError
        If the recipe's rule is none of these.
    """
    shape = (workload.tokens, workload.state_heads, *channels)
    if recipe.gate == "constant":
        return torch.full(shape, recipe.level, device=rng.device)
    if recipe.gate == "mixed":
        g = torch.full(shape, -0.001, device=rng.device)
        g[..., 0::2] = recipe.level
        return g
    if recipe.gate == "closed":
        g = (rand(*shape, rng=rng) < 0.5).float().mul_(recipe.level)
        g[..., 0::2] = 0.0
        return g
    if recipe.gate == "remembered":
        return rand(*shape, rng=rng).mul_(-2e-5)
    if recipe.gate == "scattered":
        g = _mostly_slow(*shape, rng=rng)
        decades = math.log(recipe.level / _SCATTER_LEAST)
        strong = rand(*shape, rng=rng).mul_(decades).exp_().mul_(_SCATTER_LEAST)
        return torch.where(rand(*shape, rng=rng) < _SCATTER, strong, g)
    if recipe.gate == "single_token":
        g = _mostly_slow(*shape, rng=rng)
        g[_single_tokens(workload, rng.device)] = recipe.level
        return g
    raise ValueError(f"gate rule {recipe.gate!r} has a raw form only")


def _mostly_slow(*shape: int, rng: torch.Generator) -> torch.Tensor:
    """Gates uniform in (-0.01, 0]: the ground that strong ones stand out from."""
    return rand(*shape, rng=rng).mul_(-0.01)


def _single_tokens(workload: DeltaRuleWorkload, device: torch.device) -> Any:
    """Index ``(tokens, heads)`` of one token in each sequence that has any, for each state head."""
    heads = range(workload.state_heads)
    full = [(s, n) for s, n in zip(workload.boundaries, workload.lengths, strict=False) if n]
    # Past the middle and off any chunk boundary, at another offset in each head.
    tokens = [[s + (n // 2 + 5 + 7 * h) % n for h in heads] for s, n in full]
    rows = torch.tensor(tokens, device=device, dtype=torch.int64).view(len(full), len(heads))
    return rows, torch.arange(len(heads), device=device)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Unit norm per token and head from the bf16 values, rounded to bf16 again; zero stays."""
    y = x.float()
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return y.div_(norm.clamp_(min=torch.finfo(norm.dtype).tiny)).bfloat16()


def _raw_queries(recipe: Recipe, T: int, H: int, rng: torch.Generator) -> torch.Tensor:
    q = randn(T, H, HEAD_DIM, rng=rng)
    return (torch.nn.functional.silu(q) if recipe.keys == "silu" else q).bfloat16()


def _raw_keys(recipe: Recipe, T: int, H: int, rng: torch.Generator) -> torch.Tensor:
    k = randn(T, H, HEAD_DIM, rng=rng)
    if recipe.keys == "silu":
        torch.nn.functional.silu(k, inplace=True)
    elif recipe.keys == "non_negative":
        k.abs_()
    elif recipe.keys == "similar":
        # All channels of the common key have one size; a few large ones would collect the
        # rounding errors of every write in their columns of the state.
        common = randn(H, HEAD_DIM, rng=rng).sign_()
        k.mul_(math.sqrt(_SIMILAR_NOISE)).add_(common)
    elif recipe.keys == "some_zero":
        k.masked_fill_((rand(T, H, rng=rng) < _ZERO_KEYS)[..., None], 0.0)
    return k.bfloat16()


def _values(recipe: Recipe, T: int, H: int, rng: torch.Generator) -> torch.Tensor:
    """Values of unit variance; similar keys come with similar values, as equal tokens have."""
    v = randn(T, H, HEAD_DIM, rng=rng)
    if recipe.keys == "similar":
        # With unrelated values each write cancels the last one, and summing a chunk of such
        # writes in bf16 is off by 1e-2 however exact the inverse is.
        common = randn(H, HEAD_DIM, rng=rng).sign_()
        v.mul_(_SIMILAR_VALUE_NOISE).add_(common).mul_((1 + _SIMILAR_VALUE_NOISE**2) ** -0.5)
    return v.bfloat16()


def _state(recipe: Recipe, N: int, H: int, rng: torch.Generator) -> torch.Tensor:
    """Initial states ``[N, H, V, K]``, fp32."""
    if recipe.state == "normal":
        return randn(N, H, HEAD_DIM, HEAD_DIM, rng=rng)
    state = torch.zeros(N, H, HEAD_DIM, HEAD_DIM, device=rng.device)
    n = torch.arange(N, device=rng.device)[:, None]
    h = torch.arange(H, device=rng.device)[None, :]
    # Row and column differ by 64 modulo 128, so no place is its own transpose.
    row = (17 + 3 * h + 5 * n) % HEAD_DIM
    state[n, h, row, (row + HEAD_DIM // 2) % HEAD_DIM] = 1.0
    return state
