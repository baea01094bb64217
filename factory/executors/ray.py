"""The executor of a cluster: CPU stages as Ray tasks, one actor for each GPU.

It only moves work and events.  Stages run in the same child processes and the
same device job as under the inline executor; the driver alone writes.

A process that dies takes no result with it that was reported: each stage of a
trial is reported once.  The trial that was under way is lost, which the driver
forgives once; those that waited behind it go elsewhere.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from factory.errors import MachineError
from factory.executors._ray_cluster import Cluster, join, start
from factory.executors._ray_remote import MeasureActor, Note, OpenJobIn, run_task
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
    TaskLost,
    WorkerContext,
)
from factory.executors.lane import AHEAD
from leaderboard.records import JobRecord, JobStatus, StageStatus

__all__ = ["RayExecutor"]

_START_S = 300.0
"""Until an actor answers: its GPU may have to be let go by somebody else first."""
_FAILURES = 3
"""Deaths in a row, without a finished trial between them, that are the machine's fault."""
_OPENINGS = 6
"""Tries to open a GPU whose last owner died and may not have let go of it yet."""
_PAUSE_S = 5.0
"""Between two of them."""
_CANCEL_S = 180.0
"""For the stage under way on a GPU when everything is to end."""
_CLOSE_S = 3600.0
"""For the last reading of all controls, each of which has limits of its own."""
_NODE_LOSSES = 3
"""Times that a task may lose its machine."""
_POLLING = "polling"


@dataclass
class _Running:
    """A CPU task somewhere in the cluster."""

    task: Task
    since: float
    machines_lost: int = 0


@dataclass
class _Gpu:
    """One GPU and, most of the time, the actor that holds it."""

    number: int
    actor: Any = None
    poll: Any = None
    since: float = 0.0
    heard: bool = False
    job: JobRecord | None = None
    tasks: dict[int, Task] = field(default_factory=dict)
    """By trial, in the order of work: the first is being measured."""
    finals: tuple[Finalist, ...] | None = None
    deaths: int = 0
    """In a row, without a finished trial between them."""
    refusals: int = 0
    """Openings in a row that failed."""
    not_before: float = 0.0


class RayExecutor:
    """Runs a campaign's stages on a Ray cluster.

    Without an address a cluster of this machine is started and ended; a Ray
    that this process runs already is used and left running.

    Parameters
    ----------
    context : WorkerContext
    workers : int
        CPU tasks at once; 0 means one for each CPU, less a few beside a GPU.
    address : str, optional
        Cluster to join; the project's code is sent to it.
    measured : bool
        Whether GPUs are wanted: all that are free.
    open_job : callable, optional
        Takes the context and opens the job of the GPU that is visible to the
        actor; picklable.
    gpus : int, optional
        Most GPUs to use, and those that a cluster started here announces;
        default: all.
    note : callable, optional
        Takes lines for the campaign's view.

    Raises
    ------
    MachineError
        Ray is missing, does not start or does not answer, or a GPU was asked
        for and the cluster has none free.
    """

    def __init__(
        self,
        context: WorkerContext,
        *,
        workers: int = 0,
        address: str | None = None,
        measured: bool = False,
        open_job: OpenJobIn | None = None,
        gpus: int | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self._note = note or logging.getLogger(__name__).info
        self._cluster: Cluster = (
            start(workers=workers, measured=measured, most_ahead=AHEAD + 1, gpus=gpus)
            if address is None
            else join(address, context.operation, most_ahead=AHEAD + 1)
        )
        self._ray = self._cluster.ray
        free = self._cluster.gpus if gpus is None else min(gpus, self._cluster.gpus)
        count = free if measured else 0
        if measured and not count:
            self._cluster.close()
            raise MachineError(
                f"the Ray cluster{f' at {address}' if address else ''} has no free GPU; add a node "
                "with one, wait for it, or rank with --clock modelled"
            )
        self._workers = workers or max(1, self._cluster.cpus - self._cluster.spare * count)
        self.cpu_slots = self._workers + 1
        self.gpu_slots = (AHEAD + 1) * count
        self._context = context
        self._open_job = open_job
        self._run = self._ray.remote(num_cpus=1, num_gpus=0, max_retries=0)(run_task)
        self._actor = self._ray.remote(
            num_gpus=1,
            num_cpus=self._cluster.spare,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={_POLLING: 1},  # beside the calls that keep their order
        )(MeasureActor)
        self._ahead: deque[_Running] = deque()
        self._running: dict[Any, _Running] = {}
        self._measure: deque[Task] = deque()
        self._finals: tuple[Finalist, ...] | None = None
        self._finals_lost = 0
        self._reported: dict[int, int] = {}
        """Device stages of a trial that are recorded as passed."""
        self._gpus = [_Gpu(number) for number in range(count)]
        self._closed = self._ending = False

    # -- the executor's interface --------------------------------------------------

    def submit(self, task: Task) -> None:
        """Queue a task; see :class:`factory.executors.base.Executor`."""
        if task.stage != "measure":
            self._ahead.append(_Running(task, time.monotonic()))
        elif self._gpus:
            self._measure.append(task)
        else:
            raise ValueError("a measure task needs a GPU")
        self._assign()

    def finals(self, finalists: Sequence[Finalist]) -> None:
        """Queue the re-timing of finalists, all in one job."""
        if not self._gpus:
            raise ValueError("finals need a GPU")
        self._finals = tuple(finalists)
        self._assign()

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait up to ``timeout_s`` for events."""
        self._assign()
        waiting = [*self._running, *(g.poll for g in self._gpus if g.poll is not None)]
        if not waiting:
            time.sleep(timeout_s)
            return []
        try:
            ready, _ = self._ray.wait(waiting, num_returns=1, timeout=timeout_s)
            if ready:
                ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        except self._ray.exceptions.RayError as error:
            return [HarnessFault(f"the Ray cluster is gone: {_last_line(error)}")]
        events: list[Event] = []
        for ref in ready:
            if ref in self._running:
                events += self._cpu_event(ref)
            else:
                events += self._gpu_events(next(g for g in self._gpus if g.poll == ref))
        for gpu in list(self._gpus):
            if gpu.actor is not None and not gpu.heard and time.monotonic() - gpu.since > _START_S:
                events += self._unopened(gpu, f"Ray started no actor for it in {_START_S:g} s")
        self._assign()
        return events

    def close(self, *, cancel: bool = False) -> list[Event]:
        """End all work; see :class:`factory.executors.base.Executor`."""
        if self._closed:
            return []
        self._closed = True
        events: list[Event] = []
        try:
            if cancel:
                self._drop_cpu_tasks()
            while not cancel and self._busy() and not _faults(events):
                events += self.poll(0.5)
            self._ending = True
            events += self._close_gpus(cancel=cancel)
            self._drop_cpu_tasks()
        except self._ray.exceptions.RayError as error:
            events.append(HarnessFault(f"the Ray cluster is gone: {_last_line(error)}"))
        finally:
            self._cluster.close()
        return events

    # -- CPU tasks -----------------------------------------------------------------

    def _assign(self) -> None:
        """Give out what waits: CPU tasks to Ray, candidates and finals to GPUs."""
        while self._ahead and len(self._running) < self._workers:
            work = self._ahead.popleft()
            ship = self._cluster.address is not None
            task = work.task if ship else replace(work.task, log_path=_absolute(work.task.log_path))
            work.since = time.monotonic()
            self._running[self._run.remote(self._context, task, ship_log=ship)] = work
        if self._ending:
            return
        for gpu in self._gpus:
            if gpu.actor is None and time.monotonic() >= gpu.not_before:
                self._start(gpu)
        while self._measure:
            free = [g for g in self._gpus if g.actor is not None and len(g.tasks) < AHEAD]
            if not free:
                break
            # An opened job first: one that is still opening would only hold the candidate.
            gpu = min(free, key=lambda g: (g.job is None, len(g.tasks), g.number))
            task = self._measure.popleft()
            gpu.tasks[task.trial_id] = task
            gpu.actor.submit.remote(task)
        if self._finals is not None:
            idle = [g for g in self._gpus if g.job is not None and not g.tasks]
            if idle:
                gpu, gpu.finals = idle[0], self._finals
                self._finals = None
                gpu.actor.finals.remote(gpu.finals)

    def _cpu_event(self, ref: Any) -> list[Event]:
        work = self._running.pop(ref)
        task = work.task
        errors = self._ray.exceptions
        try:
            event, log = self._ray.get(ref)
        except (errors.RayTaskError, errors.RuntimeEnvSetupError) as error:
            message = f"{task.stage} task failed: {_last_line(error)}"
            return [HarnessFault(message, task.trial_id, task.stage)]
        except errors.NodeDiedError as error:
            # A machine that goes away says nothing about the candidate.
            if work.machines_lost + 1 >= _NODE_LOSSES:
                message = f"lost {_NODE_LOSSES} machines in a row: {_last_line(error)}"
                return [HarnessFault(message, task.trial_id, task.stage)]
            self._ahead.appendleft(replace(work, machines_lost=work.machines_lost + 1))
            return []
        except errors.RayError as error:
            seconds = time.monotonic() - work.since
            reason = f"Ray worker lost in {task.stage} ({type(error).__name__})"
            return [TaskLost(task.trial_id, task.stage, "crashed", reason, seconds)]
        if log and task.log_path:
            path = Path(task.log_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as out:
                out.write(log)
        return [event]

    def _drop_cpu_tasks(self) -> None:
        self._ahead.clear()
        for ref in self._running:
            # Ray may have ended already, or the task with it.
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(ref, force=True)
        self._running.clear()

    # -- GPUs ----------------------------------------------------------------------

    def _start(self, gpu: _Gpu) -> None:
        folder = str(Path.cwd()) if self._cluster.address is None else None
        gpu.actor = self._actor.remote(self._context, folder, self._open_job)
        gpu.poll = gpu.actor.poll.options(concurrency_group=_POLLING).remote()
        gpu.since, gpu.heard, gpu.job = time.monotonic(), False, None

    def _gpu_events(self, gpu: _Gpu) -> list[Event]:
        errors = self._ray.exceptions
        try:
            messages, over = self._ray.get(gpu.poll)
        except errors.RayTaskError as error:
            return [HarnessFault(f"the actor of GPU {gpu.number} failed: {_last_line(error)}")]
        except errors.RayError as error:
            return self._died(gpu, _last_line(error))
        gpu.heard = True
        gpu.poll = None if over else gpu.actor.poll.options(concurrency_group=_POLLING).remote()
        events: list[Event] = []
        for message in messages:
            if isinstance(message, Note):
                self._note(str(message))
            elif isinstance(message, HarnessFault) and gpu.job is None:
                return events + self._unopened(gpu, message.message)
            else:
                events += self._gpu_event(gpu, message)
        return events

    def _gpu_event(self, gpu: _Gpu, event: Event) -> list[Event]:
        match event:
            case JobOpened():
                gpu.job, gpu.refusals = event.job, 0
            case JobClosed():
                gpu.job = None
            case FinalsFinished():
                gpu.finals = None
            case StageFinished():
                return self._stage_finished(gpu, event)
        return [event]

    def _stage_finished(self, gpu: _Gpu, event: StageFinished) -> list[Event]:
        """Report a stage unless it was: a trial that moved to another GPU repeats some."""
        trial = event.trial_id
        if trial not in gpu.tasks:
            return []
        passed = event.result.status is StageStatus.PASSED
        index, reported = DEVICE_STAGES.index(event.stage), self._reported.get(trial, 0)
        if not passed or event.stage == DEVICE_STAGES[-1]:
            del gpu.tasks[trial]
            gpu.deaths = 0
            self._reported.pop(trial, None)
        else:
            self._reported[trial] = max(reported, index + 1)
        if index >= reported:
            return [event]
        if passed:
            return []
        # It passed this stage once; its second, worse answer ends it at the next one.
        reason = f"at its second {event.stage}: {event.result.reason}"
        stage, result = DEVICE_STAGES[reported], replace(event.result, reason=reason)
        return [replace(event, stage=stage, result=result)]

    def _died(self, gpu: _Gpu, why: str) -> list[Event]:
        """An actor is gone, and its job with it."""
        events: list[Event] = []
        where = f"the process that held GPU {gpu.number} died"
        self._note(f"{where}: {why}")
        seconds = time.monotonic() - gpu.since
        if gpu.job is not None:
            events.append(_void(gpu.job, where))
            if gpu.tasks:
                trial = next(iter(gpu.tasks))
                del gpu.tasks[trial]
                stage = DEVICE_STAGES[self._reported.get(trial, 0)]
                events.append(TaskLost(trial, stage, "crashed", f"{where} in {stage}", seconds))
        if gpu.finals is not None:
            self._finals_lost += 1
            self._finals, gpu.finals = gpu.finals, None
            if self._finals_lost > 1:
                events.append(HarnessFault(f"{where} in the finals, for the second time"))
        self._vacate(gpu)
        gpu.deaths += 1
        if gpu.deaths >= _FAILURES:
            events.append(HarnessFault(f"{where} {gpu.deaths} times in a row: {why}"))
        return events

    def _unopened(self, gpu: _Gpu, why: str) -> list[Event]:
        """No job came to be: tried again where another was, else this GPU is done without."""
        self._vacate(gpu)
        gpu.refusals += 1
        if gpu.deaths and gpu.refusals < _OPENINGS:
            self._note(f"GPU {gpu.number} does not open yet: {why}")
            return []
        if len(self._gpus) == 1:
            return [HarnessFault(why)]
        self._note(f"GPU {gpu.number} is left out: {why}")
        self._gpus.remove(gpu)
        self.gpu_slots = (AHEAD + 1) * len(self._gpus)
        return []

    def _vacate(self, gpu: _Gpu) -> None:
        """Forget the actor; what waited for it goes to another, or to its successor."""
        self._measure.extendleft(reversed(gpu.tasks.values()))
        gpu.tasks.clear()
        if gpu.actor is not None:
            self._ray.kill(gpu.actor)
        gpu.actor = gpu.poll = gpu.job = None
        gpu.not_before = time.monotonic() + _PAUSE_S

    def _busy(self) -> bool:
        waiting = self._ahead or self._running or self._measure or self._finals is not None
        return bool(waiting) or any(g.tasks or g.finals is not None for g in self._gpus)

    def _close_gpus(self, *, cancel: bool) -> list[Event]:
        events: list[Event] = []
        for gpu in self._gpus:
            if gpu.actor is not None and gpu.job is None:  # it has nothing to say yet
                self._ray.kill(gpu.actor)
                gpu.actor = gpu.poll = None
        live = [g for g in self._gpus if g.actor is not None]
        for gpu in live:
            gpu.actor.close.remote(cancel=cancel)
        end = time.monotonic() + (_CANCEL_S if cancel else _CLOSE_S)
        while polls := [g.poll for g in live if g.poll is not None]:
            ready, _ = self._ray.wait(polls, num_returns=1, timeout=1.0)
            for gpu in [g for g in live if g.poll in ready]:
                events += self._gpu_events(gpu)
            if time.monotonic() > end:
                break
        for gpu in live:
            if gpu.job is not None:
                events.append(_void(gpu.job, "it did not end in time"))
            if gpu.actor is not None:
                self._ray.kill(gpu.actor)
        return events


def _void(job: JobRecord, note: str) -> JobClosed:
    return JobClosed(job.model_copy(update={"status": JobStatus.VOID, "note": note}), ())


def _faults(events: Sequence[Event]) -> bool:
    return any(isinstance(event, HarnessFault) for event in events)


def _absolute(path: str) -> str:
    """A task runs in Ray's own working directory."""
    return os.path.abspath(path) if path else path


def _last_line(error: BaseException) -> str:
    """Ray's errors are pages that end, or begin, with what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback" in lines[0] or "ray::" in lines[0] else lines[0]
