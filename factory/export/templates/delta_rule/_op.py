"""The call as an operator of torch, so that ``torch.compile`` keeps it in its graph.

Eager calls do not come through here: they would pay for the dispatcher and gain nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import EXPORT_ID

__all__ = ["NAME", "call"]

NAME = f"any_prefill_{EXPORT_ID}::forward"
"""Of the operator.  Copies of one export under two names share it; other exports have their own."""

_BACKWARD = (
    "any_prefill is forward only, there is no backward pass: detach its inputs or call it under "
    "torch.no_grad()"
)


def call(
    tensors: tuple[torch.Tensor | None, ...],
    scale: float | None,
    forms: tuple[Any, ...],
    out: torch.Tensor | None,
    final_state: torch.Tensor | bool | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call inside a compiled graph, on the current stream and without validation."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                raise ValueError(_BACKWARD)
    o, state = _operator()(*tensors, scale, *forms)
    # The operator allocates: what is given is filled from it.
    if out is not None:
        o = out.copy_(o)
    if final_state is False:
        state = None
    elif final_state is not None:
        state = final_state.copy_(state)
    return o, state


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    scale: float | None,
    # part: forms_of_operator
) -> tuple[torch.Tensor, torch.Tensor]:
    from .api import any_prefill

    # part: operator_calls


def _fake(
    q, k, v, g, beta, cu_seqlens, initial_state, scale, any_listed_forms,
):  # fmt: skip
    """Shapes and dtypes of the results, from those of the arguments."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (N, v.shape[-2], v.shape[-1], k.shape[-1])
    return (
        torch.empty(v.shape, dtype=v.dtype, device=v.device),
        torch.empty(state, dtype=torch.float32, device=v.device),
    )


def _operator() -> Any:
    return getattr(torch.ops, NAME.partition("::")[0]).forward.default


def _register() -> None:
    if hasattr(getattr(torch.ops, NAME.partition("::")[0]), "forward"):
        return  # another copy of this very export
    # Not torch.library.custom_op: its wrapper takes longer than the call.  What that would add to
    # the dispatch is no use here: the call allocates what it gives, and refuses gradients itself.
    schema = torch.library.infer_schema(_eager, mutates_args=())
    torch.library.define(NAME, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(NAME, "default", _eager)
    torch.library.register_fake(NAME, _fake)


_register()
