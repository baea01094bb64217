"""Calls like one before: what was checked of that one need not be checked again.

The checks of :mod:`.arguments` take longer than a launch.  Most of them are made once more by the
compiled function, in no time: dtypes, ranks, sizes that must agree, devices, alignment, and of
strides those that are no product of sizes.
So a call that differs from one before in nothing that decides how it is served, or that the
function cannot see, goes to the function at once; if that declines, the call takes the long way,
on which what is wrong is named.

To look at a tensor from Python costs more than all that the function does with it, so that a known
call looks at little: its key is made of numbers and flags, the shape of v and the number of
offsets.  Dtypes are left to the function as long as calls of that kind had but one form; from then
on they are part of the key, as strides are where tensors are not contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from candidates._delta_rule.kernel.arguments import check_overlap, finite
from candidates._delta_rule.kernel.image import HEAD

__all__ = ["DEFAULT_SCALE", "ByShape", "Kind", "is_current", "new", "recall", "remember"]

DEFAULT_SCALE = 1.0 / math.sqrt(HEAD)

_KINDS = 512  # kinds of calls that are remembered
_FORMS = 64  # of each of them, forms of its tensors
_CALLS = 512  # calls, each prepared for one shape
_KNOWN: dict[tuple[Any, ...], dict[tuple[Any, ...], Kind]] = {}
"""By key of the kind, and by form.  Emptied when there are too many."""
_PREPARED: dict[tuple[Any, ...], Any] = {}
"""By key of the call, or by that and its form, where :class:`_Apart` stands in place of the call.
Emptied when there are too many."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""torch's own, which need not see to it that CUDA is initialised: there are tensors on a device."""

current_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""Handle of the current stream of a device."""


class ByShape:
    """A schedule that shapes decide.

    Parameters
    ----------
    choose : callable
        Gives a configuration for ``(q, v, cu_seqlens)``; looks at their shapes alone.
    """

    __slots__ = ("choose",)

    def __init__(self, choose: Callable[[Any, Any, Any], Any]) -> None:
        self.choose = choose


class Kind:
    """What was found of a kind of calls when one of them was checked.

    Parameters
    ----------
    compact : bool
        Whether its function takes contiguous tensors alone, with equally many heads where it says
        so.
    in_place : bool
        Whether final states may be written over initial ones.
    prepare : callable
        What an entry point prepares calls of this kind with: takes v and cu_seqlens, and gives what
        takes tensors as its ``launch`` does, then A_log, dt_bias and lower_bound.
    """

    __slots__ = ("compact", "in_place", "prepare")

    def __init__(
        self, compact: bool, in_place: bool, prepare: Callable[[Any, Any], Callable[..., None]]
    ) -> None:
        self.compact, self.in_place, self.prepare = compact, in_place, prepare


class _Call:
    """A call of a kind, prepared for one shape.

    ``forms`` are those known of the kind, and ``places`` is where tensors lay when outputs were
    last given.
    """

    __slots__ = ("N", "device", "forms", "heads", "kind", "places", "run", "schedule")

    def __init__(self, kind: Kind, forms: Any, schedule: Any, N: int, heads: int, v, cu_seqlens):
        # The key has the schedule's id, which is its own as long as it is held here.
        self.schedule, self.kind, self.forms, self.places = schedule, kind, forms, ()
        self.N, self.heads, self.device = N, heads, v.device
        self.run = kind.prepare(v, cu_seqlens)


class _Apart:
    """In place of a call: its key does not tell it from calls of another form."""

    forms = (None, None)


def new(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor where another one is."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def is_current(stream: Any, x: Any) -> bool:
    """Whether a stream, or its handle, is the current one of a tensor's device anyway."""
    if current_stream is None or not isinstance(x, torch.Tensor):
        return False
    if isinstance(stream, torch.cuda.Stream):
        return stream.device == x.device and stream.cuda_stream == current_stream(x.get_device())
    return type(stream) is int and stream == current_stream(x.get_device())


def recall(
    schedule, grouped, q, k, v, g, beta, cu_seqlens, initial_state, scale, gate, lower_bound,
    A_log, dt_bias, beta_logits, l2norm, out, final_state,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # fmt: skip
    """The results of a call of a known kind, or None where it has to be checked.

    Parameters
    ----------
    schedule : Config, FusedConfig or ByShape
        Of others nothing is known.
    grouped : bool
        Whether contiguous tensors may have more value heads than heads.
    others
        As for an entry point, on the current stream.
    """
    try:
        # A number that equals a flag is refused.
        if (l2norm is not False and l2norm is not True) or (
            beta_logits is not False and beta_logits is not True
        ):
            return None
        device, shape = v.get_device(), v.shape
        key = (
            id(schedule), gate, lower_bound, beta_logits, l2norm, A_log is None, dt_bias is None,
            initial_state is None,
            final_state if final_state is None or final_state is False else True,
            device, q.shape if grouped else None, shape,
            None if cu_seqlens is None else cu_seqlens.numel(),
        )  # fmt: skip
        contiguous = (
            q.is_contiguous()
            and k.is_contiguous()
            and v.is_contiguous()
            and g.is_contiguous()
            and beta.is_contiguous()
        )
        call = _PREPARED.get(key) if contiguous else None
        if call is None or len(call.forms) > 1:
            call = _by_form(
                key, call is None and contiguous, shape, schedule, grouped, contiguous, q, k, v, g,
                beta, cu_seqlens, initial_state, gate, lower_bound, A_log, dt_bias, beta_logits,
                l2norm, final_state,
            )  # fmt: skip
            if call is None:
                return None
        # The tensors' device decides, not the current one.
        if device != current_device():
            return None
        if q.is_neg() or k.is_neg() or v.is_neg() or g.is_neg() or beta.is_neg():
            return None
        grad = torch.is_grad_enabled()
        if grad and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or g.requires_grad
            or beta.requires_grad
        ):
            return None
        if cu_seqlens is not None and cu_seqlens.is_neg():
            return None
        if A_log is not None and (A_log.is_neg() or (grad and A_log.requires_grad)):
            return None
        if dt_bias is not None and (dt_bias.is_neg() or (grad and dt_bias.requires_grad)):
            return None
        if initial_state is not None and (
            initial_state.is_neg()
            or (grad and initial_state.requires_grad)
            or initial_state.shape[0] != call.N
            or not initial_state.is_contiguous()
        ):
            return None
        places = None
        if out is not None or (final_state is not None and final_state is not False):
            if out is not None and (
                out.is_neg() or (grad and out.requires_grad) or not out.is_contiguous()
            ):
                return None
            given = None if final_state is False else final_state
            if given is not None and (
                given.is_neg()
                or (grad and given.requires_grad)
                or given.shape[0] != call.N
                or not given.is_contiguous()
            ):
                return None
            places = (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(),
                None if cu_seqlens is None else cu_seqlens.data_ptr(),
                None if A_log is None else A_log.data_ptr(),
                None if dt_bias is None else dt_bias.data_ptr(),
                None if initial_state is None else initial_state.data_ptr(),
                None if out is None else out.data_ptr(),
                None if given is None else given.data_ptr(),
            )  # fmt: skip
            if places != call.places:
                check_overlap(
                    (q, k, v, g, beta, cu_seqlens, A_log, dt_bias, initial_state, out, given),
                    call.kind.in_place,
                    places,
                )
        if out is None:
            if call.kind.compact:
                out = torch.empty_like(v)
            else:
                out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if final_state is None:
            if initial_state is not None and initial_state.dtype is torch.float32:
                final_state = torch.empty_like(initial_state)
            else:  # sizes one by one: of a tuple, torch takes longer to read them
                final_state = torch.empty(
                    call.N, call.heads, HEAD, HEAD, dtype=torch.float32, device=call.device
                )
        elif final_state is False:
            final_state = None
        call.run(
            q, k, v, g, beta, cu_seqlens, initial_state,
            DEFAULT_SCALE if scale is None else finite("scale", scale), out, final_state,
            A_log, dt_bias, None if lower_bound is None else float(lower_bound),
        )  # fmt: skip
        if places is not None:
            # Not before: sizes and strides have now been seen to be those of the kind.
            call.places = places
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    return out, final_state


def remember(
    kind: Kind, config, schedule, grouped, q, k, v, g, beta, cu_seqlens, initial_state, gate,
    lower_bound, A_log, dt_bias, beta_logits, l2norm, final_state,
) -> None:  # fmt: skip
    """Know calls like this one from now on; it was checked and launched.

    Parameters
    ----------
    kind : Kind
    config : Config or FusedConfig
        What ``schedule`` is or gave.
    others
        As for :func:`recall`.
    """
    contiguous = all(x.is_contiguous() for x in (q, k, v, g, beta))
    key = _kind(
        config, schedule, contiguous, q.shape, v.shape, v, cu_seqlens, initial_state, gate,
        lower_bound, A_log, dt_bias, beta_logits, l2norm, final_state,
    )  # fmt: skip
    if len(_KNOWN) >= _KINDS:
        _KNOWN.clear()
        _PREPARED.clear()  # whose forms would be told of no others
    forms = _KNOWN.setdefault(key, {})
    if len(forms) >= _FORMS:
        forms.clear()
    form = _form(grouped, contiguous, q, k, v, g, beta, cu_seqlens, initial_state, final_state)
    forms[form] = kind


def _kind(
    config, schedule, contiguous, key_shape, shape, v, cu_seqlens, initial_state, gate,
    lower_bound, A_log, dt_bias, beta_logits, l2norm, final_state,
) -> tuple[Any, ...]:  # fmt: skip
    """Key of a kind of calls of any length: what decides how a call is served, dtypes and strides
    aside, or is nothing that its function can check.

    What was checked before a schedule was asked for by shape is known of the calls of that
    schedule alone.
    """
    return (
        schedule if isinstance(schedule, ByShape) else None, config, gate, lower_bound,
        beta_logits, l2norm, A_log is None, dt_bias is None, initial_state is None,
        final_state if final_state is None or final_state is False else True,
        v.get_device(), key_shape[-2], shape[-2], contiguous, cu_seqlens is None,
        # Which strides are served depends on sizes in a batch.
        None if contiguous or cu_seqlens is not None else shape,
    )  # fmt: skip


def _by_form(
    key, new_shape, shape, schedule, grouped, contiguous, q, k, v, g, beta, cu_seqlens,
    initial_state, gate, lower_bound, A_log, dt_bias, beta_logits, l2norm, final_state,
) -> _Call | None:  # fmt: skip
    """The call of a key that does not suffice, or of a new shape; None if its kind is unknown."""
    form = None
    if not new_shape:
        form = _form(grouped, contiguous, q, k, v, g, beta, cu_seqlens, initial_state, final_state)
        call: _Call | None = _PREPARED.get((key, form))
        if call is not None:
            return call
    config, key_shape = schedule, q.shape
    if isinstance(schedule, ByShape):
        if key_shape != shape and key_shape[:-2] != shape[:-2]:
            return None
        config = schedule.choose(q, v, cu_seqlens)
    kind = _kind(
        config, schedule, contiguous, key_shape, shape, v, cu_seqlens, initial_state, gate,
        lower_bound, A_log, dt_bias, beta_logits, l2norm, final_state,
    )  # fmt: skip
    forms = _KNOWN.get(kind, {})
    if form is None:
        if len(forms) == 1:
            (form,) = forms  # its function declines another one
        else:
            form = _form(
                grouped, contiguous, q, k, v, g, beta, cu_seqlens, initial_state, final_state
            )
    known = forms.get(form)
    if known is None or 0 in shape:  # without rows nothing is launched
        return None
    N = shape[0]
    if cu_seqlens is not None:
        N = cu_seqlens.numel() - 1
        if N < 1 or cu_seqlens.dim() != 1:
            return None
    if len(_PREPARED) >= _CALLS - 1:
        _PREPARED.clear()
    call = _Call(known, forms, schedule, N, shape[-2], v, cu_seqlens)
    if new_shape and form[0] is None and len(forms) == 1:
        _PREPARED[key] = call
    else:
        if contiguous:
            _PREPARED[key] = _Apart
        _PREPARED[key, form] = call
    return call


def _form(
    grouped, contiguous, q, k, v, g, beta, cu_seqlens, initial_state, final_state
) -> tuple[Any, ...]:
    """What a compiled function sees of a call, and another one serves."""
    dtypes = (
        g.dtype, beta.dtype,
        None if cu_seqlens is None else cu_seqlens.dtype,
        None if initial_state is None else initial_state.dtype,
        None if final_state is None or final_state is False else final_state.dtype,
    )  # fmt: skip
    if not contiguous:
        strides = q.stride(), k.stride(), v.stride(), g.stride(), beta.stride()
        return q.shape[-2], *strides, *dtypes
    return None if grouped or q.shape[-2] == v.shape[-2] else q.shape[-2], *dtypes
