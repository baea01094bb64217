"""The arithmetic of the fused kernel on the CPU: its matrices of a chunk, its roundings, pieces.

Rounding helpers, inverse and the flush of small exponentials are those of
:mod:`candidates._delta_rule.emulate`, exact segments too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from candidates._base import Schedule
from candidates._delta_rule.emulate import (
    GATE_FLOOR,
    SMS,
    InverseName,
    bf16,
    composed,
    exact_segments,
    exp,
    initial_state,
    triangular_inverse,
)
from candidates._delta_rule.kernel.pieces import GUARD
from candidates.gdn_prefill.kernel.fused_plan import (
    PIECE,
    WINDOW,
    WINDOWS,
    parts_of,
    pieces_of,
    span_of,
    windows_of,
)
from candidates.gdn_prefill.space import FusedSchedule

__all__ = ["SMS", "emulate", "warm_up"]

_INVERSE: InverseName = "merged8_tf32"
"""fp16, in which blocks of 16 are merged, keeps as many digits as tf32."""


def emulate(schedule: Schedule, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Evaluate GDN prefill as the fused kernel would; see :func:`.emulate.emulate`."""
    view = FusedSchedule.of(schedule)
    final, scale = initial_state(inputs), float(inputs["scale"])
    T, HV = inputs["v"].shape[:2]
    spans = list(pairwise(inputs["cu_seqlens"].tolist()))
    pieces = pieces_of(view.bt, view.rows, view.waves, T, len(spans), HV, SMS)
    span = span_of(max(pieces, len(spans)), T, len(spans))
    windows = windows_of(span)
    o = torch.zeros_like(inputs["v"])
    for n, (begin, end) in enumerate(spans):
        length = -(-(end - begin) // PIECE)
        parts = max(min(parts_of(begin, end, span), length // 2), 1)
        if parts == 1:
            final[n], out = _walk(_Chunks.of(inputs, view.bt, begin, end, scale), final[n], scale)
            o[begin:end] = out[: end - begin].to(o.dtype)
            continue
        for h in range(HV):
            first = h * pieces + begin // span + n
            last, out = _pieces(
                inputs, view.bt, begin, end, h, parts, first, windows, final[n, h], scale
            )
            final[n, h], o[begin:end, h] = last, out.to(o.dtype)
    return {"o": o, "final_state": final.transpose(-1, -2).contiguous()}


def _pieces(
    inputs: Mapping[str, Any],
    bt: int,
    begin: int,
    end: int,
    h: int,
    parts: int,
    first: int,
    windows: int,
    state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """A sequence of a value head, in pieces of which ``first`` is the number of the first among
    all and which start ``windows`` early at most: last state ``[K, V]`` and outputs
    ``[tokens, V]``."""
    length = -(-(end - begin) // PIECE)
    bounds = [length * p // parts for p in range(parts + 1)]

    def walk(start: int, at: int, stop: int, from_: Tensor, values: bool = True) -> Any:
        rows = begin + start * PIECE, min(begin + stop * PIECE, end)
        chunks = _Chunks.of(inputs, bt, *rows, scale, h, values)
        last, out = _walk(chunks, from_[None], scale)
        return last[0], out[(at - start) * PIECE : rows[1] - rows[0], 0]

    warm = [0, *(warm_up(inputs, begin, h, b, windows) for b in bounds[1:-1])]
    last, outputs = state, []
    for p, behind in exact_segments(warm, range(first, first + len(warm))):
        at, stop, exact = bounds[p], bounds[behind], warm[p] < 0
        start = at if exact else at - warm[p]
        from_ = state if start == 0 else torch.zeros_like(state)
        own, local = walk(start, at, stop, from_)
        if exact:
            own, local = composed(walk, at, stop, own, local, last)
        outputs.append(local)
        last = own
    return last, torch.cat(outputs)


def warm_up(inputs: Mapping[str, Any], row: int, h: int, begin: int, windows: int = WINDOWS) -> int:
    """PIECEs that a piece has to start early, which begins ``begin`` of them behind a sequence's
    first row ``row``; -1 if only the exact state will do, or more than so many windows."""
    heads = inputs["v"].shape[1]
    key_head = h // (heads // inputs["k"].shape[1])
    at, total = row + begin * PIECE, 0.0
    for reach in range(1, min(windows, WINDOWS) + 1):
        window = slice(max(at - reach * WINDOW, row), max(at - (reach - 1) * WINDOW, row))
        total += float(inputs["g"][window, h].clamp(max=0.0).sum())
        if reach * WINDOW >= begin * PIECE:
            return begin
        if total <= GUARD:
            rows = slice(at - reach * WINDOW, at)
            square = inputs["k"][rows, key_head].float().square().sum(-1)
            beta = inputs["beta"][rows, h]
            tame = bool(((beta >= 0) & (beta * square <= 2)).all())
            return reach * (WINDOW // PIECE) if tame else begin
    return -1


@dataclass(frozen=True)
class _Chunks:
    """A run of tokens by chunk and value head, ``[C, HV, BT, ...]`` in fp32.

    ``decay`` is e^b, ``new`` what makes new values of residuals, decayed to the chunk's end, and
    ``read`` what makes outputs of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    new: Tensor
    read: Tensor

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, Any],
        bt: int,
        begin: int,
        end: int,
        scale: float,
        head: int | None = None,
        values: bool = True,
    ) -> _Chunks:
        """Rows ``begin`` to ``end`` in chunks of ``bt``, of all value heads or of one; without
        ``values`` these are 0."""
        heads = inputs["v"].shape[1]
        missing = -(end - begin) % bt

        def take(name: str) -> Tensor:
            x = inputs[name][begin:end].float()
            x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
            x = x.view(-1, bt, *x.shape[1:]).transpose(1, 2)
            x = x.repeat_interleave(heads // max(x.shape[1], 1), 1)
            return x if head is None else x[:, head : head + 1]

        q, k, v, g, beta = (take(name) for name in ("q", "k", "v", "g", "beta"))
        b = g.clamp(min=GATE_FLOOR).cumsum(-1)
        lower = torch.ones(bt, bt).tril().bool()
        weights = exp((b.unsqueeze(-1) - b.unsqueeze(-2)).masked_fill(~lower, 0.0))
        keys = k.transpose(-1, -2)
        akk = ((k @ keys) * (weights * beta.unsqueeze(-1))).masked_fill(~lower.tril(-1), 0.0)
        aqk = _fp16(((q @ keys) * weights).masked_fill(~lower, 0.0))
        x, columns = triangular_inverse(akk, _INVERSE), beta.unsqueeze(-2)
        to_end = exp(b[..., -1:] - b).unsqueeze(-1)
        new, read = x * (to_end * columns), (aqk @ _fp16(x)) * (scale * columns)
        return cls(q, k, v if values else 0 * v, exp(b), bf16(new), bf16(read))


def _fp16(x: Tensor) -> Tensor:
    return x.to(torch.float16).float()


def _walk(x: _Chunks, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A run from ``state`` ``[HV, K, V]`` on: the last state, and outputs ``[tokens, HV, V]``."""
    out = []
    for q, k, v, decay, new, read in zip(x.q, x.k, x.v, x.decay, x.new, x.read, strict=True):
        operand, by = bf16(state), decay.unsqueeze(-1)
        residual = bf16(v - by * (k @ operand))
        out.append((q @ operand) * (by * scale) + read @ residual)
        state = state * by[:, -1:] + k.transpose(-1, -2) @ bf16(new @ residual)
    empty = x.v.new_zeros(0, *x.v.shape[1:])
    outputs = torch.stack(out) if out else empty
    return state, outputs.transpose(1, 2).flatten(0, 1)
