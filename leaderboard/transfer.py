"""Campaigns as JSON lines: out and in again without loss or duplication.

One object a line: a header, then fingerprints, campaigns, jobs, trials (with
stages and errors), measurements and claims, then an end line that counts them, so that
a file cut short is noticed.  Identity is by id and uid, never by row number;
importing a file twice changes nothing.  Trials still running are not results
and stay behind, and so do leases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from lzma import LZMAError
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy.orm import Session

from leaderboard import _rows
from leaderboard._errors import StoreError, TransferError, UnknownError
from leaderboard._importer import Importer
from leaderboard._types import encode_json, load_json
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
from leaderboard.records import TrialStatus
from leaderboard.store import Store
from leaderboard.whole_file import open_text, whole_file

__all__ = [
    "FORMAT",
    "VERSION",
    "ImportResult",
    "export_file",
    "export_lines",
    "import_file",
    "import_lines",
    "import_open",
]

FORMAT = "kernel-factory leaderboard"
VERSION = 2
"""Of the lines, raised when an older reader would misread them; 2 may hold claims."""

_BATCH = 500
_LINE = 64 << 20
"""Most characters of a line; that of a trial with all its samples has half a million."""


_UNFIT = (StoreError, KeyError, TypeError, ValueError, OverflowError)
"""What a line raises that is no record, or contradicts what is stored."""


class ImportResult(BaseModel):
    """What an import did; ``skipped`` was there already."""

    model_config = ConfigDict(frozen=True)

    added: dict[str, int]
    skipped: dict[str, int]


def export_lines(store: Store, campaign_ids: Sequence[str] | None = None) -> Iterator[str]:
    """Lines (without line breaks) of these campaigns, or of everything.

    Equal contents give equal lines, in equal order.

    Raises
    ------
    UnknownError
        If there is no campaign of one of these ids.
    """
    count = 0
    yield _line({"kind": "header", "format": FORMAT, "version": VERSION})
    with store.reading() as session:
        for item in _items(session, store.name, campaign_ids):
            count += 1
            yield _line(item)
    yield _line({"kind": "end", "lines": count})


def export_file(store: Store, path: Path, campaign_ids: Sequence[str] | None = None) -> int:
    """Write :func:`export_lines` to ``path``, whole or not at all; returns the lines written.

    Compressed if its name ends in ``.xz``.
    """
    count = 0
    try:
        with whole_file(path) as stream:
            for line in export_lines(store, campaign_ids):
                stream.write(line + "\n")
                count += 1
    except OSError as error:
        raise TransferError(f"cannot write {path}: {error.strerror}") from None
    return count


def import_lines(store: Store, lines: Iterable[str], *, name: str = "input") -> ImportResult:
    """Add what is not there yet, in one transaction.

    Parameters
    ----------
    lines : iterable of str
        As :func:`export_lines` gives them.
    name : str
        What to call the input in messages.

    Raises
    ------
    TransferError
        If the input is not such an export, is of a newer version, is cut
        short, contradicts what is stored, or holds a passed trial without all
        its times.  Nothing is changed then.
    """
    with store.writing() as session:
        importer = Importer(session)
        count, ended = -1, False
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if ended:
                raise TransferError(f"{name} line {number}: something follows the end line")
            item = _parse(line, name, number)
            if count < 0:
                _check_header(item, name)
            elif item["kind"] == "end":
                ended = True
                if item.get("lines") != count:
                    raise TransferError(
                        f"{name} holds {count} lines where its end line counts {item.get('lines')}"
                    )
                continue
            else:
                try:
                    importer.add(item)
                except _UNFIT as error:
                    raise TransferError(f"{name} line {number}: {_why(error)}") from None
            count += 1
        if not ended:
            raise TransferError(f"{name} is cut short: it has no end line")
        try:
            importer.finish()
        except _UNFIT as error:
            raise TransferError(f"{name}: {_why(error)}") from None
        return ImportResult(added=dict(importer.added), skipped=dict(importer.skipped))


def import_file(store: Store, path: Path) -> ImportResult:
    """:func:`import_lines` of a file, which is compressed if its name ends in ``.xz``."""
    try:
        with path.open("rb") as raw:
            return import_open(store, raw, path.name, name=str(path))
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror}") from None


def import_open(store: Store, raw: BinaryIO, file_name: str, *, name: str) -> ImportResult:
    """:func:`import_lines` of an open file.

    Parameters
    ----------
    raw : BinaryIO
    file_name : str
        Its name, whose end tells whether it is compressed.
    name : str
        What to call it in messages.

    Raises
    ------
    OSError
    TransferError
    """
    try:
        with open_text(raw, file_name) as stream:
            return import_lines(store, _bounded(stream, name), name=name)
    except UnicodeDecodeError:
        raise TransferError(f"{name} is not a leaderboard export: it is not text") from None
    except (LZMAError, EOFError) as error:
        raise TransferError(f"{name} is not a whole .xz file: {error}") from None


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        return f"{field}: {first['msg']}" if field else first["msg"].removeprefix("Value error, ")
    return " ".join(str(error).split())


def _bounded(stream: TextIO, name: str) -> Iterator[str]:
    """Its lines, none of which fills the memory: a small compressed file may hold a long one."""
    number = 1
    while line := stream.readline(_LINE + 1):
        if len(line) > _LINE:
            raise TransferError(
                f"{name} line {number} is longer than {_LINE >> 20} MiB: no export writes that"
            )
        yield line
        number += 1


def _parse(line: str, name: str, number: int) -> dict[str, Any]:
    try:
        item = load_json(line, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise TransferError(f"{name} line {number} is not JSON: {error.msg}") from None
    except RecursionError:
        raise TransferError(f"{name} line {number} is nested too deeply") from None
    except ValueError as error:  # a number that is none, or too long to be one
        raise TransferError(f"{name} line {number} is not JSON: {_why(error)}") from None
    if "\\ud" in line or "\\uD" in line:
        _refuse_surrogates(item, name, number)
    if not isinstance(item, dict) or not isinstance(item.get("kind"), str):
        raise TransferError(f"{name} line {number} is not an object with a kind")
    return item


def _refuse_surrogates(item: Any, name: str, number: int) -> None:
    """Half a character, as an escape may spell it, can be neither stored nor printed."""
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise TransferError(f"{name} line {number} holds half a character") from None


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large")
    return value


def _check_header(item: dict[str, Any], name: str) -> None:
    if item["kind"] != "header" or item.get("format") != FORMAT:
        raise TransferError(f"{name} is not a leaderboard export: its first line is no header")
    version = item.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise TransferError(f"{name} states no format version: {version!r} is no whole number")
    if version > VERSION:
        raise TransferError(
            f"{name} was written by a newer version (format {version}, this one reads up to "
            f"{VERSION}); upgrade kernel-factory"
        )


def _line(item: dict[str, Any]) -> str:
    return json.dumps(
        encode_json(_moments(item)), allow_nan=False, ensure_ascii=False, separators=(",", ":")
    )


def _moments(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, dict):
        return {key: _moments(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_moments(item) for item in value]
    return value


def _items(
    session: Session, name: str, campaign_ids: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    campaigns = sa.select(CampaignRow.id)
    if campaign_ids is not None:
        campaigns = campaigns.where(CampaignRow.id.in_(campaign_ids))
        lost = set(campaign_ids) - set(session.scalars(campaigns))
        if lost:
            raise UnknownError(f"no campaign {min(lost)!r} in {name}")
    trials = sa.select(TrialRow.id).where(
        TrialRow.campaign_id.in_(campaigns), TrialRow.status != TrialStatus.RUNNING.value
    )
    wanted = JobRow.campaign_id.in_(campaigns) | JobRow.id.in_(
        sa.select(MeasurementRow.job_id).where(MeasurementRow.trial_id.in_(trials))
    )
    wanted |= JobRow.id.in_(sa.select(TrialRow.job_id).where(TrialRow.id.in_(trials)))
    jobs = sa.select(JobRow.id)
    if campaign_ids is not None:
        jobs = jobs.where(wanted)

    fingerprints = sa.select(FingerprintRow).order_by(FingerprintRow.id)
    if campaign_ids is not None:
        fingerprints = fingerprints.where(
            FingerprintRow.id.in_(sa.select(JobRow.fingerprint_id).where(JobRow.id.in_(jobs)))
        )
    for row in session.scalars(fingerprints):
        yield {"kind": "fingerprint", **_rows.fingerprint_record(row).model_dump()}
    for campaign in session.scalars(
        sa.select(CampaignRow).where(CampaignRow.id.in_(campaigns)).order_by(CampaignRow.id)
    ):
        record = _rows.campaign_record(campaign)
        yield {"kind": "campaign", **record.model_dump(exclude={"driver", "heartbeat_at"})}
    for job in session.scalars(sa.select(JobRow).where(JobRow.id.in_(jobs)).order_by(JobRow.id)):
        yield {"kind": "job", **_rows.job_record(job).model_dump()}
    yield from _trial_items(session, trials)
    yield from _measurement_items(session, jobs, trials)
    claims = sa.select(ClaimRow).where(ClaimRow.campaign_id.in_(campaigns))
    # By time, so that a claim follows the one that it supersedes.
    for claim in session.scalars(claims.order_by(ClaimRow.created_at, ClaimRow.id)):
        yield {"kind": "claim", **_rows.claim_record(claim).model_dump()}


def _trial_items(session: Session, trials: sa.Select[Any]) -> Iterator[dict[str, Any]]:
    order = (TrialRow.campaign_id, TrialRow.number, TrialRow.attempt)
    ids = list(session.scalars(trials.order_by(*order)))
    for start in range(0, len(ids), _BATCH):
        chunk = ids[start : start + _BATCH]
        stages = _children(session, StageRow, chunk)
        errors = _children(session, ErrorRow, chunk)
        rows = sa.select(TrialRow).where(TrialRow.id.in_(chunk)).order_by(*order)
        for row in session.scalars(rows):
            record = _rows.trial_record(row, stages.get(row.id, ()), errors.get(row.id, ()))
            yield {"kind": "trial", **record.model_dump(exclude={"id", "measurements"})}
        session.expunge_all()


def _children(session: Session, model: Any, ids: Sequence[int]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for row in session.scalars(sa.select(model).where(model.trial_id.in_(ids)).order_by(model.id)):
        found.setdefault(row.trial_id, []).append(row)
    return found


def _measurement_items(
    session: Session, jobs: sa.Select[Any], trials: sa.Select[Any]
) -> Iterator[dict[str, Any]]:
    m = MeasurementRow
    query = (
        sa.select(m, TrialRow.uid)
        .outerjoin(TrialRow, TrialRow.id == m.trial_id)
        .where(m.job_id.in_(jobs), m.trial_id.is_(None) | m.trial_id.in_(trials))
        .order_by(m.id)
        .execution_options(yield_per=_BATCH)
    )
    for row, trial_uid in session.execute(query):
        record = _rows.measurement_record(row)
        yield {
            "kind": "measurement",
            "uid": row.uid,
            "trial_uid": trial_uid,
            **record.model_dump(exclude={"trial_id"}),
        }
