"""flash-linear-attention's ``any_chunk`` answered by this kernel, for inference.

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
# part: fla_import

from .api import any_prefill, support
from .dispatch import GATE_BOUND

__all__ = ["AnyPrefillBackend"]

_HEAD = 128


@register(any_fla_entry)
class AnyPrefillBackend(BaseBackend):
    """Asked before any_fla_rival's backend, whose priority is 3."""

    backend_type = "any_prefill_sm90"
    package_name = None
    env_var = None
    priority = 2

    def any_chunk_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Whether a call of ``any_chunk`` is served, and if not why, in a line."""
        reason = _Call(*args, **kwargs).problem()
        return reason is None, reason

    # part: fla_answers


class _Call:
    """One call of ``any_chunk``, by fla's names of its arguments."""

    # part: fla_call

    def problem(self) -> str | None:
        """Why the call is not served; None if it is."""
        tensors = (self.q, self.k, self.v, self.g, self.beta)
        learnt = (*tensors, self.initial_state, self.A_log, self.dt_bias)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learnt):
            return "forward only: call it under torch.no_grad() or torch.inference_mode()"
        for name, asked in self.declined.items():
            if asked:
                return f"{name} is not served"
        if self.cu_seqlens is not None and self.q.shape[0] != 1:
            return f"a batch of {self.q.shape[0]} beside cu_seqlens"
        # part: fla_gates
        state = self.initial_state
        if state is not None:
            N = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
            wanted = (N, self.v.shape[-2], _HEAD, _HEAD)
            if tuple(state.shape) != wanted or state.dtype is not torch.float32:
                return f"initial_state is {state.dtype} {list(state.shape)}, not fp32 {wanted}"
            if state.device != self.q.device:
                return f"initial_state is on {state.device}, q on {self.q.device}"
            if not state.is_contiguous():
                # The call makes it so: memory without contents stands for the copy.
                state = torch.empty_like(state, memory_format=torch.contiguous_format)
        positional, options = self._arguments()
        answer = support(*positional, state, **options)
        return None if answer else answer.reason

    def run(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs as fla returns them."""
        positional, options = self._arguments()
        state = self.initial_state
        if state is not None:
            state = (state if self.v_first else state.transpose(-1, -2)).contiguous()
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
            "final_state": None if self.wants_state else False,
        }
        # part: fla_activation
        return (*tensors, self.cu_seqlens), options
