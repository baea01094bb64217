"""Records for leaderboard tests: one small campaign with two shapes."""

from __future__ import annotations

from typing import Any

import pytest
from record_makers import (
    FINGERPRINT,
    START,
    WORKLOADS,
    begin,
    campaign,
    error,
    job,
    stage,
    time,
)

from leaderboard import Clock, StageStatus, Store, TrialRecord, TrialStatus

__all__ = [
    "FINGERPRINT",
    "START",
    "WORKLOADS",
    "begin",
    "campaign",
    "controls",
    "error",
    "failed",
    "job",
    "modelled",
    "on_sqlite",
    "passed",
    "stage",
    "time",
    "times",
]

on_sqlite = pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
"""For what only a file can be: tests otherwise run on both databases."""


def times(job_id: str, trial_id: int, production_us: float, slow_us: float, **changes: Any):
    """One time on every workload: twice and half, so that the geomean is as stated."""
    return [
        time(job_id, workload, us * factor, trial_id=trial_id, regime=regime, **changes)
        for regime, us in (("production", production_us), ("slow", slow_us))
        for workload, factor in zip(WORKLOADS, (2.0, 0.5), strict=True)
    ]


def controls(
    job_id: str,
    us: float,
    name: str = "flashkda",
    phases: tuple[str, ...] = ("before", "after"),
    **changes: Any,
):
    return [
        time(job_id, workload, us * factor, control=name, phase=phase, **changes)
        for phase in phases
        for workload, factor in zip(WORKLOADS, (2.0, 0.5), strict=True)
    ]


def passed(
    store: Store,
    number: int,
    job_id: str,
    us: float,
    slow_us: float = 50.0,
    campaign_id: str = "kda-1",
    **changes: Any,
) -> TrialRecord:
    """A trial gated and timed on every workload."""
    trial = begin(store, number, campaign_id, **changes)
    store.record_stage(trial.id, stage("gate"), errors=[error()])
    store.record_stage(trial.id, stage("time"), measurements=times(job_id, trial.id, us, slow_us))
    return store.finish_trial(
        trial.id,
        TrialStatus.PASSED,
        clock=Clock.GPU,
        score_us=us,
        slow_us=slow_us,
        job_id=job_id,
    )


def modelled(store: Store, number: int, us: float, campaign_id: str = "kda-1") -> TrialRecord:
    trial = begin(store, number, campaign_id)
    store.record_stage(trial.id, stage("emulate"))
    return store.finish_trial(trial.id, TrialStatus.PASSED, clock=Clock.MODELLED, score_us=us)


def failed(
    store: Store, number: int, status: TrialStatus, reason: str, campaign_id: str = "kda-1"
) -> TrialRecord:
    trial = begin(store, number, campaign_id)
    store.record_stage(trial.id, stage("validate"))
    store.record_stage(trial.id, stage("emulate", StageStatus(status.value), reason=reason))
    return store.finish_trial(trial.id, status, reason=reason)
