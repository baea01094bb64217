"""flash-linear-attention: Triton, BT = 64, what users of Gated DeltaNet run on Hopper.

It hands work to FlashQLA by itself when that is installed; the adapter turns that off and the
declared kernel names prove that it stayed off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from candidates._baselines.fla import COMMON_KERNELS, FlaOperator, Operator

__all__ = ["FlashLinearAttention"]


class FlashLinearAttention(FlaOperator):
    """Adapter of ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``, forward only.

    Grouped value heads and value-major states are passed as they are.
    """

    operation = "gdn_prefill"
    others_off: ClassVar[Mapping[str, str]] = {"FLA_FLASH_QLA": "0", "FLA_INTRACARD_CP": "0"}
    kernels = ("chunk_gated_delta_rule_fwd_kkt_solve_kernel", "chunk_fwd_kernel_o", *COMMON_KERNELS)

    def function(self) -> Operator:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        operator: Operator = chunk_gated_delta_rule
        return operator
