"""What the campaign's driver asks of an executor, and what it hears back.

An executor runs stages somewhere; it decides nothing and writes no database.
The driver is single-threaded: it submits tasks, polls events and records them.
Everything here is small, frozen and picklable, so that it crosses processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from candidates import Schedule
from factory.stages.base import StageResult
from leaderboard.records import FingerprintRecord, JobRecord, MeasurementRecord

__all__ = [
    "CPU_STAGES",
    "DEVICE_STAGES",
    "Event",
    "Executor",
    "Finalist",
    "FinalsFinished",
    "HarnessFault",
    "JobClosed",
    "JobOpened",
    "Limits",
    "StageFinished",
    "Task",
    "TaskLost",
    "WorkerContext",
]

CPU_STAGES = ("validate", "emulate", "compile")
"""Stages that need no GPU, in the order of the funnel."""

DEVICE_STAGES = ("gate", "screen", "time")
"""Stages of one ``measure`` task, in the order of the funnel."""


@dataclass(frozen=True)
class Limits:
    """Wall-clock limits of one CPU stage of one trial, in seconds.

    A stage that outlives its limit is ended and the trial gets the verdict
    ``timeout``.  Compilation has its own limit: it is never part of the time
    of the stages around it.
    """

    emulate_s: float = 300.0
    compile_s: float = 600.0

    def of(self, stage: str) -> float:
        """Limit of a stage by its name."""
        return float(getattr(self, f"{stage}_s"))


@dataclass(frozen=True)
class WorkerContext:
    """What a worker must know to run any stage of one campaign.

    Parameters
    ----------
    campaign_id : str
    operation : str
        Looked up by name in the worker, so that only the name travels.
    seed : int
        Seed of all generated inputs.
    limits : Limits
    log_dir : str
        Folder for trial logs.
    device : Mapping[str, float]
        Limits of a device job by field name of :class:`factory.device.Limits`;
        what is absent keeps its default.
    controls : tuple of str or None
        Baselines timed beside the candidates; None is every one that can run.
    measured : bool
        Whether what passes the CPU stages goes on to a GPU.
    """

    campaign_id: str
    operation: str
    seed: int
    limits: Limits
    log_dir: str
    device: Mapping[str, float] = field(default_factory=dict)
    controls: tuple[str, ...] | None = None
    measured: bool = False


@dataclass(frozen=True)
class Task:
    """One piece of work on one trial.

    Parameters
    ----------
    trial_id : int
    stage : str
        ``emulate``, ``compile`` or ``measure``.  ``measure`` runs
        :data:`DEVICE_STAGES` one after the other on one GPU and reports each
        of them; it stops after the first that does not pass.
    schedule : Schedule
    log_path : str
        File to which the stage's own output is appended.
    """

    trial_id: int
    stage: str
    schedule: Schedule
    log_path: str


@dataclass(frozen=True)
class Finalist:
    """A candidate to be re-timed against the others."""

    trial_id: int
    schedule: Schedule


@dataclass(frozen=True)
class StageFinished:
    """A stage came to a verdict; ``job_id`` is set for device stages."""

    trial_id: int
    stage: str
    result: StageResult
    seconds: float
    job_id: str | None = None


@dataclass(frozen=True)
class TaskLost:
    """The process of a task died or outlived its limit."""

    trial_id: int
    stage: str
    kind: Literal["crashed", "timeout"]
    reason: str
    seconds: float


@dataclass(frozen=True)
class HarnessFault:
    """The machine or the harness failed; no verdict on any candidate."""

    message: str
    trial_id: int | None = None
    stage: str | None = None


@dataclass(frozen=True)
class JobOpened:
    """A GPU was taken and its smoke checks passed."""

    job: JobRecord
    fingerprint: FingerprintRecord


@dataclass(frozen=True)
class JobClosed:
    """A GPU was given back: final state of the job and all readings of its controls."""

    job: JobRecord
    controls: tuple[MeasurementRecord, ...]


@dataclass(frozen=True)
class FinalsFinished:
    """Finalists re-timed together in one job, with held-out shapes.

    Parameters
    ----------
    job_id : str
    results : Mapping[int, StageResult]
        By trial.
    order : tuple of int
        Trials that passed, fastest first.
    seconds : float
    """

    job_id: str
    results: Mapping[int, StageResult] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    seconds: float = 0.0


Event: TypeAlias = StageFinished | TaskLost | HarnessFault | JobOpened | JobClosed | FinalsFinished


class Executor(Protocol):
    """Runs tasks; used by one driver thread only."""

    cpu_slots: int
    """``emulate`` and ``compile`` tasks that keep it busy."""
    gpu_slots: int
    """``measure`` tasks worth holding, prepared-ahead ones included; 0 without a GPU."""

    def submit(self, task: Task) -> None:
        """Queue a task; returns at once."""

    def finals(self, finalists: Sequence[Finalist]) -> None:
        """Queue the re-timing of finalists; answered by one :class:`FinalsFinished`."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait up to ``timeout_s`` for something to report; an empty list means nothing did."""

    def close(self, *, cancel: bool = False) -> list[Event]:
        """End all work and give everything back; idempotent.

        With ``cancel`` running tasks are killed instead of awaited.  Returns
        the last events, a :class:`JobClosed` for every job among them.
        """
