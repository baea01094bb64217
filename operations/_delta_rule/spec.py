"""Constants of the gated delta rules, as data; nothing here imports torch."""

from __future__ import annotations

__all__ = ["ARGUMENTS", "DEFAULT_SCALE", "HEAD_DIM"]

HEAD_DIM = 128
"""Channels of a key (K) and of a value (V); no other size is served."""

DEFAULT_SCALE: float = HEAD_DIM**-0.5
"""Factor on the outputs when the caller names none: ``1 / sqrt(K)``."""

ARGUMENTS = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "scale")
"""Names of a call's arguments, in the order of every listing."""
