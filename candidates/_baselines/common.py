"""What the adapters share: finding a distribution, and a bound call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from operations import Inputs, Outputs

if TYPE_CHECKING:
    import torch

__all__ = [
    "Bound",
    "RawOperands",
    "distribution_version",
    "missing_module",
    "no_sm90",
    "raw_operands",
]


@dataclass(frozen=True)
class Bound:
    """A :class:`candidates.Runnable` made of one ``bind`` function.

    Parameters
    ----------
    kernel_names : tuple of str
        Prefixes every launched kernel's name must match.
    binder : callable
        ``(inputs, outputs) -> call``.
    """

    kernel_names: tuple[str, ...]
    binder: Callable[[Inputs, Outputs], Callable[[], Mapping[str, torch.Tensor]]]

    def bind(self, inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
        return self.binder(inputs, outputs)


class RawOperands(NamedTuple):
    """What models hand over in place of gates and write strengths.

    Parameters
    ----------
    g : Tensor [T, HV, 128] or [T, HV], bf16
        Pre-activation of the gate.
    beta : Tensor [T, HV], bf16
        Logits of the write strengths.
    A_log, dt_bias : Tensor [HV], and [HV, 128] or [HV], fp32
    lower_bound : float or None
        Of a safe gate.
    """

    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None


def raw_operands(name: str, raw: Mapping[str, Any] | None) -> RawOperands:
    """Raw inputs in the one form in which all that take them are fed, so that times compare.

    Beside it each is given the q and k of everybody and told to normalise them.

    Raises
    ------
    ValueError
        If the regime has none; ``name`` says who asked.
    """
    import torch

    if raw is None:
        raise ValueError(f"{name} takes raw gates; this regime has no raw form")
    g, beta = (raw[n].to(torch.bfloat16).contiguous() for n in ("g_raw", "beta_logits"))
    A_log, dt_bias = raw["A_log"].float(), raw["dt_bias"].float()
    return RawOperands(g, beta, A_log, dt_bias, raw.get("lower_bound"))


def missing_module(module: str, fix: str) -> str | None:
    """One line with the fix if ``module`` cannot be found, else None; imports nothing."""
    if find_spec(module) is None:
        return f"{module} is not installed; {fix}"
    return None


def no_sm90() -> str | None:
    """One line if the current GPU is not sm90, else None."""
    import torch

    if not torch.cuda.is_available():
        return "needs an sm90 GPU; torch sees none"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"needs an sm90 GPU; this one is sm{major}{minor}"
    return None


def distribution_version(distribution: str) -> str:
    """``"name version"``, with ``unknown`` where no metadata is installed."""
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"{distribution} unknown"
