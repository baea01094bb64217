"""Candidates and controls timed in turns on every clock, for a table of all of them.

Unlike the finals nobody is ranked here and no held-out workload is met: what is
wanted is each one's time on each shape, read over the same stretch of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from candidates import Schedule
from factory.device.measure import Measurer, RunStage
from factory.device.process import Child
from factory.device.protocol import Sampling
from factory.device.verdicts import geomean, measurement, medians
from factory.stages.base import StageResult
from leaderboard.records import MeasurementRecord, StageStatus

__all__ = ["IN_TURNS", "PHASE", "Rounds", "pooled", "run_rounds"]

IN_TURNS = Sampling(gpu=15, per_call=12, pipelined=4, cold=6, budget_s=0.1)
"""One turn of one contestant on one regime; the same for candidates and controls.
A slow one of thousands of small kernels gets fewer samples."""

PHASE = "bench"


@dataclass(frozen=True)
class Rounds:
    """Contestants timed in turns in one job.

    Parameters
    ----------
    results : Mapping[Schedule, StageResult]
        Measurements of all rounds, pooled, and errors of the first turn's
        outputs; ``score_us`` and ``slow_us`` are geomeans of ``gpu`` medians.
    controls : tuple of MeasurementRecord
        Those of the controls, pooled likewise.
    """

    results: Mapping[Schedule, StageResult]
    controls: tuple[MeasurementRecord, ...]


def run_rounds(
    schedules: Sequence[Schedule],
    measurer: Measurer,
    *,
    rounds: int,
    stage: RunStage,
    controls: Callable[[], Iterable[MeasurementRecord]],
) -> Rounds:
    """Let everybody take one turn in each round.

    A candidate that fails in one round has no time of any.

    Raises
    ------
    HarnessError
    """
    results = {s: StageResult(StageStatus.PASSED) for s in schedules}
    seen: list[MeasurementRecord] = []
    for _ in range(rounds):
        for schedule in schedules:
            if results[schedule].status is StageStatus.PASSED:
                results[schedule] = stage(
                    schedule,
                    lambda child, s=schedule: _turn(child, s, measurer, results[s]),  # type: ignore[misc]
                )
        seen += controls()
    settled = {s: _settled(result, measurer) for s, result in results.items()}
    return Rounds(settled, pooled(seen))


def _turn(child: Child, schedule: Schedule, measurer: Measurer, so_far: StageResult) -> StageResult:
    """One candidate's turn of one round, after what it was seen to do in earlier ones."""
    errors, found = [], list(so_far.measurements)
    for regime in measurer.regimes(schedule):
        timed = measurer.take(child, regime, measurer.workloads, IN_TURNS, PHASE)
        errors += timed.errors
        if timed.wrong:
            return StageResult(StageStatus.REJECTED, timed.wrong, errors=tuple(errors))
        found += measurer.records(timed, regime, PHASE)
    return replace(so_far, errors=so_far.errors or tuple(errors), measurements=tuple(found))


def _settled(result: StageResult, measurer: Measurer) -> StageResult:
    if result.status is not StageStatus.PASSED:
        return replace(result, measurements=())
    found = pooled(result.measurements)
    by_regime: dict[str, list[MeasurementRecord]] = {}
    for m in found:
        by_regime.setdefault(m.regime, []).append(m)
    scores = {name: geomean(medians(mine).values()) for name, mine in by_regime.items()}
    slow = [us for name, us in scores.items() if name != measurer.production.name]
    return replace(
        result,
        measurements=found,
        score_us=scores.get(measurer.production.name),
        slow_us=slow[0] if slow else None,
    )


def pooled(records: Iterable[MeasurementRecord]) -> tuple[MeasurementRecord, ...]:
    """One record for all readings of one owner on one workload, regime, clock and cache."""
    groups: dict[tuple[object, ...], list[MeasurementRecord]] = {}
    for r in records:
        key = (r.trial_id, r.control, r.regime, r.workload, r.clock, r.cache)
        groups.setdefault(key, []).append(r)
    computed = {"clock", "kernels", "samples_us", "median_us", "low_us", "high_us"}
    return tuple(
        measurement(
            [s for m in mine for s in m.samples_us],
            clock=mine[0].clock,
            kernels=dict.fromkeys(k for m in mine for k in m.kernels),
            **mine[0].model_dump(exclude=computed),
        )
        for mine in groups.values()
    )
