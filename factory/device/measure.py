"""The screen and the time stage: what is timed, how thoroughly, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from candidates import Family, Schedule
from factory.device.process import Child, ChildFailure
from factory.device.protocol import Limits, Sampling
from factory.device.timing import Timed, Timer
from factory.device.verdicts import geomean, medians
from factory.stages.base import StageResult
from leaderboard.records import ErrorRecord, MeasurementRecord, StageStatus
from operations import Operation, Regime, Workload

__all__ = ["Measurer", "RunStage", "declared"]

RunStage = Callable[[Schedule, Callable[[Child], StageResult]], StageResult]
"""Runs one piece of work on a candidate's child and turns a failure into its verdict."""

_FULL = Sampling(gpu=30, per_call=30, pipelined=8, cold=9)
_KERNEL_ONLY = Sampling(gpu=30)
_QUICK = Sampling(gpu=9, warm_s=0.05, budget_s=0.1)
_SCREENED = 3
"""Smallest workloads looked at by the screen."""


def declared(child: Child) -> tuple[str, ...]:
    """Kernel-name prefixes of a candidate, once it has loaded.

    Raises
    ------
    ChildFailure
        If it does not load, or declares none; an empty prefix would allow any name.
    """
    names = tuple(child.ready()["kernel_names"])
    if not names or not all(names):
        child.kill()
        raise ChildFailure("rejected", "kernel identity: it declares no kernel names")
    return names


@dataclass
class _Best:
    score_us: float = math.inf
    medians: dict[str, float] = field(default_factory=dict)


class Measurer:
    """Times candidates of one job and remembers the best.

    Parameters
    ----------
    operation : Operation
    family : Family
    timer : Timer
    workloads : sequence of Workload
        All of them are timed.
    production, slow : Regime or None
        Times are read on these, ``slow`` beside ``production``.
    job_id, method : str
        For the records.
    limits : Limits
    alone : callable
        A context in which nothing else of the job runs.
    """

    def __init__(
        self,
        operation: Operation,
        family: Family,
        timer: Timer,
        *,
        workloads: Sequence[Workload],
        production: Regime,
        slow: Regime | None,
        job_id: str,
        method: str,
        limits: Limits,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.workloads = tuple(workloads)
        self._operation = operation
        self._family = family
        self._timer = timer
        self.production = production
        self._slow = slow
        self._job_id = job_id
        self._method = method
        self._limits = limits
        self._alone = alone
        self._best = _Best()

    def regimes(self, schedule: Schedule) -> tuple[Regime, ...]:
        """Production, and slow where it is within the schedule's declared bound."""
        bound = self._family.gate_bound(schedule)
        both = (self.production, self._slow)
        return tuple(r for r in both if r is not None and (bound is None or r.gate_floor >= bound))

    def take(
        self,
        child: Child,
        regime: Regime,
        workloads: Sequence[Workload],
        sampling: Sampling,
        stage: str,
    ) -> Timed:
        """Time a loaded candidate while nothing else of the job runs.

        Raises
        ------
        ChildFailure, HarnessError
        """
        names = declared(child)
        limit_s = self._limits.screen_s if stage == "screen" else self._limits.time_s
        with self._alone():
            return self._timer.take(
                child, regime, workloads, sampling, declared=names, limit_s=limit_s, stage=stage
            )

    def records(
        self, timed: Timed, regime: Regime, phase: str, *, held_out: bool = False
    ) -> list[MeasurementRecord]:
        """Measurements of a candidate; ``trial_id`` is filled in by the caller."""
        return self._timer.records(
            timed,
            regime,
            job_id=self._job_id,
            method=self._method,
            cache="warm",
            held_out=held_out,
            phase=phase,
        )

    def screen(self, child: Child) -> StageResult:
        """Time the smallest workloads briefly and compare with the best so far.

        Raises
        ------
        ChildFailure, HarnessError
        """
        small = sorted(self.workloads, key=self._operation.floor_bytes)[:_SCREENED]
        timed = self.take(child, self.production, small, _QUICK, "screen")
        if timed.wrong:
            return StageResult(StageStatus.REJECTED, timed.wrong, errors=tuple(timed.errors))
        found = medians(self.records(timed, self.production, "search"))
        details: dict[str, Any] = {"medians_us": found}
        if not self._best.medians:
            return StageResult(StageStatus.PASSED, details=details)
        ratio = geomean(found[w.name] / self._best.medians[w.name] for w in small)
        estimate_us = ratio * self._best.score_us
        details["estimate_us"] = estimate_us
        if ratio > self._limits.slow_factor:
            return StageResult(
                StageStatus.SLOW,
                f"about {estimate_us:.1f} us, {ratio:.1f} times the best so far"
                f" ({self._best.score_us:.1f} us), by {len(small)} small workloads",
                details,
            )
        return StageResult(StageStatus.PASSED, details=details)

    def time(self, schedule: Schedule, child: Child) -> StageResult:
        """Time all workloads: three clocks at production gates, ``gpu`` at slow ones.

        Raises
        ------
        ChildFailure, HarnessError
        """
        measurements: list[MeasurementRecord] = []
        errors: list[ErrorRecord] = []
        scores: dict[str, float] = {}
        kernels: dict[str, list[str]] = {}
        launches: dict[str, dict[str, dict[str, int]]] = {}
        clock: dict[str, dict[str, Any]] = {}
        best = self._best
        for regime in self.regimes(schedule):
            clocks = _FULL if regime is self.production else _KERNEL_ONLY
            timed = self.take(child, regime, self.workloads, clocks, "time")
            errors += timed.errors
            if timed.wrong:
                return StageResult(StageStatus.REJECTED, timed.wrong, errors=tuple(errors))
            found = self.records(timed, regime, "search")
            measurements += found
            scores[regime.role] = geomean(medians(found).values())
            kernels[regime.name] = sorted({k for names in timed.kernels.values() for k in names})
            launches[regime.name] = timed.launches
            clock[regime.name] = {"sm_share": timed.sm_share, "thrown_away": timed.thrown_away}
            if regime is self.production and scores[regime.role] < best.score_us:
                best = _Best(scores[regime.role], medians(found))
        self._best = best  # only of what is right on all regimes
        return StageResult(
            StageStatus.PASSED,
            details={"kernels": kernels, "launches": launches, "clock": clock},
            errors=tuple(errors),
            measurements=tuple(measurements),
            score_us=scores.get("production"),
            slow_us=scores.get("slow"),
        )
