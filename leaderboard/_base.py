"""Transactions, the lease and rows by id: what every write of the store rests on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.orm import Session

from leaderboard import _rows
from leaderboard._engine import WRITES, first_line
from leaderboard._errors import HeldError, StoreError, UnknownError
from leaderboard._lease import is_stale
from leaderboard._statements import ADD_MEASUREMENTS, BEAT, LEASE, LOCKED_JOB
from leaderboard.models import CampaignRow, JobRow, TrialRow
from leaderboard.records import JobStatus, MeasurementRecord

__all__ = [
    "BaseStore",
    "campaign_by_id",
    "held_error",
    "insert_measurements",
    "job_by_id",
    "now_utc",
    "rows_changed",
    "trial_by_id",
]

_FRESH = timedelta(seconds=1)
"""A sign of life that young needs no other: busy drivers write far more often."""


class BaseStore:
    """An engine, whether it may be written, and the leases taken through it."""

    def __init__(self, engine: Engine, *, name: str, read_only: bool) -> None:
        self.name = name
        self.read_only = read_only
        self._engine = engine
        self._writer = engine.execution_options(**{WRITES: True})
        self._held: dict[str, str] = {}
        self._path = _path_of(engine)
        self._file = _file_at(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; leases stay until released or stale."""
        self._engine.dispose()

    # Transactions ------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One consistent view of the database, for queries of this package."""
        with _one_line(self.name), Session(self._engine) as session, session.begin():
            if self._engine.dialect.name == "postgresql":  # whose default is a view a statement
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction that commits whole or not at all, for this package.

        Raises
        ------
        StoreError
            If the store is read-only or the database refuses.
        """
        if self.read_only:
            raise StoreError(f"{self.name} is open read-only; name another database with --db")
        if _file_at(self._path) != self._file:
            # What is written now would go to a file that has no name any more.
            raise StoreError(
                f"{self.name} was deleted or replaced while it was in use; put it back, or start "
                "again with another database"
            )
        with (
            _one_line(self.name),
            Session(self._writer, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    def _renew(self, session: Session, campaign_id: str) -> CampaignRow:
        """Lock the campaign and check that nobody else holds it."""
        row = campaign_by_id(session, campaign_id)
        mine, now = self._held.get(campaign_id), now_utc()
        if mine is None:
            # Without a lease one may write only where nobody alive holds one.
            if row.driver is not None and not is_stale(row.driver, row.heartbeat_at, now):
                raise held_error(row, now)
        elif row.driver != mine:
            raise held_error(row, now)
        else:
            row.heartbeat_at = now
        return row

    def _hold(self, session: Session, campaign_id: str) -> None:
        """As :meth:`_renew`, for the writes of every trial: it reads the lease and no more."""
        held = session.execute(LEASE, {"of_campaign": campaign_id}).one_or_none()
        if held is None:
            raise UnknownError(f"no campaign {campaign_id!r}")
        self._check_held(session, held)

    def _check_held(self, session: Session, held: Any) -> None:
        """``held`` has the campaign's id, driver and heartbeat, and is locked."""
        mine, now = self._held.get(held.id), now_utc()
        if mine is None:
            if held.driver is not None and not is_stale(held.driver, held.heartbeat_at, now):
                raise held_error(held, now)
        elif held.driver != mine:
            raise held_error(held, now)
        elif held.heartbeat_at is None or abs(now - held.heartbeat_at) > _FRESH:
            session.execute(BEAT, {"of_campaign": held.id, "now": now})

    def _open(self, session: Session, job_id: str) -> None:
        job = session.execute(LOCKED_JOB, {"of_job": job_id}).one_or_none()
        if job is None:
            raise UnknownError(f"no job {job_id!r}")
        if job.campaign_id is not None:
            self._hold(session, job.campaign_id)
        if job.status != JobStatus.OPEN.value:
            raise StoreError(f"job {job_id} is closed as {job.status}; its times are final")


def _path_of(engine: Engine) -> str | None:
    """Where a SQLite database lies, whatever the working directory becomes; None without one."""
    if engine.dialect.name != "sqlite" or engine.url.database in (None, "", ":memory:"):
        return None
    return os.path.abspath(str(engine.url.database))


def _file_at(path: str | None) -> tuple[int, int] | None:
    """Which file that is; None without one."""
    try:
        found = os.stat(path) if path is not None else None
    except FileNotFoundError:
        found = None
    return None if found is None else (found.st_dev, found.st_ino)


def now_utc() -> datetime:
    return datetime.now(UTC)


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn the database's and the records' errors into one line each."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StoreError(f"{where}: {first['msg']}" if where else first["msg"]) from error
    except DBAPIError as error:
        raise StoreError(f"{name}: {first_line(error)}") from error
    except StatementError as error:  # a value that has no column form
        raise StoreError(f"{name}: {error.orig or error}") from error


def held_error(row: Any, now: datetime) -> HeldError:
    holder = row.driver or "nobody"
    age = 0.0 if row.heartbeat_at is None else max(0.0, (now - row.heartbeat_at).total_seconds())
    return HeldError(
        f"campaign {row.id} is held by {holder} (last sign {age:.0f} s ago); "
        "stop that driver or launch another campaign",
        holder=holder,
        age_seconds=age,
    )


def campaign_by_id(session: Session, campaign_id: str) -> CampaignRow:
    row = session.get(CampaignRow, campaign_id, with_for_update=True)
    if row is None:
        raise UnknownError(f"no campaign {campaign_id!r}")
    return row


def job_by_id(session: Session, job_id: str, *, lock: bool = True) -> JobRow:
    row = session.get(JobRow, job_id, with_for_update=lock)
    if row is None:
        raise UnknownError(f"no job {job_id!r}")
    return row


def trial_by_id(session: Session, trial_id: int) -> TrialRow:
    row = session.get(TrialRow, trial_id, with_for_update=True)
    if row is None:
        raise UnknownError(f"no trial {trial_id}")
    return row


def rows_changed(session: Session, statement: sa.Update) -> int:
    result = session.execute(statement)
    assert isinstance(result, sa.CursorResult)
    return result.rowcount


def insert_measurements(session: Session, measurements: Sequence[MeasurementRecord]) -> None:
    if measurements:
        session.execute(ADD_MEASUREMENTS, [_rows.measurement_values(m) for m in measurements])
