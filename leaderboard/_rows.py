"""Rows to records and back; knows no rules and opens no transactions."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from leaderboard.models import (
    CampaignRow,
    ClaimRow,
    ErrorRow,
    FingerprintRow,
    JobRow,
    MeasurementRow,
    StageRow,
)
from leaderboard.records import (
    CampaignRecord,
    ClaimRecord,
    ErrorRecord,
    FingerprintRecord,
    JobRecord,
    MeasurementRecord,
    StageRecord,
    TrialRecord,
)

__all__ = [
    "CAMPAIGN_FIELDS",
    "TRIAL_FIELDS",
    "campaign_record",
    "campaign_row",
    "claim_record",
    "claim_row",
    "error_record",
    "error_values",
    "fingerprint_record",
    "job_record",
    "job_row",
    "measurement_record",
    "measurement_values",
    "new_uid",
    "stage_record",
    "trial_record",
]

CAMPAIGN_FIELDS = tuple(CampaignRecord.model_fields)
CLAIM_FIELDS = tuple(ClaimRecord.model_fields)
JOB_FIELDS = tuple(JobRecord.model_fields)
STAGE_FIELDS = tuple(StageRecord.model_fields)
ERROR_FIELDS = tuple(ErrorRecord.model_fields)
MEASUREMENT_FIELDS = tuple(MeasurementRecord.model_fields)
TRIAL_FIELDS = tuple(
    name for name in TrialRecord.model_fields if name not in ("stages", "errors", "measurements")
)


def new_uid() -> str:
    """A fresh identity that no other database will give."""
    return uuid.uuid4().hex


def campaign_row(record: CampaignRecord) -> CampaignRow:
    values = record.model_dump()
    values.update(
        status=record.status.value, clock=record.clock.value, workloads=list(record.workloads)
    )
    return CampaignRow(**values)


def campaign_record(row: CampaignRow) -> CampaignRecord:
    return CampaignRecord(**{name: getattr(row, name) for name in CAMPAIGN_FIELDS})


def claim_row(record: ClaimRecord) -> ClaimRow:
    return ClaimRow(**{**record.model_dump(), "kernels": list(record.kernels)})


def claim_record(row: ClaimRow) -> ClaimRecord:
    return ClaimRecord(**{name: getattr(row, name) for name in CLAIM_FIELDS})


def fingerprint_record(row: FingerprintRow) -> FingerprintRecord:
    return FingerprintRecord(id=row.id, values=row.contents)


def job_row(record: JobRecord) -> JobRow:
    return JobRow(**{**record.model_dump(), "status": record.status.value})


def job_record(row: JobRow) -> JobRecord:
    return JobRecord(**{name: getattr(row, name) for name in JOB_FIELDS})


def stage_record(row: StageRow) -> StageRecord:
    return StageRecord(**{name: getattr(row, name) for name in STAGE_FIELDS})


def error_values(trial_id: int, record: ErrorRecord) -> dict[str, Any]:
    return {"trial_id": trial_id, **record.model_dump()}


def error_record(row: ErrorRow) -> ErrorRecord:
    return ErrorRecord(**{name: getattr(row, name) for name in ERROR_FIELDS})


def measurement_values(record: MeasurementRecord, uid: str | None = None) -> dict[str, Any]:
    values = record.model_dump()
    values.update(
        uid=uid or new_uid(),
        clock=record.clock.value,
        samples_us=list(record.samples_us),
        kernels=list(record.kernels),
    )
    return values


def measurement_record(row: MeasurementRow) -> MeasurementRecord:
    return MeasurementRecord(**{name: getattr(row, name) for name in MEASUREMENT_FIELDS})


def trial_record(
    row: Any,
    stages: Iterable[StageRow] = (),
    errors: Iterable[ErrorRow] = (),
    measurements: Iterable[MeasurementRow] = (),
) -> TrialRecord:
    return TrialRecord(
        **{name: getattr(row, name) for name in TRIAL_FIELDS},
        stages=tuple(map(stage_record, stages)),
        errors=tuple(map(error_record, errors)),
        measurements=tuple(map(measurement_record, measurements)),
    )
