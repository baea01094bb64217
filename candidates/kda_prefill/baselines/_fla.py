"""flash-linear-attention: Triton, BT = 64, sub-block pairs.

It hands work to FlashKDA or another backend by itself when one is installed;
the adapter turns that off and the declared kernel names prove that it stayed off.
Its autotuner takes about a minute for each new head count on its first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from candidates._baselines.fla import COMMON_KERNELS, FlaOperator, Operator

__all__ = ["FlashLinearAttention"]


class FlashLinearAttention(FlaOperator):
    """Adapter of ``fla.ops.kda.chunk_kda``, forward only."""

    operation = "kda_prefill"
    others_off: ClassVar[Mapping[str, str]] = {"FLA_FLASH_KDA": "0"}
    kernels = (
        "chunk_kda_fwd_kernel",
        "kda_gate_chunk_cumsum",
        "chunk_gla_fwd_kernel_o",
        "solve_tril",
        "merge_16x16",
        *COMMON_KERNELS,
    )

    def function(self) -> Operator:
        from fla.ops.kda import chunk_kda

        operator: Operator = chunk_kda
        return operator
