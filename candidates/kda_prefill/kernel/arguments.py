"""What a call may pass: everything the host can see, judged without waiting for the device."""

from __future__ import annotations

import torch

from candidates._delta_rule.kernel.arguments import (
    BF16,
    F32,
    FLOATS,
    MAX_ROWS,
    check_overlap,
    check_rest,
    check_states,
    declared,
    finite,
    on_gpu,
    options_of,
    tensor,
    validate,
    value_heads,
    whole,
)
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import GATES, LOWEST_BOUND, Options

__all__ = [
    "MAX_ROWS",
    "check",
    "check_overlap",
    "decline_for_split",
    "finite",
    "on_gpu",
    "validate",
]


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | bool | None = None,
    in_place: bool = True,
    *,
    gate: str = "log",
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_logits: bool = False,
    l2norm: bool = False,
) -> Options:
    """Refuse by name what is not served; reads nothing on the device.

    Parameters
    ----------
    q, k, v, g, beta, cu_seqlens, initial_state, out, final_state
        As for :func:`.entry.kda_prefill`.
    in_place : bool
        Whether ``final_state`` may be ``initial_state``: with one segment, each CTA reads its
        part of the state before it writes it; with more, another CTA may still read it.
    gate, lower_bound, A_log, dt_bias, beta_logits, l2norm
        As for :func:`.entry.kda_prefill`.

    Returns
    -------
    Options
        The form in which the arguments come.

    Raises
    ------
    TypeError
        Not a tensor, or a dtype that is not served.
    ValueError
        A shape, stride, alignment, device, aliasing or gradient that is not served.
    """
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a torch.Tensor, not {type(q).__name__}")
    device, shape, packed = q.device, tuple(q.shape), cu_seqlens is not None
    if not on_gpu(q):
        raise ValueError(f"q is on {device}; move the inputs to a CUDA device")
    HV = value_heads(q, v, packed)
    values = (*shape[:-2], HV, HEAD)
    compact = (
        tensor("q", q, BF16, shape, device)
        & tensor("k", k, BF16, shape, device)
        & tensor("v", v, BF16, values, device)
        & tensor("g", g, FLOATS, values, device)
        & tensor("beta", beta, FLOATS, values[:-1], device, alignment=0)
    )
    if not compact:
        for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
            declared(name, x, packed)
    offsets, given, wanted, written = check_states(
        cu_seqlens, initial_state, out, final_state, values, device
    )
    if gate != "log" or A_log is not None or dt_bias is not None or lower_bound is not None:
        _gate(gate, lower_bound, A_log, dt_bias, HV, device)
    tensors = (q, k, v, g, beta, cu_seqlens, A_log, dt_bias, initial_state, out, written)
    check_rest({"beta_logits": beta_logits, "l2norm": l2norm}, tensors, in_place)
    return options_of(
        gate,
        "float32" if g.dtype is torch.float32 else "bfloat16",
        dt_bias is not None,
        "float32" if beta.dtype is torch.float32 else "bfloat16",
        beta_logits,
        l2norm,
        given,
        wanted,
        offsets,
        compact and HV == shape[-2],
    )


def decline_for_split(options: Options) -> None:
    """Refuse by name what the split kernels do not serve.

    Raises
    ------
    ValueError
        If an option is none of theirs.
    """
    for name, asked in (
        ("l2norm", options.l2norm),
        ("tensors that are not contiguous, or more value heads than keys", not options.compact),
    ):
        if asked:
            raise ValueError(f"{name}: not served by a split schedule; use a fused one")


def _gate(gate, lower_bound, A_log, dt_bias, heads, device) -> None:
    """The arguments of the gate's activation, each with the gate that takes it."""
    if gate not in GATES:
        raise ValueError(f"gate={gate!r} is not one of {list(GATES)}")
    if gate == "log":
        for name, value in (("lower_bound", lower_bound), ("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name} is given, but gate='log' takes g as it is")
        return
    if A_log is None:
        raise ValueError(f"gate={gate!r} needs A_log, fp32 [{heads}]")
    whole("A_log", A_log, F32, (heads,), device, alignment=4)
    if dt_bias is not None:
        whole("dt_bias", dt_bias, F32, (heads, HEAD), device, alignment=4)
    if gate == "softplus":
        if lower_bound is not None:
            raise ValueError("lower_bound is given, but gate='softplus' has none")
    elif lower_bound is None:
        raise ValueError("gate='safe' needs lower_bound")
    elif not LOWEST_BOUND <= finite("lower_bound", lower_bound) < 0:
        raise ValueError(
            f"lower_bound={lower_bound} is not served: it must be below 0 and at least "
            f"{LOWEST_BOUND:g}"
        )
