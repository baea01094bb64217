"""What the adapters share: finding a distribution, and a bound call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from operations import Inputs, Outputs

if TYPE_CHECKING:
    import torch

__all__ = ["Bound", "distribution_version", "missing_module", "no_sm90"]


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
