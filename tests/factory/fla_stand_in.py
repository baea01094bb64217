"""An exported folder beside a stand-in of fla's backend registry, called without a GPU."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import export_board as board
import pytest

from factory.export.folder import write
from factory.export.render import render

__all__ = ["vendored"]


def _modules(function: str | None) -> dict[str, types.ModuleType]:
    """``fla.backends``, and the module of fla's own function by its dotted name."""
    names = ["fla", "fla.backends"]
    where, _, name = (function or "").rpartition(".")
    parts = where.split(".")
    names += [".".join(parts[: n + 1]) for n in range(1, len(parts))]
    made = {name: types.ModuleType(name) for name in names}
    if function is not None:
        setattr(made[where], name, lambda: None)
    return made


@contextmanager
def vendored(
    base: Path,
    subject: board.Subject,
    package: str,
    compiled: Callable[[Any, bool, Any], Callable[..., None]],
    function: str | None = None,
) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """An export in ``base`` under the name ``package``, whose kernels ``compiled`` gives.

    It takes a configuration, whether there is an initial state, and the form of the arguments.
    ``function`` is fla's own, if the backend imports it.  Yields the module of the backend, and
    what it registered by what it registered it for.
    """
    write(render(board.selected(subject=subject)), base / package)
    registered: dict[Any, Any] = {}

    def register(entry_point: Any) -> Any:
        def keep(cls: Any) -> Any:
            registered[entry_point] = cls
            return cls

        return keep

    stand_ins = _modules(function)
    stand_ins["fla.backends"].BaseBackend = object  # type: ignore[attr-defined]
    stand_ins["fla.backends"].register = register  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patched:
        for name, module in stand_ins.items():
            patched.setitem(sys.modules, name, module)
        patched.syspath_prepend(str(base))
        backend = importlib.import_module(f"{package}.fla_backend")
        entry = importlib.import_module(f"{package}.kernel.entry")
        for name, attribute, value in (
            ("kernel.arguments", "on_gpu", lambda x: True),
            ("kernel.entry", "compiled", compiled),
            ("kernel.entry", "on_stream", lambda stream, device: None),
            ("api", "_machine_problem", lambda index: ""),
        ):
            patched.setattr(importlib.import_module(f"{package}.{name}"), attribute, value)
        known = sys.modules[entry.recall.__module__]
        patched.setattr(known, "current_device", (-1).__index__)
        if hasattr(entry, "sms"):
            patched.setattr(entry, "sms", lambda device: 132)
        assert Path(str(backend.__file__)).parent == base / package
        yield backend, registered
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        del sys.modules[name]  # the next export of this name lies elsewhere
