"""flash-linear-attention: Triton, BT = 64, sub-block pairs.

It hands work to FlashKDA or another backend by itself when one is installed;
the adapter turns that off and the declared kernel names prove that it stayed off.
Its autotuner takes about a minute for each new head count on its first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from candidates._base import Baseline, Runnable
from candidates.kda_prefill.baselines._common import (
    Bound,
    distribution_version,
    missing_module,
    no_sm90,
)
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["FlashLinearAttention"]


class FlashLinearAttention(Baseline):
    """Adapter of ``fla.ops.kda.chunk_kda``, forward only."""

    name = "fla"
    operation = "kda_prefill"
    input_form = "activated"

    def missing(self) -> str | None:
        fix = "pip install flash-linear-attention"
        return missing_module("fla", fix) or missing_module("einops", fix) or no_sm90()

    def version(self) -> str:
        return distribution_version("fla-core")

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        os.environ["FLA_FLASH_KDA"] = "0"  # else FlashKDA answers under fla's name
        import torch
        from fla.ops.kda import chunk_kda

        def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
            q, k, v, g, beta = (inputs[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta"))
            offsets = inputs["cu_seqlens"].to(torch.int64)
            on_host = offsets.cpu()  # what a caller of fla passes to spare it a copy per call
            scale, initial = float(inputs["scale"]), inputs["initial_state"]

            @torch.inference_mode()
            def call() -> Mapping[str, torch.Tensor]:
                o, final = chunk_kda(
                    q, k, v, g, beta, scale=scale, initial_state=initial,
                    output_final_state=True, state_v_first=True,
                    cu_seqlens=offsets, cu_seqlens_cpu=on_host,
                )  # fmt: skip
                return {"o": o.squeeze(0), "final_state": final}

            return call

        return Bound(
            (
                "chunk_kda_fwd_kernel",
                "kda_gate_chunk_cumsum",
                "chunk_local_cumsum",
                "recompute_w_u_fwd",
                "chunk_gated_delta_rule_fwd_kernel_h",
                "chunk_gla_fwd_kernel_o",
                "solve_tril",
                "merge_16x16",
                "prepare_",
                "void at::native::",
            ),
            bind,
        )
