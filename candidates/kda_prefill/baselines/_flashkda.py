"""FlashKDA: CUDA, BT = 16, chunk-start anchor; takes raw gates and beta logits.

It activates gates and beta and normalises q and k itself, so it reads 10 bytes
per element where a kernel fed activated fp32 gates reads 12: its time is marked
``raw``.
"""

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

__all__ = ["KERNELS", "FlashKda"]

_OWN = ("_flash_kda_build_tile_prefix", "_flash_kda_fwd_prepare", "_flash_kda_fwd_recurrence")

KERNELS: tuple[str, ...] = (
    *_OWN,
    *(f"void {name}" for name in _OWN),
    # Profilers leave names as long as these mangled: _Z, the length of the name, the name.
    *(f"_Z{len(name)}{name}" for name in _OWN),
    # Its own call also launches torch's copy kernel.
    "void at::native::",
)
"""Prefixes of the kernels that a call launches, as profilers write them."""


class FlashKda(Baseline):
    """Adapter of ``flash_kda.fwd``."""

    name = "flashkda"
    operation = "kda_prefill"
    input_form = "raw"

    def missing(self) -> str | None:
        return (
            missing_module("flash_kda", "build MoonshotAI/FlashKDA for sm90a")
            or missing_module("flash_kda_C", "build FlashKDA's extension for sm90a")
            or no_sm90()
        )

    def version(self) -> str:
        return distribution_version("flash_kda")

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        import flash_kda

        given = raw_operands(self.name, raw)

        def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
            import torch

            q, k, v = (inputs[name].unsqueeze(0) for name in ("q", "k", "v"))
            g, beta = given.g.unsqueeze(0), given.beta.unsqueeze(0)
            _, _, a_log, dt_bias, lower_bound = given
            offsets = inputs["cu_seqlens"].to(torch.int64)
            out = outputs["o"].unsqueeze(0)
            scale = float(inputs["scale"])
            initial, final = inputs["initial_state"], outputs["final_state"]

            def call() -> Mapping[str, torch.Tensor]:
                flash_kda.fwd(
                    q, k, v, g, beta, scale, out, a_log, dt_bias, lower_bound,
                    initial_state=initial, final_state=final, cu_seqlens=offsets,
                )  # fmt: skip
                return outputs

            return call

        return Bound(KERNELS, bind)
