"""What runs inside a Ray cluster: one CPU stage as a task, one GPU's job as an actor.

Both are the parts that the inline executor uses, so that a stage cannot come
to another verdict here.  Ray moves the messages; it decides nothing.
"""

from __future__ import annotations

import os
import queue
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

from factory.executors.base import (
    Event,
    Finalist,
    StageFinished,
    Task,
    WorkerContext,
)
from factory.executors.lane import DeviceJob, DeviceLane, opener
from factory.executors.pool import ProcessPool
from factory.stages.base import StageResult

__all__ = ["MeasureActor", "Message", "Note", "OpenJobIn", "run_task"]

OpenJobIn = Callable[[WorkerContext], AbstractContextManager[DeviceJob]]
"""Takes the GPU of the process it is called in."""

_LOG_BYTES = 256 * 1024
"""Of a log that has to travel: the end of it."""
_POLL_S = 20.0

_pools: dict[str, tuple[WorkerContext, ProcessPool]] = {}
"""At most one, of the campaign whose task this process ran last; keyed by its id."""


class Note(str):
    """A line for the campaign's view; no event."""


Message = Event | Note


def run_task(context: WorkerContext, task: Task, *, ship_log: bool) -> tuple[Event, str]:
    """Run a CPU stage in a child process of this one, under its limit.

    Parameters
    ----------
    context : WorkerContext
    task : Task
    ship_log : bool
        Whether the driver cannot read what is written here.

    Returns
    -------
    event : StageFinished, TaskLost or HarnessFault
    log : str
        What the stage printed, if it is shipped.
    """
    pool = _pool(context)
    if not ship_log:
        return _run(pool, task), ""
    with tempfile.TemporaryDirectory(prefix="factory-") as folder:
        path = Path(folder) / "stage.log"
        event = _run(pool, replace(task, log_path=str(path)))
        return event, _tail(path)


def _run(pool: ProcessPool, task: Task) -> Event:
    pool.submit(task)
    while not (events := pool.collect()):
        wait(pool.handles(), timeout=pool.next_deadline())
    return events[0]


def _pool(context: WorkerContext) -> ProcessPool:
    """The child process of this one; it keeps its references between two tasks."""
    held = _pools.get(context.campaign_id)
    if held is None or held[0] != context:
        for _, other in _pools.values():
            other.close(cancel=True)
        _pools.clear()
        held = _pools[context.campaign_id] = context, ProcessPool(context, 1)
    return held[1]


def _tail(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    return data[-_LOG_BYTES:].decode("utf-8", errors="replace")


class MeasureActor:
    """Owns the one GPU that Ray gave to its process, from the opening of the job to its end.

    :meth:`poll` has a thread of its own; the other calls keep their order.

    Parameters
    ----------
    context : WorkerContext
    folder : str or None
        The driver's working directory; None if this machine does not share it.
    open_job : callable, optional
        Default: the job of the first visible sm90 GPU.
    """

    def __init__(
        self, context: WorkerContext, folder: str | None, open_job: OpenJobIn | None = None
    ) -> None:
        self._host = ""
        if folder is not None:
            os.chdir(folder)
        else:
            self._host = socket.gethostname()
            context = replace(context, log_dir=tempfile.mkdtemp(prefix="factory-"))
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        if open_job is not None:
            opened = open_job  # for the closure: it is never None
            self._lane = DeviceLane(lambda: opened(context), self._emit)
        else:
            self._lane = DeviceLane(
                opener(context, lambda word, line: self._messages.put(Note(f"{word}: {line}"))),
                self._emit,
            )

    def submit(self, task: Task) -> None:
        """Queue a ``measure`` task."""
        self._lane.submit(task)

    def finals(self, finalists: Sequence[Finalist]) -> None:
        """Queue the re-timing of finalists."""
        self._lane.finals(finalists)

    def close(self, *, cancel: bool) -> None:
        """End the job; :meth:`poll` gives its last events, then says that it is over."""
        try:
            self._lane.close(cancel=cancel)
        finally:
            self._messages.put(None)

    def poll(self) -> tuple[list[Message], bool]:
        """Wait a while for something to report.

        Returns
        -------
        messages : list of Event or Note
        over : bool
            Whether these were the last.
        """
        found: list[Message] = []
        try:
            message = self._messages.get(timeout=_POLL_S)
            while message is not None:
                found.append(message)
                message = self._messages.get_nowait()
        except queue.Empty:
            return found, False
        return found, True

    def _emit(self, event: Event) -> None:
        if self._host and isinstance(event, StageFinished):
            event = replace(event, result=self._located(event.result))
        self._messages.put(event)

    def _located(self, result: StageResult) -> StageResult:
        """A log that lies on another machine is named with it."""
        log = result.details.get("log")
        if log is None:
            return result
        return replace(result, details={**result.details, "log": f"{self._host}:{log}"})
