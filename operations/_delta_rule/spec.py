"""Constants and tensors of the gated delta rules, as data; nothing here imports torch."""

from __future__ import annotations

from operations._base import TensorSpec

__all__ = ["ARGUMENTS", "DEFAULT_SCALE", "HEAD_DIM", "tensors"]

HEAD_DIM = 128
"""Channels of a key (K) and of a value (V); no other size is served."""

DEFAULT_SCALE: float = HEAD_DIM**-0.5
"""Factor on the outputs when the caller names none: ``1 / sqrt(K)``."""

ARGUMENTS = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "scale")
"""Names of a call's arguments, in the order of every listing."""


def tensors(
    HV: str, gate: tuple[str | int, ...], *, values: str, gates: str
) -> tuple[TensorSpec, ...]:
    """Tensors of one gated delta rule.

    Parameters
    ----------
    HV : str
        Size of the axis of heads that have a state; q and k have H.
    gate : tuple of (str or int)
        Sizes of g.
    values, gates : str
        Meaning of v and of g.
    """
    K = V = HEAD_DIM
    q = "queries, unit norm per token and head"
    k = "keys, unit norm per token and head"
    beta = "activated write strength in [0, 1]"
    offsets = "sequence boundaries on the packed token axis; first 0, last T"
    state = "value-major: row v, column k"
    before = f"state before each sequence, {state}; None means zero"
    o = "outputs, read after the token's write"
    return (
        TensorSpec("q", ("T", "H", K), "bfloat16", "input", q),
        TensorSpec("k", ("T", "H", K), "bfloat16", "input", k),
        TensorSpec("v", ("T", HV, V), "bfloat16", "input", values),
        TensorSpec("g", gate, "float32", "input", gates),
        TensorSpec("beta", ("T", HV), "float32", "input", beta),
        TensorSpec("cu_seqlens", ("N+1",), "int32", "input", offsets),
        TensorSpec("initial_state", ("N", HV, V, K), "float32", "optional", before),
        TensorSpec("o", ("T", HV, V), "bfloat16", "output", o),
        TensorSpec(
            "final_state",
            ("N", HV, V, K),
            "float32",
            "output",
            f"state after each sequence, {state}",
        ),
    )
