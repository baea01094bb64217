"""Tensors, contract and tolerances of GDN prefill, as data.

Nothing here imports torch: listing what an operation is must stay cheap.
"""

from __future__ import annotations

from operations._base import Contract, Tolerance
from operations._delta_rule.spec import tensors

__all__ = ["CONTRACT", "SIMILAR_KEYS_TOLERANCES", "TENSORS", "TOLERANCES"]

TENSORS = tensors(
    "HV",
    ("T", "HV"),
    values="values; HV is a multiple of H, and value head j reads head j // (HV / H) of q and k",
    gates="activated forget gate per value head, natural-log units, <= 0",
)

_TOLERANCE_SOURCE = (
    "bf16 operands alone cost up to 1.2e-2 max and 5.8e-3 rms of o, 8.4e-3 and 5.2e-3 of the state "
    "(chunks of 32, 64 and 128 tokens emulated with an exact inverse, not similar_keys, "
    "8 seeds, sequences of 1 to 200 tokens); the bound is 1.7 times the larger of each"
)

TOLERANCES: dict[str, Tolerance] = {
    "o": Tolerance(max_rel=2e-2, rms_rel=1e-2, source=_TOLERANCE_SOURCE),
    "final_state": Tolerance(max_rel=2e-2, rms_rel=1e-2, source=_TOLERANCE_SOURCE),
}

_SIMILAR_KEYS_SOURCE = (
    "with keys and values that almost repeat and no incoming state, what is written is small "
    "beside its rounded terms: chunks of 16, 32 and 64 tokens and the fused form, emulated on "
    "sequences of 2 to 200 tokens, 8 seeds, reach 1.9e-2 max and 2.1e-2 rms (7e-3 and 4.2e-3 with "
    "an incoming state); the bound is 1.4 times the larger"
)

SIMILAR_KEYS_TOLERANCES: dict[str, Tolerance] = {
    name: Tolerance(max_rel=3e-2, rms_rel=3e-2, source=_SIMILAR_KEYS_SOURCE) for name in TOLERANCES
}

CONTRACT = Contract(
    served=(
        "forward pass of packed sequences, q, k [T, H, 128] and v [T, HV, 128] in bf16, o in bf16",
        "grouped value heads: HV any multiple of H, value head j reads head j // (HV / H) of q and "
        "k",
        "g and beta [T, HV] in fp32, already activated; any g <= 0, minus infinity included, "
        "0 <= beta <= 1",
        "q and k normalised per token and head by the caller, or exactly zero",
        "cu_seqlens int32 on the device, any lengths including 0; T = 0 and N = 0 included",
        "initial_state absent (zero) or fp32 [N, HV, V, K] contiguous",
        "final_state fp32 [N, HV, V, K]; an empty sequence returns its initial state",
        "any scale, passed at run time, 0 included",
        "rows of o that no sequence covers are 0",
    ),
    declined=(
        "backward pass; checkpoints inside a sequence",
        "head sizes other than K = V = 128",
        "fewer value heads than heads of q and k",
        "write strengths above 1 (negative eigenvalues)",
        "token dtypes other than bf16, gate and beta dtypes other than fp32",
        "in-kernel activation of the gate or of beta, in-kernel normalisation of q and k",
        "initial states in bf16 or fp16, or in another layout",
        "int64 cu_seqlens, or cu_seqlens on the CPU",
        "tensors that are not contiguous",
    ),
)
