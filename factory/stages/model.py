"""The cost model's time of a schedule on every tuned workload.

Such times carry the clock ``modelled``: they order schedules where nothing
can be measured and are never ranked beside measured ones.
"""

from __future__ import annotations

import math

from candidates import Family, Schedule
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import StageStatus
from operations import Operation

__all__ = ["geomean", "model"]


def geomean(values: list[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def model(operation: Operation, family: Family, schedule: Schedule) -> StageResult:
    """Estimate a schedule on all tuned workloads.

    Returns
    -------
    StageResult
        ``passed`` with ``score_us``, the geomean in microseconds, and
        ``details["modelled_us"]``, workload name to microseconds.

    Raises
    ------
    HarnessError
        The model gave a time that is not positive and finite.
    """
    times: dict[str, float] = {}
    for workload in operation.tuned():
        us = family.modelled_us(schedule, workload)
        if not (math.isfinite(us) and us > 0):
            raise HarnessError(f"cost model of {family.name} gave {us} us for {schedule.key}")
        times[workload.name] = us
    return StageResult(
        StageStatus.PASSED, details={"modelled_us": times}, score_us=geomean(list(times.values()))
    )
