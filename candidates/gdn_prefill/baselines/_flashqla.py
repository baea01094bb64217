"""FlashQLA: TileLang, BT = 64, fused and warp-specialised, sequences cut where that pays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from candidates._base import Baseline, Runnable
from candidates._baselines.common import distribution_version, missing_module, no_sm90
from candidates._baselines.fla import bound
from operations import Workload

__all__ = ["FlashQla"]


class FlashQla(Baseline):
    """Adapter of ``flash_qla.chunk_gated_delta_rule``, forward only, which has fla's signature.

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

        # TileLang names a CUDA function after the Python function that it was written as.
        functions = ("chunk_local_cumsum", "kkt_solve", "fused_chunk_gdr_fwd", "prepare_h",
                     "get_warmup_chunks", "correct_h0")  # fmt: skip
        kernels = (*(f"tilelang_{name}" for name in functions), "void at::native::")
        return bound(chunk_gated_delta_rule, kernels)
