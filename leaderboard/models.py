"""Tables of the leaderboard.

Rows mirror the records of :mod:`leaderboard.records`; the rules that a single
row can break are CHECK and UNIQUE constraints here, the rest is the store's.
Names carry the prefix ``kf_``, so that a database may be shared with others
(Optuna's tables are called ``trials`` and ``alembic_version``).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from leaderboard._types import JsonValue, UtcDateTime

__all__ = [
    "Base",
    "CampaignRow",
    "ClaimRow",
    "ErrorRow",
    "FingerprintRow",
    "JobRow",
    "MeasurementRow",
    "StageRow",
    "TrialRow",
    "table",
]

# SQLite numbers rows by itself only for a column typed exactly INTEGER.
_RowId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Declarative base; its metadata is what the migrations must arrive at."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own spelling
        str: Text,
        int: Integer,
        float: Double,
        bool: Boolean,
        datetime: UtcDateTime,
        dict[str, Any]: JsonValue,
        list[Any]: JsonValue,
    }


class FingerprintRow(Base):
    """Machine and toolchain."""

    __tablename__ = "kf_fingerprints"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    contents: Mapped[dict[str, Any]]


class CampaignRow(Base):
    """One search and its lease."""

    __tablename__ = "kf_campaigns"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), index=True)
    operation: Mapped[str] = mapped_column(String(128), index=True)
    operation_version: Mapped[str] = mapped_column(String(64))
    family: Mapped[str] = mapped_column(String(128))
    source_hash: Mapped[str] = mapped_column(String(64))
    config: Mapped[dict[str, Any]]
    space_hash: Mapped[str] = mapped_column(String(64))
    space: Mapped[dict[str, Any]]
    seed: Mapped[int] = mapped_column(BigInteger)
    budget: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))
    clock: Mapped[str] = mapped_column(String(16))
    workloads: Mapped[list[Any]]
    ranking_regime: Mapped[str] = mapped_column(String(64))
    slow_regime: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    driver: Mapped[str | None]
    heartbeat_at: Mapped[datetime | None]

    __table_args__ = (CheckConstraint("budget >= 1", name="budget"),)


class JobRow(Base):
    """One stretch of measuring on one GPU."""

    __tablename__ = "kf_jobs"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    campaign_id: Mapped[str | None] = mapped_column(ForeignKey("kf_campaigns.id"), index=True)
    fingerprint_id: Mapped[str] = mapped_column(ForeignKey("kf_fingerprints.id"))
    gpu: Mapped[str] = mapped_column(String(128))
    status: Mapped[str] = mapped_column(String(16))
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    drift: Mapped[float | None]
    note: Mapped[str]
    seed: Mapped[int | None] = mapped_column(BigInteger)
    details: Mapped[dict[str, Any]]


class TrialRow(Base):
    """One schedule of one campaign.

    ``finished`` is true or NULL, never false: NULLs are distinct in a UNIQUE
    constraint, so a schedule may be abandoned and begun again, but finishes
    once.
    """

    __tablename__ = "kf_trials"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    campaign_id: Mapped[str] = mapped_column(ForeignKey("kf_campaigns.id"))
    number: Mapped[int]
    schedule_key: Mapped[str] = mapped_column(String(512))
    schedule: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(String(16))
    stage: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str]
    attempt: Mapped[int]
    finished: Mapped[bool | None]
    clock: Mapped[str | None] = mapped_column(String(16))
    score_us: Mapped[float | None]
    slow_us: Mapped[float | None]
    method: Mapped[str | None] = mapped_column(String(64))
    cache: Mapped[str | None] = mapped_column(String(16))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("kf_jobs.id"), index=True)
    source_hash: Mapped[str] = mapped_column(String(64))
    gate_bound: Mapped[float | None]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    log_path: Mapped[str | None]

    __table_args__ = (
        UniqueConstraint("campaign_id", "schedule_key", "finished"),
        UniqueConstraint("campaign_id", "schedule_key", "attempt"),
        UniqueConstraint("campaign_id", "number", "attempt"),
        CheckConstraint(
            "(status = 'passed' AND score_us IS NOT NULL AND score_us > 0 AND clock IS NOT NULL)"
            " OR (status <> 'passed' AND score_us IS NULL AND slow_us IS NULL)",
            name="only_passed_has_time",
        ),
        CheckConstraint(
            "(status IN ('running', 'abandoned')) = (finished IS NULL)", name="finished"
        ),
        Index("ix_kf_trials_campaign_id_status", "campaign_id", "status"),
        # Equal up to the score is what may be ordered without looking elsewhere: the best of
        # each such run are the first rows of it (see leaderboard._top).
        Index(
            "ix_kf_trials_ranking",
            "status",
            "campaign_id",
            "job_id",
            "clock",
            "method",
            "cache",
            "source_hash",
            "score_us",
            "id",
        ),
    )


class StageRow(Base):
    """What one stage said of one trial."""

    __tablename__ = "kf_stages"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("kf_trials.id"))
    position: Mapped[int]
    stage: Mapped[str] = mapped_column(String(32))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str]
    seconds: Mapped[float]
    details: Mapped[dict[str, Any]]

    __table_args__ = (UniqueConstraint("trial_id", "stage"),)


class ErrorRow(Base):
    """Error of one output of one trial against the oracle."""

    __tablename__ = "kf_errors"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("kf_trials.id"), index=True)
    stage: Mapped[str] = mapped_column(String(32))
    regime: Mapped[str] = mapped_column(String(64))
    workload: Mapped[str] = mapped_column(String(128))
    tensor: Mapped[str] = mapped_column(String(64))
    scope: Mapped[str] = mapped_column(String(64))
    max_rel: Mapped[float | None]
    rms_rel: Mapped[float | None]
    finite: Mapped[bool]
    within: Mapped[bool]
    seed: Mapped[int] = mapped_column(BigInteger)
    out_of_contract: Mapped[bool]


class MeasurementRow(Base):
    """One time of a trial or of a control."""

    __tablename__ = "kf_measurements"

    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    uid: Mapped[str] = mapped_column(String(32), unique=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("kf_jobs.id"))
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("kf_trials.id"), index=True)
    control: Mapped[str | None] = mapped_column(String(128))
    workload: Mapped[str] = mapped_column(String(128))
    regime: Mapped[str] = mapped_column(String(64))
    clock: Mapped[str] = mapped_column(String(16))
    cache: Mapped[str] = mapped_column(String(16))
    method: Mapped[str] = mapped_column(String(64))
    input_form: Mapped[str] = mapped_column(String(16))
    median_us: Mapped[float]
    low_us: Mapped[float]
    high_us: Mapped[float]
    samples_us: Mapped[list[Any]]
    kernels: Mapped[list[Any]]
    held_out: Mapped[bool]
    phase: Mapped[str] = mapped_column(String(16))

    __table_args__ = (
        CheckConstraint("(trial_id IS NULL) <> (control IS NULL)", name="one_owner"),
        CheckConstraint(
            "0 < low_us AND low_us <= median_us AND median_us <= high_us", name="ordered"
        ),
        Index("ix_kf_measurements_job_id_control", "job_id", "control"),
    )


class ClaimRow(Base):
    """An exported folder that passed the export gate."""

    __tablename__ = "kf_claims"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    operation: Mapped[str] = mapped_column(String(128), index=True)
    operation_version: Mapped[str] = mapped_column(String(64))
    family: Mapped[str] = mapped_column(String(128))
    export_hash: Mapped[str] = mapped_column(String(64), index=True)
    source_hash: Mapped[str] = mapped_column(String(64))
    table: Mapped[list[Any]]
    campaign_id: Mapped[str] = mapped_column(ForeignKey("kf_campaigns.id"))
    trial_uid: Mapped[str] = mapped_column(ForeignKey("kf_trials.uid"))
    job_id: Mapped[str] = mapped_column(ForeignKey("kf_jobs.id"))
    gpu: Mapped[str] = mapped_column(String(128))
    score_us: Mapped[float]
    slow_us: Mapped[float | None]
    held_out_us: Mapped[float | None]
    candidate_us: Mapped[float]
    candidate_held_out_us: Mapped[float | None]
    ratio: Mapped[float]
    held_out_ratio: Mapped[float | None]
    bound: Mapped[float]
    control: Mapped[str | None] = mapped_column(String(128))
    control_form: Mapped[str | None] = mapped_column(String(16))
    control_us: Mapped[float | None]
    control_ratio: Mapped[float | None]
    kernels: Mapped[list[Any]]
    details: Mapped[dict[str, Any]]
    supersedes: Mapped[str | None] = mapped_column(ForeignKey("kf_claims.id"))
    created_at: Mapped[datetime]

    __table_args__ = (
        CheckConstraint("0 < score_us AND 0 < candidate_us", name="timed"),
        CheckConstraint(
            "ratio <= bound AND (held_out_ratio IS NULL OR held_out_ratio <= bound)", name="within"
        ),
        UniqueConstraint("export_hash", "job_id"),
    )


def table(model: type[Base]) -> Table:
    """Table of a model, for statements that make no objects: the writes of every trial."""
    found = model.__table__
    assert isinstance(found, Table)
    return found
