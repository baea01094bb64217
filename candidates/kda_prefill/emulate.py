"""The arithmetic of a schedule on the CPU: rounding, order and masking, without its speed.

What decides whether a chunked schedule is right is where it rounds and how large its
exponents grow, not how it moves data.  So the emulation follows the kernels in every
rounding (bf16 operands, fp32 accumulation, exponentials flushed to zero below the normal
range) and in none of their layouts: all chunks of all sequences are prepared at once, and
only the scan loops, over the chunk index.

Knows operands and schedules; must not know of oracles, tolerances or the DSL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from candidates._base import Schedule
from candidates._delta_rule.kernel.image import chunks_of, segment_turns, segments_of
from candidates.kda_prefill.kernel.steep_plan import (
    RUN,
    RUN_FLOOR,
    SINGLE_FLOOR,
    STEEP_WINDOW,
)
from candidates.kda_prefill.space import KdaSchedule, bears_any_gate

__all__ = ["GATE_FLOOR", "INVERSE", "Variant", "emulate", "largest_exponent", "triangular_inverse"]

GATE_FLOOR = -100.0
"""Gates below are taken as this before they are summed.

``exp(-100)`` is below every normal fp32 number, so nothing that a token with such a gate
decays survives either way; but sums stay small enough to keep the digits of the gates
beside it, and minus infinity does not turn differences of sums into NaN.
"""

_SMALLEST_NORMAL = 2.0**-126

_GROUP = 8
"""Tokens that steep chunks are taken apart to."""

InverseName = Literal[
    "merged_tf32",
    "merged8_tf32",
    "halving_fp32",
    "halving_tf32",
    "halving_fp16",
    "halving_bf16",
    "neumann_fp32",
    "neumann_tf32",
    "neumann_fp16",
    "neumann_bf16",
]

INVERSE: InverseName = "merged_tf32"
"""How the kernels invert ``I + L``: block halving, 16 x 16 blocks in fp32 and then, with tf32
operands, merges to 32 and 64.  ``merged8`` merges 8 x 8 blocks
in tf32 already, as the fused kernel does.

Every intermediate is an entry of the answer, at most about 1, so nothing cancels; the power
series (``neumann``) is a difference of large numbers on similar keys.
"""


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
    plan = _Plan.of(view, inputs)
    chunks = _Chunks.of(plan, inputs)
    images = _prepare(view, chunks, float(inputs["scale"]), variant)
    final = _initial_state(inputs)
    units, state = plan.units(view.segments), final
    if all(unit.last for unit in units):
        state = state[[unit.sequence for unit in units]]
    else:
        state = _segment_states(units, images, state)
    out, state = _scan(units, images, images.u, state)
    for index, unit in enumerate(units):
        if unit.last:
            final[unit.sequence] = state[index]
    o = torch.zeros_like(inputs["v"])
    o[plan.rows[plan.valid]] = out.to(torch.bfloat16).transpose(1, 2)[plan.valid]
    return {"o": o, "final_state": final.transpose(-1, -2).contiguous()}


def largest_exponent(schedule: Schedule, inputs: Mapping[str, Any]) -> float:
    """Largest exponent among the anchored factors that the schedule forms on these inputs.

    Above 88.7 the factor is infinite; what multiplies it is then 0, and their product NaN.
    Takes what :func:`emulate` takes; 0 where no exponent is positive.
    """
    view = KdaSchedule.of(schedule)
    chunks = _Chunks.of(_Plan.of(view, inputs), inputs)
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


# ------------------------------------------------------------------- chunks of a ragged batch


@dataclass(frozen=True)
class _Unit:
    """A run of chunks that one CTA scans: a segment of a sequence."""

    sequence: int
    part: int
    first: int
    count: int
    last: bool


@dataclass(frozen=True)
class _Plan:
    """Which token stands where: chunks never cross a sequence.

    ``rows`` and ``valid`` are ``[C, BT]``: packed token index of each row of each chunk, and
    whether the row is inside its sequence; ``base`` is each sequence's first chunk.
    """

    view: KdaSchedule
    lengths: tuple[int, ...]
    base: tuple[int, ...]
    rows: Tensor
    valid: Tensor

    @classmethod
    def of(cls, view: KdaSchedule, inputs: Mapping[str, Any]) -> _Plan:
        cu = [int(c) for c in inputs["cu_seqlens"].tolist()]
        lengths = tuple(hi - lo for lo, hi in pairwise(cu))
        base, rows, valid, chunks = [], [], [], 0
        for lo, length in zip(cu, lengths, strict=False):
            n = -(-length // view.bt)
            base.append(chunks)
            chunks += n
            token = torch.arange(n * view.bt)
            valid.append(token < length)
            rows.append(lo + token.clamp(max=max(length - 1, 0)))
        empty = torch.zeros(0, dtype=torch.long)
        return cls(
            view,
            lengths,
            tuple(base),
            torch.cat([empty, *rows]).view(-1, view.bt),
            torch.cat([empty.bool(), *valid]).view(-1, view.bt),
        )

    def units(self, segments: int) -> list[_Unit]:
        """Segments of every sequence that has a token, in order."""
        unroll, units = self.view.unroll, []
        for n, (length, base) in enumerate(zip(self.lengths, self.base, strict=True)):
            if length == 0:
                continue
            live = -(-length // self.view.bt)
            padded = chunks_of(length, self.view.bt, unroll)
            parts = segments_of(padded, segments, unroll)
            for part in range(parts):
                first, stop = segment_turns(padded, part, parts, unroll)
                # Padding chunks leave the state as it is: they are not worth emulating.
                count = min(stop, live) - min(first, live)
                units.append(_Unit(n, part, base + first, count, part == parts - 1))
        return units


@dataclass(frozen=True)
class _Chunks:
    """Operands by chunk, ``[C, H, BT, ...]`` in fp32, rows past a sequence's end set to 0.

    ``b`` is the gate ``g`` summed from the chunk's start, inclusive, in fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    b: Tensor
    beta: Tensor

    @classmethod
    def of(cls, plan: _Plan, inputs: Mapping[str, Any]) -> _Chunks:
        def take(x: Tensor) -> Tensor:
            invalid = ~plan.valid.view(*plan.valid.shape, *[1] * (x.dim() - 1))
            return x[plan.rows].float().masked_fill(invalid, 0.0).transpose(1, 2).contiguous()

        g = take(inputs["g"]).clamp(min=GATE_FLOOR)
        return cls(
            q=take(inputs["q"]),
            k=take(inputs["k"]),
            v=take(inputs["v"]),
            g=g,
            b=g.cumsum(-2),
            beta=take(inputs["beta"]),
        )


def _initial_state(inputs: Mapping[str, Any]) -> Tensor:
    """``[N, H, K, V]`` fp32, keys by values: the transpose of what memory holds; a copy."""
    state = inputs["initial_state"]
    if state is None:
        _, heads, size = inputs["v"].shape
        sequences = len(inputs["cu_seqlens"]) - 1
        return torch.zeros(sequences, heads, inputs["k"].shape[-1], size)
    return state.float().transpose(-1, -2).clone()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------ rounding


def _flush(x: Tensor) -> Tensor:
    """Subnormal numbers to 0, in place."""
    return x.masked_fill_(x.abs() < _SMALLEST_NORMAL, 0.0)


def _exp(x: Tensor) -> Tensor:
    """The fast exponential: fp32, subnormal results are 0."""
    return _flush(torch.exp(x))


def _bf16(x: Tensor) -> Tensor:
    """Round to a bf16 operand (subnormals to 0), held in fp32 so that products accumulate there."""
    return _flush(x.to(torch.bfloat16).float())


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


def _scores(view: KdaSchedule, x: _Chunks, variant: Variant) -> tuple[Tensor, Tensor]:
    """``Aqk`` (with the diagonal) and ``Akk`` (without), ``[C, H, BT, BT]`` fp32."""
    shape = (*x.b.shape[:2], view.bt, view.bt)
    aqk, akk = x.q.new_zeros(shape), x.q.new_zeros(shape)
    for product in _products(view):
        row, col = product.exponents(x.b)
        if variant.clamp is not None:
            row, col = (e.clamp(-variant.clamp, variant.clamp) for e in (row, col))
        factor = _exp(row)
        column = _bf16(x.k[:, :, product.cols] * _exp(col)).transpose(-1, -2)
        at = (slice(None), slice(None), product.rows[:, :, None], product.cols[:, None, :])
        aqk[at] = _bf16(x.q[:, :, product.rows] * factor) @ column
        akk[at] = _bf16(x.k[:, :, product.rows] * factor) @ column
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


def _steep(view: KdaSchedule, x: _Chunks) -> Tensor:
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


def _score_steep(view: KdaSchedule, x: _Chunks, steep: Tensor, aqk: Tensor, akk: Tensor) -> None:
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
        factor = _exp(rows)
        column = _bf16(x.k * _exp(columns)).transpose(-1, -2)
        own = steep[..., None, None] & (apart == distance)
        for scores, operand in ((aqk, x.q), (akk, x.k)):
            scores.copy_(torch.where(own, _bf16(operand * factor) @ column, scores))


def _operand(x: Tensor, precision: str) -> Tensor:
    """Round to an operand of the inverse's products, held in fp32."""
    if precision == "fp32":
        return x
    if precision == "tf32":  # round to nearest, ties away: 10 mantissa bits stay
        return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return x.to({"fp16": torch.float16, "bf16": torch.bfloat16}[precision]).float()


def triangular_inverse(lower: Tensor, name: InverseName) -> Tensor:
    """``(I + lower)^-1`` for strictly lower triangular ``lower`` ``[..., BT, BT]``, fp32."""
    method, precision = name.split("_")
    bt = lower.shape[-1]
    eye = torch.eye(bt)
    if method == "neumann":
        # I + P + P^2 + ... with P = -lower, doubling the number of terms each round.
        power, x = -lower, eye - lower
        terms = 2
        while terms < bt:
            p = _operand(power, precision)
            power = p @ p
            x = x + _operand(x, precision) @ _operand(power, precision)
            terms *= 2
        return x
    x = eye.expand_as(lower).clone()
    size = 1
    while size < bt:
        # X21 = -X22 L21 X11 for all neighbouring blocks of this size at once.
        exact = size < {"merged": 16, "merged8": 8}.get(method, 0)
        operand = partial(_operand, precision="fp32" if exact else precision)
        start = torch.arange(0, bt, 2 * size)
        first = start[:, None] + torch.arange(size)
        second = first + size
        low = (..., second[:, :, None], first[:, None, :])
        x11 = operand(x[..., first[:, :, None], first[:, None, :]])
        x22 = operand(x[..., second[:, :, None], second[:, None, :]])
        x[low] = -(operand(x22 @ operand(lower[low])) @ x11)
        size *= 2
    return x


@dataclass(frozen=True)
class _Images:
    """What PREP leaves of each chunk for the scan, ``[C, H, ...]``; operands rounded to bf16."""

    w: Tensor
    u: Tensor
    q_hat: Tensor
    k_bar: Tensor
    aqk: Tensor
    decay: Tensor


def _prepare(view: KdaSchedule, x: _Chunks, scale: float, variant: Variant) -> _Images:
    """Everything that depends on the chunk alone."""
    aqk, akk = _scores(view, x, variant)
    inverse = triangular_inverse(x.beta.unsqueeze(-1) * akk, variant.inverse)
    write = _bf16(inverse * x.beta.unsqueeze(-2))  # X diag(beta)
    factor, end = _exp(x.b), x.b[:, :, -1:]
    return _Images(
        w=_bf16(write @ _bf16(x.k * factor)),
        u=_bf16(write @ x.v),
        q_hat=_bf16(scale * (x.q * factor)),
        # From its own exponent: (k exp(-b)) exp(b_end) would overflow on the way.
        k_bar=_bf16(x.k * _exp(end - x.b)),
        aqk=_bf16(scale * aqk),
        decay=_exp(end).transpose(-1, -2),
    )


# ------------------------------------------------------------------------------------ SCAN


def _scan(units: list[_Unit], images: _Images, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Walk every unit from its own state, all at once.

    ``u`` ``[C, H, BT, columns]`` and ``state`` ``[units, H, K, columns]`` share their columns:
    values, and in pass 1 of the segmented scan key channels as well.  Returns the fp32 output
    ``[C, H, BT, columns]`` and the final states.
    """
    out, state = torch.zeros_like(u), state.clone()
    first = torch.tensor([unit.first for unit in units], dtype=torch.long)
    count = torch.tensor([unit.count for unit in units], dtype=torch.long)
    for step in range(int(count.max()) if len(units) else 0):
        live = (count > step).nonzero().squeeze(-1)
        c = first[live] + step
        s = state[live]
        operand = _bf16(s)
        new = _bf16(u[c] - images.w[c] @ operand)
        out[c] = images.q_hat[c] @ operand + images.aqk[c] @ new
        state[live] = images.decay[c] * s + images.k_bar[c].transpose(-1, -2) @ new
    return out, state


def _segment_states(units: list[_Unit], images: _Images, initial: Tensor) -> Tensor:
    """State at the start of each segment, ``[units, H, K, V]``, by the exact affine carry.

    Pass 1 scans every segment but a sequence's last.  The first one starts from the true
    initial state and so ends in the next one's.  Any other starts from ``[0 | I]`` with values
    ``[U | 0]`` and ends as ``[C | M]``: it maps a state S to ``M S + C``.
    """
    _, heads, keys, values = initial.shape
    composed = [unit for unit in units if not unit.last]
    leads = [unit.part == 0 for unit in composed]
    start = torch.cat([torch.zeros(keys, values), torch.eye(keys)], -1)
    starts = start.repeat(len(composed), heads, 1, 1)
    for index, unit in enumerate(composed):
        if leads[index]:
            starts[index, :, :, :values] = initial[unit.sequence]
    wide = torch.nn.functional.pad(images.u, (0, keys))
    _, ends = _scan(composed, images, wide, starts)
    offset, transition = ends[..., :values], _bf16(ends[..., values:])
    after = iter(zip(leads, offset, transition, strict=True))
    states: list[Tensor] = []
    for unit in units:
        if unit.part == 0:
            states.append(initial[unit.sequence])
        if not unit.last:
            lead, c, m = next(after)
            states.append(c if lead else m @ _bf16(states[-1]) + c)
    return torch.stack(states)
