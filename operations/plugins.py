"""Objects that other distributions declare by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TypeVar

__all__ = ["PluginError", "load"]

T = TypeVar("T")


class PluginError(ImportError):
    """An entry point of another distribution that cannot be used; the message is one line."""


def load(entry: EntryPoint, kind: type[T]) -> T:
    """The object behind an entry point.

    Raises
    ------
    PluginError
        If importing it fails, whichever way, or it is not an instance of ``kind``.
    """
    whose = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    what = f"entry point {entry.group}: {entry.name} = {entry.value}{whose}"
    try:
        found = entry.load()
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        raise PluginError(f"{what} cannot be loaded ({why}); mend or uninstall it") from error
    if not isinstance(found, kind):
        raise PluginError(f"{what} is of type {type(found).__name__}, not {kind.__name__}")
    return found
