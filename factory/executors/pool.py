"""Worker processes for CPU stages: each task alone with its limit, none able to harm another.

A process that dies or outlives its limit takes its own task with it and is
replaced; the other workers do not notice.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from factory.executors._worker import worker_main
from factory.executors.base import (
    Event,
    HarnessFault,
    StageFinished,
    Task,
    TaskLost,
    WorkerContext,
)

__all__ = ["ProcessPool"]

_START_LIMIT_S = 180.0
"""Time a worker may take to import torch and the family before it counts as broken."""

_STARTS = 3
"""Workers in a row that may die before they are ready until the machine is blamed."""


@dataclass
class _Worker:
    process: BaseProcess
    tasks: Connection
    lifeline: Connection
    started: float
    ready: bool = False
    task: Task | None = None
    task_started: float = 0.0


class ProcessPool:
    """Runs ``emulate`` and ``compile`` tasks in child processes.

    Parameters
    ----------
    context : WorkerContext
    workers : int
        Processes; each uses one thread.
    """

    def __init__(self, context: WorkerContext, workers: int) -> None:
        self._context = context
        # A server process forks the workers: torch is imported once, and no
        # lock or thread of the driver is ever copied into a worker.
        self._mp = multiprocessing.get_context("forkserver")
        self._mp.set_forkserver_preload(["torch", "factory.executors._worker"])
        self._waiting: deque[Task] = deque()
        self._workers: list[_Worker] = []
        self._size = workers
        self._stillborn = 0
        """Workers in a row that died before they were ready."""

    def submit(self, task: Task) -> None:
        """Queue a task and start a worker for it if one may still be started."""
        self._waiting.append(task)
        idle = sum(w.task is None for w in self._workers)
        if idle < len(self._waiting) and len(self._workers) < self._size:
            self._workers.append(self._start())
        self._assign()

    def handles(self) -> list[Connection | int]:
        """What to wait on for :meth:`collect` to have something to do."""
        found: list[Connection | int] = []
        for worker in self._workers:
            found += [worker.tasks, worker.process.sentinel]
        return found

    def next_deadline(self) -> float | None:
        """Seconds until the first limit runs out; None when nothing runs."""
        now = time.monotonic()
        left = []
        for worker in self._workers:
            if worker.task is not None:
                limit = self._context.limits.of(worker.task.stage)
                left.append(worker.task_started + limit - now)
            elif not worker.ready:
                left.append(worker.started + _START_LIMIT_S - now)
        return max(0.0, min(left)) if left else None

    def collect(self) -> list[Event]:
        """Answers, deaths and overruns since the last call; does not wait."""
        events: list[Event] = []
        for worker in list(self._workers):
            # Asked before reading: what it answered before it died still counts.
            ended = not worker.process.is_alive()
            events += self._read(worker)
            events += self._check(worker, ended=ended)
        self._assign()
        return events

    def close(self, *, cancel: bool) -> list[Event]:
        """End all workers; without ``cancel`` queued and running tasks are finished first."""
        events: list[Event] = []
        while not cancel and (self._waiting or any(w.task for w in self._workers)):
            wait(self.handles(), timeout=self.next_deadline())
            events += self.collect()
        self._waiting.clear()
        for worker in self._workers:
            self._stop(worker)
        self._workers.clear()
        return events

    def _start(self) -> _Worker:
        tasks, child_tasks = self._mp.Pipe()
        child_lifeline, lifeline = self._mp.Pipe(duplex=False)
        process = self._mp.Process(
            target=worker_main,
            args=(self._context, child_tasks, child_lifeline),
            daemon=True,
        )
        process.start()
        child_tasks.close()
        child_lifeline.close()
        return _Worker(process, tasks, lifeline, time.monotonic())

    def _assign(self) -> None:
        for worker in list(self._workers):
            if not self._waiting:
                return
            if worker.ready and worker.task is None:
                task = self._waiting.popleft()
                try:
                    worker.tasks.send(task)
                except OSError:  # died while idle; its sentinel replaces it
                    self._waiting.appendleft(task)
                    continue
                worker.task = task
                worker.task_started = time.monotonic()

    def _read(self, worker: _Worker) -> list[Event]:
        events: list[Event] = []
        try:
            while worker.tasks.poll():
                kind, payload, seconds = worker.tasks.recv()
                if kind == "ready":
                    worker.ready = True
                    self._stillborn = 0
                    continue
                task, worker.task = worker.task, None
                if kind == "result" and task is not None:
                    events.append(StageFinished(task.trial_id, task.stage, payload, seconds))
                else:
                    where = (task.trial_id, task.stage) if task else (None, None)
                    events.append(HarnessFault(str(payload), *where))
        except (EOFError, OSError):
            pass  # it is dying: the sentinel tells, and the exit code says how
        return events

    def _check(self, worker: _Worker, *, ended: bool) -> list[Event]:
        task = worker.task
        if ended:
            how = _how(worker.process.exitcode)
            if task is None and not worker.ready:
                # Somebody may have killed it; one that cannot start says so, or dies again.
                self._stillborn += 1
                once_more = self._stillborn < _STARTS
                self._replace(worker, start=once_more)
                return [] if once_more else [HarnessFault(f"worker did not start: it {how}")]
            seconds = time.monotonic() - worker.task_started
            events: list[Event] = []
            if task is not None:
                reason = f"worker {how} in {task.stage}"
                events.append(TaskLost(task.trial_id, task.stage, "crashed", reason, seconds))
            try:
                self._replace(worker)
            except OSError as error:  # the server of workers is gone too
                events.append(HarnessFault(f"a worker {how} and no other can be started: {error}"))
            return events
        now = time.monotonic()
        if task is not None:
            limit = self._context.limits.of(task.stage)
            seconds = now - worker.task_started
            if seconds > limit:
                self._replace(worker)
                reason = f"{task.stage} took longer than its limit of {limit:g} s"
                return [TaskLost(task.trial_id, task.stage, "timeout", reason, seconds)]
        elif not worker.ready and now - worker.started > _START_LIMIT_S:
            self._replace(worker, start=False)
            return [HarnessFault(f"worker did not start within {_START_LIMIT_S:g} s")]
        return []

    def _replace(self, worker: _Worker, *, start: bool = True) -> None:
        self._stop(worker)
        self._workers.remove(worker)
        if start:
            self._workers.append(self._start())

    def _stop(self, worker: _Worker) -> None:
        pid = worker.process.pid
        if worker.ready and pid is not None and worker.process.is_alive():
            with suppress(ProcessLookupError):  # it may be gone between the two lines
                os.killpg(pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join()
        worker.tasks.close()
        worker.lifeline.close()


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"died of {signal.Signals(-exitcode).name}"
    return f"exited with code {exitcode}"
