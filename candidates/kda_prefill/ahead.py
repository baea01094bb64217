"""Schedules compiled ahead of time; see :mod:`candidates._delta_rule.ahead`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from candidates._base import Schedule
from candidates._delta_rule.ahead import load_modules, objects_of
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.kda_prefill.kernel import launch
from candidates.kda_prefill.kernel.config import FusedConfig

__all__ = ["load_objects", "objects"]

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
    return dict(_objects(config))


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
    from candidates.kda_prefill.kernel import entry

    modules = load_modules(
        folder, _FUNCTION, lambda function, with_state: entry.adopt(function, config, with_state)
    )
    return launch.LoadedSchedule(config, keep=modules)


@lru_cache(maxsize=2)  # schedules that differ in a number at the launch come one after the other
def _objects(config: Any) -> dict[str, bytes]:
    from candidates.kda_prefill.kernel import host

    return objects_of(lambda with_state: host.call_job(config, with_state), _FUNCTION)
