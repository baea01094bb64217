"""The arithmetic of a schedule on the CPU: rounding, order and masking, without its speed.

Chunks, rounding, inverse and scan are those of :mod:`candidates._delta_rule.emulate`; here are the
scores, which anchor the gates' exponents.

Knows operands and schedules; must not know of oracles, tolerances or the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from candidates._base import Schedule
from candidates._delta_rule.emulate import (
    INVERSE,
    Chunks,
    Images,
    InverseName,
    Plan,
    bf16,
    exp,
    outcome,
    triangular_inverse,
)
from candidates.kda_prefill.kernel.steep_plan import (
    RUN,
    RUN_FLOOR,
    SINGLE_FLOOR,
    STEEP_WINDOW,
)
from candidates.kda_prefill.space import KdaSchedule, bears_any_gate

__all__ = ["Variant", "emulate", "inside_exponents", "largest_exponent", "split_tokens"]

_GROUP = 8
"""Tokens that steep chunks are taken apart to."""


@dataclass(frozen=True)
class Variant:
    """Departures from the kernels' arithmetic, to show what they would cost.

    Parameters
    ----------
    mask : {"select", "multiply"}
        How scores above the diagonal are removed.  Multiplying by 0 makes NaN of infinity.
    clamp : float or None
        Limit of the magnitude of the exponents of anchored factors.
    inverse : str
        Method and operand precision of the triangular inverse.
    """

    mask: Literal["select", "multiply"] = "select"
    clamp: float | None = None
    inverse: InverseName = INVERSE


KERNEL = Variant()
"""The arithmetic that the kernels have."""


def emulate(
    schedule: Schedule, inputs: Mapping[str, Any], variant: Variant = KERNEL
) -> dict[str, Tensor]:
    """Evaluate KDA prefill as the schedule's kernels would.

    Parameters
    ----------
    schedule : Schedule
        Whether it breaks a budget does not matter here.
    inputs : Mapping
        ``q, k, v`` ``[T, H, 128]`` bf16, ``g`` ``[T, H, 128]`` fp32, ``beta`` ``[T, H]`` fp32,
        ``cu_seqlens`` ``[N + 1]`` int, ``initial_state`` ``[N, H, 128, 128]`` fp32 (value-major)
        or None, ``scale`` float.
    variant : Variant
        For experiments; the default is what the kernels do.

    Returns
    -------
    dict
        ``o`` ``[T, H, 128]`` bf16 and ``final_state`` ``[N, H, 128, 128]`` fp32, value-major.
    """
    view = KdaSchedule.of(schedule)
    plan = Plan.of(view, inputs)
    chunks = Chunks.of(plan, inputs)
    images = _prepare(view, chunks, float(inputs["scale"]), variant)
    return outcome(plan, images, view.segments, inputs)


def largest_exponent(schedule: Schedule, inputs: Mapping[str, Any]) -> float:
    """Largest exponent among the anchored factors that the schedule forms on these inputs.

    Above 88.7 the factor is infinite; what multiplies it is then 0, and their product NaN.
    Takes what :func:`emulate` takes; 0 where no exponent is positive.
    """
    view = KdaSchedule.of(schedule)
    chunks = Chunks.of(Plan.of(view, inputs), inputs)
    steep = _steep(view, chunks)
    pairs = [(product.exponents(chunks.b), ~steep) for product in _products(view)]
    inside = inside_exponents(chunks.g)
    pairs.append(((inside, -inside), steep))
    largest = 0.0
    for exponents, formed in pairs:
        for x in exponents:
            if x[formed].numel():
                largest = max(largest, float(x[formed].max()))
    return largest


# -------------------------------------------------------------------- PREP: scores and inverse


@dataclass(frozen=True)
class _Product:
    """Scores of ``rows`` against ``cols``, tokens of a chunk, under one anchor per block.

    ``rows`` ``[B, m]`` and ``cols`` ``[B, n]`` are token indices; block x is anchored at the
    cumulative gate of the first ``anchors[x]`` tokens of the chunk.
    """

    rows: Tensor
    cols: Tensor
    anchors: Tensor

    def exponents(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Of the row and of the column factors, ``[C, H, B, m or n, K]``."""
        before = torch.nn.functional.pad(b, (0, 0, 1, 0))
        r = before[:, :, self.anchors].unsqueeze(-2)
        return b[:, :, self.rows] - r, r - b[:, :, self.cols]


def _products(view: KdaSchedule) -> list[_Product]:
    """The matrix products that make up a chunk's scores on and below the diagonal."""
    bt, size = view.bt, view.window
    tokens, products = torch.arange(bt), []
    for start in range(size, bt, size):  # different blocks: the anchor stands between them
        products.append(
            _Product(
                tokens[None, start : start + size], tokens[None, :start], torch.tensor([start])
            )
        )
    if view.rule != "halving":
        blocks = tokens.view(-1, size)
        offset = {"start": 0, "mid": size // 2, "end": size}[view.rule]
        return [*products, _Product(blocks, blocks, blocks[:, 0] + offset)]
    while size > 1:  # right half against left half, then inside each
        halves = tokens.view(-1, 2, size // 2)
        products.append(_Product(halves[:, 1], halves[:, 0], halves[:, 1, 0]))
        size //= 2
    return products


def _scores(view: KdaSchedule, x: Chunks, variant: Variant) -> tuple[Tensor, Tensor]:
    """``Aqk`` (with the diagonal) and ``Akk`` (without), ``[C, H, BT, BT]`` fp32."""
    shape = (*x.b.shape[:2], view.bt, view.bt)
    aqk, akk = x.q.new_zeros(shape), x.q.new_zeros(shape)
    for product in _products(view):
        row, col = product.exponents(x.b)
        if variant.clamp is not None:
            row, col = (e.clamp(-variant.clamp, variant.clamp) for e in (row, col))
        factor = exp(row)
        column = bf16(x.k[:, :, product.cols] * exp(col)).transpose(-1, -2)
        at = (slice(None), slice(None), product.rows[:, :, None], product.cols[:, None, :])
        aqk[at] = bf16(x.q[:, :, product.rows] * factor) @ column
        akk[at] = bf16(x.k[:, :, product.rows] * factor) @ column
    steep = _steep(view, x)
    if steep.any():
        _score_steep(view, x, steep, aqk, akk)
    if view.rule == "halving":  # a token with itself: no exponent, no matrix product
        aqk.diagonal(dim1=-2, dim2=-1).copy_((x.q * x.k).sum(-1))
    lower = torch.ones(view.bt, view.bt).tril().bool()
    strict = lower.tril(-1)
    if variant.mask == "multiply":
        return aqk * lower, akk * strict
    return aqk.masked_fill(~lower, 0.0), akk.masked_fill(~strict, 0.0)


def _steep(view: KdaSchedule, x: Chunks) -> Tensor:
    """Which chunks PREP makes the scores of another way, ``[C, H]``."""
    if view.rule == "halving" or not bears_any_gate(view):
        return torch.zeros(x.g.shape[:2], dtype=torch.bool)
    halves = split_tokens(x.g, view.window // 2).sum(3)
    steep: Tensor = (halves < STEEP_WINDOW).flatten(2).any(-1)
    return steep


def split_tokens(x: Tensor, *sizes: int) -> Tensor:
    """``[C, H, BT, K]`` with the axis of tokens split: the last axes of them have ``sizes``."""
    first = x.shape[2] // math.prod(sizes)
    return x.reshape(*x.shape[:2], first, *sizes, x.shape[-1])


def inside_exponents(g: Tensor) -> Tensor:
    """Gates summed from the middle of every 8 tokens, floored as in the scores of a steep chunk.

    ``g`` and what is returned are ``[C, H, BT, K]``.
    """
    gates = split_tokens(g.clamp(min=SINGLE_FLOOR), 2, _GROUP // 2)
    # The anchor stands behind the fourth token: the first one's own gate is outside.
    before, after = (
        torch.where(x.sum(-2, keepdim=True) < RUN, x.clamp(min=RUN_FLOOR), x)
        for x in (gates[:, :, :, 0, 1:], gates[:, :, :, 1])
    )
    before = torch.nn.functional.pad(-before.flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))
    return torch.cat([before, after.cumsum(-2)], -2).flatten(2, 3)


def _score_steep(view: KdaSchedule, x: Chunks, steep: Tensor, aqk: Tensor, akk: Tensor) -> None:
    """Replace what lies inside half a window in the scores of steep chunks."""
    group = torch.arange(view.bt) // _GROUP
    apart = group[:, None] ^ group
    groups = split_tokens(x.g, _GROUP)
    onward = groups.cumsum(3)  # from in front of the second 8 tokens, and up to behind the first
    up_to = torch.nn.functional.pad(groups.flip(3).cumsum(3).flip(3)[:, :, :, 1:], (0, 0, 0, 1))
    inside = inside_exponents(x.g)
    steps = [(0, inside, -inside)]
    if view.window > 2 * _GROUP:
        steps.append((1, onward.flatten(2, 3), up_to.flatten(2, 3)))
    for distance, rows, columns in steps:
        factor = exp(rows)
        column = bf16(x.k * exp(columns)).transpose(-1, -2)
        own = steep[..., None, None] & (apart == distance)
        for scores, operand in ((aqk, x.q), (akk, x.k)):
            scores.copy_(torch.where(own, bf16(operand * factor) @ column, scores))


def _prepare(view: KdaSchedule, x: Chunks, scale: float, variant: Variant) -> Images:
    """Everything that depends on the chunk alone."""
    aqk, akk = _scores(view, x, variant)
    inverse = triangular_inverse(x.beta.unsqueeze(-1) * akk, variant.inverse)
    write = bf16(inverse * x.beta.unsqueeze(-2))  # X diag(beta)
    factor, end = exp(x.b), x.b[:, :, -1:]
    return Images(
        w=bf16(write @ bf16(x.k * factor)),
        u=bf16(write @ x.v),
        q_hat=bf16(scale * (x.q * factor)),
        # From its own exponent: (k exp(-b)) exp(b_end) would overflow on the way.
        k_bar=bf16(x.k * exp(end - x.b)),
        aqk=bf16(scale * aqk),
        decay=exp(end).transpose(-1, -2),
    )
