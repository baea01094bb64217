"""The arithmetic of chunked delta rules on the CPU, but for what PREP makes of the gates.

What decides whether a chunked schedule is right is where it rounds and how large its
exponents grow, not how it moves data.  So the emulation follows the kernels in every
rounding (bf16 operands, fp32 accumulation, exponentials flushed to zero below the normal
range) and in none of their layouts: all chunks of all sequences are prepared at once, and
only the scan loops, over the chunk index.

Knows operands and how they are cut; must not know of oracles, tolerances or the DSL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from candidates._delta_rule.kernel.config import Split
from candidates._delta_rule.kernel.image import chunks_of, segment_turns, segments_of

__all__ = [
    "GATE_FLOOR",
    "INVERSE",
    "SMS",
    "Chunks",
    "Images",
    "InverseName",
    "Plan",
    "bf16",
    "composed",
    "exact_segments",
    "exp",
    "initial_state",
    "outcome",
    "triangular_inverse",
]

GATE_FLOOR = -100.0
"""Gates below are taken as this before they are summed.

``exp(-100)`` is below every normal fp32 number, so nothing that a token with such a gate
decays survives either way; but sums stay small enough to keep the digits of the gates
beside it, and minus infinity does not turn differences of sums into NaN.
"""

SMS = 132
"""Streaming multiprocessors of the machine that is emulated."""

_SMALLEST_NORMAL = 2.0**-126

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


# ------------------------------------------------------------------- chunks of a ragged batch


@dataclass(frozen=True)
class Unit:
    """A run of chunks that one CTA scans: a segment of a sequence."""

    sequence: int
    part: int
    first: int
    count: int
    last: bool


@dataclass(frozen=True)
class Plan:
    """Which token stands where: chunks never cross a sequence.

    ``rows`` and ``valid`` are ``[C, BT]``: packed token index of each row of each chunk, and
    whether the row is inside its sequence; ``base`` is each sequence's first chunk.
    """

    view: Split
    lengths: tuple[int, ...]
    base: tuple[int, ...]
    rows: Tensor
    valid: Tensor

    @classmethod
    def of(cls, view: Split, inputs: Mapping[str, Any]) -> Plan:
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

    def units(self, segments: int) -> list[Unit]:
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
                units.append(Unit(n, part, base + first, count, part == parts - 1))
        return units


@dataclass(frozen=True)
class Chunks:
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
    def of(cls, plan: Plan, inputs: Mapping[str, Any]) -> Chunks:
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


def initial_state(inputs: Mapping[str, Any]) -> Tensor:
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


def exp(x: Tensor) -> Tensor:
    """The fast exponential: fp32, subnormal results are 0."""
    return _flush(torch.exp(x))


def bf16(x: Tensor) -> Tensor:
    """Round to a bf16 operand (subnormals to 0), held in fp32 so that products accumulate there."""
    return _flush(x.to(torch.bfloat16).float())


# --------------------------------------------------------------------------- PREP: the inverse


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
class Images:
    """What PREP leaves of each chunk for the scan, ``[C, H, ...]``; operands rounded to bf16."""

    w: Tensor
    u: Tensor
    q_hat: Tensor
    k_bar: Tensor
    aqk: Tensor
    decay: Tensor


# ------------------------------------------------------------------------------------ SCAN


def scan(units: list[Unit], images: Images, u: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
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
        operand = bf16(s)
        new = bf16(u[c] - images.w[c] @ operand)
        out[c] = images.q_hat[c] @ operand + images.aqk[c] @ new
        state[live] = images.decay[c] * s + images.k_bar[c].transpose(-1, -2) @ new
    return out, state


def segment_states(units: list[Unit], images: Images, initial: Tensor) -> Tensor:
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
    _, ends = scan(composed, images, wide, starts)
    offset, transition = ends[..., :values], bf16(ends[..., values:])
    after = iter(zip(leads, offset, transition, strict=True))
    states: list[Tensor] = []
    for unit in units:
        if unit.part == 0:
            states.append(initial[unit.sequence])
        if not unit.last:
            lead, c, m = next(after)
            states.append(c if lead else m @ bf16(states[-1]) + c)
    return torch.stack(states)


def outcome(
    plan: Plan, images: Images, segments: int, inputs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """What the scan makes of the chunks' images, in up to ``segments`` pieces of a sequence.

    Returns
    -------
    dict
        ``o`` ``[T, HV, 128]`` bf16 and ``final_state`` ``[N, HV, 128, 128]`` fp32, value-major.
    """
    final = initial_state(inputs)
    units, state = plan.units(segments), final
    if all(unit.last for unit in units):
        state = state[[unit.sequence for unit in units]]
    else:
        state = segment_states(units, images, state)
    out, state = scan(units, images, images.u, state)
    for index, unit in enumerate(units):
        if unit.last:
            final[unit.sequence] = state[index]
    o = torch.zeros_like(inputs["v"])
    o[plan.rows[plan.valid]] = out.to(torch.bfloat16).transpose(1, 2)[plan.valid]
    return {"o": o, "final_state": final.transpose(-1, -2).contiguous()}


# --------------------------------------------------------------- pieces of the fused kernels


def exact_segments(warm: list[int], numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and past-the-last piece of each segment of a chain.

    ``numbers`` are those of the cuts at which its pieces begin; the CTAs behind cuts 2 i and
    2 i + 1 are a pair, and take two pieces as one if the guard fails between them.
    """
    starts = [p for p, chunks in enumerate(warm) if chunks >= 0 or numbers[p] % 2 == 0]
    return list(pairwise([*starts, len(warm)]))


def composed(
    walk: Callable[..., tuple[Tensor, Tensor]],
    begin: int,
    end: int,
    offset: Tensor,
    local: Tensor,
    before: Tensor,
) -> tuple[Tensor, Tensor]:
    """State and outputs of an exact segment, from its own and from the state before it."""
    change, response = walk(begin, begin, end, torch.eye(offset.shape[0]), values=False)
    operand = bf16(before)
    outputs = bf16(local) + bf16(response) @ operand
    diagonal = change.diagonal()
    rest = bf16(change - torch.diag(diagonal)) @ operand
    return offset + diagonal.unsqueeze(-1) * before + rest, outputs
