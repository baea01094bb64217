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
    raw_operands,
)
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["CudnnHopper", "CudnnHopperRaw"]


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

        plan, given = self.plan, self.given(raw)

        def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
            import torch

            named = {name: inputs[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
            more = {**named, **given, "initial_state": inputs["initial_state"]}
            scale = float(inputs["scale"])

            @torch.inference_mode()
            def call() -> Mapping[str, torch.Tensor]:
                o, final = kimi_delta_attention(
                    **more, scale=scale, output_final_state=True, plan_name=plan
                )
                return {"o": o, "final_state": final}

            return call

        return Bound(self.kernels(), bind)

    def given(self, raw: Mapping[str, Any] | None) -> dict[str, Any]:
        """What it is called with in place of, or beside, activated inputs.

        Raises
        ------
        ValueError
            If it needs raw inputs and there are none.
        """
        return {}

    def kernels(self) -> tuple[str, ...]:
        """Prefixes of the kernels that its plan launches."""
        # The fused kernel is one CUDA function; the segmented plan's three are CuTe DSL kernels.
        if self.plan == "kda_hopper_cuda":
            return ("kda_fused",)
        return tuple(f"kernel_cutlass_{k}_kernel" for k in ("prep", "seg", "comb"))


class CudnnHopperRaw(CudnnHopper):
    """The fused plan fed raw inputs; the segmented one declines them.

    The kernel activates gates and write strengths and normalises q and k, but reads both in fp32:
    what came in bf16 is first converted, by a copy kernel of torch each.
    """

    input_form = "raw"

    def given(self, raw: Mapping[str, Any] | None) -> dict[str, Any]:
        g, beta, a_log, dt_bias, lower_bound = raw_operands(self.name, raw)
        return {
            "g": g,
            "beta": beta,
            "a_log": a_log,
            "dt_bias": dt_bias,
            "safe_gate": True,
            "gate_lower_bound": lower_bound,
            "use_beta_sigmoid_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
        }

    def kernels(self) -> tuple[str, ...]:
        return (*super().kernels(), "void at::native::")
