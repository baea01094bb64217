"""Compile the schedule to machine code and judge what the compiler gave."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

from candidates import Build, BuildError, Family, KernelResources, Schedule, ToolchainError
from factory.artefacts import Store, key_of
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import StageStatus

__all__ = ["compile_schedule"]

_BUILD = "build.json"
"""File of an artefact that is ours; the others are the family's."""

_log = logging.getLogger(__name__)


def compile_schedule(
    family: Family, schedule: Schedule, *, store: Store | None = None, objects: bool = False
) -> StageResult:
    """Compile one schedule to sm_90a, unless that was done before; needs no GPU.

    Parameters
    ----------
    family : Family
    schedule : Schedule
    store : Store, optional
        Where what was compiled is kept; None keeps nothing.
    objects : bool
        Whether to keep, too, what a GPU's process can load instead of compiling.

    Returns
    -------
    StageResult
        ``infeasible`` if it does not compile or breaks a budget (spills,
        shared memory).  ``details`` holds ``kernels`` (registers per thread,
        stack and shared-memory bytes), ``compile_s``, ``cubin_sha256``, and ``kept``: whether
        nothing had to be compiled.

    Raises
    ------
    HarnessError
        The toolchain is missing or broken.
    """
    key = key_of(family, schedule) if store is not None else ""
    files = dict((store and store.get(key)) or {})
    build = _read(files.get(_BUILD))
    kept = build is not None
    try:
        if build is None:
            build = family.compile(schedule)
            files = {_BUILD: json.dumps(asdict(build)).encode()}
        if store is not None and store.keeps and objects and not build.problems:
            kept = _add_objects(family, schedule, files) and kept
    except BuildError as error:
        return StageResult(StageStatus.INFEASIBLE, _one_line(error))
    except ToolchainError as error:
        raise HarnessError(_one_line(error)) from error
    if store is not None and not kept:
        store.put(key, files)
    details = {
        "kernels": [asdict(kernel) for kernel in build.kernels],
        "compile_s": round(build.seconds, 3),
        "cubin_sha256": build.cubin_sha256,
        "kept": kept,
    }
    if build.problems:
        return StageResult(
            StageStatus.INFEASIBLE,
            "; ".join(build.problems),
            details={**details, "problems": list(build.problems)},
        )
    return StageResult(StageStatus.PASSED, details=details)


def _add_objects(family: Family, schedule: Schedule, files: dict[str, bytes]) -> bool:
    """Compile what can be loaded, if it is not there; returns whether it was."""
    if set(files) - {_BUILD}:
        return True
    try:
        made = family.objects(schedule)
    except (BuildError, ToolchainError) as error:
        # It did compile just now: whether it is any good is for the process that loads it to say.
        _log.warning("%s is compiled when it is loaded: %s", schedule.key, _one_line(error))
        return True
    files.update(made)
    return not made


def _read(data: bytes | None) -> Build | None:
    """A build as it was kept; None if there is none, or one of another shape."""
    if data is None:
        return None
    try:
        values = json.loads(data)
        kernels = tuple(KernelResources(**k) for k in values.pop("kernels"))
        problems = tuple(values.pop("problems"))
        return Build(kernels=kernels, problems=problems, **values)
    except (ValueError, TypeError, KeyError):
        return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
