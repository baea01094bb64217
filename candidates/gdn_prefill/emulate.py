"""The arithmetic of a schedule on the CPU: rounding, order and masking, without its speed.

Chunks, inverse, scan and segments are those of :mod:`candidates._delta_rule.emulate`.  What is
GDN's own is what PREP makes of a chunk: scores of rows as they come, each times an exponential of
its own in fp32.

Knows operands and schedules; must not know of oracles, tolerances or the DSL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from candidates.gdn_prefill.space import GdnSchedule

__all__ = ["emulate", "largest_exponent"]


def emulate(
    schedule: Schedule, inputs: Mapping[str, Any], inverse: InverseName = INVERSE
) -> dict[str, Tensor]:
    """Evaluate GDN prefill as the schedule's kernels would.

    Parameters
    ----------
    schedule : Schedule
        Whether it breaks a budget does not matter here.
    inputs : Mapping
        ``q, k`` ``[T, H, 128]`` bf16, ``v`` ``[T, HV, 128]`` bf16, ``g, beta`` ``[T, HV]`` fp32,
        ``cu_seqlens`` ``[N + 1]`` int, ``initial_state`` ``[N, HV, 128, 128]`` fp32 (value-major)
        or None, ``scale`` float.
    inverse : str
        Method and operand precision of the triangular inverse, for experiments.

    Returns
    -------
    dict
        ``o`` ``[T, HV, 128]`` bf16 and ``final_state`` ``[N, HV, 128, 128]`` fp32, value-major.
    """
    view = GdnSchedule.of(schedule)
    plan = Plan.of(view, inputs)
    images = _prepare(_Chunks.of(plan, inputs), float(inputs["scale"]), inverse)
    return outcome(plan, images, view.segments, inputs)


def largest_exponent(schedule: Schedule, inputs: Mapping[str, Any]) -> float:
    """Largest exponent that the schedule forms on these inputs: 0, of a token with itself."""
    x = _Chunks.of(Plan.of(GdnSchedule.of(schedule), inputs), inputs)
    return float(x.exponents.max()) if x.exponents.numel() else 0.0


@dataclass(frozen=True)
class _Chunks:
    """Operands by chunk and value head, ``[C, HV, BT, ...]`` in fp32, 0 past a sequence's end.

    ``b`` is the gate summed from the chunk's start, inclusive, in fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    beta: Tensor

    @classmethod
    def of(cls, plan: Plan, inputs: Mapping[str, Any]) -> _Chunks:
        x = Chunks.of(plan, {**inputs, "g": inputs["g"].unsqueeze(-1)})  # of one channel
        heads = x.v.shape[1]

        def shared(keys: Tensor) -> Tensor:  # a key head serves neighbouring value heads
            return keys.repeat_interleave(heads // max(keys.shape[1], 1), 1)

        return cls(shared(x.q), shared(x.k), x.v, x.b.squeeze(-1), x.beta)

    @property
    def exponents(self) -> Tensor:
        """Of the scores, ``[C, HV, BT, BT]``: what would be positive is never formed."""
        return (self.b.unsqueeze(-1) - self.b.unsqueeze(-2)).clamp(max=0.0)


def _prepare(x: _Chunks, scale: float, inverse: InverseName) -> Images:
    """Everything that depends on the chunk alone."""
    decays = exp(x.exponents)
    lower = torch.ones(x.b.shape[-1], x.b.shape[-1]).tril().bool()
    beta = x.beta.unsqueeze(-1)
    keys = x.k.transpose(-1, -2)
    akk = ((x.k @ keys) * decays * beta).masked_fill(~lower.tril(-1), 0.0)
    aqk = ((x.q @ keys) * decays * scale).masked_fill(~lower, 0.0)
    write = bf16(triangular_inverse(akk, inverse) * x.beta.unsqueeze(-2))  # X diag(beta)
    b = x.b.unsqueeze(-1)
    factor, end = exp(b), b[:, :, -1:]
    return Images(
        w=bf16(write @ bf16(x.k * factor)),
        u=bf16(write @ x.v),
        q_hat=bf16(x.q * (factor * scale)),
        k_bar=bf16(x.k * exp(end - b)),
        aqk=bf16(aqk),
        decay=exp(end),
    )
