"""cuDNN front-end's two Hopper plans: fused CUDA pieces, and exact CuTe DSL segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from candidates._base import Baseline, Runnable
from candidates._baselines.common import (
    Bound,
    distribution_version,
    missing_module,
    no_sm90,
)
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["CudnnHopper"]


class CudnnHopper(Baseline):
    """Adapter of ``cudnn.linear_attention.ops.kimi_delta_attention`` with a pinned plan.

    Parameters
    ----------
    name : str
        Name of the control.
    plan : str
        Plan name, ``"kda_hopper_cuda"`` (fused) or ``"kda_hopper"`` (segmented).
    """

    operation = "kda_prefill"
    input_form = "activated"

    def __init__(self, name: str, plan: str) -> None:
        self.name = name
        self.plan = plan

    def missing(self) -> str | None:
        fix = "pip install nvidia-cudnn-frontend"
        return missing_module("cudnn", fix) or no_sm90()

    def version(self) -> str:
        return distribution_version("nvidia-cudnn-frontend")

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        from cudnn.linear_attention.ops import kimi_delta_attention

        plan = self.plan

        def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
            import torch

            q, k, v, g, beta, offsets = (
                inputs[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")
            )
            scale, initial = float(inputs["scale"]), inputs["initial_state"]

            @torch.inference_mode()
            def call() -> Mapping[str, torch.Tensor]:
                o, final = kimi_delta_attention(
                    q, k, v, g, beta, offsets, scale=scale, initial_state=initial,
                    output_final_state=True, plan_name=plan,
                )  # fmt: skip
                return {"o": o, "final_state": final}

            return call

        # The fused kernel is one CUDA function; the segmented plan's three are CuTe DSL kernels.
        names = (
            ("kda_fused",)
            if plan == "kda_hopper_cuda"
            else tuple(f"kernel_cutlass_{k}_kernel" for k in ("prep", "seg", "comb"))
        )
        return Bound(names, bind)
