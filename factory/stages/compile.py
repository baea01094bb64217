"""Compile the schedule to machine code and judge what the compiler gave."""

from __future__ import annotations

from dataclasses import asdict

from candidates import BuildError, Family, Schedule, ToolchainError
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import StageStatus

__all__ = ["compile_schedule"]


def compile_schedule(family: Family, schedule: Schedule) -> StageResult:
    """Compile one schedule to sm_90a; needs no GPU.

    Returns
    -------
    StageResult
        ``infeasible`` if it does not compile or breaks a budget (spills,
        shared memory).  ``details`` holds ``kernels`` (registers per thread,
        stack and shared-memory bytes), ``compile_s`` and ``cubin_sha256``.

    Raises
    ------
    HarnessError
        The toolchain is missing or broken.
    """
    try:
        build = family.compile(schedule)
    except BuildError as error:
        return StageResult(StageStatus.INFEASIBLE, _one_line(error))
    except ToolchainError as error:
        raise HarnessError(_one_line(error)) from error
    details = {
        "kernels": [asdict(kernel) for kernel in build.kernels],
        "compile_s": round(build.seconds, 3),
        "cubin_sha256": build.cubin_sha256,
    }
    if build.problems:
        return StageResult(
            StageStatus.INFEASIBLE,
            "; ".join(build.problems),
            details={**details, "problems": list(build.problems)},
        )
    return StageResult(StageStatus.PASSED, details=details)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
