"""The one writer of the leaderboard, and how to open it.

Every method is one transaction: after ``kill -9`` it happened or it did not.
Rules that a row alone can break are in :mod:`leaderboard.models`; those that
need several rows (a score needs all its times, one driver a campaign, a
schedule finishes once) are here.  Knows nothing of torch, operations or
candidates.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from leaderboard import _rows
from leaderboard._base import (
    campaign_by_id,
    held_error,
    insert_measurements,
    job_by_id,
    now_utc,
    rows_changed,
    trial_by_id,
)
from leaderboard._engine import describe, make_engine, normalise
from leaderboard._errors import StoreError, UnknownError
from leaderboard._lease import driver_name, is_stale
from leaderboard._trials import TrialStore
from leaderboard.models import CampaignRow, ClaimRow, FingerprintRow, JobRow, TrialRow
from leaderboard.records import (
    CampaignRecord,
    CampaignStatus,
    ClaimRecord,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    TrialStatus,
)

__all__ = ["DEFAULT_URL", "Store", "open_store"]

DEFAULT_URL = "sqlite:///factory.db"
"""The database in the working directory."""


def open_store(url: str, *, read_only: bool = False) -> Store:
    """Open a leaderboard, creating or upgrading its schema unless ``read_only``.

    Parameters
    ----------
    url : str
        ``sqlite:///FILE`` (WAL) or ``postgresql://USER@HOST/NAME`` (psycopg 3).
    read_only : bool
        Refuse every write, and create nothing.

    Raises
    ------
    StoreError
        Nonsense URL, unwritable path, missing driver, not a database, or one
        written by a newer version; one line each.
    """
    parsed = normalise(url)
    engine = make_engine(parsed, read_only=read_only)
    return Store(engine, name=describe(parsed), read_only=read_only)


class Store(TrialStore):
    """Reads and writes records; made by :func:`open_store`.

    Attributes
    ----------
    name : str
        What to call it in messages; no password in it.
    read_only : bool

    Notes
    -----
    Safe to use from several threads, but for one in memory, as the shipped results are:
    that is for the thread which opened it.  Do not carry one across ``fork``.
    """

    # Campaigns and their lease -----------------------------------------------

    def create_campaign(self, record: CampaignRecord) -> CampaignRecord:
        """Add a campaign under its own id; refuse an id that is taken.

        A ``driver`` in the record is not a lease: call :meth:`acquire`.
        """
        with self.writing() as session:
            if session.get(CampaignRow, record.id) is not None:
                raise StoreError(f"campaign {record.id} already exists in {self.name}")
            row = _rows.campaign_row(record)
            row.driver = row.heartbeat_at = None
            session.add(row)
            session.flush()
            return _rows.campaign_record(row)

    def get_campaign(self, ref: str | None = None) -> CampaignRecord:
        """Campaign by id, else the newest of that name; None means the newest of all.

        Raises
        ------
        UnknownError
            If there is none; the message suggests the nearest.
        """
        query = sa.select(CampaignRow).order_by(
            CampaignRow.created_at.desc(), CampaignRow.id.desc()
        )
        with self.reading() as session:
            if ref is None:
                row = session.scalars(query.limit(1)).first()
                if row is None:
                    raise UnknownError(f"{self.name} holds no campaign yet; start with launch")
                return _rows.campaign_record(row)
            row = session.get(CampaignRow, ref)
            if row is None:
                row = session.scalars(query.where(CampaignRow.name == ref).limit(1)).first()
            if row is None:
                pairs = session.execute(sa.select(CampaignRow.id, CampaignRow.name)).all()
                known = sorted({text for pair in pairs for text in pair})
                near = difflib.get_close_matches(ref, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UnknownError(f"no campaign {ref!r} in {self.name}{hint}")
            return _rows.campaign_record(row)

    def list_campaigns(self) -> list[CampaignRecord]:
        """All campaigns, oldest first."""
        query = sa.select(CampaignRow).order_by(CampaignRow.created_at, CampaignRow.id)
        with self.reading() as session:
            return [_rows.campaign_record(row) for row in session.scalars(query)]

    def acquire(self, campaign_id: str, driver: str | None = None) -> CampaignRecord:
        """Become the campaign's driver.

        Parameters
        ----------
        campaign_id : str
        driver : str, optional
            ``host:pid``; this process by default.

        Raises
        ------
        HeldError
            If another driver holds it and is not stale: its process is alive,
            or on another host, and its last sign is at most ``LEASE_SECONDS`` old.
        """
        driver = driver or driver_name()
        now = now_utc()
        with self.writing() as session:
            row = campaign_by_id(session, campaign_id)
            if (
                row.driver is not None
                and row.driver != driver
                and not is_stale(row.driver, row.heartbeat_at, now)
            ):
                raise held_error(row, now)
            row.driver, row.heartbeat_at, row.updated_at = driver, now, now
            session.flush()
            record = _rows.campaign_record(row)
        self._held[campaign_id] = driver
        return record

    def heartbeat(self, campaign_id: str) -> None:
        """Renew the lease; every write of a trial does too.

        Raises
        ------
        HeldError
            If another driver took the campaign over.
        """
        with self.writing() as session:
            self._renew(session, campaign_id)

    def release(self, campaign_id: str) -> None:
        """Give the lease back; nothing happens if it was not held or was lost."""
        driver = self._held.pop(campaign_id, None)
        if driver is None:
            return
        with self.writing() as session:
            session.execute(
                sa.update(CampaignRow)
                .where(CampaignRow.id == campaign_id, CampaignRow.driver == driver)
                .values(driver=None, heartbeat_at=None)
            )

    def set_campaign_status(
        self,
        campaign_id: str,
        status: CampaignStatus,
        *,
        budget: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> CampaignRecord:
        """Set the status and, when resuming with others, the total budget and configuration."""
        with self.writing() as session:
            row = self._renew(session, campaign_id)
            row.status, row.updated_at = status.value, now_utc()
            if budget is not None:
                row.budget = budget
            if config is not None:
                row.config = dict(config)
            session.flush()
            return _rows.campaign_record(row)

    # Fingerprints, jobs and times outside a stage ----------------------------

    def put_fingerprint(self, record: FingerprintRecord) -> None:
        """Store a fingerprint once; its id is the hash of its contents."""
        with self.writing() as session:
            row = session.get(FingerprintRow, record.id)
            if row is None:
                session.add(FingerprintRow(id=record.id, contents=record.values))
            elif _rows.fingerprint_record(row) != record:
                raise StoreError(f"fingerprint {record.id} is stored with other contents")

    def get_fingerprint(self, fingerprint_id: str) -> FingerprintRecord:
        with self.reading() as session:
            row = session.get(FingerprintRow, fingerprint_id)
            if row is None:
                raise UnknownError(f"no fingerprint {fingerprint_id!r} in {self.name}")
            return _rows.fingerprint_record(row)

    def open_job(self, record: JobRecord) -> None:
        """Begin a stretch of measuring; its fingerprint must be stored."""
        if record.status is not JobStatus.OPEN:
            raise StoreError(f"job {record.id} must be opened with status open")
        with self.writing() as session:
            if record.campaign_id is not None:
                self._renew(session, record.campaign_id)
            if session.get(FingerprintRow, record.fingerprint_id) is None:
                raise StoreError(f"job {record.id}: store its fingerprint first")
            session.add(_rows.job_row(record))

    def close_job(
        self,
        job_id: str,
        status: JobStatus,
        *,
        drift: float | None = None,
        note: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> JobRecord:
        """End a job as valid, or as void: then none of its times rank.

        ``details`` are added to those that the job was opened with.
        """
        if status is JobStatus.OPEN:
            raise StoreError(f"job {job_id} can be closed as valid or void only")
        with self.writing() as session:
            row = job_by_id(session, job_id)
            if row.campaign_id is not None:
                self._renew(session, row.campaign_id)
            if row.status != JobStatus.OPEN.value:
                raise StoreError(f"job {job_id} is already closed as {row.status}")
            row.status, row.ended_at, row.drift, row.note = status.value, now_utc(), drift, note
            row.details = {**row.details, **(details or {})}
            session.flush()
            return _rows.job_record(row)

    def void_open_jobs(self, campaign_id: str, note: str) -> int:
        """Close what a killed driver left open as void; returns how many."""
        with self.writing() as session:
            self._renew(session, campaign_id)
            return rows_changed(
                session,
                sa.update(JobRow)
                .where(JobRow.campaign_id == campaign_id, JobRow.status == JobStatus.OPEN.value)
                .values(status=JobStatus.VOID.value, ended_at=now_utc(), note=note),
            )

    def get_job(self, job_id: str) -> JobRecord:
        with self.reading() as session:
            return _rows.job_record(job_by_id(session, job_id, lock=False))

    def list_jobs(self, campaign_id: str) -> list[JobRecord]:
        """Jobs of one campaign, oldest first."""
        query = (
            sa.select(JobRow)
            .where(JobRow.campaign_id == campaign_id)
            .order_by(JobRow.started_at, JobRow.id)
        )
        with self.reading() as session:
            return [_rows.job_record(row) for row in session.scalars(query)]

    def add_measurements(self, measurements: Sequence[MeasurementRecord]) -> None:
        """Add times of controls, and of finalists after their trial ended.

        Raises
        ------
        StoreError
            If a job is closed, or a time belongs to a trial that did not pass.
        """
        with self.writing() as session:
            for job_id in sorted({m.job_id for m in measurements}):
                self._open(session, job_id)
            trial_ids = {m.trial_id for m in measurements if m.trial_id is not None}
            for trial_id in sorted(trial_ids):
                row = trial_by_id(session, trial_id)
                if row.status != TrialStatus.PASSED.value:
                    raise StoreError(f"trial {trial_id} is {row.status}: it carries no time")
            insert_measurements(session, measurements)

    # Claims ------------------------------------------------------------------

    def add_claim(self, record: ClaimRecord) -> None:
        """Store what an exported folder was seen to do; a stored claim is never changed.

        Raises
        ------
        StoreError
            If the job is not valid, the trial did not pass, or the superseded claim is of
            another operation or was superseded already.
        """
        with self.writing() as session:
            job = job_by_id(session, record.job_id)
            if job.status != JobStatus.VALID.value:
                raise StoreError(f"job {job.id} is {job.status}: nothing can be claimed from it")
            trial = session.scalars(
                sa.select(TrialRow).where(TrialRow.uid == record.trial_uid)
            ).first()
            if trial is None or trial.status != TrialStatus.PASSED.value:
                raise StoreError(f"no passed trial {record.trial_uid} in {self.name}")
            if trial.campaign_id != record.campaign_id:
                raise StoreError(f"trial {record.trial_uid} is not of {record.campaign_id}")
            if record.supersedes is not None:
                older = session.get(ClaimRow, record.supersedes)
                if older is None or older.operation != record.operation:
                    raise StoreError(f"no claim {record.supersedes!r} of {record.operation}")
                newer = session.scalars(
                    sa.select(ClaimRow.id).where(ClaimRow.supersedes == record.supersedes)
                ).first()
                if newer is not None:
                    raise StoreError(f"claim {record.supersedes} was superseded by {newer}")
            session.add(_rows.claim_row(record))
