"""Does the schedule keep the stated budgets?  Instant, no arithmetic."""

from __future__ import annotations

from candidates import Family, Schedule
from factory.stages.base import StageResult
from leaderboard.records import StageStatus

__all__ = ["validate"]


def validate(family: Family, schedule: Schedule) -> StageResult:
    """Judge a schedule by its family's budgets (shared memory, registers, divisibility).

    Returns
    -------
    StageResult
        ``infeasible`` with every broken budget in the reason, else ``passed``.
    """
    problems = family.problems(schedule)
    if problems:
        return StageResult(
            StageStatus.INFEASIBLE, "; ".join(problems), details={"problems": list(problems)}
        )
    return StageResult(StageStatus.PASSED)
