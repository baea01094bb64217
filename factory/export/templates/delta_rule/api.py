"""The entry point: ask :func:`support`, call :func:`any_prefill`.

Chooses the schedule by shape, refuses what this machine or these kernels do not serve, and hands
over to ``kernel/entry.py``, which checks every argument before anything is launched.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import any_of_dataclasses
from typing import Any

import torch

from . import _aot, _op
from .dispatch import GATE_BOUND, ROWS
from .kernel import arguments, entry

__all__ = ["Support", "choose", "any_prefill", "support"]

_BY_SHAPE = {row.shape: row.config for row in ROWS if row.shape is not None}
_DEFAULT = next(row.config for row in ROWS if row.shape is None)
_SCHEDULE = entry.ByShape(lambda q, v, cu_seqlens: choose(any_shape_arguments))
"""Calls known by it came through :func:`_run` once."""

_DEVICES = 64  # of which it is remembered that they can run this


@dataclass(frozen=True)
class Support:
    """Whether a call is served; true or false where a boolean is asked for.

    Parameters
    ----------
    served : bool
    reason : str
        Why not, in one line that names the argument or the package; empty if it is.
    """

    served: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.served


def any_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    stream: torch.cuda.Stream | int | None = None,
    validate: bool = False,
    # part: forms
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """@CONTRACT@"""
    if validate is not True and validate is not False:
        raise TypeError(f"validate must be True or False, not {validate!r}")
    traced = torch.compiler.is_compiling()
    if not (traced or validate) and (stream is None or entry.is_current(stream, v)):
        # part: known
        if results is not None:
            return results
    forms = (any_forms)
    tensors = (q, k, v, g, beta, cu_seqlens, initial_state)
    if traced:
        if stream is None and not validate:
            return _op.call(tensors, scale, forms, out, final_state)
        # A stream of its own and a look at the device break the graph.  Imported here: it brings
        # torch's tracer in, which takes seconds.
        from ._outside import run

        return run(tensors, scale, forms, stream, validate, out, final_state)
    return _run(tensors, scale, forms, stream, validate, out, final_state)


def _run(tensors, scale, forms, stream, validate, out, final_state):
    """The call, not traced."""
    # part: shaped
    any_forms = forms
    if isinstance(q, torch.Tensor) and q.is_cuda and (problem := _machine_problem(q.device.index)):
        raise RuntimeError(problem)
    bounded = GATE_BOUND is not None and gate != "log"
    if bounded or validate:
        _refuse(choose(any_shape_arguments), tensors, scale, forms, out, final_state)
    if bounded:
        _refuse_gate(any_bounded)
    if validate:
        _validate_gates(g, gate)
    # part: call


def support(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    # part: forms
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | bool | None = None,
) -> Support:
    """Say whether :func:`any_prefill` serves these arguments here, or why not.

    Nothing is compiled, launched or read from the device: it costs no synchronisation.  What is
    device data (offsets, gates) is not looked at; see ``validate`` of :func:`any_prefill`.

    Parameters
    ----------
    q, k, v, g, beta, cu_seqlens, initial_state, scale, any_documented_forms, out, final_state
        As for :func:`any_prefill`.

    Returns
    -------
    Support
    """
    forms = (any_forms)
    tensors = (q, k, v, g, beta, cu_seqlens, initial_state)
    try:
        config = choose(any_shape_arguments)
        options = _refuse(config, tensors, scale, forms, out, final_state)
        _refuse_gate(any_bounded)
    except (TypeError, ValueError) as error:
        return Support(False, str(error))
    problem = _machine_problem(q.device.index)
    if not problem and _aot.present():
        problem = _aot.missing(config, initial_state is not None, options)
    return Support(not problem, problem)


# part: choose


@functools.lru_cache(maxsize=_DEVICES)
def _machine_problem(index: int) -> str:
    """Why a CUDA device of this process cannot run the kernels; empty if it can."""
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        return (
            f"cuda:{index} is {torch.cuda.get_device_name(index)}, sm_{capability[0]}"
            f"{capability[1]}; these kernels are machine code for sm_90a (H100, H200) alone"
        )
    needed = {"tvm_ffi": "'apache-tvm-ffi>=0.1.15'"}
    if not _aot.present():
        needed["cutlass"] = "'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'"
    for module, package in needed.items():
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed; pip install {package}"
    return ""


def _refuse(config, tensors, scale, forms, out, final_state):
    """Raise on what the host can see is not served, by name, as the call itself would.

    Returns the form of the arguments.
    """
    # part: check
    if scale is not None:
        arguments.finite("scale", scale)
    return options


# part: refuse_gate


def _validate_gates(g: torch.Tensor, gate: str) -> None:
    """Read the gates and refuse what the kernels are not right for; synchronises."""
    if gate != "log" or g.numel() == 0 or torch.cuda.is_current_stream_capturing():
        return  # an activated gate is bounded by its form; a capture is refused with the offsets
    low, high = (float(x) for x in torch.aminmax(g))
    if not high <= 0:
        raise ValueError(f"g reaches {high:g}; a log gate is at most 0")
    if GATE_BOUND is not None and not low >= GATE_BOUND:
        raise ValueError(f"g reaches {low:g}; these kernels are right for at least {GATE_BOUND:g}")


_aot.install()
