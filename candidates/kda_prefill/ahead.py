"""Schedules compiled ahead of time: object files that a GPU's process loads instead of compiling.

They hold the machine code for sm_90a, the code that launches it and the checks of its arguments,
and are made where there is no GPU.  Where they are kept is for the caller to know.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from candidates._base import Schedule
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.kda_prefill.kernel import launch
from candidates.kda_prefill.kernel.config import FusedConfig

__all__ = ["load_objects", "objects"]

_FILES = {"state.o": True, "no_state.o": False}
"""Object file to whether its function takes an initial state."""
_FUNCTION = "kda_prefill_call"


def objects(schedule: Schedule) -> dict[str, bytes]:
    """Object files of a schedule; needs no GPU.

    Returns
    -------
    dict of str to bytes
        File name to contents: the call with an initial state, and the one without.

    Raises
    ------
    BuildError
        The schedule does not compile.
    ToolchainError
        The DSL is missing or broken.
    """
    config = launch.config_of(schedule)
    require_dsl()
    if isinstance(config, FusedConfig):
        config = replace(config, waves=1)  # a number at the launch
    return {
        name: launch.compiling(partial(_object, config, with_state), name)
        for name, with_state in _FILES.items()
    }


def load_objects(schedule: Schedule, folder: Path) -> launch.LoadedSchedule:
    """Make a schedule launchable on the current GPU from its object files.

    Raises
    ------
    ToolchainError
        The DSL is missing or broken, or the current GPU is no sm90.
    Exception
        A file is missing or does not load.
    """
    config = launch.config_of(schedule)
    require_dsl()
    launch.require_gpu()
    import cutlass.cute as cute

    from candidates.kda_prefill.kernel import entry

    modules = []
    for name, with_state in _FILES.items():
        module = cute.runtime.load_module(str(folder / name), enable_tvm_ffi=True)
        entry.adopt(getattr(module, _FUNCTION), config, with_state)
        modules.append(module)
    return launch.LoadedSchedule(config, keep=tuple(modules))


@lru_cache(maxsize=4)  # schedules that differ in a number at the launch come one after the other
def _object(config: Any, with_state: bool) -> bytes:
    from candidates.kda_prefill.kernel import host

    compiled, _ = host.compile_function(*host.call_job(config, with_state))
    with tempfile.TemporaryDirectory(prefix="kda-object-") as folder:
        path = Path(folder) / "call.o"
        compiled.export_to_c(str(path), function_name=_FUNCTION)
        return path.read_bytes()
