"""KDA prefill as a function of torch tensors: refuse by name, or compute.

:func:`kda_prefill` judges on the host everything the host can see (types, shapes, strides,
devices, arguments) before anything is launched, without synchronising.  What is device data,
the offsets, is made safe on the device.  This module and the kernels beside it need torch, the
DSL and TVM-FFI, and know nothing of schedule spaces, records or campaigns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .fused_plan import pieces_of
from .image import HEAD, ImageLayout, segment_entries, slots, unroll_of

__all__ = ["Config", "FusedConfig", "check", "compiled", "kda_prefill", "launch", "workspace"]

DEFAULT_SCALE = 1.0 / math.sqrt(HEAD)
MAX_ROWS = 2**31 - 1
"""Offsets are int32."""

DEVICE_TYPE = "cuda"
_ALIGNMENT = 16  # bytes; what the kernels' widest loads and bulk copies assume
_CACHED = 256  # compiled functions kept in a process: 128 schedules, with and without a state


_SPLIT_FORM = ("form", "split")


@dataclass(frozen=True)
class Config:
    """What one compiled kernel pair is built for; everything else is a run-time value.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.
    anchor : str
        Reference of the exponents: ``start``, ``mid``, ``end``, ``halving`` or ``pairs``.
    rows : int
        Value rows per scan CTA: 64 or 128.
    segments : int
        Pieces a long sequence is cut into.
    block : int or None
        For ``pairs``: tokens per sub-block.
    diagonal : str or None
        For ``pairs``: anchor inside a diagonal block.
    """

    bt: int
    anchor: str
    rows: int = 64
    segments: int = 1
    block: int | None = None
    diagonal: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any] | Config) -> Config:
        """Make one of named choices; ``form``, if given, is ``split``.

        Raises
        ------
        ValueError
            If a name is unknown or a necessary one is missing.
        """
        if isinstance(values, Config):
            return values
        values = {name: value for name, value in values.items() if (name, value) != _SPLIT_FORM}
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"schedule has no {unknown[0]!r}; it knows {', '.join(sorted(known))}")
        if missing := sorted({"bt", "anchor"} - set(values)):
            raise ValueError(f"schedule needs {missing[0]!r}")
        return cls(**values)

    @property
    def unroll(self) -> int:
        """Chunks per turn of the scan's loop; sequences are padded to whole turns."""
        return unroll_of(self.bt, self.rows)


@dataclass(frozen=True)
class FusedConfig:
    """What one compiled fused kernel is built for, and how it cuts sequences.

    Parameters
    ----------
    frame : str
        ``middle`` or ``boundary``; see :class:`.fused_plan.FusedPlan`.
    builders : int
        Warpgroups that build chunks.
    waves : int
        CTAs per SM that sequences are cut into pieces for; not compiled in.
    """

    frame: str
    builders: int
    waves: int = 1


def workspace(config: Config, T: int, N: int, H: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Scratch tensors of one call, as (shape, torch dtype name), in the order of the ABI.

    Bounded by the arguments: images of about ``9 T H 128`` bytes and one padded turn for each
    sequence; with more than one segment, 96 KiB for each inner boundary and head.
    """
    images = (slots(T, N, config.bt, config.unroll), H, ImageLayout(config.bt).elements)
    if config.segments == 1:
        return ((images, "bfloat16"),)
    entries = segment_entries(T, N, config.bt, config.unroll, config.segments)
    return (images, "bfloat16"), ((max(entries, 1), H, boundary_words(config.segments)), "float32")


def boundary_words(segments: int) -> int:
    """fp32 words of one inner segment boundary: a state, and with a carry a bf16 map as well."""
    return HEAD * HEAD + (HEAD * HEAD // 2 if segments > 2 else 0)


@functools.lru_cache(maxsize=_CACHED)
def compiled(config: Config | FusedConfig, with_state: bool) -> Callable[..., None]:
    """Compile a configuration for sm_90a, once a process.

    Parameters
    ----------
    config : Config or FusedConfig
    with_state : bool
        Whether an initial state is given; without one the state starts from zero.

    Returns
    -------
    callable
        The bare TVM-FFI function; its positional arguments are those of ``host.ABI``, or of
        ``host.FUSED_ABI``.
    """
    from . import host  # imports the DSL: only what launches needs it

    if isinstance(config, FusedConfig):
        if config.waves != 1:  # a number at the launch: one function serves all
            return compiled(replace(config, waves=1), with_state)
        return host.compile_fused(config, with_state)
    return host.compile_call(config, with_state)


def launch(
    config: Config | FusedConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    final_state: torch.Tensor,
) -> None:
    """Launch on the current stream of the current device; checks nothing.

    All tensors packed, as :func:`check` accepts them.
    """
    prepare(config, q, cu_seqlens, initial_state)(
        q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state
    )


def prepare(
    config: Config | FusedConfig,
    q: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> Callable[..., None]:
    """The call for tensors shaped like these; takes what :func:`launch` takes after ``config``."""
    T, H, _ = q.shape
    N = cu_seqlens.shape[0] - 1
    if T == 0 or N == 0 or H == 0:  # a grid of no blocks cannot be launched
        return _without_rows
    if isinstance(config, FusedConfig):
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        function = compiled(config, initial_state is not None)
        return functools.partial(_enqueue_fused, function, pieces_of(config.waves, N, H, sms))
    function = compiled(config, initial_state is not None)
    scratch = [(shape, getattr(torch, name)) for shape, name in workspace(config, T, N, H)]
    return functools.partial(_enqueue, function, scratch)


def _without_rows(
    q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state
) -> None:  # fmt: skip
    """No row belongs to a sequence: outputs are zero, states stay as they are."""
    out.zero_()
    if initial_state is None:
        final_state.zero_()
    elif initial_state.data_ptr() != final_state.data_ptr():
        final_state.copy_(initial_state)


def _enqueue_fused(
    function, pieces, q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state
) -> None:  # fmt: skip
    """Launch; the fused kernel needs no scratch."""
    function(q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, scale, pieces)


def _enqueue(
    function, scratch, q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state
) -> None:  # fmt: skip
    """Allocate scratch and launch.

    The scratch belongs to this call: it comes from torch's allocator, which gives it to a later
    call of the same stream only, so that calls in flight on two streams never share it.
    """
    device = q.device
    shape, dtype = scratch[0]
    images, boundaries = torch.empty(shape, dtype=dtype, device=device), None
    if len(scratch) > 1:
        shape, dtype = scratch[1]
        boundaries = torch.empty(shape, dtype=dtype, device=device)
    function(
        q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, images, boundaries, scale
    )


@torch.compiler.disable
def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    schedule: Config | Mapping[str, Any],
    scale: float | None = None,
    stream: torch.cuda.Stream | int | None = None,
    validate: bool = False,
    gate: str = "log",
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_logits: bool = False,
    l2norm: bool = False,
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule with a gate per key channel (KDA), forward, over packed sequences.

    Parameters
    ----------
    q, k, v : torch.Tensor
        bf16 ``[T, H, 128]`` with ``cu_seqlens``, or ``[B, T, H, 128]`` without; contiguous.
        q and k are normalised by the caller.
    g : torch.Tensor
        fp32, shaped like q: gate per key channel in natural-log space, at most 0.
    beta : torch.Tensor
        fp32 ``[T, H]`` or ``[B, T, H]``: write strength in [0, 1].
    cu_seqlens : torch.Tensor, optional
        int32 ``[N + 1]`` on the same device: sequence n is rows ``[cu[n], cu[n + 1])``.
        Offsets outside ``0..T`` are clamped and made monotone on the device; rows that no
        sequence covers are written 0.
    initial_state : torch.Tensor, optional
        fp32 ``[N, H, 128, 128]``, value-major (``[V, K]``); zero if absent.
    schedule : Config or Mapping
        Which kernel.
    scale : float, optional
        Factor of the output, any finite number, 0 included; ``1 / sqrt(128)`` if absent.
    stream : torch.cuda.Stream or int, optional
        Stream or handle to launch on, 0 (the default stream) included; None is torch's current
        stream of q's device.  New outputs and scratch then belong to that stream, as in
        ``with torch.cuda.stream(stream)``.
    validate : bool
        Synchronise and raise on offsets that are not ``0 = cu[0] <= ... <= cu[N] = T``.
    gate, lower_bound, A_log, dt_bias, beta_logits, l2norm
        Named for callers of other kernels.  Only ``gate="log"`` is served: the gate is given
        activated, beta is no logit, and nothing is normalised here.
    out, final_state : torch.Tensor, optional
        Where to write, shaped as the results.  ``final_state`` may be ``initial_state`` itself
        if ``schedule`` has one segment.

    Returns
    -------
    o : torch.Tensor
        bf16, shaped like v.
    final_state : torch.Tensor
        fp32 ``[N, H, 128, 128]``, value-major.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched; the message names the argument and the fix.
    """
    config = Config.of(schedule)
    _decline_forms(gate, lower_bound, A_log, dt_bias, beta_logits, l2norm)
    check(
        q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, config.segments == 1
    )  # fmt: skip
    scale = DEFAULT_SCALE if scale is None else _finite(scale)
    context = _on_stream(stream, q.device)
    if context is not None:
        with context:
            return _call(
                config, q, k, v, g, beta, cu_seqlens, initial_state, scale, validate, out,
                final_state,
            )  # fmt: skip
    return _call(
        config, q, k, v, g, beta, cu_seqlens, initial_state, scale, validate, out, final_state
    )


def _call(
    config, q, k, v, g, beta, cu_seqlens, initial_state, scale, validate, out, final_state
):  # fmt: skip
    """Allocate results and launch; arguments are checked, stream and device are current."""
    if cu_seqlens is None:
        B, T, H, _ = q.shape
        cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=q.device).mul_(T)
        packed = [x.view(B * T, *x.shape[2:]) for x in (q, k, v, g, beta)]
    else:
        packed = [q, k, v, g, beta]
        if validate:
            _validate(cu_seqlens, q.shape[0])
    H, N = q.shape[-2], cu_seqlens.shape[0] - 1
    if out is None:
        out = torch.empty_like(v)
    if final_state is None:
        final_state = torch.empty((N, H, HEAD, HEAD), dtype=torch.float32, device=q.device)
    launch(
        config, *packed, cu_seqlens, initial_state, scale, out.view(packed[2].shape), final_state
    )
    return out, final_state


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    in_place: bool = True,
) -> None:
    """Refuse by name what is not served; reads nothing on the device.

    Parameters
    ----------
    q, k, v, g, beta, cu_seqlens, initial_state, out, final_state
        As for :func:`kda_prefill`.
    in_place : bool
        Whether ``final_state`` may be ``initial_state``: with one segment, each CTA reads its
        part of the state before it writes it; with more, another CTA may still read it.

    Raises
    ------
    TypeError
        Not a tensor, or a dtype that is not served.
    ValueError
        A shape, stride, alignment, device, aliasing or gradient that is not served.
    """
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a torch.Tensor, not {type(q).__name__}")
    device = q.device
    if device.type != DEVICE_TYPE:
        raise ValueError(f"q is on {device}; move the inputs to a CUDA device")
    packed = cu_seqlens is not None
    form = "[T, H, 128] beside cu_seqlens" if packed else "[B, T, H, 128] without cu_seqlens"
    if q.dim() != (3 if packed else 4):
        raise ValueError(f"q must be {form}, not {_shape(q)}")
    if q.shape[-1] != HEAD:
        raise ValueError(f"q has head size {q.shape[-1]}; only {HEAD} is served")
    shape = q.shape
    H = shape[-2]
    rows = shape[0] if packed else shape[0] * shape[1]
    if rows > MAX_ROWS:
        raise ValueError(f"q has {rows} rows; offsets are int32, at most {MAX_ROWS} are served")
    _tensor("q", q, torch.bfloat16, shape, device)
    _tensor("k", k, torch.bfloat16, shape, device)
    _tensor("v", v, torch.bfloat16, shape, device)
    _tensor("g", g, torch.float32, shape, device)
    _tensor("beta", beta, torch.float32, shape[:-1], device)
    if packed:
        if isinstance(cu_seqlens, torch.Tensor) and (cu_seqlens.dim() != 1 or not len(cu_seqlens)):
            raise ValueError(f"cu_seqlens must be [N + 1], not {_shape(cu_seqlens)}")
        _tensor("cu_seqlens", cu_seqlens, torch.int32, None, device, alignment=4)
        N = cu_seqlens.shape[0] - 1  # type: ignore[union-attr]
    else:
        N = shape[0]
    state = (N, H, HEAD, HEAD)
    if initial_state is not None:
        _tensor("initial_state", initial_state, torch.float32, state, device)
    if out is not None:
        _tensor("out", out, torch.bfloat16, shape, device)
    if final_state is not None:
        _tensor("final_state", final_state, torch.float32, state, device)
    if out is not None or final_state is not None:
        _check_overlap(
            {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens},
            initial_state,
            out,
            final_state,
            in_place,
        )
    if torch.is_grad_enabled():
        for name, x in zip(
            ("q", "k", "v", "g", "beta", "initial_state", "out", "final_state"),
            (q, k, v, g, beta, initial_state, out, final_state),
            strict=True,
        ):
            if x is not None and x.requires_grad:
                raise ValueError(
                    f"{name} requires grad, and there is no backward pass: "
                    "detach it or call under torch.no_grad()"
                )


def _tensor(name, x, dtype, shape, device, alignment=_ALIGNMENT):
    """One tensor against what is served; the first thing wrong is named."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if x.dtype is not dtype:
        raise TypeError(
            f"{name} is {_dtype(x.dtype)}, only {_dtype(dtype)} is served; "
            f"convert it with .to(torch.{_dtype(dtype)})"
        )
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)} to go with q, not {_shape(x)}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, q on {device}; move it there")
    if not x.is_contiguous():
        raise ValueError(
            f"{name} has strides {list(x.stride())}; only contiguous tensors are served: "
            "pass .contiguous()"
        )
    if x.data_ptr() % alignment:
        raise ValueError(f"{name} must start on a multiple of {alignment} bytes: pass .clone()")


def _check_overlap(inputs, initial_state, out, final_state, in_place):
    """Outputs share no memory with inputs or each other, but for the state updated in place."""
    spans = {n: _span(x) for n, x in inputs.items() if x is not None}
    for name, x in (("out", out), ("final_state", final_state)):
        if x is None:
            continue
        span = _span(x)
        others = dict(spans)
        if initial_state is not None:
            state = _span(initial_state)
            if name == "out" or not in_place or span != state:
                others["initial_state"] = state
        if name == "final_state" and out is not None:
            others["out"] = _span(out)
        for other, (low, high) in others.items():
            if span[0] < high and low < span[1]:
                raise ValueError(f"{name} shares memory with {other}; give it memory of its own")


def _span(x: torch.Tensor) -> tuple[int, int]:
    start = x.data_ptr()
    return start, start + x.numel() * x.element_size()


def _decline_forms(gate, lower_bound, A_log, dt_bias, beta_logits, l2norm):
    """The interface's other input forms, each declined by its name."""
    if gate != "log":
        raise ValueError(f"gate={gate!r} is not served: activate the gate and pass it as g (fp32)")
    for name, value in (("lower_bound", lower_bound), ("A_log", A_log), ("dt_bias", dt_bias)):
        if value is not None:
            raise ValueError(f"{name} is not served: activate the gate and pass it as g (fp32)")
    if beta_logits:
        raise ValueError("beta_logits is not served: pass the sigmoid as beta (fp32)")
    if l2norm:
        raise ValueError("l2norm is not served: normalise q and k before the call")


def _finite(scale: float) -> float:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, not {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")
    return float(scale)


def _on_stream(stream, device):
    """Context that makes the wanted stream and the tensors' device current, or None if they are."""
    if stream is None:
        # The tensors' device decides, not the current one.
        return None if device.index == torch.cuda.current_device() else torch.cuda.device(device)
    if isinstance(stream, bool) or not isinstance(stream, (int, torch.cuda.Stream)):
        raise TypeError(
            f"stream must be a torch.cuda.Stream, an integer handle or None, "
            f"not {type(stream).__name__}"
        )
    if isinstance(stream, int):
        if stream < 0:
            raise ValueError(f"stream={stream} is no stream handle")
        # Handle 0 is the default stream, not "none given".
        stream = (
            torch.cuda.ExternalStream(stream, device=device)
            if stream
            else torch.cuda.default_stream(device)
        )
    if stream.device != device:
        raise ValueError(f"stream is on {stream.device}, q on {device}; use a stream of q's device")
    return torch.cuda.stream(stream)


def _validate(cu_seqlens: torch.Tensor, T: int) -> None:
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


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(x: torch.Tensor) -> str:
    return str(list(x.shape))
