"""From what a child did to what is said of the candidate.

Pure functions over answers, events and errors; they start nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from factory.device.bank import Entry
from factory.device.process import ChildFailure
from factory.stages.base import HarnessError, StageResult
from leaderboard import interval
from leaderboard.records import Clock, ErrorRecord, MeasurementRecord, StageStatus
from operations import Operation, TensorError, Tolerance

if TYPE_CHECKING:
    import torch

__all__ = [
    "Judgement",
    "geomean",
    "interval",
    "judge",
    "measurement",
    "medians",
    "of_failure",
    "undeclared",
]

_KINDS = {
    "timeout": StageStatus.TIMEOUT,
    "died": StageStatus.CRASHED,
    "memory": StageStatus.CRASHED,
    "candidate": StageStatus.CRASHED,
    "rejected": StageStatus.REJECTED,
    "build": StageStatus.INFEASIBLE,
}


def of_failure(failure: ChildFailure) -> StageResult:
    """Verdict on a candidate whose process did not answer as asked.

    Raises
    ------
    HarnessError
        If the toolchain is at fault.
    """
    if failure.kind == "toolchain":
        raise HarnessError(str(failure))
    return StageResult(_KINDS[failure.kind], str(failure))


@dataclass
class Judgement:
    """What a comparison with the oracle found.

    Parameters
    ----------
    records : list of ErrorRecord
        Each output as a whole, and its worst slice where one is out of tolerance.
    slices : dict
        Output name to its worst head or sequence, in tolerance or not; empty
        where the operation compares outputs as a whole only.
    reason : str
        Why it is wrong, with numbers; empty if it is right.
    """

    records: list[ErrorRecord] = field(default_factory=list)
    slices: dict[str, ErrorRecord] = field(default_factory=dict)
    reason: str = ""


def judge(
    operation: Operation,
    entry: Entry,
    outputs: Mapping[str, torch.Tensor],
    stage: str,
) -> Judgement:
    """Compare one set of outputs with the oracle.

    Raises
    ------
    HarnessError
        If the comparison itself fails.
    """
    draw = entry.draw
    try:
        found = operation.compare(outputs, entry.expected, draw.workload, draw.regime)
    except Exception as error:
        raise HarnessError(
            f"comparing {draw.label} failed: {type(error).__name__}: {error}"
        ) from error
    judged = Judgement()
    for name in outputs:
        mine = [e for e in found if e.tensor == name]
        if not mine:
            raise HarnessError(f"the operation does not compare output {name!r}")
        bad = [e for e in mine if not e.within]
        worst = max(bad, key=_severity, default=mine[0])
        judged.records.append(_record(mine[0], entry, stage))
        if worst is not mine[0]:
            judged.records.append(_record(worst, entry, stage))
        if len(mine) > 1:
            judged.slices[name] = _record(max(mine[1:], key=_severity), entry, stage)
        if bad and not judged.reason:
            judged.reason = (
                f"{draw.label}: {_words(draw.regime.tolerances or operation.tolerances, worst)}"
            )
    return judged


def _record(error: TensorError, entry: Entry, stage: str) -> ErrorRecord:
    return ErrorRecord(
        stage=stage,
        regime=entry.draw.regime.name,
        workload=entry.draw.workload.name,
        tensor=error.tensor,
        scope=error.scope,
        max_rel=error.max_rel if math.isfinite(error.max_rel) else None,
        rms_rel=error.rms_rel if math.isfinite(error.rms_rel) else None,
        finite=error.finite,
        within=error.within,
        seed=entry.seed,
    )


def _severity(error: TensorError) -> tuple[bool, float]:
    return (not error.finite, max(error.max_rel, error.rms_rel))


def _words(tolerances: Mapping[str, Tolerance], error: TensorError) -> str:
    where = error.tensor if error.scope == "all" else f"{error.tensor} {error.scope}"
    if not error.finite:
        return f"{where} has {error.nonfinite_count} non-finite or unwritten elements"
    bound = tolerances[error.tensor]
    return (
        f"{where} is off by max {error.max_rel:.2e} (accepted {bound.max_rel:.1e}),"
        f" rms {error.rms_rel:.2e} (accepted {bound.rms_rel:.1e})"
    )


def undeclared(launched: Iterable[str], declared: Sequence[str]) -> list[str]:
    """Names of kernels, copies and fills that match no declared prefix.

    A demangled template starts with its return type: ``void `` is ignored on both sides.
    """
    known = tuple(p.removeprefix("void ") for p in declared)
    return [n for n in launched if not n.removeprefix("void ").startswith(known)]


def measurement(
    samples: Sequence[float], *, clock: Clock, kernels: Iterable[str] = (), **fields: Any
) -> MeasurementRecord:
    """A record of samples in microseconds; ``fields`` are the record's own."""
    median, low, high = interval(samples)
    return MeasurementRecord(
        clock=clock,
        median_us=median,
        low_us=low,
        high_us=high,
        samples_us=tuple(round(s, 3) for s in samples),
        kernels=tuple(kernels),
        **fields,
    )


def medians(records: Sequence[MeasurementRecord]) -> dict[str, float]:
    """``gpu`` medians by workload, the L2 cache warm."""
    return {m.workload: m.median_us for m in records if m.clock is Clock.GPU and m.cache == "warm"}


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    return statistics.geometric_mean(list(values))
