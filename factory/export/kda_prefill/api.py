"""The entry point: ask :func:`support`, call :func:`kda_prefill`.

Chooses the schedule by shape, refuses what this machine or these kernels do not serve, and hands
over to ``kernel/entry.py``, which checks every argument before anything is launched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from . import _op
from .dispatch import GATE_BOUND, ROWS
from .kernel import entry

__all__ = ["Support", "choose", "kda_prefill", "support"]

_BY_SHAPE = {row.shape: row.config for row in ROWS if row.shape is not None}
_DEFAULT = next(row.config for row in ROWS if row.shape is None)
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


def kda_prefill(
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
    gate: str = "log",
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_logits: bool = False,
    l2norm: bool = False,
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """@CONTRACT@"""
    forms = (gate, lower_bound, A_log, dt_bias, beta_logits, l2norm)
    tensors = (q, k, v, g, beta, cu_seqlens, initial_state)
    if torch.compiler.is_compiling():
        return _op.call(tensors, scale, forms, stream, validate, out, final_state)
    config = choose(q, cu_seqlens)
    scale = _refuse(config, tensors, scale, forms, out, final_state)
    if problem := _machine_problem(q.device.index):
        raise RuntimeError(problem)
    current = entry._on_stream(stream, q.device)
    with contextlib.nullcontext() if current is None else current:
        if validate:
            _validate_gates(g)
        return entry._call(config, *tensors, scale, validate, out, final_state)


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
    gate: str = "log",
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_logits: bool = False,
    l2norm: bool = False,
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
) -> Support:
    """Say whether :func:`kda_prefill` serves these arguments here, or why not.

    Nothing is compiled, launched or read from the device: it costs no synchronisation.  What is
    device data (offsets, gates) is not looked at; see ``validate`` of :func:`kda_prefill`.

    Parameters
    ----------
    q, k, v, g, beta, cu_seqlens, initial_state, scale, gate, lower_bound, A_log, dt_bias, \
beta_logits, l2norm, out, final_state
        As for :func:`kda_prefill`.

    Returns
    -------
    Support
    """
    forms = (gate, lower_bound, A_log, dt_bias, beta_logits, l2norm)
    tensors = (q, k, v, g, beta, cu_seqlens, initial_state)
    try:
        _refuse(choose(q, cu_seqlens), tensors, scale, forms, out, final_state)
    except (TypeError, ValueError) as error:
        return Support(False, str(error))
    problem = _machine_problem(q.device.index)
    return Support(not problem, problem)


def choose(q: Any, cu_seqlens: Any) -> Any:
    """The schedule of a shape, by tokens in all, heads and sequences; host values only.

    Arguments that are not served get the schedule of all other shapes: they are refused later,
    by name.
    """
    if not isinstance(q, torch.Tensor):
        return _DEFAULT
    if isinstance(cu_seqlens, torch.Tensor) and q.dim() == 3 and cu_seqlens.dim() == 1:
        shape = (q.shape[0], q.shape[1], cu_seqlens.shape[0] - 1)
    elif cu_seqlens is None and q.dim() == 4:
        shape = (q.shape[0] * q.shape[1], q.shape[2], q.shape[0])
    else:
        return _DEFAULT
    return _BY_SHAPE.get(shape, _DEFAULT)


@functools.lru_cache(maxsize=_DEVICES)
def _machine_problem(index: int) -> str:
    """Why a CUDA device of this process cannot run the kernels; empty if it can."""
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        return (
            f"cuda:{index} is {torch.cuda.get_device_name(index)}, sm_{capability[0]}"
            f"{capability[1]}; these kernels are machine code for sm_90a (H100, H200) alone"
        )
    for module, package in (
        ("cutlass", "'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'"),
        ("tvm_ffi", "'apache-tvm-ffi>=0.1.15'"),
    ):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed; pip install {package}"
    return ""


def _refuse(config, tensors, scale, forms, out, final_state):
    """Raise on what the host can see is not served, by name; returns the scale to use."""
    entry._decline_forms(*forms)
    in_place = getattr(config, "segments", 0) == 1
    entry.check(*tensors, out, final_state, in_place)
    return entry.DEFAULT_SCALE if scale is None else entry._finite(scale)


def _validate_gates(g: torch.Tensor) -> None:
    """Read the gates and refuse what the kernels are not right for; synchronises."""
    if g.numel() == 0 or torch.cuda.is_current_stream_capturing():
        return  # a capture is refused where the offsets are validated
    low, high = (float(x) for x in torch.aminmax(g))
    if not high <= 0:
        raise ValueError(f"g reaches {high:g}; a log gate is at most 0")
    if GATE_BOUND is not None and not low >= GATE_BOUND:
        raise ValueError(f"g reaches {low:g}; these kernels are right for at least {GATE_BOUND:g}")
