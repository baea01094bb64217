"""What is to be computed: operations by name.

Other distributions add an operation through the entry-point group
``kernel_factory.operations`` (name to an :class:`Operation` instance).
"""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.metadata import entry_points

from operations._base import (
    Contract,
    Inputs,
    Operation,
    Outputs,
    Probe,
    Regime,
    Region,
    TensorError,
    TensorSpec,
    Tolerance,
    Workload,
)
from operations.plugins import PluginError, load

__all__ = [
    "Contract",
    "Inputs",
    "Operation",
    "Outputs",
    "PluginError",
    "Probe",
    "Regime",
    "Region",
    "TensorError",
    "TensorSpec",
    "Tolerance",
    "UnknownOperationError",
    "Workload",
    "get",
    "names",
]

_ENTRY_POINTS = "kernel_factory.operations"
_SHIPPED = {
    "gdn_prefill": "operations.gdn_prefill",
    "kda_prefill": "operations.kda_prefill",
}


class UnknownOperationError(LookupError):
    """No operation of that name; the message names the nearest one."""


def names() -> tuple[str, ...]:
    """Names of all operations that can be got, shipped and plugged in, sorted."""
    return tuple(sorted({*_SHIPPED, *(e.name for e in entry_points(group=_ENTRY_POINTS))}))


def get(name: str) -> Operation:
    """Look an operation up by name.

    Raises
    ------
    UnknownOperationError
        If there is none; the message suggests the nearest known name.
    PluginError
        If another distribution's cannot be loaded.
    """
    if name in _SHIPPED:
        operation: Operation = import_module(_SHIPPED[name]).OPERATION
        return operation
    for entry in entry_points(group=_ENTRY_POINTS, name=name):
        return load(entry, Operation)  # type: ignore[type-abstract]
    near = difflib.get_close_matches(name, names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names())}"
    raise UnknownOperationError(f"unknown operation {name!r}{hint}")
