"""Records for leaderboard tests: one small campaign with two shapes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leaderboard import (
    CampaignRecord,
    CampaignStatus,
    Clock,
    ErrorRecord,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageRecord,
    StageStatus,
    Store,
    TrialRecord,
    TrialStatus,
)

WORKLOADS = ("2048/12/1", "1024/4/1")
START = datetime(2026, 11, 1, 7, 15, tzinfo=UTC)
on_sqlite = pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
"""For what only a file can be: tests otherwise run on both databases."""
FINGERPRINT = FingerprintRecord.of({"gpu": "NVIDIA H200", "driver": "580.1"})


def campaign(id_: str = "kda-1", *, minutes: int = 0, **changes: Any) -> CampaignRecord:
    moment = START + timedelta(minutes=minutes)
    values: dict[str, Any] = {
        "id": id_,
        "name": "kda",
        "operation": "kda_prefill",
        "operation_version": "1",
        "family": "cute",
        "source_hash": "a" * 64,
        "config": {"budget": 10, "nested": {"seed": [1, 2.5, None, True]}},
        "space_hash": "b" * 64,
        "space": {"bt": [16, 32, 64], "anchor": ["start", "mid"]},
        "seed": 7,
        "budget": 10,
        "status": CampaignStatus.RUNNING,
        "clock": Clock.GPU,
        "workloads": WORKLOADS,
        "created_at": moment,
        "updated_at": moment,
    }
    return CampaignRecord(**{**values, **changes})


def job(id_: str, campaign_id: str | None = "kda-1", gpu: str = "NVIDIA H200") -> JobRecord:
    return JobRecord(
        id=id_,
        campaign_id=campaign_id,
        fingerprint_id=FINGERPRINT.id,
        gpu=gpu,
        status=JobStatus.OPEN,
        started_at=START,
        seed=7,
        details={"opened": True},
    )


def time(
    job_id: str,
    workload: str,
    median_us: float,
    *,
    trial_id: int | None = None,
    control: str | None = None,
    regime: str = "production",
    clock: Clock = Clock.GPU,
    **changes: Any,
) -> MeasurementRecord:
    values: dict[str, Any] = {
        "job_id": job_id,
        "trial_id": trial_id,
        "control": control,
        "workload": workload,
        "regime": regime,
        "clock": clock,
        "cache": "warm",
        "method": "cupti",
        "median_us": median_us,
        "low_us": median_us * 0.99,
        "high_us": median_us * 1.01,
        "samples_us": (median_us * 0.99, median_us, median_us * 1.01),
        "kernels": ("prep", "scan"),
    }
    return MeasurementRecord(**{**values, **changes})


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


def stage(name: str = "gate", status: StageStatus = StageStatus.PASSED, **changes: Any):
    return StageRecord(**{"stage": name, "status": status, "seconds": 0.25, **changes})


def error(**changes: Any) -> ErrorRecord:
    values: dict[str, Any] = {
        "stage": "gate",
        "regime": "production",
        "workload": WORKLOADS[0],
        "tensor": "o",
        "scope": "head 3",
        "max_rel": 0.004,
        "rms_rel": 0.001,
        "finite": True,
        "within": True,
        "seed": 3,
    }
    return ErrorRecord(**{**values, **changes})


def begin(store: Store, number: int, campaign_id: str = "kda-1", **changes: Any) -> TrialRecord:
    schedule: Mapping[str, int | str] = {"bt": 16, "n": number}
    values: dict[str, Any] = {
        "number": number,
        "schedule_key": f"bt=16 n={number}",
        "schedule": schedule,
        "source_hash": "a" * 64,
        "gate_bound": -5.0,
        "log_path": f"logs/{number}.log",
    }
    return store.begin_trial(campaign_id, **{**values, **changes})


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
