"""Records for tests: plausible ones, of which a test states what matters to it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

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
)

WORKLOADS = ("2048/12/1", "1024/4/1")
START = datetime(2026, 11, 1, 7, 15, tzinfo=UTC)
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


def job(id_: str = "job-1", campaign_id: str | None = "kda-1", **changes: Any) -> JobRecord:
    values: dict[str, Any] = {
        "id": id_,
        "campaign_id": campaign_id,
        "fingerprint_id": FINGERPRINT.id,
        "gpu": "NVIDIA H200",
        "status": JobStatus.OPEN,
        "started_at": START,
        "seed": 7,
        "details": {"opened": True},
    }
    return JobRecord(**{**values, **changes})


def time(job_id: str, workload: str, median_us: float, **changes: Any) -> MeasurementRecord:
    values: dict[str, Any] = {
        "job_id": job_id,
        "workload": workload,
        "regime": "production",
        "clock": Clock.GPU,
        "cache": "warm",
        "method": "cupti",
        "median_us": median_us,
        "low_us": median_us * 0.99,
        "high_us": median_us * 1.01,
        "samples_us": (median_us * 0.99, median_us, median_us * 1.01),
        "kernels": ("prep", "scan"),
    }
    return MeasurementRecord(**{**values, **changes})


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


def stage(
    name: str = "gate", status: StageStatus = StageStatus.PASSED, **changes: Any
) -> StageRecord:
    return StageRecord(**{"stage": name, "status": status, "seconds": 0.25, **changes})


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
