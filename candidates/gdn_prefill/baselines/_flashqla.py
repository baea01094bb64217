"""FlashQLA: TileLang, BT = 64, fused and warp-specialised, sequences cut where that pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from candidates._base import Baseline, Runnable
from candidates._baselines.common import Bound, distribution_version, missing_module, no_sm90
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["FlashQla"]


class FlashQla(Baseline):
    """Adapter of ``flash_qla.chunk_gated_delta_rule``, forward only.

    It decides for itself whether to cut a sequence; version 0.1.3 refuses empty ones.
    """

    name = "flashqla"
    operation = "gdn_prefill"
    input_form = "activated"

    def missing(self) -> str | None:
        fix = "pip install flash-qla"
        return missing_module("flash_qla", fix) or missing_module("tilelang", fix) or no_sm90()

    def version(self) -> str:
        return distribution_version("flash_qla")

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        from flash_qla import chunk_gated_delta_rule

        def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
            import torch

            q, k, v, g, beta = (inputs[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta"))
            offsets = inputs["cu_seqlens"].to(torch.int64)
            scale, initial = float(inputs["scale"]), inputs["initial_state"]

            @torch.inference_mode()
            def call() -> Mapping[str, torch.Tensor]:
                o, final = chunk_gated_delta_rule(
                    q, k, v, g, beta, scale=scale, initial_state=initial,
                    output_final_state=True, state_v_first=True, cu_seqlens=offsets,
                )  # fmt: skip
                return {"o": o.squeeze(0), "final_state": final}

            return call

        # TileLang names a CUDA function after the Python function that it was written as.
        functions = ("chunk_local_cumsum", "kkt_solve", "fused_chunk_gdr_fwd", "prepare_h",
                     "get_warmup_chunks", "correct_h0")  # fmt: skip
        return Bound((*(f"tilelang_{name}" for name in functions), "void at::native::"), bind)
