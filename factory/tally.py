"""Running totals of a campaign, as progress shows them.  Knows no terminal."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from factory.executors.base import DEVICE_STAGES
from leaderboard.records import StageStatus, TrialRecord, TrialStatus

__all__ = ["Best", "Tally", "reason_class"]


@dataclass(frozen=True)
class Best:
    """The fastest trial so far."""

    trial_id: int
    schedule_key: str
    score_us: float


@dataclass
class Tally:
    """Counts of one campaign, trials of earlier launches included.

    Parameters
    ----------
    campaign_id : str
    clock : str
    target : int
        Finished trials at which it is done.
    stages : sequence of str
    """

    campaign_id: str
    clock: str
    target: int
    stages: Sequence[str]
    finished: int = 0
    passed: int = 0
    best: Best | None = None
    entered: Counter[str] = field(default_factory=Counter)
    through: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    running: dict[int, str] = field(default_factory=dict)
    """Open trial to the stage it is in."""
    gpu_s: float = 0.0
    """Seconds of gate, screen and time, over all GPUs."""
    stale: int = 0
    """Finished trials since the best so far, or since the start."""
    _since: float = field(default_factory=time.monotonic)
    _finished_before: int = 0

    def restore(self, trials: Sequence[TrialRecord]) -> None:
        """Count the trials of earlier launches; of abandoned ones only their time on a GPU."""
        for trial in sorted(trials, key=lambda t: (t.ended_at or t.started_at, t.id)):
            self.gpu_s += sum(s.seconds for s in trial.stages if s.stage in DEVICE_STAGES)
            if trial.status.finished:
                self.count(trial)
                for stage in trial.stages:
                    self.entered[stage.stage] += 1
                    self.through[stage.stage] += stage.status is StageStatus.PASSED
        self._finished_before = self.finished

    def enter(self, trial_id: int, stage: str) -> None:
        """A trial is in a stage now."""
        self.running[trial_id] = stage

    def leave(self, trial_id: int, stage: str, status: StageStatus, seconds: float = 0.0) -> None:
        """A trial came out of a stage, in which it spent ``seconds``."""
        if stage in DEVICE_STAGES:
            self.gpu_s += seconds
        self.entered[stage] += 1
        self.through[stage] += status is StageStatus.PASSED
        self.running.pop(trial_id, None)

    def count(self, trial: TrialRecord) -> bool:
        """Count a finished trial; returns whether it is the best so far."""
        self.running.pop(trial.id, None)
        self.finished += 1
        self.stale += 1
        self.verdicts[trial.status.value] += 1
        if trial.status is not TrialStatus.PASSED or trial.score_us is None:
            self.reasons[f"{trial.status.value}: {reason_class(trial.reason)}"] += 1
            return False
        self.passed += 1
        if self.best is None or trial.score_us < self.best.score_us:
            self.best = Best(trial.id, trial.schedule_key, trial.score_us)
            self.stale = 0
            return True
        return False

    def withdraw(self, trial: TrialRecord) -> None:
        """A trial that had passed failed as a finalist."""
        self.passed -= 1
        self.verdicts[TrialStatus.PASSED.value] -= 1
        self.verdicts[trial.status.value] += 1
        self.reasons[f"{trial.status.value}: {reason_class(trial.reason)}"] += 1
        if self.best is not None and self.best.trial_id == trial.id:
            self.best = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since this launch began."""
        return time.monotonic() - self._since

    @property
    def left_s(self) -> float | None:
        """Estimated seconds to the end, from the pace of this launch; None before it has one."""
        done = self.finished - self._finished_before
        if done == 0:
            return None
        return self.elapsed_s / done * max(0, self.target - self.finished)


def reason_class(reason: str) -> str:
    """What rejections of one kind have in common: the reason up to its first detail."""
    head = re.split(r"[,;:(]", reason, maxsplit=1)[0].strip()
    return head if len(head) <= 48 else head[:45] + "..."
