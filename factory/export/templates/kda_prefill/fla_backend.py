"""flash-linear-attention's ``chunk_kda`` answered by this kernel, for inference.

Importing this module is all it takes::

    import my_repository.vendored.any_prefill.fla_backend

It registers with the public backend registry of fla-core 0.6 (``fla.backends.register``), whose
dispatcher asks the verifier before each call and goes on to fla's own kernels where it says no.
The verifier reads nothing on the device and says yes only to what is computed as fla defines it.
"""

from __future__ import annotations

from typing import Any

import torch
from fla.backends import BaseBackend, register
from fla.ops.kda.chunk import chunk_kda

from .api import any_prefill, support
from .dispatch import GATE_BOUND

__all__ = ["KdaPrefillBackend"]

_HEAD = 128


@register(chunk_kda)
class KdaPrefillBackend(BaseBackend):
    """Asked before FlashKDA's backend, whose priority is 3."""

    backend_type = "any_prefill_sm90"
    package_name = None
    env_var = None
    priority = 2

    def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Whether a call of ``chunk_kda`` is served, and if not why, in a line."""
        reason = _Call(*args, **kwargs).problem()
        return reason is None, reason

    def chunk_kda(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The call, after the verifier said yes."""
        return _Call(*args, **kwargs).run()


class _Call:
    """One call of ``chunk_kda``, by fla's names of its arguments."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        disable_recompute: bool = False,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        cp_context: Any = None,
        use_graph: bool = False,
        max_num_seqs: int | None = None,
        *,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        chunk_size: int = 64,
        **others: Any,
    ) -> None:
        # Not looked at: what only a backward pass or fla's own chunks need (disable_recompute,
        # chunk_size), a copy of the offsets (cu_seqlens_cpu), and use_graph with max_num_seqs,
        # which ask for a grid that does not depend on the offsets: ours never does.
        self.q, self.k, self.v, self.g, self.beta = q, k, v, g, beta
        self.scale, self.cu_seqlens = scale, cu_seqlens
        self.initial_state, self.wants_state = initial_state, output_final_state
        self.v_first = state_v_first
        self.l2norm, self.logits = use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel
        self.raw, self.lower_bound, self.bounded = use_gate_in_kernel, lower_bound, safe_gate
        self.A_log, self.dt_bias = A_log, dt_bias
        self.declined = {
            "allow_neg_eigval": allow_neg_eigval,
            "return_intermediate_states": return_intermediate_states,
            "cp_context": cp_context is not None,
            **dict.fromkeys(others, True),
        }

    def problem(self) -> str | None:
        """Why the call is not served; None if it is."""
        tensors = (self.q, self.k, self.v, self.g, self.beta)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return "forward only: call it under torch.no_grad() or torch.inference_mode()"
        for name, asked in self.declined.items():
            if asked:
                return f"{name} is not served"
        if self.cu_seqlens is not None and self.q.shape[0] != 1:
            return f"a batch of {self.q.shape[0]} beside cu_seqlens"
        if self.raw and self.lower_bound is None and self.A_log is None:
            return "use_gate_in_kernel without A_log"
        if not self.raw and GATE_BOUND is not None and not self.bounded:
            # Activated gates cannot be looked at without a synchronisation. safe_gate is the
            # caller's word that they are bounded; fla's own fast path takes it too.
            return (
                f"gates may be stronger than {GATE_BOUND:g} a token, which these kernels do not"
                " bear; pass safe_gate=True if they are bounded"
            )
        state = self.initial_state
        if state is not None:
            N = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
            wanted = (N, self.v.shape[-2], _HEAD, _HEAD)
            if tuple(state.shape) != wanted or state.dtype is not torch.float32:
                return f"initial_state is {state.dtype} {list(state.shape)}, not fp32 {wanted}"
            if state.device != self.q.device:
                return f"initial_state is on {state.device}, q on {self.q.device}"
        positional, options = self._arguments()
        answer = support(*positional, **options)
        return None if answer else answer.reason

    def run(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs as fla returns them."""
        positional, options = self._arguments()
        state = self.initial_state
        if state is not None:
            state = (state if self.v_first else state.transpose(-1, -2)).contiguous()
        if not self.wants_state:
            options["final_state"] = False
        o, final = any_prefill(*positional, state, **options)
        if final is not None and not self.v_first:
            final = final.transpose(-1, -2).contiguous()
        return o.view(self.v.shape), final

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """q to cu_seqlens, and the options, of :func:`.api.any_prefill`; views and no copies."""
        tensors = [self.q, self.k, self.v, self.g, self.beta]
        if self.cu_seqlens is not None:
            tensors = [x.squeeze(0) for x in tensors]
        options: dict[str, Any] = {
            "scale": self.scale,
            "l2norm": self.l2norm,
            "beta_logits": self.logits,
        }
        if self.raw:
            A_log, bias = self.A_log, self.dt_bias
            if A_log is None:
                A_log = torch.zeros(self.v.shape[-2], device=self.q.device)  # exp(0) = 1
            options["gate"] = "softplus" if self.lower_bound is None else "safe"
            options["lower_bound"] = self.lower_bound
            options["A_log"] = A_log.flatten()
            options["dt_bias"] = None if bias is None else bias.view(-1, _HEAD)
        return (*tensors, self.cu_seqlens), options
