"""An executor of many fake devices: what is left of a campaign's time is the driver's own.

CPU stages are answered at once and a device is busy for a fixed time with each candidate, three
candidates at most waiting at it, as under the real executors.  The answers are a function of the
schedule.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from toy_wide import score

from candidates import Schedule
from factory.executors.base import (
    DEVICE_STAGES,
    Event,
    Finalist,
    FinalsFinished,
    JobClosed,
    JobOpened,
    StageFinished,
    Task,
)
from factory.executors.lane import AHEAD
from factory.stages.base import StageResult
from leaderboard.records import (
    Clock,
    ErrorRecord,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageStatus,
)

FINGERPRINT = FingerprintRecord.of({"gpu": "FAKE H200"})
SHAPES = {"64": 0.5, "256": 2.0}
"""Time on each workload over the score, their geomean."""
_SAMPLES = 30
_ERROR = ErrorRecord(
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


def new_job(name: str) -> JobRecord:
    return JobRecord(
        id=name,
        campaign_id=None,
        fingerprint_id=FINGERPRINT.id,
        gpu="FAKE H200",
        status=JobStatus.OPEN,
        started_at=datetime.now(UTC),
    )


def times(
    job: str,
    us: float,
    *,
    trial: int | None = None,
    control: str | None = None,
    phase: str = "search",
) -> tuple[MeasurementRecord, ...]:
    """Three clocks at production gates and one at slow ones, each with its samples."""
    found = []
    for regime, slower, clocks in (
        ("production", 1.0, (Clock.GPU, Clock.PER_CALL, Clock.PIPELINED)),
        ("slow", 2.0, (Clock.GPU,)),
    ):
        for workload, share in SHAPES.items():
            for clock in clocks:
                median = us * slower * share
                found.append(
                    MeasurementRecord(
                        job_id=job,
                        trial_id=trial,
                        control=control,
                        workload=workload,
                        regime=regime,
                        clock=clock,
                        cache="warm",
                        method="fake",
                        median_us=median,
                        low_us=median,
                        high_us=median,
                        samples_us=(median,) * _SAMPLES,
                        kernels=("toy",),
                        phase=phase,
                    )
                )
    return tuple(found)


def passed(job: str, schedule: Schedule, *, phase: str = "search") -> StageResult:
    """What the last stage says of a schedule."""
    us = score(schedule)
    return StageResult(
        StageStatus.PASSED,
        measurements=times(job, us, trial=0, phase=phase),
        score_us=us,
        slow_us=2.0 * us,
    )


@dataclass
class Device:
    job: JobRecord
    waiting: deque[Task] = field(default_factory=deque)
    busy_s: float = 0.0
    free_since: float | None = None
    idle_s: float = 0.0
    """Between the first of its candidates and the last."""


class Fleet:
    """``devices`` fake GPUs, each ``trial_s`` seconds busy with a candidate."""

    def __init__(self, devices: int, trial_s: float) -> None:
        self.cpu_slots = devices + 1
        self.gpu_slots = (AHEAD + 1) * devices
        self.devices = [Device(new_job(f"job-{n}")) for n in range(devices)]
        self._trial_s = trial_s
        self._events: deque[Event] = deque(JobOpened(d.job, FINGERPRINT) for d in self.devices)
        self._due: list[tuple[float, int]] = []
        self._queue: deque[Task] = deque()
        self._idle = deque(range(devices))
        self._places = deque(range(devices))
        self.waited_s = 0.0
        """That the driver waited for this executor: all the rest is its own work."""

    def submit(self, task: Task) -> None:
        if task.stage != "measure":
            wrong = task.stage == "emulate" and task.schedule.get("order") == "c"
            result = StageResult(StageStatus.PASSED)
            if wrong:
                error = _ERROR.model_copy(update={"max_rel": 0.1, "within": False})
                result = StageResult(StageStatus.REJECTED, "y off", errors=(error,))
            self._events.append(StageFinished(task.trial_id, task.stage, result, 0.001))
            return
        if self._idle:
            number = self._idle.popleft()
            self.devices[number].waiting.append(task)
            self._start(number, time.monotonic())
            return
        for _ in self.devices:  # in turn, those that are full left out unless all are
            self._places.rotate(-1)
            if len(self.devices[self._places[0]].waiting) <= AHEAD:
                break
        self.devices[self._places[0]].waiting.append(task)

    def _start(self, number: int, now: float) -> None:
        device = self.devices[number]
        if device.free_since is not None:
            device.idle_s += now - device.free_since
            device.free_since = None
        heapq.heappush(self._due, (now + self._trial_s, number))

    def finals(self, finalists: Sequence[Finalist]) -> None:
        job = self.devices[0].job.id
        results = {f.trial_id: passed(job, f.schedule, phase="final") for f in finalists}
        order = sorted(results, key=lambda t: results[t].score_us or 0.0)
        self._events.append(FinalsFinished(job, results, tuple(order), 0.0))

    def poll(self, timeout_s: float) -> list[Event]:
        found = [self._events.popleft() for _ in range(len(self._events))]
        if not found and self._due:
            left = min(timeout_s, self._due[0][0] - time.monotonic())
            if left > 0:
                time.sleep(left)
                self.waited_s += left
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, number = heapq.heappop(self._due)
            device = self.devices[number]
            task = device.waiting.popleft()
            device.busy_s += self._trial_s
            for stage in DEVICE_STAGES[:-1]:
                errors = (_ERROR,) if stage == "gate" else ()
                result = StageResult(StageStatus.PASSED, errors=errors)
                found.append(StageFinished(task.trial_id, stage, result, 0.0, device.job.id))
            last = passed(device.job.id, task.schedule)
            found.append(
                StageFinished(task.trial_id, DEVICE_STAGES[-1], last, self._trial_s, device.job.id)
            )
            if device.waiting:  # it did not wait for us to look
                self._start(number, due)
            else:
                device.free_since = due
                self._idle.append(number)
        return found

    def close(self, *, cancel: bool = False) -> list[Event]:
        closed = {"status": JobStatus.VOID if cancel else JobStatus.VALID, "drift": 0.0}
        return [
            JobClosed(
                d.job.model_copy(update=closed),
                times(d.job.id, 110.0, control="peer", phase="before"),
            )
            for d in self.devices
        ]
