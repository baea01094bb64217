"""What a call may pass: everything the host can see, judged without waiting for the device."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from .image import HEAD
from .options import GATES, LOWEST_BOUND, Options

__all__ = [
    "MAX_ROWS",
    "check",
    "check_overlap",
    "decline_for_split",
    "finite",
    "on_gpu",
    "validate",
]

MAX_ROWS = 2**31 - 1
"""Rows are int32 in the kernels."""

_ALIGNMENT = 16  # bytes; what the kernels' widest loads and copies assume
_MAX_STRIDE = 2**31 - 1  # bytes from a token to the next: one 32-bit factor of an address
_BF16, _F32 = (torch.bfloat16,), (torch.float32,)
_FLOATS = (torch.float32, torch.bfloat16)
_OFFSETS = (torch.int32, torch.int64)
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}

_options = functools.lru_cache(maxsize=1024)(Options)


def on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor is where the kernels run."""
    return x.is_cuda


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
        & _tensor("g", g, _FLOATS, values, device)
        & _tensor("beta", beta, _FLOATS, values[:-1], device, alignment=0)
    )
    if not compact:
        for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
            _declared(name, x, packed)
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
    if gate != "log" or A_log is not None or dt_bias is not None or lower_bound is not None:
        _gate(gate, lower_bound, A_log, dt_bias, HV, device)
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
        "float32" if g.dtype is torch.float32 else "bfloat16",
        dt_bias is not None,
        "float32" if beta.dtype is torch.float32 else "bfloat16",
        beta_logits,
        l2norm,
        given,
        None if final_state is False else wanted,
        offsets,
        compact and HV == H,
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
    _whole("A_log", A_log, _F32, (heads,), device, alignment=4)
    if dt_bias is not None:
        _whole("dt_bias", dt_bias, _F32, (heads, HEAD), device, alignment=4)
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


def _tensor(name, x, dtypes, shape, device, alignment=_ALIGNMENT) -> bool:
    """One tensor against what is served; the first thing wrong is named.

    Returns whether it is contiguous.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if x.dtype not in dtypes:
        served = " or ".join(_dtype(d) for d in dtypes)
        raise TypeError(
            f"{name} is {_dtype(x.dtype)}, only {served} is served; "
            f"convert it with .to(torch.{_dtype(dtypes[0])})"
        )
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)} to go with q, not {_shape(x)}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, q on {device}; move it there")
    if x.layout is not torch.strided:
        raise ValueError(f"{name} is {_dtype(x.layout)}; only dense tensors are served")
    if x.is_neg():  # also of the imaginary part of a conjugate
        raise ValueError(f"{name} is a view that negates what it views: pass .resolve_neg()")
    if alignment and x.data_ptr() % alignment:
        raise ValueError(f"{name} must start on a multiple of {alignment} bytes: pass .clone()")
    contiguous: bool = x.is_contiguous()
    return contiguous


def _whole(name, x, dtypes, shape, device, alignment=_ALIGNMENT) -> None:
    """A tensor that must be contiguous."""
    if not _tensor(name, x, dtypes, shape, device, alignment):
        raise ValueError(
            f"{name} has strides {list(x.stride())}; only contiguous tensors are served here: "
            "pass .contiguous()"
        )


def _declared(name, x, packed) -> None:
    """Strides that the kernels can follow: rows of contiguous channels, 16-byte steps."""
    strides, size = x.stride(), x.element_size()
    says = f"{name} has strides {list(strides)}"
    if not packed:
        outer, strides = strides[0], strides[1:]
        if x.shape[0] > 1 and outer != x.shape[1] * strides[0]:
            raise ValueError(f"{says}; sequences must follow each other without a gap")
    if strides[0] * size > _MAX_STRIDE:
        raise ValueError(f"{says}; a token is at most 2 GiB from the next")
    if name == "beta":
        return
    if strides[-1] != 1:
        raise ValueError(f"{says}; channels must be contiguous: pass .contiguous()")
    if any(s * size % _ALIGNMENT for s in strides[:-1]):
        raise ValueError(
            f"{says}; tokens and heads must be a multiple of {_ALIGNMENT} bytes apart: "
            "pass .contiguous()"
        )


_ORDER = (
    "q", "k", "v", "g", "beta", "cu_seqlens", "A_log", "dt_bias", "initial_state", "out",
    "final_state",
)  # fmt: skip
"""Of the tensors of one call, outputs last."""


def check_overlap(tensors, in_place: bool, starts: tuple[Any, ...] | None = None) -> None:
    """Outputs share no memory with inputs or each other, but for the state updated in place.

    ``starts`` are the tensors' addresses, if they are at hand.
    """
    if starts is None:
        starts = tuple([None if x is None else x.data_ptr() for x in tensors])
    state, final = tensors[-3], tensors[-1]
    for i in (len(tensors) - 2, len(tensors) - 1):
        x, low = tensors[i], starts[i]
        if x is None:
            continue
        high = low + x.nbytes
        for j in range(i):
            other, start = tensors[j], starts[j]
            if other is None or start >= high or start + _reach(other) <= low:
                continue
            if (
                in_place
                and x is final
                and other is state
                and (start, x.dtype) == (low, state.dtype)
            ):
                continue
            raise ValueError(
                f"{_ORDER[i]} shares memory with {_ORDER[j]}; give it memory of its own"
            )


def _reach(x: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if x.is_contiguous():
        return x.nbytes
    if not x.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def finite(name: str, value: float) -> float:
    """A number that fp32 can hold.

    Raises
    ------
    TypeError
        If it is no number.
    ValueError
        If it is infinite or NaN, in fp32 too.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not abs(value) <= 3.4028234663852886e38:  # NaN, too
        raise ValueError(f"{name} is {value}; it must be finite in float32")
    return float(value)


def validate(cu_seqlens: torch.Tensor, T: int) -> None:
    """Wait for the offsets, and raise on any that are not ``0 = cu[0] <= ... <= cu[N] = T``."""
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("validate=True synchronises, which a CUDA graph capture does not allow")
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens starts with {offsets[0]}, not 0")
    for n, (low, high) in enumerate(itertools.pairwise(offsets)):
        if high < low:
            raise ValueError(f"cu_seqlens falls from {low} to {high} at sequence {n}")
    if offsets[-1] != T:
        raise ValueError(f"cu_seqlens ends with {offsets[-1]}, but q has {T} rows")


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(x: torch.Tensor) -> str:
    return str(list(x.shape))
