"""The arithmetic of the fused kernel on the CPU: its two matrices of a chunk, and its roundings.

Rounding helpers, inverse and the flush of small exponentials are those of
:mod:`candidates.kda_prefill.emulate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from candidates._base import Schedule
from candidates.gdn_prefill.kernel.fused_plan import BT
from candidates.kda_prefill.emulate import (
    GATE_FLOOR,
    InverseName,
    _bf16,
    _exp,
    _initial_state,
    triangular_inverse,
)

__all__ = ["emulate"]

_INVERSE: InverseName = "merged8_tf32"
"""fp16, in which blocks of 16 are merged, keeps as many digits as tf32."""


def emulate(schedule: Schedule, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Evaluate GDN prefill as the fused kernel would; see :func:`.emulate.emulate`.

    How many value rows a CTA has changes nothing.
    """
    final, scale = _initial_state(inputs), float(inputs["scale"])
    o = torch.zeros_like(inputs["v"])
    for n, (begin, end) in enumerate(pairwise(inputs["cu_seqlens"].tolist())):
        chunks = _Chunks.of(inputs, begin, end, scale)
        final[n], out = _walk(chunks, final[n], scale)
        o[begin:end] = out[: end - begin].to(o.dtype)
    return {"o": o, "final_state": final.transpose(-1, -2).contiguous()}


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
    def of(cls, inputs: Mapping[str, Any], begin: int, end: int, scale: float) -> _Chunks:
        heads = inputs["v"].shape[1]
        missing = -(end - begin) % BT

        def take(name: str) -> Tensor:
            x = inputs[name][begin:end].float()
            x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
            x = x.view(-1, BT, *x.shape[1:]).transpose(1, 2)
            return x.repeat_interleave(heads // max(x.shape[1], 1), 1)

        q, k, v, g, beta = (take(name) for name in ("q", "k", "v", "g", "beta"))
        b = g.clamp(min=GATE_FLOOR).cumsum(-1)
        lower = torch.ones(BT, BT).tril().bool()
        weights = _exp((b.unsqueeze(-1) - b.unsqueeze(-2)).masked_fill(~lower, 0.0))
        keys = k.transpose(-1, -2)
        akk = ((k @ keys) * (weights * beta.unsqueeze(-1))).masked_fill(~lower.tril(-1), 0.0)
        aqk = _fp16(((q @ keys) * weights).masked_fill(~lower, 0.0))
        x, columns = triangular_inverse(akk, _INVERSE), beta.unsqueeze(-2)
        to_end = _exp(b[..., -1:] - b).unsqueeze(-1)
        new, read = x * (to_end * columns), (aqk @ _fp16(x)) * (scale * columns)
        return cls(q, k, v, _exp(b), _bf16(new), _bf16(read))


def _fp16(x: Tensor) -> Tensor:
    return x.to(torch.float16).float()


def _walk(x: _Chunks, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A run from ``state`` ``[HV, K, V]`` on: the last state, and outputs ``[tokens, HV, V]``."""
    out = []
    for q, k, v, decay, new, read in zip(x.q, x.k, x.v, x.decay, x.new, x.read, strict=True):
        operand, by = _bf16(state), decay.unsqueeze(-1)
        residual = _bf16(v - by * (k @ operand))
        out.append((q @ operand) * (by * scale) + read @ residual)
        state = state * by[:, -1:] + k.transpose(-1, -2) @ _bf16(new @ residual)
    empty = x.v.new_zeros(0, *x.v.shape[1:])
    outputs = torch.stack(out) if out else empty
    return state, outputs.transpose(1, 2).flatten(0, 1)
