"""How an operation may be computed: kernel families and baselines by operation.

Other distributions add a family through the entry-point group
``kernel_factory.families`` (operation name to a :class:`Family` instance), and
baselines through ``kernel_factory.baselines`` (operation name to a tuple of
:class:`Baseline` instances).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from candidates._base import (
    Baseline,
    Build,
    BuildError,
    Family,
    KernelResources,
    Parameter,
    Runnable,
    Schedule,
    ToolchainError,
    Value,
)
from operations.plugins import load

__all__ = [
    "Baseline",
    "Build",
    "BuildError",
    "Family",
    "KernelResources",
    "Parameter",
    "Runnable",
    "Schedule",
    "ToolchainError",
    "UnknownFamilyError",
    "Value",
    "baselines",
    "get",
]

_ENTRY_POINTS = "kernel_factory.families"
_BASELINES = "kernel_factory.baselines"
_SHIPPED = {
    "kda_prefill": "candidates.kda_prefill",
    "gdn_prefill": "candidates.gdn_prefill",
}


class UnknownFamilyError(LookupError):
    """No kernel family serves that operation."""


def get(operation: str) -> Family:
    """The kernel family of an operation.

    Raises
    ------
    UnknownFamilyError
        If none is shipped or plugged in.
    PluginError
        If another distribution's cannot be loaded.
    """
    if operation in _SHIPPED:
        family: Family = import_module(_SHIPPED[operation]).FAMILY
        return family
    for entry in entry_points(group=_ENTRY_POINTS, name=operation):
        return load(entry, Family)  # type: ignore[type-abstract]
    raise UnknownFamilyError(f"no kernel family for operation {operation!r}")


def baselines(operation: str) -> tuple[Baseline, ...]:
    """Baselines of an operation, present on this machine or not, in reporting order.

    Those that come with the operation first, then those that are plugged in.
    """
    found: tuple[Baseline, ...] = ()
    if operation in _SHIPPED:
        found = import_module(f"{_SHIPPED[operation]}.baselines").BASELINES
    for entry in entry_points(group=_BASELINES, name=operation):
        found += load(entry, tuple)
    return found
