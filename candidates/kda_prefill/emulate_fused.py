"""The arithmetic of the fused kernel on the CPU: its frames, its roundings and its runs.

As :mod:`.emulate`, whose chunks, rounding and inverse it shares: what differs is where the state
is held between chunks and that a run of chunks that begins within a sequence may start from zero,
where the guard says so, or with an exact segment, where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from candidates._base import Schedule
from candidates._delta_rule.emulate import (
    GATE_FLOOR,
    SMS,
    InverseName,
    Plan,
    bf16,
    composed,
    exact_segments,
    exp,
    initial_state,
    triangular_inverse,
)
from candidates._delta_rule.kernel.pieces import GUARD
from candidates.kda_prefill.emulate import inside_exponents, split_tokens
from candidates.kda_prefill.kernel.fused_plan import BT, GUARD_MARGIN, SHORT, cuts_of, runs_of
from candidates.kda_prefill.kernel.steep_plan import STEEP_HALF
from candidates.kda_prefill.space import FusedSchedule, KdaSchedule

__all__ = ["SMS", "emulate", "largest_exponent", "warm_ups"]

_HALF = BT // 2
_INVERSE: InverseName = "merged8_tf32"
_CHUNKS = KdaSchedule(BT, "mid", None, None, 1, 64)
"""How the sequences are cut into chunks."""


def emulate(schedule: Schedule, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Evaluate KDA prefill as the fused kernel would; see :func:`.emulate.emulate`."""
    view = FusedSchedule.of(schedule)
    plan = Plan.of(_CHUNKS, inputs)
    middle = view.frame == "middle"
    chunks = _Chunks.of(plan, inputs)
    images = _prepare(chunks, middle)
    final, scale = initial_state(inputs), float(inputs["scale"])
    heads = inputs["v"].shape[1]
    out = torch.zeros(*chunks.v.shape)
    cuts = _cuts_by_chain(cuts_of(plan.lengths, heads, runs_of(view.waves, SMS)))
    for n, (length, base) in enumerate(zip(plan.lengths, plan.base, strict=True)):
        count = -(-length // BT)
        chains = [cuts.get(h * len(plan.lengths) + n, []) for h in range(heads)]
        bound = window_bounds(chunks, base, count) if any(chains) else None
        for h in range(heads):
            numbers, begins, warm = [0], [0], [0]
            if bound is not None:
                for number, begin in chains[h]:
                    numbers.append(number)
                    begins.append(begin)
                    warm.append(_warm_up(bound[:, h], begin))
            last = final[n, h]
            walk = partial(_walk, images, chunks, base, h, scale=scale, middle=middle)
            for p, stop in exact_segments(warm, numbers):
                begin, end, exact = begins[p], [*begins, count][stop], warm[p] < 0
                first = begin if exact else begin - warm[p]
                start = torch.zeros_like(final[n, h])
                if first == 0:
                    start = final[n, h].clone()
                state, local = walk(first, begin, end, start)
                if exact:
                    state, local = composed(walk, begin, end, state, local, last)
                out[base + begin : base + end, h], last = local, state
            if count:
                final[n, h] = last
    o = torch.zeros_like(inputs["v"])
    o[plan.rows[plan.valid]] = out.to(torch.bfloat16).transpose(1, 2)[plan.valid]
    return {"o": o, "final_state": final.transpose(-1, -2).contiguous()}


def _cuts_by_chain(cuts: list[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    """Number and chunk of each cut within a chain, by chain."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, (chain, chunk) in enumerate(cuts):
        if chunk > 0:
            found.setdefault(chain, []).append((number, chunk))
    return found


def largest_exponent(schedule: Schedule, inputs: Mapping[str, Any]) -> float:
    """Largest exponent that the fused kernel forms, of a factor or, negated, of a decay.

    A decay that is flushed to 0 loses what a factor of the next chunk would raise again, so it
    counts like the factor.  The whole decay of a steep chunk does not: nothing raises it.
    """
    view = FusedSchedule.of(schedule)
    chunks = _Chunks.of(Plan.of(_CHUNKS, inputs), inputs)
    if not chunks.up.numel():
        return 0.0
    inside = inside_exponents(chunks.g).abs().amax((-1, -2))
    factors = torch.where(chunks.steep, inside, chunks.up.abs().amax((-1, -2)))
    largest = float(factors.max())
    if view.frame == "middle":  # what decays the state between two middles
        head, tail = (_held(x, chunks.steep) for x in (chunks.head, chunks.tail))
        largest = max(largest, float(-(head + tail).min()))
    return largest


def warm_ups(inputs: Mapping[str, Any], n: int, h: int, boundary: int) -> int:
    """Chunks of warm-up at chunk ``boundary`` of a sequence and head; -1 if none will do."""
    plan = Plan.of(_CHUNKS, inputs)
    chunks = _Chunks.of(plan, inputs)
    bounds = window_bounds(chunks, plan.base[n], -(-plan.lengths[n] // BT))
    return _warm_up(bounds[:, h], boundary)


# ---------------------------------------------------------------------------------- chunks


@dataclass(frozen=True)
class _Chunks:
    """Operands by chunk ``[C, H, BT, ...]`` in fp32, rows past a sequence's end 0.

    ``up`` is the gate summed from the chunk's middle; ``head`` and ``tail`` ``[C, H, K]`` are
    the sums of the two halves, and ``steep`` ``[C, H]`` says whether one of these is out of what
    the middle frame bears.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    up: Tensor
    head: Tensor
    tail: Tensor
    steep: Tensor

    @classmethod
    def of(cls, plan: Plan, inputs: Mapping[str, Any]) -> _Chunks:
        def take(x: Tensor) -> Tensor:
            invalid = ~plan.valid.view(*plan.valid.shape, *[1] * (x.dim() - 1))
            return x[plan.rows].float().masked_fill(invalid, 0.0).transpose(1, 2).contiguous()

        g = take(inputs["g"])
        halves = g.clamp(min=GATE_FLOOR).view(*g.shape[:2], 2, _HALF, -1).cumsum(3)
        head, tail = halves[:, :, 0, -1], halves[:, :, 1, -1]
        up = torch.cat([halves[:, :, 0] - head[:, :, None], halves[:, :, 1]], 2)
        q, k, v, beta = (take(inputs[name]) for name in ("q", "k", "v", "beta"))
        steep = (torch.minimum(head, tail) < STEEP_HALF).any(-1)
        return cls(q, k, v, g, beta, up, head, tail, steep)


@dataclass(frozen=True)
class _Images:
    w: Tensor
    u: Tensor
    q: Tensor
    k: Tensor
    aqk: Tensor


def _held(x: Tensor, steep: Tensor) -> Tensor:
    """What a half chunk adds to the decay between two frames: nothing where the chunk is steep."""
    return x.masked_fill(steep[..., None], 0.0)


def _prepare(x: _Chunks, middle: bool) -> _Images:
    """Everything that depends on the chunk alone, in the frame of its middle or of its ends."""
    rows, columns = exp(x.up), exp(-x.up)
    k_rows, q_rows, k_columns = bf16(x.k * rows), bf16(x.q * rows), bf16(x.k * columns)
    aqk, akk = q_rows @ k_columns.transpose(-1, -2), k_rows @ k_columns.transpose(-1, -2)
    steep = x.steep[..., None, None]
    if steep.any():
        inside = inside_exponents(x.g)
        up, down = exp(inside), bf16(x.k * exp(-inside)).transpose(-1, -2)
        half = torch.arange(BT) // _HALF
        own = steep & (half[:, None] == half)
        aqk = torch.where(own, bf16(x.q * up) @ down, aqk)
        akk = torch.where(own, bf16(x.k * up) @ down, akk)
        b = split_tokens(x.g.clamp(min=GATE_FLOOR), _HALF).cumsum(3)
        b = torch.cat([b[:, :, 0], b[:, :, 1] + x.head[:, :, None]], 2)
        rest = (
            x.up[:, :, :_HALF].neg() + x.tail[:, :, None],
            x.tail[:, :, None] - x.up[:, :, _HALF:],
        )
        to_end = torch.cat(rest, 2)
        k_rows = torch.where(steep, bf16(x.k * exp(b)), k_rows)
        q_rows = torch.where(steep, bf16(x.q * exp(b)), q_rows)
        k_columns = torch.where(steep, bf16(x.k * exp(to_end)), k_columns)
    lower = torch.ones(BT, BT).tril().bool()
    akk, aqk = akk.masked_fill(~lower.tril(-1), 0.0), aqk.masked_fill(~lower, 0.0)
    strengths = x.beta.unsqueeze(-1)
    inverse = bf16(triangular_inverse(akk * x.beta.unsqueeze(-2), _INVERSE))
    w, u = strengths * (inverse @ k_rows), bf16(strengths * (inverse @ x.v))
    if middle:
        return _Images(bf16(w), u, q_rows, k_columns, aqk)
    head, tail = exp(x.head).unsqueeze(2), exp(x.tail).unsqueeze(2)
    w = torch.where(steep, w, w * head)
    q_rows = torch.where(steep, q_rows, bf16(x.q * rows * head))
    return _Images(
        bf16(w), u, q_rows, torch.where(steep, k_columns, bf16(x.k * columns * tail)), aqk
    )


def _walk(
    images: _Images,
    x: _Chunks,
    base: int,
    h: int,
    first: int,
    begin: int,
    end: int,
    state: Tensor,
    scale: float,
    middle: bool,
    values: bool = True,
) -> tuple[Tensor, Tensor]:
    """Chunks ``first`` to ``end`` of one sequence and head: last state, outputs from ``begin`` on.

    Without ``values`` it is the map of states that is walked.
    """
    out = []
    head, tail = _held(x.head[:, h], x.steep[:, h]), _held(x.tail[:, h], x.steep[:, h])
    for c in range(base + first, base + end):
        if middle:
            before = tail[c - 1] if c > base + first else torch.zeros_like(head[c])
            state = state * exp(head[c] + before).unsqueeze(-1)
        operand = bf16(state)
        new = bf16(values * images.u[c, h] - images.w[c, h] @ operand)
        if c >= base + begin:
            scores = bf16(scale * images.aqk[c, h])
            out.append(scale * (images.q[c, h] @ operand) + scores @ new)
        if middle and x.steep[c, h]:
            state = state * exp(x.head[c, h] + x.tail[c, h]).unsqueeze(-1)
        if not middle:
            state = state * (exp(x.head[c, h]) * exp(x.tail[c, h])).unsqueeze(-1)
        state = state + images.k[c, h].transpose(-1, -2) @ new
    if middle and end > first:
        state = state * exp(tail[base + end - 1]).unsqueeze(-1)
    return state, torch.stack(out) if out else torch.zeros(0, BT, state.shape[-1])


# ----------------------------------------------------------------------------------- guard


def window_bounds(x: _Chunks, base: int, count: int) -> Tensor:
    """Logarithm of the bound on the map of each chunk, ``[count, H]``.

    Infinite where a token's map is not known to be of norm 1 at most.  See
    :mod:`.kernel.fused_guard`: ``fore`` and ``back`` are squares of keys ``[count, H, pairs, K]``
    that have decayed from the pair's begin and to its end, and then from further off.
    """
    own = slice(base, base + count)
    (e1, e2), (k1, k2) = ([t[own, :, i::2] for i in range(2)] for t in (exp(x.g), x.k))
    beta = x.beta[own].view(count, -1, _HALF, 2).movedim(-1, 0)
    both = e1 * e2
    decays = bf16(both * both)
    fore, back = ([y * y for y in pair] for pair in ((k1 * e1, k2 * both), (k1 * e2, k2)))
    inner = (k2 * k1 * e2).sum(-1).abs()
    squares = torch.stack([(k * k).sum(-1) for k in (k1, k2)])
    tame = ((beta >= 0) & (beta * squares <= 2)).all(0).all(-1)
    pairs = torch.arange(_HALF)
    near = []
    for level in range(3):
        by = _product([decays[:, :, pairs ^ y] for y in range(1 << level, 2 << level)])
        late = (pairs >> level & 1).bool().unsqueeze(-1)
        near.append([torch.where(late, *y).sum(-1).sqrt() for y in zip(fore, back, strict=True)])
        fore = [torch.where(late, y * by, y) for y in fore]
        back = [torch.where(late, y, y * by) for y in back]
    begin, end = ([y.sum(-1).sqrt() for y in side] for side in (fore, back))
    bound = _product(list(decays.unbind(2))).amax(-1).sqrt()
    carried = [torch.zeros_like(bound) for _ in range(3)]
    for p in range(_HALF):
        v = [y[..., p] for y in begin]
        for level in range(3):
            if p >> level & 1:
                v = [v[r] + near[level][r][..., p] * carried[level] for r in range(2)]
        w1 = beta[0, ..., p] * v[0]
        w = w1, beta[1, ..., p] * (v[1] + inner[..., p] * w1)
        for level in range(3):
            if not p >> level & 1:
                more = near[level][0][..., p] * w[0] + near[level][1][..., p] * w[1]
                carried[level] = more if p % (1 << level) == 0 else carried[level] + more
        bound = bound + sum(end[r][..., p] * w[r] for r in range(2))
    return (bound.log() + GUARD_MARGIN).masked_fill(~tame, torch.inf)


def _product(factors: list[Tensor]) -> Tensor:
    """By a tree, each product rounded to bf16."""
    while len(factors) > 1:
        factors = [bf16(a * b) for a, b in zip(factors[::2], factors[1::2], strict=True)]
    return factors[0]


def _warm_up(bounds: Tensor, begin: int) -> int:
    """Chunks of warm-up for a piece from chunk ``begin`` on; -1 if only the exact state will do."""
    if begin <= SHORT:
        return begin
    near = float(bounds[begin - SHORT])
    if near <= GUARD:
        return SHORT
    if begin <= 2 * SHORT:
        return begin
    far = float(bounds[begin - 2 * SHORT])
    return 2 * SHORT if near <= GUARD / 4 and near + far <= GUARD else -1
