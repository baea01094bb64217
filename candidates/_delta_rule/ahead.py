"""Calls compiled ahead of time: object files that a GPU's process loads instead of compiling.

They hold the machine code for sm_90a, the code that launches it and the checks of its arguments,
and are made where there is no GPU.  Where they are kept is for the caller to know.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from candidates._delta_rule.kernel.launch import compiling

__all__ = ["FILES", "load_modules", "objects_of"]

FILES = {"state.o": True, "no_state.o": False}
"""Object file to whether its function takes an initial state."""


def objects_of(
    job: Callable[[bool], tuple[Any, tuple[Any, ...]]], function: str
) -> dict[str, bytes]:
    """Object files of the calls, by :data:`FILES`.

    Parameters
    ----------
    job : callable
        Gives the host function and the arguments to compile it, with an initial state or without.
    function : str
        What the function is called in the files.

    Raises
    ------
    BuildError
        It does not compile.
    ToolchainError
        The DSL is missing or broken.
    """
    return {
        name: compiling(partial(_object, job, with_state, function), name)
        for name, with_state in FILES.items()
    }


def _object(
    job: Callable[[bool], tuple[Any, tuple[Any, ...]]], with_state: bool, function: str
) -> bytes:
    from candidates._delta_rule.kernel import host

    compiled, _ = host.compile_function(*job(with_state))
    with tempfile.TemporaryDirectory(prefix="kernel-object-") as folder:
        path = Path(folder) / "call.o"
        compiled.export_to_c(str(path), function_name=function)
        return path.read_bytes()


def load_modules(
    folder: Path, function: str, adopt: Callable[[Callable[..., None], bool], None]
) -> tuple[Any, ...]:
    """Load what :func:`objects_of` made; the modules, which must be kept.

    Parameters
    ----------
    folder : Path
        Where the files are.
    function : str
        As they were made with.
    adopt : callable
        Takes each function, and whether it takes an initial state.

    Raises
    ------
    Exception
        A file is missing or does not load.
    """
    import cutlass.cute as cute

    modules = []
    for name, with_state in FILES.items():
        module = cute.runtime.load_module(str(folder / name), enable_tvm_ffi=True)
        adopt(getattr(module, function), with_state)
        modules.append(module)
    return tuple(modules)
