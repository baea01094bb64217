"""The rules of comparison: what may be ordered, by what, and what may not.

* Only passed trials, and of measured ones only those of a valid job.
* Never together: other operations or versions of one, other sets of workloads,
  clocks, GPUs, methods, cache states; superseded sources come apart.
* Within one job times order directly.  Across jobs the time over the same
  job's control orders, and the order is provisional.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import InstrumentedAttribute, Session

from leaderboard._scores import geomean
from leaderboard.models import CampaignRow, JobRow, MeasurementRow, TrialRow
from leaderboard.records import Clock, JobStatus, TrialStatus

__all__ = [
    "Board",
    "Control",
    "Entry",
    "Filters",
    "build_board",
    "chunks",
    "complete_controls",
    "control_cells",
    "ended",
    "entry_of",
    "passed_entries",
    "trial_medians",
    "trial_samples",
]

_CHUNK = 500
"""Ids a statement: far below any database's bound on parameters."""

Control = tuple[str, str]
"""Control name and the form of inputs it was fed."""

CellKey = tuple[str, str, str, str, str]
"""job, regime, clock, method, cache."""

Cells = Mapping[CellKey, Mapping[Control, Mapping[str, float]]]
"""Mean medians of controls, microseconds, by control and workload."""


@dataclass(frozen=True)
class Filters:
    """Which passed trials to look at; None means any."""

    operation: str | None = None
    operation_version: str | None = None
    campaign_id: str | None = None
    clock: Clock | None = None
    gpu: str | None = None
    source_hash: str | Mapping[str, str] | None = None
    """Current source; or that of each family, by its name."""
    control: str | None = None

    @property
    def of_campaign(self) -> list[sa.ColumnElement[bool]]:
        """What they say of a campaign."""
        wanted: tuple[tuple[Any, str | None], ...] = (
            (CampaignRow.operation, self.operation),
            (CampaignRow.operation_version, self.operation_version),
            (CampaignRow.id, self.campaign_id),
        )
        return [column == value for column, value in wanted if value is not None]


@dataclass
class Entry:
    """A passed trial on its way into an order."""

    trial: Any
    campaign: str
    operation: str
    operation_version: str
    family: str
    workloads: tuple[str, ...]
    regime: str
    gpu: str | None
    job_status: str | None
    job_note: str
    superseded: bool
    control: Control | None = None
    control_us: float | None = None
    ratio: float | None = None
    control_shapes: Mapping[str, float] = field(default_factory=dict)
    provisional: bool = False

    @property
    def modelled(self) -> bool:
        return bool(self.trial.clock == Clock.MODELLED.value)

    @property
    def group(self) -> tuple[Any, ...]:
        """Entries of equal groups may be ordered among each other."""
        t = self.trial
        return (
            self.superseded,
            self.operation,
            self.operation_version,
            # Measured before modelled, whatever their names.
            self.modelled,
            t.clock,
            self.gpu or "",
            t.method or "",
            t.cache or "",
            self.regime,
            self.workloads,
        )

    @property
    def cell_key(self) -> CellKey:
        t = self.trial
        return (t.job_id, self.regime, t.clock, t.method, t.cache)

    def values(self, medians: Mapping[str, float]) -> dict[str, Any]:
        """What every view of the entry shows; ``medians`` are its own, by workload."""
        t = self.trial
        name, form = self.control or (None, None)
        return {
            "id": t.id,
            "uid": t.uid,
            "campaign_id": t.campaign_id,
            "campaign": self.campaign,
            "operation": self.operation,
            "operation_version": self.operation_version,
            "family": self.family,
            "number": t.number,
            "schedule_key": t.schedule_key,
            "schedule": t.schedule,
            "source_hash": t.source_hash,
            "clock": t.clock,
            "score_us": t.score_us,
            "slow_us": t.slow_us,
            "method": t.method,
            "cache": t.cache,
            "gpu": self.gpu,
            "job_id": t.job_id,
            "control": name,
            "control_form": form,
            "control_us": self.control_us,
            "ratio": self.ratio,
            "losses": tuple(
                w for w in self.workloads if w in medians and medians[w] > self.control_shapes[w]
            )
            if self.control
            else (),
            "provisional": self.provisional,
            "superseded": self.superseded,
        }


@dataclass(frozen=True)
class Board:
    """Groups of ordered entries, and the entries without a place and why."""

    groups: tuple[tuple[Entry, ...], ...]
    unranked: tuple[tuple[Entry, str], ...]


def build_board(
    session: Session,
    filters: Filters,
    *,
    jobs: Iterable[JobStatus],
    entries: Iterable[Entry] | None = None,
) -> Board:
    """Order what may be ordered, in two queries whatever the number of trials.

    Parameters
    ----------
    jobs : iterable of JobStatus
        Jobs whose times count: valid ones, and open ones while looking on.
    entries : iterable of Entry, optional
        What to order; by default every passed trial that the filters let through.
    """
    counted = {status.value for status in jobs}
    groups: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    unranked: list[tuple[Entry, str]] = []
    for entry in _entries(session, filters) if entries is None else entries:
        if entry.modelled or entry.job_status in counted:
            groups[entry.group].append(entry)
        elif entry.job_status is None:
            unranked.append((entry, "it names no job"))
        else:
            note = f": {entry.job_note}" if entry.job_note else ""
            unranked.append((entry, f"job {entry.trial.job_id} is {entry.job_status}{note}"))
    measured = [e for entries in groups.values() for e in entries if not e.modelled]
    cells = control_cells(session, {e.trial.job_id for e in measured}) if measured else {}
    ordered = []
    for key in _in_order(groups):
        placed, left = _order(groups[key], cells, filters.control)
        unranked += left
        if placed:
            ordered.append(tuple(placed))
    return Board(tuple(ordered), tuple(unranked))


def _in_order(groups: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Groups as they are shown: of each operation the newest version first."""
    found = sorted(groups)
    found.sort(key=lambda group: (len(group[2]), group[2]), reverse=True)
    found.sort(key=lambda group: group[:2])
    return found


def passed_entries(
    session: Session, filters: Filters, *, ids: Sequence[int] | None = None
) -> Iterator[Entry]:
    """Every passed trial that the filters let through, of ``ids`` only where given."""
    if ids is None:
        yield from _entries(session, filters)
        return
    for chunk in chunks(ids):
        yield from _entries(session, filters, TrialRow.id.in_(chunk))


def _entries(session: Session, filters: Filters, *more: sa.ColumnElement[bool]) -> Iterator[Entry]:
    query = (
        sa.select(TrialRow.__table__, CampaignRow, JobRow)
        .join(CampaignRow, CampaignRow.id == TrialRow.campaign_id)
        .outerjoin(JobRow, JobRow.id == TrialRow.job_id)
        .where(TrialRow.status == TrialStatus.PASSED.value, *filters.of_campaign, *more)
        .order_by(TrialRow.id)
    )
    if filters.clock is not None:
        query = query.where(TrialRow.clock == filters.clock.value)
    if filters.gpu is not None:
        query = query.where(JobRow.gpu == filters.gpu, TrialRow.clock != Clock.MODELLED.value)
    for row in session.execute(query):
        campaign, job = row.CampaignRow, row.JobRow
        yield entry_of(row, campaign, job, source_hash=filters.source_hash)


def entry_of(
    trial: Any,
    campaign: CampaignRow,
    job: JobRow | None,
    *,
    source_hash: str | Mapping[str, str] | None = None,
) -> Entry:
    """Put what decides an order into one place; ``source_hash`` is the current one."""
    if isinstance(source_hash, Mapping):
        source_hash = source_hash.get(campaign.family)
    modelled = trial.clock == Clock.MODELLED.value
    return Entry(
        trial=trial,
        campaign=campaign.name,
        operation=campaign.operation,
        operation_version=campaign.operation_version,
        family=campaign.family,
        workloads=tuple(campaign.workloads),
        regime=campaign.ranking_regime,
        gpu=None if modelled or job is None else job.gpu,
        job_status=None if job is None else job.status,
        job_note="" if job is None else job.note,
        superseded=source_hash not in (None, trial.source_hash),
    )


def control_cells(
    session: Session, job_ids: Iterable[str], *, final: bool = False, held_out: bool = False
) -> Cells:
    """Mean of the controls' medians by job, regime, clock, method and cache.

    Parameters
    ----------
    final : bool
        The readings among finalists instead of those of the search.
    """
    cells: dict[CellKey, dict[Control, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    m = MeasurementRow
    keys = (m.job_id, m.regime, m.clock, m.method, m.cache, m.control, m.input_form, m.workload)
    for chunk in chunks(sorted(job_ids)):
        query = (
            sa.select(*keys, sa.func.avg(m.median_us))
            .where(
                m.job_id.in_(chunk),
                m.control.is_not(None),
                m.phase == "final" if final else m.phase != "final",
            )
            .group_by(*keys)
        )
        if not held_out:
            query = query.where(m.held_out.is_(False))
        for job, regime, clock, method, cache, name, form, workload, us in session.execute(query):
            cells[job, regime, clock, method, cache][name, form][workload] = float(us)
    return cells


def trial_medians(session: Session, entries: Sequence[Entry]) -> dict[int, dict[str, float]]:
    """Medians behind the score of each entry, microseconds, by trial and workload."""
    found = _of_scores(session, entries, MeasurementRow.median_us)
    return {t: {w: us for w, (us,) in times.items()} for t, times in found.items()}


def trial_samples(
    session: Session, entries: Sequence[Entry]
) -> dict[int, dict[str, Sequence[float]]]:
    """The samples of those medians; the median itself where none were kept."""
    found = _of_scores(session, entries, MeasurementRow.samples_us, MeasurementRow.median_us)
    return {
        t: {w: samples or [us] for w, (samples, us) in times.items()} for t, times in found.items()
    }


def _of_scores(
    session: Session, entries: Sequence[Entry], *columns: InstrumentedAttribute[Any]
) -> dict[int, dict[str, list[Any]]]:
    m = MeasurementRow
    found: dict[int, dict[str, list[Any]]] = defaultdict(dict)
    regimes = {e.trial.id: e.regime for e in entries}
    for chunk in chunks(list(regimes)):
        query = (
            sa.select(m.trial_id, m.regime, m.workload, *columns)
            .join(TrialRow, TrialRow.id == m.trial_id)
            .where(
                m.trial_id.in_(chunk),
                m.job_id == TrialRow.job_id,
                m.clock == TrialRow.clock,
                m.method == TrialRow.method,
                m.cache == TrialRow.cache,
                m.phase == "search",
                m.held_out.is_(False),
            )
            .order_by(m.id)  # the last reading counts, as when the trial passed
        )
        for trial_id, regime, workload, *values in session.execute(query):
            if trial_id is not None and regime == regimes[trial_id]:
                found[trial_id][workload] = values
    return found


def chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """So many ids at a time as a statement takes."""
    for start in range(0, len(items), _CHUNK):
        yield items[start : start + _CHUNK]


def complete_controls(
    cells: Cells, key: CellKey, workloads: tuple[str, ...]
) -> dict[Control, float]:
    """Geomean of each control that was timed on all of ``workloads`` in this cell."""
    return {
        control: geomean([shapes[w] for w in workloads])
        for control, shapes in cells.get(key, {}).items()
        if workloads and all(w in shapes for w in workloads)
    }


def _order(
    entries: list[Entry], cells: Cells, wanted: str | None
) -> tuple[list[Entry], list[tuple[Entry, str]]]:
    if entries[0].modelled:
        return sorted(entries, key=lambda e: (e.trial.score_us, e.trial.id)), []
    by_job = {e.trial.job_id: complete_controls(cells, e.cell_key, e.workloads) for e in entries}
    control = _choose(by_job.values(), wanted)
    many = len(by_job) > 1
    placed: list[Entry] = []
    left: list[tuple[Entry, str]] = []
    for e in entries:
        us = None if control is None else by_job[e.trial.job_id].get(control)
        if control is not None and us is not None:
            e.control, e.control_us, e.ratio = control, us, e.trial.score_us / us
            e.control_shapes = cells[e.cell_key][control]
        elif many:
            what = wanted or (control[0] if control else "a control")
            left.append(
                (e, f"job {e.trial.job_id} did not time {what}, so it has no place among jobs")
            )
            continue
        e.provisional = many
        placed.append(e)
    if many:
        return sorted(placed, key=lambda e: (e.ratio, e.trial.id)), left
    return sorted(placed, key=lambda e: (e.trial.score_us, e.trial.id)), left


def _choose(jobs: Iterable[Mapping[Control, float]], wanted: str | None) -> Control | None:
    """The control that most jobs timed; of several the fastest, the hardest to beat."""
    seen: dict[Control, list[float]] = defaultdict(list)
    for controls in jobs:
        for control, us in controls.items():
            if wanted in (None, control[0]):
                seen[control].append(us)
    return min(seen, key=lambda c: (-len(seen[c]), geomean(seen[c]), c), default=None)


def ended(entry: Entry) -> tuple[datetime, int]:
    """Sort key: when the trial finished."""
    return (entry.trial.ended_at, entry.trial.id)
