"""FlashInfer: CuTe DSL, one fused kernel, and context-parallel ones for few long sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from candidates._base import Baseline, Runnable
from candidates._baselines.common import Bound, distribution_version, missing_module, no_sm90
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["FlashInfer"]


class FlashInfer(Baseline):
    """Adapter of ``flashinfer.gdn_prefill.chunk_gated_delta_rule`` with its own Hopper kernels.

    Its states are value-major as well.  Its kernels take the factor instead of the log gate: the
    exponential is part of its call, as it is for whoever has log gates.  It has to be told of the
    longest sequence, so that there has to be one.
    """

    name = "flashinfer"
    operation = "gdn_prefill"
    input_form = "activated"

    def missing(self) -> str | None:
        return missing_module("flashinfer", "pip install flashinfer-python[cu13]") or no_sm90()

    def version(self) -> str:
        return distribution_version("flashinfer-python")

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
            import torch

            q, k, v, g, beta, offsets = (
                inputs[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")
            )
            if len(offsets) < 2:
                raise ValueError("flashinfer needs a sequence; cu_seqlens has none")
            scale, initial = float(inputs["scale"]), inputs["initial_state"]
            o, final = outputs["o"], outputs["final_state"]
            longest = int(offsets.diff().max())  # what a caller that schedules sequences knows

            @torch.inference_mode()
            def call() -> Mapping[str, torch.Tensor]:
                chunk_gated_delta_rule(
                    q, k, v, g, beta, scale, initial, True, offsets, output=o, output_state=final,
                    backend="flashinfer", gate_domain="log", max_seqlen=longest,
                )  # fmt: skip
                return outputs

            return call

        # The DSL names a kernel after its method, the module and the class that has it.
        return Bound(("kernel_cutlass_kernel_flashinfer", "void at::native::"), bind)
