"""The executor of one machine: worker processes for CPU stages, a lane for its GPU."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait

from factory.executors.base import Event, Finalist, Task, WorkerContext
from factory.executors.lane import AHEAD, DeviceLane, OpenJob
from factory.executors.pool import ProcessPool
from factory.machine import cpu_count

__all__ = ["InlineExecutor"]


class InlineExecutor:
    """Runs everything on this machine; needs no cluster.

    Parameters
    ----------
    context : WorkerContext
    workers : int
        CPU worker processes; 0 means one for each CPU, less a few beside a GPU.
    open_job : callable, optional
        Opens the GPU's job; without it nothing can be measured.
    """

    def __init__(
        self, context: WorkerContext, *, workers: int = 0, open_job: OpenJob | None = None
    ) -> None:
        # Timing reads host clocks too: leave it, and what is prepared ahead, CPUs of their own.
        spared = AHEAD + 1 if open_job is not None else 0
        count = workers or max(1, cpu_count() - spared)
        self.cpu_slots = count + 1  # one waits, so that no worker idles between two polls
        self.gpu_slots = AHEAD + 1 if open_job is not None else 0
        self._pool = ProcessPool(context, count)
        self._events: deque[Event] = deque()
        self._wakeup, self._waker = os.pipe()
        self._lane = DeviceLane(open_job, self._emit) if open_job is not None else None
        self._closed = False

    def submit(self, task: Task) -> None:
        """Queue a task; see :class:`factory.executors.base.Executor`."""
        if task.stage != "measure":
            self._pool.submit(task)
        elif self._lane is not None:
            self._lane.submit(task)
        else:
            raise ValueError("a measure task needs a GPU job")

    def finals(self, finalists: Sequence[Finalist]) -> None:
        """Queue the re-timing of finalists."""
        if self._lane is None:
            raise ValueError("finals need a GPU job")
        self._lane.finals(finalists)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait up to ``timeout_s`` for events."""
        deadline = self._pool.next_deadline()
        timeout = timeout_s if deadline is None else min(timeout_s, deadline + 0.01)
        wait([self._wakeup, *self._pool.handles()], timeout=timeout)
        return [*self._pool.collect(), *self._from_lane()]

    def close(self, *, cancel: bool = False) -> list[Event]:
        """End all work; see :class:`factory.executors.base.Executor`."""
        if self._closed:
            return []
        self._closed = True
        events = self._pool.close(cancel=cancel)
        if self._lane is not None:
            self._lane.close(cancel=cancel)
        events += self._from_lane()
        os.close(self._wakeup)
        os.close(self._waker)
        return events

    def _emit(self, event: Event) -> None:
        """Called in the lane's thread: append, then wake the driver."""
        self._events.append(event)
        os.write(self._waker, b".")

    def _from_lane(self) -> list[Event]:
        # Bytes before events: an event taken without its byte only makes the
        # next poll return early, a byte taken without its event would delay it.
        while wait([self._wakeup], timeout=0):
            os.read(self._wakeup, 4096)
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events
