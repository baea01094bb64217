"""What a call may pass: everything the host can see, judged without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch

from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import Options
from candidates.kda_prefill.kernel.arguments import (
    _BF16,
    _F32,
    _FLOATS,
    _NAMES,
    _OFFSETS,
    _ORDER,
    MAX_ROWS,
    _declared,
    _options,
    _shape,
    _tensor,
    _whole,
    check_overlap,
    finite,
    on_gpu,
    validate,
)

__all__ = [
    "GATES",
    "MAX_ROWS",
    "check",
    "check_overlap",
    "finite",
    "on_gpu",
    "validate",
]

GATES = ("log", "softplus")


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
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_logits: bool = False,
    l2norm: bool = False,
) -> Options:
    """Refuse by name what is not served; reads nothing on the device.

    Parameters
    ----------
    q, k, v, g, beta, cu_seqlens, initial_state, out, final_state
        As for :func:`.entry.gdn_prefill`.
    in_place : bool
        Whether ``final_state`` may be ``initial_state``: with one segment, each CTA reads its
        part of the state before it writes it; with more, another CTA may still read it.
    gate, A_log, dt_bias, beta_logits, l2norm
        As for :func:`.entry.gdn_prefill`.

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
    if len(shape) != (3 if packed else 4):
        form = "[T, H, 128] beside cu_seqlens" if packed else "[B, T, H, 128] without cu_seqlens"
        raise ValueError(f"q must be {form}, not {_shape(q)}")
    if shape[-1] != HEAD:
        raise ValueError(f"q has head size {shape[-1]}; only {HEAD} is served")
    rows = shape[0] if packed else shape[0] * shape[1]
    if rows > MAX_ROWS:
        raise ValueError(f"q has {rows} rows; offsets are int32, at most {MAX_ROWS} are served")
    H = shape[-2]
    HV = v.shape[-2] if isinstance(v, torch.Tensor) and v.dim() == len(shape) else H
    if HV != H and (H == 0 or HV == 0 or HV % H):
        raise ValueError(f"v has {HV} heads, which is no multiple of the {H} of q and k")
    values = (*shape[:-2], HV, HEAD)
    compact = (
        _tensor("q", q, _BF16, shape, device)
        & _tensor("k", k, _BF16, shape, device)
        & _tensor("v", v, _BF16, values, device)
        & _tensor("g", g, _FLOATS, values[:-1], device, alignment=0)
        & _tensor("beta", beta, _FLOATS, values[:-1], device, alignment=0)
    )
    if not compact:
        for name, x in (("q", q), ("k", k), ("v", v)):
            _declared(name, x, packed)
        for name, x in (("g", g), ("beta", beta)):  # one number a token and head: any steps
            if not packed and x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
                raise ValueError(
                    f"{name} has strides {list(x.stride())}; sequences must follow each other "
                    "without a gap"
                )
    offsets, N = "equal", shape[0]
    if cu_seqlens is not None:
        _whole("cu_seqlens", cu_seqlens, _OFFSETS, None, device, alignment=0)
        if cu_seqlens.dim() != 1 or not len(cu_seqlens):
            raise ValueError(f"cu_seqlens must be [N + 1], not {_shape(cu_seqlens)}")
        offsets = "int64" if cu_seqlens.dtype is torch.int64 else "int32"
        N = cu_seqlens.shape[0] - 1
    state = (N, HV, HEAD, HEAD)
    given, wanted = "float32", "float32"
    if initial_state is not None:
        _whole("initial_state", initial_state, _FLOATS, state, device)
        given = _NAMES[initial_state.dtype]
    if out is not None:
        _whole("out", out, _BF16, values, device)
    written: Any = None if final_state is False else final_state
    if written is not None:
        _whole("final_state", written, _FLOATS, state, device)
        wanted = _NAMES[written.dtype]
    if gate != "log" or A_log is not None or dt_bias is not None:
        _gate(gate, A_log, dt_bias, HV, device)
    flags: dict[str, Any] = {"beta_logits": beta_logits, "l2norm": l2norm}
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise TypeError(f"{name} must be True or False, not {flag!r}")
    tensors = (q, k, v, g, beta, cu_seqlens, A_log, dt_bias, initial_state, out, written)
    if out is not None or written is not None:
        check_overlap(tensors, in_place)
    if torch.is_grad_enabled():
        for i, tensor in enumerate(tensors):
            if tensor is not None and tensor.requires_grad:
                raise ValueError(
                    f"{_ORDER[i]} requires grad, and there is no backward pass: "
                    "detach it or call under torch.no_grad()"
                )
    return _options(
        gate,
        _NAMES[g.dtype],
        dt_bias is not None,
        _NAMES[beta.dtype],
        beta_logits,
        l2norm,
        given,
        None if final_state is False else wanted,
        offsets,
        compact,
    )


def _gate(gate, A_log, dt_bias, heads, device) -> None:
    """The arguments of the gate's activation, each with the gate that takes it."""
    if gate not in GATES:
        raise ValueError(f"gate={gate!r} is not one of {list(GATES)}")
    if gate == "log":
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name} is given, but gate='log' takes g as it is")
        return
    if A_log is None:
        raise ValueError(f"gate={gate!r} needs A_log, fp32 [{heads}]")
    _whole("A_log", A_log, _F32, (heads,), device, alignment=4)
    if dt_bias is not None:
        _whole("dt_bias", dt_bias, _F32, (heads,), device, alignment=4)
