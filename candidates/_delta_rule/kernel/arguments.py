"""What is the same in judging the arguments of all gated delta rules."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import Options

__all__ = [
    "BF16",
    "F32",
    "FLOATS",
    "MAX_ROWS",
    "NAMES",
    "OFFSETS",
    "ORDER",
    "check_overlap",
    "check_rest",
    "check_states",
    "declared",
    "finite",
    "on_gpu",
    "options_of",
    "shape_of",
    "tensor",
    "validate",
    "value_heads",
    "whole",
]

MAX_ROWS = 2**31 - 1
"""Rows are int32 in the kernels."""

_ALIGNMENT = 16  # bytes; what the kernels' widest loads and copies assume
_MAX_STRIDE = 2**31 - 1  # bytes from a token to the next: one 32-bit factor of an address

BF16, F32 = (torch.bfloat16,), (torch.float32,)
FLOATS = (torch.float32, torch.bfloat16)
OFFSETS = (torch.int32, torch.int64)
"""Dtypes that are served somewhere; the first is the one to convert to."""

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int64: "int64"}
"""Dtypes as options name them."""

options_of = functools.lru_cache(maxsize=1024)(Options)
"""The form of a call: the same object for equal ones."""


def on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor is where the kernels run."""
    return x.is_cuda


def value_heads(q: torch.Tensor, v: Any, packed: bool) -> int:
    """Value heads, a multiple of the heads of q and k.

    Raises
    ------
    ValueError
        If q is not ``[T, H, 128]`` beside offsets or ``[B, T, H, 128]`` without, or has too many
        rows, or v other heads.
    """
    shape = q.shape
    if len(shape) != (3 if packed else 4):
        form = "[T, H, 128] beside cu_seqlens" if packed else "[B, T, H, 128] without cu_seqlens"
        raise ValueError(f"q must be {form}, not {shape_of(q)}")
    if shape[-1] != HEAD:
        raise ValueError(f"q has head size {shape[-1]}; only {HEAD} is served")
    rows = shape[0] if packed else shape[0] * shape[1]
    if rows > MAX_ROWS:
        raise ValueError(f"q has {rows} rows; offsets are int32, at most {MAX_ROWS} are served")
    H = shape[-2]
    HV = v.shape[-2] if isinstance(v, torch.Tensor) and v.dim() == len(shape) else H
    if HV != H and (H == 0 or HV == 0 or HV % H):
        raise ValueError(f"v has {HV} heads, which is no multiple of the {H} of q and k")
    return int(HV)


def check_states(
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    out: torch.Tensor | None,
    final_state: torch.Tensor | bool | None,
    values: tuple[int, ...],
    device: torch.device,
) -> tuple[str, str, str | None, torch.Tensor | None]:
    """Offsets, states and outputs against what is served.

    Parameters
    ----------
    values : tuple of int
        What the shape of v must be.
    others
        As for an entry point.

    Returns
    -------
    offsets, given, wanted : str
        Of the :class:`.Options`: offsets, and dtypes of the states.
    written : torch.Tensor or None
        The final state, if one is given.
    """
    offsets, N, HV = "equal", values[0], values[-2]
    if cu_seqlens is not None:
        whole("cu_seqlens", cu_seqlens, OFFSETS, None, device, alignment=0)
        if cu_seqlens.dim() != 1 or not len(cu_seqlens):
            raise ValueError(f"cu_seqlens must be [N + 1], not {shape_of(cu_seqlens)}")
        offsets = "int64" if cu_seqlens.dtype is torch.int64 else "int32"
        N = cu_seqlens.shape[0] - 1
    state = (N, HV, HEAD, HEAD)
    given, wanted = "float32", None if final_state is False else "float32"
    if initial_state is not None:
        whole("initial_state", initial_state, FLOATS, state, device)
        given = NAMES[initial_state.dtype]
    if out is not None:
        whole("out", out, BF16, values, device)
    written: Any = None if final_state is False else final_state
    if written is not None:
        whole("final_state", written, FLOATS, state, device)
        wanted = NAMES[written.dtype]
    return offsets, given, wanted, written


def check_rest(flags: dict[str, Any], tensors: tuple[Any, ...], in_place: bool) -> None:
    """Flags, memory that outputs share, and gradients.

    Parameters
    ----------
    flags : dict of str to bool
    tensors : tuple of torch.Tensor or None
        All of a call, in :data:`ORDER`.
    in_place : bool
        Whether the final state may lie over the initial one.
    """
    for name, flag in flags.items():
        if flag is not True and flag is not False:
            raise TypeError(f"{name} must be True or False, not {flag!r}")
    if tensors[-2] is not None or tensors[-1] is not None:
        check_overlap(tensors, in_place)
    if torch.is_grad_enabled():
        for i, x in enumerate(tensors):
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{ORDER[i]} requires grad, and there is no backward pass: "
                    "detach it or call under torch.no_grad()"
                )


def tensor(name, x, dtypes, shape, device, alignment=_ALIGNMENT) -> bool:
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
        raise ValueError(f"{name} must be {list(shape)} to go with q, not {shape_of(x)}")
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


def whole(name, x, dtypes, shape, device, alignment=_ALIGNMENT) -> None:
    """A tensor that must be contiguous."""
    if not tensor(name, x, dtypes, shape, device, alignment):
        raise ValueError(
            f"{name} has strides {list(x.stride())}; only contiguous tensors are served here: "
            "pass .contiguous()"
        )


def declared(name, x, packed) -> None:
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


ORDER = (
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
            raise ValueError(f"{ORDER[i]} shares memory with {ORDER[j]}; give it memory of its own")


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


def shape_of(x: torch.Tensor) -> str:
    return str(list(x.shape))
