"""Adds exported items to a database, by identity; knows nothing of files.

Works in batches inside the caller's transaction, so that a large import costs
few statements.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.orm import Session

from leaderboard import _rows
from leaderboard._consistent import (
    check_fingerprint,
    check_job,
    check_measurement,
    check_trial,
)
from leaderboard._errors import TransferError
from leaderboard._scores import score_basis
from leaderboard._statements import ADD_ERRORS, ADD_MEASUREMENTS
from leaderboard.models import (
    CampaignRow,
    ClaimRow,
    ErrorRow,
    FingerprintRow,
    JobRow,
    MeasurementRow,
    StageRow,
    TrialRow,
)
from leaderboard.records import (
    FREE_ON_RESUME,
    CampaignRecord,
    ClaimRecord,
    Clock,
    ErrorRecord,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageRecord,
    TrialRecord,
    TrialStatus,
)

__all__ = ["Importer"]

_BATCH = 500
_MUTABLE = {"status", "budget", "updated_at", "driver", "heartbeat_at"}
"""Fields of a campaign that its driver changes while it runs."""
_FINALS = "finals"
_OF_A_VERDICT = {"status", "stage", "reason", "clock", "score_us", "slow_us"}
"""Fields of a passed trial that its finals change if it does not pass them."""


class Importer:
    """One import.

    Attributes
    ----------
    added, skipped : Counter
        Lines by kind.
    """

    def __init__(self, session: Session) -> None:
        self.added: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self._session = session
        self._trial_ids: dict[str, int] = {}
        self._newer: set[str] = set()
        """Campaigns that come in a later state than the stored one."""
        self._passed: list[int] = []
        self._times: list[tuple[str, MeasurementRecord]] = []

    def add(self, item: dict[str, Any]) -> None:
        """Add one exported item.

        Raises
        ------
        TransferError
            If it contradicts what is stored, or its kind is unknown.
        ValueError
            If it is not a valid record.
        """
        kind = item.pop("kind")
        handlers = {
            "fingerprint": self._fingerprint,
            "campaign": self._campaign,
            "job": self._job,
            "trial": self._trial,
            "measurement": self._measurement,
            "claim": self._claim,
        }
        if kind not in handlers:
            raise TransferError(f"unknown kind {kind!r}")
        handlers[kind](item)

    def finish(self) -> None:
        """Write what is still held back and check every passed trial that was added.

        Raises
        ------
        TransferError, StoreError
            If a measured score is not made of stored times.
        """
        self._flush_times()
        for start in range(0, len(self._passed), _BATCH):
            self._check(self._passed[start : start + _BATCH])

    def _insert(self, row: FingerprintRow | CampaignRow | JobRow | TrialRow | ClaimRow) -> None:
        # At once: later rows refer to it, and the order of a flush follows
        # relationships, of which these tables declare none.
        self._session.add(row)
        self._session.flush()

    def _count(self, kind: str, added: bool) -> None:
        (self.added if added else self.skipped)[kind] += 1

    def _fingerprint(self, item: dict[str, Any]) -> None:
        record = FingerprintRecord.model_validate(item)
        check_fingerprint(record)
        row = self._session.get(FingerprintRow, record.id)
        if row is None:
            self._insert(FingerprintRow(id=record.id, contents=record.values))
        elif not _same(_rows.fingerprint_record(row), record):
            raise TransferError(f"fingerprint {record.id} is stored with other contents")
        self._count("fingerprint", row is None)

    def _campaign(self, item: dict[str, Any]) -> None:
        record = CampaignRecord.model_validate(item)
        row = self._session.get(CampaignRow, record.id)
        self._count("campaign", row is None)
        if row is None:
            self._insert(_rows.campaign_row(record))
            return
        stored = _rows.campaign_record(row)
        for name in _rows.CAMPAIGN_FIELDS:
            if name not in _MUTABLE and not _same(_fixed(stored, name), _fixed(record, name)):
                raise TransferError(f"campaign {record.id} is stored with another {name}")
        # A campaign that is driven here knows its own state better.
        if row.driver is None and record.updated_at > stored.updated_at:
            row.status, row.budget, row.config = record.status.value, record.budget, record.config
            row.updated_at = record.updated_at
            self._newer.add(record.id)

    def _job(self, item: dict[str, Any]) -> None:
        record = JobRecord.model_validate(item)
        machine = self._session.get(FingerprintRow, record.fingerprint_id)
        config = self._session.scalar(
            sa.select(CampaignRow.config).where(CampaignRow.id == record.campaign_id)
        )
        check_job(record, None if machine is None else machine.contents, config)
        row = self._session.get(JobRow, record.id)
        self._count("job", row is None)
        if row is None:
            self._insert(_rows.job_row(record))
            return
        stored = _rows.job_record(row)
        closing = {"status", "ended_at", "drift", "note", "details"}
        if not _same(stored.model_dump(exclude=closing), record.model_dump(exclude=closing)):
            raise TransferError(f"job {record.id} is stored with other contents")
        if _same(stored, record) or record.status is JobStatus.OPEN:
            return
        if stored.status is not JobStatus.OPEN:
            raise TransferError(
                f"job {record.id} is stored as {stored.status} and comes as {record.status}"
            )
        row.status, row.ended_at = record.status.value, record.ended_at
        row.drift, row.note, row.details = record.drift, record.note, record.details

    def _trial(self, item: dict[str, Any]) -> None:
        record = TrialRecord.model_validate({**item, "id": 0})
        if not record.uid:
            raise TransferError("a trial has no uid")
        if record.status is TrialStatus.RUNNING:
            raise TransferError(f"trial {record.uid} is still running: it is no result")
        check_trial(record)
        row = self._session.scalars(sa.select(TrialRow).where(TrialRow.uid == record.uid)).first()
        self._count("trial", row is None)
        if row is None:
            self._insert_trial(record)
            return
        self._trial_ids[record.uid] = row.id
        stored = _rows.trial_record(row)
        bare = record.model_copy(update={"id": row.id, "stages": (), "errors": ()})
        if _lost_its_finals(bare, stored):
            return  # it comes as it was before
        if _lost_its_finals(stored, bare):
            for name in _OF_A_VERDICT:
                value = getattr(record, name)
                setattr(row, name, value.value if name == "status" else value)
        elif not _same(stored, bare):
            raise TransferError(f"trial {record.uid} is stored with other contents")
        self._bring_finals(row, record)

    def _bring_finals(self, row: TrialRow, record: TrialRecord) -> None:
        """What the finals said of a trial that was here before them, or before later ones."""
        said = [(n, s) for n, s in enumerate(record.stages) if s.stage == _FINALS]
        ours = sa.select(sa.func.count()).where(
            StageRow.trial_id == row.id, StageRow.stage == _FINALS
        )
        if not said or (record.campaign_id not in self._newer and self._session.scalar(ours)):
            return
        for model in (StageRow, ErrorRow):
            self._session.execute(
                sa.delete(model).where(model.trial_id == row.id, model.stage == _FINALS)
            )
        self._add_stages(row.id, said, [e for e in record.errors if e.stage == _FINALS])

    def _insert_trial(self, record: TrialRecord) -> None:
        for what, table, key in (
            ("campaign", CampaignRow, record.campaign_id),
            ("job", JobRow, record.job_id),
        ):
            if key is not None and self._session.get(table, key) is None:
                raise TransferError(f"trial {record.uid} is of {what} {key}, which is not here")
        values = record.model_dump(include=set(_rows.TRIAL_FIELDS) - {"id"})
        values["status"] = record.status.value
        values["clock"] = None if record.clock is None else record.clock.value
        clash = self._session.execute(
            sa.select(TrialRow.uid).where(
                TrialRow.campaign_id == record.campaign_id,
                TrialRow.schedule_key == record.schedule_key,
                TrialRow.attempt == record.attempt,
            )
        ).first()
        if clash is not None:
            raise TransferError(
                f"campaign {record.campaign_id} holds another trial of '{record.schedule_key}', "
                f"attempt {record.attempt}: it went on in two places"
            )
        row = TrialRow(**values, finished=True if record.status.finished else None)
        self._insert(row)
        self._trial_ids[record.uid] = row.id
        self._add_stages(row.id, enumerate(record.stages), record.errors)
        if record.status is TrialStatus.PASSED and record.clock is not Clock.MODELLED:
            self._passed.append(row.id)

    def _add_stages(
        self,
        trial_id: int,
        stages: Iterable[tuple[int, StageRecord]],
        errors: Sequence[ErrorRecord],
    ) -> None:
        self._session.add_all(
            StageRow(
                trial_id=trial_id, position=position, **{**s.model_dump(), "status": s.status.value}
            )
            for position, s in stages
        )
        if errors:
            self._session.execute(ADD_ERRORS, [_rows.error_values(trial_id, e) for e in errors])

    def _measurement(self, item: dict[str, Any]) -> None:
        uid, trial_uid = item.pop("uid"), item.pop("trial_uid")
        if not isinstance(uid, str) or not uid:
            raise TransferError("a measurement has no uid")
        if trial_uid is not None and trial_uid not in self._trial_ids:
            raise TransferError(f"measurement {uid} is of trial {trial_uid}, which is not here")
        trial_id = None if trial_uid is None else self._trial_ids[trial_uid]
        record = MeasurementRecord.model_validate({**item, "trial_id": trial_id})
        check_measurement(record, uid)
        self._times.append((uid, record))
        if len(self._times) >= _BATCH:
            self._flush_times()

    def _claim(self, item: dict[str, Any]) -> None:
        record = ClaimRecord.model_validate(item)
        row = self._session.get(ClaimRow, record.id)
        self._count("claim", row is None)
        if row is None:
            job = self._session.get(JobRow, record.job_id)
            if job is None or job.status != JobStatus.VALID.value:
                raise TransferError(f"claim {record.id} rests on job {record.job_id}, not valid")
            self._insert(_rows.claim_row(record))
        elif not _same(_rows.claim_record(row), record):
            raise TransferError(f"claim {record.id} is stored with other contents")

    def _flush_times(self) -> None:
        if not self._times:
            return
        self._session.flush()
        rows = self._session.scalars(
            sa.select(MeasurementRow).where(MeasurementRow.uid.in_([uid for uid, _ in self._times]))
        )
        known = {row.uid: _rows.measurement_record(row) for row in rows}
        for uid, record in self._times:
            if not _same(known.get(uid, record), record):
                raise TransferError(f"measurement {uid} is stored with other contents")
        fresh = [_rows.measurement_values(r, uid) for uid, r in self._times if uid not in known]
        for counter, count in (
            (self.added, len(fresh)),
            (self.skipped, len(self._times) - len(fresh)),
        ):
            if count:
                counter["measurement"] += count
        if fresh:
            self._session.execute(ADD_MEASUREMENTS, fresh)
        self._times.clear()

    def _check(self, ids: Sequence[int]) -> None:
        times: dict[int | None, list[MeasurementRecord]] = defaultdict(list)
        m = MeasurementRow
        rows = sa.select(m).where(m.trial_id.in_(ids), m.phase == "search").order_by(m.id)
        for row in self._session.scalars(rows):
            times[row.trial_id].append(_rows.measurement_record(row))
        trials = (
            sa.select(TrialRow, CampaignRow)
            .join(CampaignRow, CampaignRow.id == TrialRow.campaign_id)
            .where(TrialRow.id.in_(ids))
        )
        for trial, campaign in self._session.execute(trials):
            if trial.job_id is None or trial.clock is None or trial.score_us is None:
                raise TransferError(f"trial {trial.uid} cannot pass: a time belongs to a job")
            basis = score_basis(
                _rows.campaign_record(campaign),
                label=f"trial {trial.uid}",
                clock=Clock(trial.clock),
                job_id=trial.job_id,
                score_us=trial.score_us,
                slow_us=trial.slow_us,
                measurements=times[trial.id],
            )
            if (basis.method, basis.cache) != (trial.method, trial.cache):
                raise TransferError(
                    f"trial {trial.uid} states {trial.method}, {trial.cache} and was read with "
                    f"{basis.method}, {basis.cache}"
                )


def _same(stored: Any, comes: Any) -> bool:
    """Whether they are equal, where a NaN is equal to another."""
    return bool(stored == comes) or _text(stored) == _text(comes)


def _text(value: Any) -> str:
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return json.dumps(plain, default=str, sort_keys=True)


def _fixed(record: CampaignRecord, name: str) -> Any:
    """A field without what may change when a campaign goes on."""
    value = getattr(record, name)
    if name == "config":
        return {key: v for key, v in value.items() if key not in FREE_ON_RESUME}
    return value


def _lost_its_finals(before: TrialRecord, after: TrialRecord) -> bool:
    """Whether they are one trial, which had passed and did not pass the finals."""
    return (
        before.status is TrialStatus.PASSED
        and after.status is not TrialStatus.PASSED
        and after.stage == _FINALS
        and before.model_dump(exclude=_OF_A_VERDICT) == after.model_dump(exclude=_OF_A_VERDICT)
    )
