"""A device job without a device: verdicts and times by rule, faults on request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from candidates import Schedule
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import (
    Clock,
    ErrorRecord,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageStatus,
)

WORKLOADS = {"64": 10.0, "256": 40.0}


@dataclass(frozen=True)
class FakeFinals:
    results: dict[Schedule, StageResult]
    order: tuple[Schedule, ...]


@dataclass
class FakeJob:
    """Block 1 fails the gate, block 2 is hopeless, the others take their block's time."""

    breaks_at: str = ""
    number: int = 0
    during: Callable[[str], object] = lambda what: None
    """Called inside each call, with its name and schedule: what happens meanwhile."""
    calls: list[str] = field(default_factory=list)
    prepared: set[str] = field(default_factory=set)
    most_prepared: int = 0
    thread: int | None = None

    def __post_init__(self) -> None:
        self.fingerprint = FingerprintRecord.of({"gpu": "FAKE H200"})
        self.record = JobRecord(
            id=f"job-{self.number}",
            campaign_id=None,
            fingerprint_id=self.fingerprint.id,
            gpu="FAKE H200",
            status=JobStatus.OPEN,
            started_at=datetime.now(UTC),
        )

    def __enter__(self) -> FakeJob:
        self._called("open")
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._called("close")
        assert not self.prepared, "a handle was not released"
        self.record = self.record.model_copy(
            update={
                "status": JobStatus.VOID if error else JobStatus.VALID,
                "ended_at": datetime.now(UTC),
                "drift": 0.01,
                "note": "cut short" if error else "",
            }
        )

    def prepare(self, schedule: Schedule) -> Schedule:
        self._called("prepare", schedule)
        self.prepared.add(schedule.key)
        self.most_prepared = max(self.most_prepared, len(self.prepared))
        return schedule

    def release(self, handle: Schedule) -> None:
        self.calls.append(f"release {handle.key}")
        self.prepared.discard(handle.key)

    def gate(self, handle: Schedule) -> StageResult:
        self._called("gate", handle)
        error = ErrorRecord(
            stage="gate",
            regime="production",
            workload="64",
            tensor="y",
            scope="all",
            max_rel=0.001,
            rms_rel=0.001,
            finite=True,
            within=True,
            seed=0,
        )
        if handle["block"] == 1:
            wrong = error.model_copy(update={"max_rel": 0.5, "within": False})
            return StageResult(StageStatus.REJECTED, "regime production: y off", errors=(wrong,))
        return StageResult(StageStatus.PASSED, errors=(error,))

    def screen(self, handle: Schedule) -> StageResult:
        self._called("screen", handle)
        if handle["block"] == 2:
            return StageResult(StageStatus.SLOW, "9 times the best", {"estimate_us": 900.0})
        return StageResult(StageStatus.PASSED)

    def time(self, handle: Schedule) -> StageResult:
        self._called("time", handle)
        block = int(handle["block"])
        return StageResult(
            StageStatus.PASSED,
            measurements=self._times(float(block), trial_id=0),
            score_us=20.0 * block,
            slow_us=40.0 * block,
        )

    def finals(self, schedules) -> FakeFinals:
        self._called("finals")
        results = {}
        for schedule in schedules:
            block = int(schedule["block"])
            if block == 3:
                results[schedule] = StageResult(StageStatus.REJECTED, "held out 17: y off")
                continue
            results[schedule] = StageResult(
                StageStatus.PASSED,
                measurements=self._times(float(block), trial_id=0, phase="final"),
                score_us=20.0 * block,
            )
        order = [s for s in schedules if results[s].status is StageStatus.PASSED]
        return FakeFinals(results, tuple(sorted(order, key=lambda s: results[s].score_us)))

    def controls(self) -> tuple[MeasurementRecord, ...]:
        self._called("controls")
        return self._times(2.0, control="torch", phase="before")

    def _times(self, factor: float, *, phase="search", trial_id=None, control=None):
        found = []
        for regime, slower in (("production", 1.0), ("slow", 2.0)):
            for workload, us in WORKLOADS.items():
                median = us * factor * slower
                found.append(
                    MeasurementRecord(
                        job_id=self.record.id,
                        trial_id=trial_id,
                        control=control,
                        workload=workload,
                        regime=regime,
                        clock=Clock.GPU,
                        cache="warm",
                        method="fake",
                        median_us=median,
                        low_us=median,
                        high_us=median,
                        kernels=("toy",),
                        phase=phase,
                    )
                )
        return tuple(found)

    def _called(self, what: str, schedule: Schedule | None = None) -> None:
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), "one thread uses a job"
        self.calls.append(f"{what} {schedule.key}" if schedule else what)
        self.during(self.calls[-1])
        if self.breaks_at and what == self.breaks_at:
            raise HarnessError(f"the GPU fell off the bus at {what}")
