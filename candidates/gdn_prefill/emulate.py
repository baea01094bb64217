"""The arithmetic of a schedule on the CPU: rounding, order and masking, without its speed.

Behind PREP everything is KDA's, so chunks, inverse, scan and segments are those of
:mod:`candidates.kda_prefill.emulate`.  What is GDN's own is what PREP makes of a chunk: scores of
rows as they come, each times an exponential of its own in fp32.

Knows operands and schedules; must not know of oracles, tolerances or the DSL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from candidates._base import Schedule
from candidates.gdn_prefill.space import GdnSchedule
from candidates.kda_prefill import emulate as kda
from candidates.kda_prefill.emulate import INVERSE, InverseName, triangular_inverse

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
    plan = kda._Plan.of(view.like_kda(), inputs)
    images = _prepare(_Chunks.of(plan, inputs), float(inputs["scale"]), inverse)
    final = kda._initial_state(inputs)
    units, state = plan.units(view.segments), final
    if all(unit.last for unit in units):
        state = state[[unit.sequence for unit in units]]
    else:
        state = kda._segment_states(units, images, state)
    out, state = kda._scan(units, images, images.u, state)
    for index, unit in enumerate(units):
        if unit.last:
            final[unit.sequence] = state[index]
    o = torch.zeros_like(inputs["v"])
    o[plan.rows[plan.valid]] = out.to(torch.bfloat16).transpose(1, 2)[plan.valid]
    return {"o": o, "final_state": final.transpose(-1, -2).contiguous()}


def largest_exponent(schedule: Schedule, inputs: Mapping[str, Any]) -> float:
    """Largest exponent that the schedule forms on these inputs: 0, of a token with itself."""
    x = _Chunks.of(kda._Plan.of(GdnSchedule.of(schedule).like_kda(), inputs), inputs)
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
    def of(cls, plan: kda._Plan, inputs: Mapping[str, Any]) -> _Chunks:
        x = kda._Chunks.of(plan, {**inputs, "g": inputs["g"].unsqueeze(-1)})  # of one channel
        heads = x.v.shape[1]

        def shared(keys: Tensor) -> Tensor:  # a key head serves neighbouring value heads
            return keys.repeat_interleave(heads // max(keys.shape[1], 1), 1)

        return cls(shared(x.q), shared(x.k), x.v, x.b.squeeze(-1), x.beta)

    @property
    def exponents(self) -> Tensor:
        """Of the scores, ``[C, HV, BT, BT]``: what would be positive is never formed."""
        return (self.b.unsqueeze(-1) - self.b.unsqueeze(-2)).clamp(max=0.0)


def _prepare(x: _Chunks, scale: float, inverse: InverseName) -> kda._Images:
    """Everything that depends on the chunk alone."""
    decays = kda._exp(x.exponents)
    lower = torch.ones(x.b.shape[-1], x.b.shape[-1]).tril().bool()
    beta = x.beta.unsqueeze(-1)
    keys = x.k.transpose(-1, -2)
    akk = ((x.k @ keys) * decays * beta).masked_fill(~lower.tril(-1), 0.0)
    aqk = ((x.q @ keys) * decays * scale).masked_fill(~lower, 0.0)
    write = kda._bf16(triangular_inverse(akk, inverse) * x.beta.unsqueeze(-2))  # X diag(beta)
    b = x.b.unsqueeze(-1)
    factor, end = kda._exp(b), b[:, :, -1:]
    return kda._Images(
        w=kda._bf16(write @ kda._bf16(x.k * factor)),
        u=kda._bf16(write @ x.v),
        q_hat=kda._bf16(x.q * (factor * scale)),
        k_bar=kda._bf16(x.k * kda._exp(end - b)),
        aqk=kda._bf16(aqk),
        decay=kda._exp(end),
    )
