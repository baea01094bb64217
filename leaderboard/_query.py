"""One question for all of it: trials by operation, GPU, campaign, clock, regime, status and words.

The rules of :mod:`leaderboard._ranking` order the rows; a filter never changes a rank, but for
that of a campaign, which is then ranked alone.  Rows that must not be compared stay in runs of
their own whatever they are sorted by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from leaderboard._basis import rebased, times_of
from leaderboard._errors import UnknownError
from leaderboard._known import check_names, gpu_named
from leaderboard._ranking import (
    Entry,
    Filters,
    build_board,
    passed_entries,
    trial_medians,
)
from leaderboard._top import top
from leaderboard._where import nearest, parse_where
from leaderboard.models import CampaignRow, JobRow, TrialRow
from leaderboard.records import Clock, JobStatus, TrialStatus
from leaderboard.store import Store
from leaderboard.views import ResultRow

if TYPE_CHECKING:
    import pandas

__all__ = ["COLUMNS", "STATUSES", "Results", "query"]

STATUSES = ("ranked", "failed", "all", *(s.value for s in TrialStatus))
"""What ``status`` may be: ``ranked`` are the passed that have a place, ``failed`` the finished
that did not pass."""

_ALIASES = {"us": "score_us", "slow": "slow_us", "trial": "id"}
"""Short names of columns in conditions and orders."""

COLUMNS = tuple(ResultRow.model_fields)
"""Names of the columns of a result."""

_FAILED = tuple(s for s in TrialStatus if s.finished and s is not TrialStatus.PASSED)


@dataclass(frozen=True)
class Results(Sequence[ResultRow]):
    """Rows of a query, in order; those of another ``run`` must not be compared.

    Parameters
    ----------
    rows : tuple of ResultRow
    parameters : tuple of str
        Of the spaces of the campaigns that were asked, whatever rows are left: so that columns
        do not depend on a condition or a limit.
    """

    rows: tuple[ResultRow, ...]
    parameters: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> ResultRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ResultRow, ...]: ...
    def __getitem__(self, index: int | slice) -> ResultRow | tuple[ResultRow, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def runs(self) -> list[tuple[ResultRow, ...]]:
        """Rows by run; what has no place comes last."""
        found: dict[int | None, list[ResultRow]] = {}
        for row in self.rows:
            found.setdefault(row.run, []).append(row)
        return [tuple(rows) for rows in found.values()]

    def flat(self) -> tuple[list[str], list[list[Any]]]:
        """Column names and rows of plain values, each parameter of a schedule a column.

        A parameter that is called as a column is has ``schedule.`` before its name.
        """
        met = (name for row in self.rows for name in row.schedule)
        parameters = dict.fromkeys([*self.parameters, *met])
        names = {p: f"schedule.{p}" if p in COLUMNS else p for p in parameters}
        fixed = [name for name in COLUMNS if name != "schedule"]
        lines = []
        for row in self.rows:
            values = row.model_dump(mode="json")
            line = [values[name] for name in fixed] + [row.schedule.get(p) for p in parameters]
            lines.append([" ".join(v) if isinstance(v, list) else v for v in line])
        return [*fixed, *names.values()], lines

    def frame(self) -> pandas.DataFrame:
        """The rows as a frame: columns as in :meth:`flat`, moments as datetimes.

        Raises
        ------
        ModuleNotFoundError
            If pandas is not installed; nothing else here needs it.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "a frame needs pandas: pip install pandas", name="pandas"
            ) from error
        columns, lines = self.flat()
        frame = pandas.DataFrame(lines, columns=columns)
        for name in ("started_at", "ended_at"):
            frame[name] = pandas.to_datetime(frame[name], utc=True, format="ISO8601")
        return frame


def query(
    store: Store,
    *,
    operation: str | None = None,
    operation_version: str | None = None,
    campaign: str | None = None,
    gpu: str | None = None,
    clock: Clock | str | None = None,
    regime: str | None = None,
    status: TrialStatus | str = "ranked",
    where: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
    control: str | None = None,
    source_hash: str | Mapping[str, str] | None = None,
    live: bool = False,
) -> Results:
    """Trials that fit, best first within each run that may be compared.

    Parameters
    ----------
    operation, operation_version : str, optional
        Only these.
    gpu : str, optional
        Only this one; a part of its name will do where it is no other's.
    campaign : str, optional
        Only this one, by id, or the newest of that name; ranks are among its own trials.
    clock, regime : optional
        Time by another clock or regime than the one that ranks a campaign: the geomean over its
        tuned workloads, read in the job of the score.  Ranks and ratios are then by that.
    status : TrialStatus or str
        One of :data:`STATUSES`; only ``ranked`` rows are promised a place.
    where : str, optional
        Condition on columns and parameters of schedules, see :func:`parse_where`; it leaves
        ranks as they are.
    sort : str, optional
        Column or parameter, ``-`` before it for the largest first; within each run.
    limit : int, optional
        At most so many rows of each run.
    control : str, optional
        Baseline for the ratios, as in :func:`leaderboard.ranked`.
    source_hash : str or mapping, optional
        The current source, or that of each family: other rows come apart, marked superseded.
    live : bool
        Whether to count jobs that are still open.

    Raises
    ------
    UnknownError
        If operation, GPU, campaign, control, regime, column or parameter is not there.
    QueryError
        If the condition cannot be read.
    """
    if status not in STATUSES:
        raise UnknownError(f"no status {str(status)!r}; {nearest(str(status), STATUSES)}")
    if clock is not None and clock not in list(Clock):
        raise UnknownError(f"no clock {str(clock)!r}; {nearest(str(clock), Clock)}")
    campaign_id = None if campaign is None else store.get_campaign(campaign).id
    # What ranks a campaign is these two; by another clock, or on another regime, only what has a
    # score to be put in its place can be asked.
    by = None if clock is None else Clock(clock)
    own = regime is None and by in (Clock.GPU, Clock.MODELLED)
    basis = _Basis(regime, None if own else by)
    with store.reading() as session:
        check_names(session, store.name, operation=operation, control=control, regime=regime)
        filters = Filters(
            operation=operation,
            operation_version=operation_version,
            campaign_id=campaign_id,
            clock=by if own or by is Clock.MODELLED else None,
            gpu=None if gpu is None else gpu_named(session, store.name, gpu),
            source_hash=source_hash,
            control=control,
        )
        # What neither words nor an order of one's own need is not read.
        first = limit if where is None and sort is None else None
        rows = _rows(session, filters, basis, str(status), live=live, first=first)
        names = _names(session, rows)
        parameters = _parameters(session, filters)
    if where is not None:
        holds = parse_where(where, names)
        rows = [row for row in rows if holds(_named(row))]
    if sort is not None:
        rows = _sorted(rows, sort, names)
    return Results(tuple(_cut(rows, limit)), parameters)


@dataclass(frozen=True)
class _Basis:
    """By what time; None is that of each trial's score."""

    regime: str | None
    clock: Clock | None


def _rows(
    session: Session,
    filters: Filters,
    basis: _Basis,
    status: str,
    *,
    live: bool,
    first: int | None,
) -> list[ResultRow]:
    found: list[ResultRow] = []
    if status == "ranked" and basis == _Basis(None, None) and first is not None:
        return _best(session, filters, live=live, first=first)
    if status in ("ranked", "passed", "all"):
        found += _passed(session, filters, basis, live=live, everything=status != "ranked")
    if status not in ("ranked", "passed"):
        wanted = {"failed": _FAILED, "all": [s for s in TrialStatus if s is not TrialStatus.PASSED]}
        found += _others(session, filters, wanted.get(status) or [TrialStatus(status)])
    return found


def _jobs(live: bool) -> tuple[JobStatus, ...]:
    return (JobStatus.VALID, JobStatus.OPEN) if live else (JobStatus.VALID,)


def _best(session: Session, filters: Filters, *, live: bool, first: int) -> list[ResultRow]:
    """The first rows of each run, without reading the rest."""
    runs = top(session, filters, jobs=_jobs(live), limit=first)
    return _placed(session, runs, _Basis(None, None))


def _passed(
    session: Session, filters: Filters, basis: _Basis, *, live: bool, everything: bool
) -> list[ResultRow]:
    jobs = _jobs(live)
    entries = list(passed_entries(session, filters))
    left: list[tuple[Entry, str]] = []
    if basis.clock is not None:
        ranked_so = [e for e in entries if e.trial.clock == basis.clock.value]
        if basis.regime is not None or not ranked_so:
            entries, left = rebased(session, entries, regime=basis.regime, clock=basis.clock)
        else:
            entries = ranked_so
    elif basis.regime is not None:
        entries, left = rebased(session, entries, regime=basis.regime, clock=Clock.GPU)
    board = build_board(session, filters, jobs=jobs, entries=entries)
    rows = _placed(session, board.groups, basis)
    if everything:
        rows += [_result(e, None, None, {}, reason) for e, reason in (*board.unranked, *left)]
    return rows


def _placed(session: Session, runs: Sequence[Sequence[Entry]], basis: _Basis) -> list[ResultRow]:
    """Entries in the order of their runs, with their places."""
    medians = _medians(session, [e for run in runs for e in run], basis)
    return [
        _result(e, rank, number, medians.get(e.trial.id, {}))
        for number, run in enumerate(runs, 1)
        for rank, e in enumerate(run, 1)
    ]


def _medians(
    session: Session, entries: Sequence[Entry], basis: _Basis
) -> dict[int, Mapping[str, float]]:
    """Times behind each score that stands over a control."""
    over = [e for e in entries if e.control]
    if basis.regime is None and basis.clock is None:
        return dict(trial_medians(session, over))
    found = times_of(session, over, regime=basis.regime, clock=basis.clock)
    return {
        e.trial.id: {w: t.us for w, t in found[e.trial.id].get(e.trial.method, {}).items()}
        for e in over
        if e.trial.id in found
    }


def _result(
    e: Entry,
    rank: int | None,
    run: int | None,
    medians: Mapping[str, float],
    reason: str | None = None,
) -> ResultRow:
    t = e.trial
    return ResultRow(
        run=run,
        rank=rank,
        status=TrialStatus(t.status),
        stage=t.stage,
        reason=t.reason if reason is None else reason,
        regime=e.regime,
        started_at=t.started_at,
        ended_at=t.ended_at,
        **e.values(medians),
    )


def _others(session: Session, filters: Filters, statuses: Iterable[TrialStatus]) -> list[ResultRow]:
    """Trials without a time, in order of proposal."""
    statement = (
        sa.select(TrialRow, CampaignRow, JobRow.gpu)
        .join(CampaignRow, CampaignRow.id == TrialRow.campaign_id)
        .outerjoin(JobRow, JobRow.id == TrialRow.job_id)
        .where(TrialRow.status.in_([s.value for s in statuses]), *filters.of_campaign)
        .order_by(TrialRow.campaign_id, TrialRow.number, TrialRow.attempt)
    )
    if filters.gpu is not None:
        statement = statement.where(JobRow.gpu == filters.gpu)
    return [
        ResultRow(
            id=t.id,
            uid=t.uid,
            run=None,
            rank=None,
            status=TrialStatus(t.status),
            stage=t.stage,
            reason=t.reason,
            campaign_id=t.campaign_id,
            campaign=c.name,
            operation=c.operation,
            operation_version=c.operation_version,
            family=c.family,
            number=t.number,
            schedule_key=t.schedule_key,
            schedule=t.schedule,
            source_hash=t.source_hash,
            gpu=gpu,
            job_id=t.job_id,
            started_at=t.started_at,
            ended_at=t.ended_at,
        )
        for t, c, gpu in session.execute(statement)
    ]


# ------------------------------------------------------------------- conditions and orders


def _names(session: Session, rows: Iterable[ResultRow]) -> set[str]:
    """What conditions and orders may name."""
    spaces = session.scalars(sa.select(CampaignRow.space)).all()
    parameters = {name for space in spaces for name in space}
    parameters |= {name for row in rows for name in row.schedule}
    return {*COLUMNS, *_ALIASES, *parameters} - {"schedule"}


def _parameters(session: Session, filters: Filters) -> tuple[str, ...]:
    """Parameters of the campaigns that are asked, in the order of their spaces."""
    statement = (
        sa.select(CampaignRow.space)
        .where(*filters.of_campaign)
        .order_by(CampaignRow.created_at, CampaignRow.id)
    )
    return tuple(dict.fromkeys(name for space in session.scalars(statement) for name in space))


def _named(row: ResultRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in COLUMNS if name != "schedule"}
    values |= {short: values[name] for short, name in _ALIASES.items()}
    values |= {k: v for k, v in row.schedule.items() if k not in values}
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in values.items()}


def _sorted(rows: list[ResultRow], sort: str, names: set[str]) -> list[ResultRow]:
    name = sort.removeprefix("-")
    if name not in names:
        raise UnknownError(f"no column or parameter {name!r} to sort by; {nearest(name, names)}")
    down = sort.startswith("-")

    def key(row: ResultRow) -> tuple[int, float | str]:
        value = _named(row).get(name)
        if isinstance(value, int | float):
            return (0, -value if down else value)
        return (1, str(value))

    def gone(row: ResultRow) -> bool:
        return _named(row).get(name) is None

    def run_of(row: ResultRow) -> float:
        return math.inf if row.run is None else row.run

    # Stable sorts: text the other way round first, then numbers, what is gone, and runs.
    found = sorted(rows, key=key, reverse=down and any(isinstance(key(r)[1], str) for r in rows))
    found.sort(key=gone)
    found.sort(key=run_of)
    return found


def _cut(rows: Iterable[ResultRow], limit: int | None) -> Iterator[ResultRow]:
    seen: dict[int | None, int] = {}
    for row in rows:
        seen[row.run] = seen.get(row.run, 0) + 1
        if limit is None or seen[row.run] <= limit:
            yield row
