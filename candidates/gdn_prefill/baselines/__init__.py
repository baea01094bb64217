"""Other implementations of GDN prefill, timed as controls inside a job.

Each adapter says why it cannot run here instead of failing, feeds its
implementation the form of inputs that implementation is made for, and names the
kernels it expects to launch, so that a time can never be another engine's.
"""

from __future__ import annotations

from candidates._base import Baseline
from candidates._baselines.torch_chunked import TorchChunked
from candidates.gdn_prefill.baselines._fla import FlashLinearAttention
from candidates.gdn_prefill.baselines._flashinfer import FlashInfer
from candidates.gdn_prefill.baselines._flashqla import FlashQla
from candidates.gdn_prefill.baselines._ours import GdnFedRaw

__all__ = ["BASELINES", "FED_RAW"]

BASELINES: tuple[Baseline, ...] = (
    FlashLinearAttention(),
    FlashQla(),
    FlashInfer(),
    TorchChunked("gdn_prefill"),
)

FED_RAW = GdnFedRaw
"""What makes a contestant of a schedule of ours that is fed raw inputs."""
