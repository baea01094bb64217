"""Where stages run: on this machine (``inline``) or on a cluster (``ray``)."""

from __future__ import annotations

from factory.executors.base import (
    Event,
    Executor,
    Finalist,
    FinalsFinished,
    HarnessFault,
    JobClosed,
    JobOpened,
    Limits,
    StageFinished,
    Task,
    TaskLost,
    WorkerContext,
)

__all__ = [
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
