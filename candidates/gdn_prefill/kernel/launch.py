"""Compile schedules of the kernels, judge what the compiler made, and load them on a GPU.

:func:`compile_schedule` needs no GPU.  PREP and SCAN are compiled apart for it and kept while
the process lives, so that a whole preset of schedules costs little more than its distinct
parts; :func:`load_schedule` compiles both into the one call that is launched.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from candidates._base import Build, BuildError, Schedule
from candidates._delta_rule.kernel import launch as shared
from candidates._delta_rule.kernel.launch import (
    PARTS,
    Part,
    built,
    compile_part,
    compiling,
    require_gpu,
    scan_names,
    scan_part,
)
from candidates._delta_rule.kernel.options import PLAIN
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.gdn_prefill.kernel.config import Config, FusedConfig, schedule_of

__all__ = [
    "LoadedSchedule",
    "compile_schedule",
    "compiling",
    "config_of",
    "kernel_names",
    "load_schedule",
    "require_gpu",
]


def kernel_names(segments: int) -> tuple[str, ...]:
    """Prefixes of the kernels a schedule launches, in launch order."""
    return ("gdn_prep_", *scan_names(segments))


def fused_names(config: FusedConfig) -> tuple[str, ...]:
    """The same of a fused schedule."""
    return ("gdn_fused_", "gdn_fixup") if config.plan.cuts else ("gdn_fused_",)


def compile_schedule(schedule: Schedule) -> Build:
    """Compile one schedule to sm_90a machine code and judge it; needs no GPU.

    Parameters
    ----------
    schedule : Schedule
        Choices of the space: ``bt``, ``rows`` and ``segments``; of ``form=fused``, ``bt``,
        ``rows``, ``waves`` and ``builders``.

    Returns
    -------
    Build
        ``problems`` holds broken budgets: spills, shared memory, threads, registers.  ``seconds``
        is what its parts took when they were compiled; a part that another schedule of this
        process brought along counts in both.

    Raises
    ------
    BuildError
        The schedule does not compile.
    ToolchainError
        The DSL is missing or broken.
    """
    config = config_of(schedule)
    require_dsl()
    parts: tuple[Part, ...]
    if isinstance(config, FusedConfig):
        parts = (_fused_part(replace(config, waves=1)),)
    else:
        parts = (
            _prep_part(config.bt, config.unroll),
            scan_part(config.bt, config.rows, config.segments),
        )
    return built(schedule, parts)


def load_schedule(schedule: Schedule) -> LoadedSchedule:
    """Compile one schedule and make it launchable on the current GPU.

    The variant that takes an initial state is compiled here; the other one when a call without
    a state is first bound.

    Raises
    ------
    BuildError
        The schedule does not compile.
    ToolchainError
        The DSL is missing or broken, or the current GPU is no sm90.
    """
    config = config_of(schedule)
    require_dsl()
    require_gpu()
    compiling(lambda: _entry().compiled(config, True, PLAIN), schedule.key)  # as bind asks for it
    return LoadedSchedule(config)


class LoadedSchedule(shared.LoadedSchedule):
    """See :class:`candidates._delta_rule.kernel.launch.LoadedSchedule`.

    Parameters
    ----------
    config : Config or FusedConfig
    keep : object
        Kept while the schedule is: the modules that its functions came from.
    """

    def __init__(self, config: Config | FusedConfig, keep: object = None) -> None:
        if isinstance(config, FusedConfig):
            super().__init__(config, config.in_place, fused_names(config), config.bt, keep)
        else:
            names = kernel_names(config.segments)
            super().__init__(config, config.in_place, names, config.bt, keep)

    def _entry(self) -> Any:
        return _entry()


def _entry() -> Any:
    """The module of torch functions; imported late, because it imports torch."""
    from candidates.gdn_prefill.kernel import entry

    return entry


def config_of(schedule: Schedule) -> Config | FusedConfig:
    """The :class:`Config` or :class:`FusedConfig` of a schedule."""
    try:
        return schedule_of(schedule.as_dict())
    except ValueError as error:
        raise BuildError(f"{schedule.key}: {error}") from error


@functools.lru_cache(maxsize=PARTS)
def _prep_part(bt: int, unroll: int) -> Part:
    config = next(c for c in (Config(bt, 64), Config(bt, 128)) if c.unroll == unroll)
    return compile_part("prep", lambda: _host().prep_job(config))


@functools.lru_cache(maxsize=PARTS)
def _fused_part(config: FusedConfig) -> Part:
    return compile_part("fused", lambda: _host().fused_job(config, True))


def _host() -> Any:
    """The module of host functions; imported late, because it imports the DSL."""
    from candidates.gdn_prefill.kernel import host

    return host
