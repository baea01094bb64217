"""The way of one trial: which stage comes next, and how a CPU stage is run.

The order is fixed: validate, emulate, compile, then gate, screen and time
where there is a GPU.  What failed a stage goes no further and has no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from candidates import Family, Schedule
from factory.artefacts import Store
from factory.executors.base import DEVICE_STAGES
from factory.stages.base import StageResult
from factory.stages.compile import compile_schedule
from factory.stages.emulate import References, emulate
from factory.stages.validate import validate
from leaderboard.records import Clock, StageStatus, TrialStatus

__all__ = ["Funnel", "run_cpu_stage", "verdict"]

_VERDICTS: Mapping[StageStatus, TrialStatus] = {
    StageStatus.REJECTED: TrialStatus.REJECTED,
    StageStatus.INFEASIBLE: TrialStatus.INFEASIBLE,
    StageStatus.CRASHED: TrialStatus.CRASHED,
    StageStatus.TIMEOUT: TrialStatus.TIMEOUT,
    StageStatus.SLOW: TrialStatus.SLOW,
}


def verdict(status: StageStatus) -> TrialStatus:
    """Verdict on a trial that ended with this stage status; ``passed`` has none yet."""
    return _VERDICTS[status]


@dataclass(frozen=True)
class Funnel:
    """Stages of one campaign, in order.

    Parameters
    ----------
    stages : tuple of str
    """

    stages: tuple[str, ...]

    @classmethod
    def of(cls, clock: Clock, stop_after: str) -> Funnel:
        """Stages for a clock; ``stop_after`` counts on the modelled clock only."""
        if clock is not Clock.MODELLED:
            return cls(("validate", "emulate", "compile", *DEVICE_STAGES))
        if stop_after == "emulate":
            return cls(("validate", "emulate"))
        return cls(("validate", "emulate", "compile"))

    def after(self, stage: str) -> str | None:
        """The stage that follows, or None after the last."""
        index = self.stages.index(stage) + 1
        return self.stages[index] if index < len(self.stages) else None


def run_cpu_stage(
    stage: str,
    family: Family,
    schedule: Schedule,
    references: References,
    *,
    store: Store | None = None,
    objects: bool = False,
) -> StageResult:
    """Run one stage that needs no GPU.

    Parameters
    ----------
    stage : {"validate", "emulate", "compile"}
    family : Family
    schedule : Schedule
    references : References
    store, objects
        As for :func:`factory.stages.compile.compile_schedule`.

    Raises
    ------
    HarnessError
        The machine, the toolchain or the reference failed.
    ValueError
        There is no such stage.
    """
    match stage:
        case "validate":
            return validate(family, schedule)
        case "emulate":
            return emulate(family, schedule, references)
        case "compile":
            return compile_schedule(family, schedule, store=store, objects=objects)
    raise ValueError(f"no CPU stage {stage!r}")
