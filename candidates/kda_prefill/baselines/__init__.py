"""Other implementations of KDA prefill, timed as controls inside a job.

Each adapter says why it cannot run here instead of failing, feeds its
implementation the form of inputs that implementation is made for, and names the
kernels it expects to launch, so that a time can never be another engine's.
"""

from __future__ import annotations

from candidates._base import Baseline
from candidates._baselines.torch_chunked import TorchChunked
from candidates.kda_prefill.baselines._cudnn import CudnnHopper, CudnnHopperRaw
from candidates.kda_prefill.baselines._fla import FlashLinearAttention
from candidates.kda_prefill.baselines._flashkda import FlashKda
from candidates.kda_prefill.baselines._ours import KdaFedRaw

__all__ = ["BASELINES", "FED_RAW"]

BASELINES: tuple[Baseline, ...] = (
    FlashKda(),
    FlashLinearAttention(),
    CudnnHopper("cudnn_fused", "kda_hopper_cuda"),
    CudnnHopperRaw("cudnn_fused_raw", "kda_hopper_cuda"),
    CudnnHopper("cudnn_segmented", "kda_hopper"),
    TorchChunked("kda_prefill"),
)

FED_RAW = KdaFedRaw
"""What makes a contestant of a schedule of ours that is fed raw inputs."""
