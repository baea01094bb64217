"""How an operation may be computed: kernel families and baselines by operation.

Other distributions add a family through the entry-point group
``kernel_factory.families`` (operation name to a :class:`Family` instance),
baselines through ``kernel_factory.baselines`` (operation name to a tuple of
:class:`Baseline` instances), and what feeds a family's schedules raw inputs
through ``kernel_factory.fed_raw`` (see :func:`fed_raw`).
"""

from __future__ import annotations

from collections.abc import Callable
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
    "fed_raw",
    "get",
]

_ENTRY_POINTS = "kernel_factory.families"
_BASELINES = "kernel_factory.baselines"
_FED_RAW = "kernel_factory.fed_raw"
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


def fed_raw(operation: str) -> Callable[[Schedule, str], Baseline] | None:
    """What makes of a schedule, and a name, a contestant that is fed raw inputs.

    It is adapted like somebody else's implementation, but for a bench only: it is none of
    :func:`baselines`, because it changes with the schedules that would be held to it.

    Returns
    -------
    callable or None
        None where nothing feeds the operation's family raw inputs.

    Raises
    ------
    PluginError
        If another distribution's cannot be loaded.
    """
    if operation in _SHIPPED:
        shipped: type[Baseline] = import_module(f"{_SHIPPED[operation]}.baselines").FED_RAW
        return shipped
    for entry in entry_points(group=_FED_RAW, name=operation):
        return load(entry, type)
    return None
