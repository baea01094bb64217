"""Finalists: timed together in turns, and met by held-out workloads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from candidates import Schedule
from factory.device.measure import Measurer, RunStage
from factory.device.process import Child
from factory.device.protocol import Sampling
from factory.device.timing import Timed
from factory.device.verdicts import geomean, medians
from factory.stages.base import StageResult
from leaderboard import in_groups
from leaderboard.records import Clock, MeasurementRecord, StageStatus
from operations import Operation

__all__ = ["Finals", "run_finals"]

_ROUND = Sampling(gpu=15)


@dataclass(frozen=True)
class Finals:
    """Finalists timed together in one job.

    Parameters
    ----------
    results : Mapping[Schedule, StageResult]
        Held-out errors, and measurements of phase ``final``.
    order : tuple of Schedule
        Those that passed, fastest first.
    controls : tuple of MeasurementRecord
        Controls read in the same rounds.
    groups : tuple of tuples of Schedule
        The same in order, those together that are not told apart
        (:func:`leaderboard.in_groups`): within a group the order says nothing.
    """

    results: Mapping[Schedule, StageResult]
    order: tuple[Schedule, ...]
    controls: tuple[MeasurementRecord, ...] = ()
    groups: tuple[tuple[Schedule, ...], ...] = ()


def run_finals(
    finalists: Sequence[Schedule],
    operation: Operation,
    measurer: Measurer,
    *,
    rounds: int,
    stage: RunStage,
    gate: Callable[[Child, Schedule], StageResult],
    controls: Callable[[], tuple[MeasurementRecord, ...]],
) -> Finals:
    """Gate finalists on held-out workloads and time them in turns.

    Each round times every finalist and every control once, so that all of
    them see the same stretch of time; samples of all rounds are pooled.

    Raises
    ------
    HarnessError
    """
    results = {s: stage(s, lambda child, s=s: gate(child, s)) for s in finalists}  # type: ignore[misc]
    pooled: dict[Schedule, dict[str, Timed]] = {s: {} for s in finalists}
    seen: list[MeasurementRecord] = []
    for _ in range(rounds):
        for schedule in finalists:
            if results[schedule].status is StageStatus.PASSED:
                results[schedule] = stage(
                    schedule,
                    lambda child, s=schedule: _turn(child, s, measurer, pooled[s], results[s]),  # type: ignore[misc]
                )
        seen += controls()
    for schedule in finalists:
        if results[schedule].status is StageStatus.PASSED:
            results[schedule] = stage(
                schedule,
                lambda child, s=schedule: _settle(  # type: ignore[misc]
                    child, s, operation, measurer, pooled[s], results[s]
                ),
            )
    order = sorted(
        (s for s in finalists if results[s].status is StageStatus.PASSED),
        key=lambda s: results[s].score_us or math.inf,
    )
    production = measurer.production.name
    groups = in_groups({s: _samples(results[s].measurements, production) for s in order})
    return Finals(results, tuple(order), tuple(seen), groups)


def _samples(
    measurements: Sequence[MeasurementRecord], regime: str
) -> dict[str, tuple[float, ...]]:
    """What a finalist's score is made of, by workload."""
    return {
        m.workload: m.samples_us
        for m in measurements
        if m.clock is Clock.GPU and m.cache == "warm" and m.regime == regime and not m.held_out
    }


def _turn(
    child: Child,
    schedule: Schedule,
    measurer: Measurer,
    pooled: dict[str, Timed],
    so_far: StageResult,
) -> StageResult:
    """One finalist's turn of one round; its samples join those of earlier rounds."""
    for regime in measurer.regimes(schedule):
        timed = measurer.take(child, regime, measurer.workloads, _ROUND, "final")
        if timed.wrong:
            return StageResult(StageStatus.REJECTED, timed.wrong, errors=tuple(timed.errors))
        known = pooled.setdefault(regime.name, timed)
        if known is not timed:
            for workload, clocks in timed.samples.items():
                for clock, samples in clocks.items():
                    known.samples[workload][clock] += samples
    return so_far


def _settle(
    child: Child,
    schedule: Schedule,
    operation: Operation,
    measurer: Measurer,
    pooled: Mapping[str, Timed],
    so_far: StageResult,
) -> StageResult:
    """A finalist's record: pooled times, and times on held-out workloads."""
    measurements: list[MeasurementRecord] = []
    scores: dict[str, float] = {}
    regimes = measurer.regimes(schedule)
    for regime in regimes:
        found = measurer.records(pooled[regime.name], regime, "final")
        measurements += found
        scores[regime.role] = geomean(medians(found).values())
    # An empty workload launches next to nothing: right or wrong, but not fast or slow.
    timeable = [w for w in operation.held_out() if operation.floor_bytes(w) > 0]
    if timeable:
        timed = measurer.take(child, regimes[0], timeable, _ROUND, "final")
        if timed.wrong:
            return StageResult(StageStatus.REJECTED, timed.wrong, errors=so_far.errors)
        measurements += measurer.records(timed, regimes[0], "final", held_out=True)
    return StageResult(
        StageStatus.PASSED,
        details=so_far.details,
        errors=so_far.errors,
        measurements=tuple(measurements),
        score_us=scores["production"],
        slow_us=scores.get("slow"),
    )
