"""Tensors, contract and tolerances of KDA prefill, as data.

Nothing here imports torch: listing what an operation is must stay cheap.
"""

from __future__ import annotations

from operations._base import Contract, Tolerance
from operations._delta_rule.spec import HEAD_DIM, tensors

__all__ = [
    "CONTRACT",
    "SIMILAR_KEYS_TOLERANCES",
    "TENSORS",
    "TOLERANCES",
]

TENSORS = tensors(
    "H",
    ("T", "H", HEAD_DIM),
    values="values",
    gates="activated forget gate per key channel, natural-log units, <= 0",
)

_TOLERANCE_SOURCE = (
    "bf16 operands alone cost about 4e-3 max and rms with independent keys and up to 7.6e-3 max, "
    "6e-3 rms with similar ones (schedules emulated with an exact inverse against float64); "
    "the bound is about twice that"
)

TOLERANCES: dict[str, Tolerance] = {
    "o": Tolerance(max_rel=1.5e-2, rms_rel=1e-2, source=_TOLERANCE_SOURCE),
    "final_state": Tolerance(max_rel=1.5e-2, rms_rel=1e-2, source=_TOLERANCE_SOURCE),
}

_SIMILAR_KEYS_SOURCE = (
    "with keys and values that almost repeat and no incoming state, what is written is small "
    "beside its rounded terms: schedules emulated with an exact 16x16 inverse reach 1.9e-2 max "
    "and 1.9e-2 rms (12 seeds, sequences of 16 to 98 tokens); the bound is 1.6 times that, and a "
    "power-series inverse is off by 5e-2 and more wherever a sequence is longer than 64 tokens"
)

SIMILAR_KEYS_TOLERANCES: dict[str, Tolerance] = {
    name: Tolerance(max_rel=3e-2, rms_rel=3e-2, source=_SIMILAR_KEYS_SOURCE) for name in TOLERANCES
}

CONTRACT = Contract(
    served=(
        "forward pass of packed sequences, q, k, v [T, H, 128] in bf16, o in bf16",
        "g [T, H, 128] and beta [T, H] in fp32, already activated; any g <= 0, minus infinity "
        "included, 0 <= beta <= 1",
        "q and k normalised per token and head by the caller, or exactly zero",
        "cu_seqlens int32 on the device, any lengths including 0; T = 0 and N = 0 included",
        "initial_state absent (zero) or fp32 [N, H, V, K] contiguous",
        "final_state fp32 [N, H, V, K]; an empty sequence returns its initial state",
        "any scale, passed at run time, 0 included",
        "rows of o that no sequence covers are 0",
    ),
    declined=(
        "backward pass; checkpoints inside a sequence",
        "head sizes other than K = V = 128",
        "grouped heads: q, k and v must have equal head counts",
        "token dtypes other than bf16, gate and beta dtypes other than fp32",
        "in-kernel activation of the gate or of beta, in-kernel normalisation of q and k",
        "initial states in bf16 or fp16, or in another layout",
        "int64 cu_seqlens, or cu_seqlens on the CPU",
        "tensors that are not contiguous",
    ),
)
