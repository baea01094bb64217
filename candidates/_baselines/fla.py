"""flash-linear-attention's chunked operators: Triton, BT = 64, one signature for all of them.

It hands work to other installed packages by itself; an adapter turns that off and the declared
kernel names prove that it stayed off.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from candidates._base import Baseline, Runnable
from candidates._baselines.common import Bound, distribution_version, missing_module, no_sm90
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["COMMON_KERNELS", "FlaOperator", "Operator", "bound"]

Operator: TypeAlias = "Callable[..., tuple[torch.Tensor, torch.Tensor]]"
"""A chunked operator with fla's signature, which returns ``o`` and the final state."""

COMMON_KERNELS: tuple[str, ...] = (
    "chunk_local_cumsum",
    "recompute_w_u_fwd",
    "chunk_gated_delta_rule_fwd_kernel_h",
    "prepare_",
    "void at::native::",
)
"""Prefixes of the kernels that every gated delta rule of fla launches."""


class FlaOperator(Baseline):
    """Adapter of one of ``fla.ops``' chunked operators, forward only.

    A subclass names the operation and the function.

    Attributes
    ----------
    kernels : tuple of str
        Prefixes of the kernels that it launches.
    others_off : Mapping of str to str
        Environment variables that keep other packages from answering under fla's name.
    """

    name = "fla"
    input_form = "activated"
    kernels: ClassVar[tuple[str, ...]]
    others_off: ClassVar[Mapping[str, str]]

    @abstractmethod
    def function(self) -> Operator:
        """Import the operator."""

    def missing(self) -> str | None:
        fix = "pip install flash-linear-attention"
        return missing_module("fla", fix) or missing_module("einops", fix) or no_sm90()

    def version(self) -> str:
        return distribution_version("fla-core")

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        os.environ.update(self.others_off)
        # The offsets on the host are what a caller of fla passes to spare it a copy per call.
        return bound(
            self.function(), self.kernels, lambda offsets: {"cu_seqlens_cpu": offsets.cpu()}
        )


def bound(
    operator: Operator,
    kernels: tuple[str, ...],
    more: Callable[[torch.Tensor], Mapping[str, Any]] = lambda offsets: {},
) -> Bound:
    """Calls of an operator with fla's signature: one batch row of packed tokens.

    Parameters
    ----------
    operator : callable
    kernels : tuple of str
        Prefixes of the kernels that it launches.
    more : callable
        Further arguments of a call, made once from its offsets [N + 1] in int64.
    """

    def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
        import torch

        q, k, v, g, beta = (inputs[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta"))
        offsets = inputs["cu_seqlens"].to(torch.int64)
        given = more(offsets)
        scale, initial = float(inputs["scale"]), inputs["initial_state"]

        @torch.inference_mode()
        def call() -> Mapping[str, torch.Tensor]:
            o, final = operator(
                q, k, v, g, beta, scale=scale, initial_state=initial,
                output_final_state=True, state_v_first=True, cu_seqlens=offsets, **given,
            )  # fmt: skip
            return {"o": o.squeeze(0), "final_state": final}

        return call

    return Bound(kernels, bind)
