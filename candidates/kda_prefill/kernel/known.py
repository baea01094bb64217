"""Calls like one before: what was checked of that one need not be checked again.

The checks of :mod:`.arguments` take longer than a launch.  Most of them are made once more by the
compiled function, in no time: dtypes, ranks, sizes that must agree, devices, strides, alignment.
So a call that differs from one before in nothing that decides how it is served, or that the
function cannot see, goes to the function at once; if that declines, the call takes the long way,
on which what is wrong is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import Options

from .arguments import check_overlap, finite
from .config import Config, FusedConfig

__all__ = ["DEFAULT_SCALE", "Known", "key_of", "new", "recall", "remember"]

DEFAULT_SCALE = 1.0 / math.sqrt(HEAD)

_CALLS = 512  # kinds of calls that are remembered
_SHAPES = 64  # of each of them, shapes for which all but the arguments is kept
_KNOWN: dict[tuple[Any, ...], Known] = {}
"""By :func:`key_of`; emptied when there are too many."""


class Known:
    """A kind of calls: the kernel, calls prepared for some shapes, and where tensors lay when
    outputs were last given.

    Parameters
    ----------
    config : Config or FusedConfig
    options : Options
    """

    __slots__ = ("config", "options", "places", "prepared")

    def __init__(self, config: Config | FusedConfig, options: Options) -> None:
        self.config, self.options = config, options
        self.prepared: dict[tuple[int, torch.Size], Callable[..., None]] = {}
        self.places: tuple[Any, ...] = ()


def key_of(
    q, k, v, g, beta, cu_seqlens, initial_state, schedule, gate, lower_bound, A_log, dt_bias,
    beta_logits, l2norm, final_state,
) -> tuple[Any, ...]:  # fmt: skip
    """Whatever of a call decides which function serves it, or is nothing that it can check."""
    layout: Any = True
    if not (
        q.is_contiguous()
        and k.is_contiguous()
        and v.is_contiguous()
        and g.is_contiguous()
        and beta.is_contiguous()
    ):
        strides = q.stride(), k.stride(), v.stride(), g.stride(), beta.stride()
        layout = q.shape[-2], v.shape[1:-1], strides
    return (
        schedule, gate, lower_bound, A_log is None, dt_bias is None, beta_logits, l2norm,
        v.device, g.dtype, beta.dtype, layout,
        cu_seqlens if cu_seqlens is None else cu_seqlens.dtype,
        initial_state if initial_state is None else initial_state.dtype,
        final_state if final_state is None or final_state is False else final_state.dtype,
    )  # fmt: skip


def remember(key: tuple[Any, ...], config: Config | FusedConfig, options: Options) -> None:
    """Know calls of this key from now on; one of them was checked and launched."""
    if len(_KNOWN) >= _CALLS:
        _KNOWN.clear()
    _KNOWN[key] = Known(config, options)


def new(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor where another one is."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def recall(
    prepare, on_stream, q, k, v, g, beta, cu_seqlens, initial_state, schedule, scale, gate,
    lower_bound, A_log, dt_bias, beta_logits, l2norm, out, final_state,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # fmt: skip
    """The results of a call of a known kind, or None where it has to be checked.

    Parameters
    ----------
    prepare : callable
        :func:`.entry.prepare`.
    on_stream : callable
        Gives None for ``(None, device)`` where that device is the current one.
    others
        As for :func:`.entry.kda_prefill`, on the current stream.
    """
    try:
        key = key_of(
            q, k, v, g, beta, cu_seqlens, initial_state, schedule, gate, lower_bound, A_log,
            dt_bias, beta_logits, l2norm, final_state,
        )  # fmt: skip
        known = _KNOWN.get(key)
        if known is None or on_stream(None, v.device) is not None:
            return None
        shape = v.shape
        N = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        call = known.prepared.get((N, shape))
        if call is None:
            if N < 1 or 0 in shape or (cu_seqlens is None and isinstance(known.config, Config)):
                return None
            call = prepare(known.config, v, cu_seqlens, initial_state, known.options)
            if len(known.prepared) >= _SHAPES:
                known.prepared.clear()
            known.prepared[N, shape] = call
        grad = torch.is_grad_enabled()
        if (
            q.is_neg()
            or k.is_neg()
            or v.is_neg()
            or g.is_neg()
            or beta.is_neg()
            or (
                grad
                and (
                    q.requires_grad
                    or k.requires_grad
                    or v.requires_grad
                    or g.requires_grad
                    or beta.requires_grad
                )
            )
        ):
            return None
        for x in (cu_seqlens, initial_state, A_log, dt_bias, out, final_state):
            if x is None or x is False:
                continue
            if x.is_neg() or (grad and x.requires_grad):
                return None
        if initial_state is not None and initial_state.shape[0] != N:
            return None
        given = out is not None or (final_state is not None and final_state is not False)
        if out is None:
            if known.options.compact:
                out = torch.empty_like(v)
            else:
                out = new(shape, v, torch.bfloat16)
        if final_state is None:
            if initial_state is not None and initial_state.dtype is torch.float32:
                final_state = torch.empty_like(initial_state)
            else:
                final_state = new((N, shape[-2], HEAD, HEAD), v, torch.float32)
        elif final_state is False:
            final_state = None
        elif final_state.shape[0] != N:
            return None
        if given:
            tensors = q, k, v, g, beta, cu_seqlens, A_log, dt_bias, initial_state, out, final_state
            places = (shape, N, *[x if x is None else x.data_ptr() for x in tensors])
            if places != known.places:
                config = known.config
                check_overlap(tensors, isinstance(config, Config) and config.segments == 1)
                known.places = places
        call(
            q, k, v, g, beta, cu_seqlens, initial_state,
            DEFAULT_SCALE if scale is None else finite("scale", scale), out, final_state,
            A_log, dt_bias, lower_bound if lower_bound is None else float(lower_bound),
        )  # fmt: skip
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return out, final_state
