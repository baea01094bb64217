"""One GPU's part of an executor: a thread that owns a device job from opening to closing.

The job blocks while it gates and times, so it lives beside the driver, which
keeps polling, recording and sending heartbeats.  Candidates waiting for their
turn are prepared (child process started, kernel compiled) ahead of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from candidates import Schedule
from factory.executors.base import (
    DEVICE_STAGES,
    Event,
    Finalist,
    FinalsFinished,
    HarnessFault,
    JobClosed,
    JobOpened,
    StageFinished,
    Task,
    WorkerContext,
)
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import FingerprintRecord, JobRecord, MeasurementRecord, StageStatus

__all__ = ["AHEAD", "DeviceJob", "DeviceLane", "Finals", "OpenJob", "opener"]

AHEAD = 3
"""Candidates prepared at once, the one being measured included."""


class Finals(Protocol):
    """Finalists re-timed together."""

    @property
    def results(self) -> Mapping[Schedule, StageResult]:
        """By schedule, with held-out errors and measurements of phase ``final``."""

    @property
    def order(self) -> Sequence[Schedule]:
        """Those that passed, fastest first."""


class DeviceJob(Protocol):
    """One stretch of measuring on one GPU, as the lane uses it."""

    @property
    def record(self) -> JobRecord: ...

    @property
    def fingerprint(self) -> FingerprintRecord: ...

    def prepare(self, schedule: Schedule) -> Any:
        """Start a child process for a candidate and compile in it; returns at once."""

    def gate(self, handle: Any) -> StageResult: ...

    def screen(self, handle: Any) -> StageResult: ...

    def time(self, handle: Any) -> StageResult: ...

    def release(self, handle: Any) -> None: ...

    def finals(self, schedules: Sequence[Schedule]) -> Finals: ...

    def controls(self) -> tuple[MeasurementRecord, ...]: ...


OpenJob = Callable[[], AbstractContextManager[DeviceJob]]
"""Takes a GPU; called in the thread that will use the job."""


def opener(context: WorkerContext, on_event: Callable[[str, str], None] | None = None) -> OpenJob:
    """How to open the job of this process's first sm90 GPU.

    Parameters
    ----------
    context : WorkerContext
    on_event : callable, optional
        Takes a word and a line, in the lane's thread.
    """

    def open_job() -> AbstractContextManager[DeviceJob]:
        import candidates
        import operations
        from factory import device
        from factory.artefacts import default_store

        job: AbstractContextManager[DeviceJob] = device.open_job(
            operations.get(context.operation),
            candidates.get(context.operation),
            baselines=[
                baseline
                for baseline in candidates.baselines(context.operation)
                if context.controls is None or baseline.name in context.controls
            ],
            seed=None,  # drawn by the job and kept in its record: none can be prepared for
            limits=replace(device.Limits(), **dict[str, Any](context.device)),
            log_dir=context.log_dir,
            on_event=on_event,
            artefacts=default_store(),
        )
        return job

    return open_job


@dataclass
class _Prepared:
    task: Task
    handle: Any


class DeviceLane:
    """Measures one candidate after the other in one job.

    Parameters
    ----------
    open_job : callable
        Returns the context manager of a job; called in the lane's thread.
    emit : callable
        Takes events; called in the lane's thread.
    """

    def __init__(self, open_job: OpenJob, emit: Callable[[Event], None]) -> None:
        self._open_job = open_job
        self._emit = emit
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._finals: tuple[Finalist, ...] | None = None
        self._closing = False
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="device-lane", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a ``measure`` task."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def finals(self, finalists: Sequence[Finalist]) -> None:
        """Queue the re-timing of finalists, after all tasks before it."""
        with self._changed:
            self._finals = tuple(finalists)
            self._changed.notify()

    def close(self, *, cancel: bool) -> None:
        """Finish what is queued, or with ``cancel`` only the stage under way, and end the job."""
        with self._changed:
            self._closing = True
            self._cancelled = self._cancelled or cancel
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        job: DeviceJob | None = None
        controls: tuple[MeasurementRecord, ...] = ()
        try:
            with self._open_job() as job:
                self._emit(JobOpened(job.record, job.fingerprint))
                self._serve(job)
                controls = job.controls()  # takes the closing reading
        except HarnessError as error:
            self._emit(HarnessFault(str(error)))
        except Exception as error:  # noqa: BLE001 - a dead lane must stop the campaign, not hang it
            self._emit(HarnessFault(f"device lane failed: {type(error).__name__}: {error}"))
        if job is not None:
            self._emit(JobClosed(job.record, controls))

    def _serve(self, job: DeviceJob) -> None:
        prepared: deque[_Prepared] = deque()
        try:
            while True:
                with self._changed:
                    while not (self._tasks or prepared or self._finals or self._closing):
                        self._changed.wait()
                    if self._cancelled:
                        return
                    fresh: list[Task] = []
                    while self._tasks and len(prepared) + len(fresh) < AHEAD:
                        fresh.append(self._tasks.popleft())
                    finals = None
                    if not (prepared or fresh):
                        finals, self._finals = self._finals, None
                for task in fresh:
                    prepared.append(_Prepared(task, job.prepare(task.schedule)))
                if prepared:
                    self._measure(job, prepared.popleft())
                elif finals is not None:
                    self._run_finals(job, finals)
                else:  # closing with nothing left
                    return
        finally:
            for left in prepared:
                job.release(left.handle)

    def _measure(self, job: DeviceJob, candidate: _Prepared) -> None:
        trial_id = candidate.task.trial_id
        with _released(job, candidate.handle):
            for stage in DEVICE_STAGES:
                start = time.perf_counter()
                result: StageResult = getattr(job, stage)(candidate.handle)
                seconds = time.perf_counter() - start
                log = getattr(candidate.handle, "log_path", None)
                if log is not None:
                    result = replace(result, details={**result.details, "log": str(log)})
                self._emit(StageFinished(trial_id, stage, result, seconds, job.record.id))
                if result.status is not StageStatus.PASSED or self._cancelled:
                    return

    def _run_finals(self, job: DeviceJob, finalists: tuple[Finalist, ...]) -> None:
        ids = {f.schedule: f.trial_id for f in finalists}
        start = time.perf_counter()
        finals = job.finals([f.schedule for f in finalists])
        self._emit(
            FinalsFinished(
                job_id=job.record.id,
                results={ids[s]: result for s, result in finals.results.items()},
                order=tuple(ids[s] for s in finals.order),
                seconds=time.perf_counter() - start,
            )
        )


@contextmanager
def _released(job: DeviceJob, handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        job.release(handle)
