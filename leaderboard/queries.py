"""Questions to the leaderboard, answered by the rules of comparison.

Each is a few set-based statements whatever the number of trials, and returns
plain lists of frozen rows (:mod:`leaderboard.views`).  SQL stays in this
package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import sqlalchemy as sa
from sqlalchemy.orm import Session

from leaderboard import _rows
from leaderboard._against import judged, over_control, shape_ratios
from leaderboard._claims import claim_of, claims
from leaderboard._errors import QueryError, UnknownError
from leaderboard._finals import finals, winner
from leaderboard._overview import control_spans, named_times, trial_errors, trial_seconds
from leaderboard._ranking import (
    Board,
    Entry,
    Filters,
    build_board,
    control_cells,
    ended,
    entry_of,
    trial_medians,
    trial_samples,
)
from leaderboard._top import top
from leaderboard._verdicts import contrast
from leaderboard.models import CampaignRow, ErrorRow, JobRow, MeasurementRow, StageRow, TrialRow
from leaderboard.records import Clock, JobStatus, StageStatus, TrialStatus
from leaderboard.store import Store
from leaderboard.views import (
    BestPoint,
    Comparison,
    ControlTime,
    Funnel,
    LeaderboardRow,
    Ratio,
    RejectedRow,
    ShapeRow,
    StageCount,
    UnrankedRow,
    WorstError,
)

__all__ = [
    "best_so_far",
    "claim_of",
    "claims",
    "compare",
    "control_spans",
    "finals",
    "funnel",
    "named_times",
    "ranked",
    "ratio",
    "rejected",
    "shapes",
    "trial_errors",
    "trial_seconds",
    "unranked",
    "winner",
    "worst_errors",
]

_VALID = (JobStatus.VALID,)
_LIVE = (JobStatus.VALID, JobStatus.OPEN)
_FAILED = tuple(s for s in TrialStatus if s.finished and s is not TrialStatus.PASSED)


def ranked(
    store: Store,
    *,
    operation: str | None = None,
    operation_version: str | None = None,
    campaign_id: str | None = None,
    clock: Clock | None = None,
    gpu: str | None = None,
    source_hash: str | Mapping[str, str] | None = None,
    control: str | None = None,
    live: bool = False,
    limit: int | None = None,
) -> list[LeaderboardRow]:
    """Passed trials in order, best first.

    Rows that must not be compared (another GPU, clock, method, cache state,
    set of workloads or version of the operation) come as separate runs, each
    ranked from 1.  Times of void jobs never rank.

    Parameters
    ----------
    source_hash : str or mapping, optional
        The current source, or that of each family: rows of any other are marked
        superseded and ranked apart, after all current ones.
    control : str, optional
        Baseline for the ratios; by default the one that most jobs timed on all
        workloads, of several the fastest.
    live : bool
        Whether to count jobs that are still open, for whoever looks on; their
        ranks may yet change, or vanish.
    limit : int, optional
        At most so many rows of each run.
    """
    filters = Filters(operation, operation_version, campaign_id, clock, gpu, source_hash, control)
    with store.reading() as session:
        runs = top(session, filters, jobs=_LIVE if live else _VALID, limit=limit)
        medians = trial_medians(session, [e for run in runs for e in run if e.control])
        return [
            _leaderboard_row(rank, entry, medians.get(entry.trial.id, {}))
            for run in runs
            for rank, entry in enumerate(run, 1)
        ]


def _leaderboard_row(rank: int, entry: Entry, medians: Mapping[str, float]) -> LeaderboardRow:
    return LeaderboardRow(rank=rank, **entry.values(medians))


def unranked(
    store: Store,
    *,
    operation: str | None = None,
    campaign_id: str | None = None,
    clock: Clock | None = None,
    control: str | None = None,
) -> list[UnrankedRow]:
    """Passed trials that have no place, each with the reason."""
    filters = Filters(operation=operation, campaign_id=campaign_id, clock=clock, control=control)
    with store.reading() as session:
        board = build_board(session, filters, jobs=_VALID)
    return [
        UnrankedRow(
            id=e.trial.id,
            uid=e.trial.uid,
            campaign_id=e.trial.campaign_id,
            number=e.trial.number,
            schedule_key=e.trial.schedule_key,
            clock=e.trial.clock,
            score_us=e.trial.score_us,
            job_id=e.trial.job_id,
            reason=reason,
        )
        for e, reason in board.unranked
    ]


def best_so_far(store: Store, campaign_id: str) -> list[BestPoint]:
    """Improvements in the order they came; the last of each GPU is its best now.

    Counts open jobs too, for it is asked while they run: within one job by
    score, across jobs by the ratio to the job's control (provisional).
    """
    with store.reading() as session:
        board = build_board(session, Filters(campaign_id=campaign_id), jobs=_LIVE)
    return _improvements(board)


def _improvements(board: Board) -> list[BestPoint]:
    points = []
    for group in board.groups:
        best = float("inf")
        for e in sorted(group, key=ended):
            value = e.ratio if e.provisional and e.ratio is not None else e.trial.score_us
            if value < best:
                best = value
                points.append(
                    BestPoint(
                        id=e.trial.id,
                        number=e.trial.number,
                        schedule_key=e.trial.schedule_key,
                        gpu=e.gpu,
                        job_id=e.trial.job_id,
                        score_us=e.trial.score_us,
                        ratio=e.ratio,
                        provisional=e.provisional,
                        ended_at=e.trial.ended_at,
                    )
                )
    return points


def rejected(
    store: Store,
    *,
    campaign_id: str | None = None,
    operation: str | None = None,
    statuses: Iterable[TrialStatus] = _FAILED,
) -> list[RejectedRow]:
    """Trials that failed, with their reasons, in order of proposal."""
    scope: list[sa.ColumnElement[bool]] = [TrialRow.status.in_([s.value for s in statuses])]
    if campaign_id is not None:
        scope.append(TrialRow.campaign_id == campaign_id)
    if operation is not None:
        scope.append(
            TrialRow.campaign_id.in_(
                sa.select(CampaignRow.id).where(CampaignRow.operation == operation)
            )
        )
    first = (
        sa.select(sa.func.min(ErrorRow.id))
        .join(TrialRow, TrialRow.id == ErrorRow.trial_id)
        .where(*scope, ErrorRow.within.is_(False), ErrorRow.out_of_contract.is_(False))
        .group_by(ErrorRow.trial_id)
    )
    with store.reading() as session:
        breaches = {
            e.trial_id: _worst(e)
            for e in session.scalars(sa.select(ErrorRow).where(ErrorRow.id.in_(first)))
        }
        rows = session.scalars(
            sa.select(TrialRow).where(*scope).order_by(TrialRow.campaign_id, TrialRow.number)
        )
        return [
            RejectedRow(
                id=t.id,
                uid=t.uid,
                campaign_id=t.campaign_id,
                number=t.number,
                schedule_key=t.schedule_key,
                status=TrialStatus(t.status),
                stage=t.stage,
                reason=t.reason,
                breach=breaches.get(t.id),
            )
            for t in rows
        ]


def worst_errors(store: Store, trial_id: int) -> list[WorstError]:
    """Largest error of each output in each regime, regimes in the order gated."""
    worst: dict[tuple[str, str], ErrorRow] = {}
    with store.reading() as session:
        rows = session.scalars(
            sa.select(ErrorRow).where(ErrorRow.trial_id == trial_id).order_by(ErrorRow.id)
        )
        for row in rows:
            key = (row.regime, row.tensor)
            if key not in worst or _size(row) > _size(worst[key]):
                worst[key] = row
        return [_worst(row) for row in worst.values()]


def _size(row: ErrorRow) -> tuple[bool, bool, float]:
    return (not row.finite, not row.within, row.max_rel or 0.0)


def _worst(row: ErrorRow) -> WorstError:
    return WorstError(**{name: getattr(row, name) for name in WorstError.model_fields})


def funnel(store: Store, campaign_id: str) -> Funnel:
    """Counts by stage and by status."""
    with store.reading() as session:
        campaign = session.get(CampaignRow, campaign_id)
        if campaign is None:
            raise UnknownError(f"no campaign {campaign_id!r} in {store.name}")
        statuses = {
            TrialStatus(status): count
            for status, count in session.execute(
                sa.select(TrialRow.status, sa.func.count())
                .where(TrialRow.campaign_id == campaign_id)
                .group_by(TrialRow.status)
            )
        }
        counts = session.execute(
            sa.select(
                StageRow.stage,
                StageRow.status,
                sa.func.count(),
                sa.func.min(StageRow.position),
                sa.func.sum(StageRow.seconds),
            )
            .join(TrialRow, TrialRow.id == StageRow.trial_id)
            .where(
                TrialRow.campaign_id == campaign_id,
                TrialRow.status != TrialStatus.ABANDONED.value,
            )
            .group_by(StageRow.stage, StageRow.status)
        ).all()
        budget = campaign.budget
    place: dict[str, int] = {}
    spent: dict[str, float] = defaultdict(float)
    by_stage: dict[str, dict[StageStatus, int]] = defaultdict(dict)
    for stage, status, count, position, seconds in counts:
        by_stage[stage][StageStatus(status)] = count
        place[stage] = min(position, place.get(stage, position))
        spent[stage] += seconds
    return Funnel(
        campaign_id=campaign_id,
        budget=budget,
        finished=sum(n for status, n in statuses.items() if status.finished),
        statuses=statuses,
        stages=tuple(
            StageCount(
                stage=stage,
                entered=sum(by_stage[stage].values()),
                passed=by_stage[stage].get(StageStatus.PASSED, 0),
                failed={s: n for s, n in by_stage[stage].items() if s is not StageStatus.PASSED},
                seconds=spent[stage],
            )
            for stage in sorted(place, key=lambda name: (place[name], name))
        ),
    )


def shapes(store: Store, trial_id: int, *, clock: Clock | None = None) -> list[ShapeRow]:
    """A passed trial on each workload, regime and clock, beside its job's controls.

    Of several readings of one cell the last counts; finals are rows of their own.

    Raises
    ------
    QueryError
        If the trial did not pass: it has no time to show.
    """
    with store.reading() as session:
        _passed(session, trial_id)
        query = sa.select(MeasurementRow).where(MeasurementRow.trial_id == trial_id)
        if clock is not None:
            query = query.where(MeasurementRow.clock == clock.value)
        last: dict[tuple[str | bool, ...], MeasurementRow] = {}
        for m in session.scalars(query.order_by(MeasurementRow.id)):
            last[m.phase == "final", m.job_id, m.workload, m.regime, m.clock, m.cache, m.method] = m
        jobs = {m.job_id for m in last.values()}
        cells = {
            final: control_cells(session, jobs, final=final, held_out=True)
            for final in (False, True)
        }
        rows = []
        for m in last.values():
            found = cells[m.phase == "final"].get(
                (m.job_id, m.regime, m.clock, m.method, m.cache), {}
            )
            record = _rows.measurement_record(m)
            rows.append(
                ShapeRow(
                    id=trial_id,
                    **record.model_dump(include=set(ShapeRow.model_fields) - {"id", "controls"}),
                    controls=tuple(
                        ControlTime(
                            control=name,
                            input_form=form,
                            median_us=times[m.workload],
                            ratio=m.median_us / times[m.workload],
                        )
                        for (name, form), times in sorted(found.items())
                        if m.workload in times
                    ),
                )
            )
        return rows


def ratio(store: Store, trial_id: int, control: str) -> Ratio:
    """A trial's score over the geomean of a control timed in the same job.

    Over all workloads and on each there is a verdict by the samples (see
    :func:`leaderboard.contrast`); its threshold is what the campaign let its controls drift by
    within a job (``device.drift``), for a lead smaller than that may be drift.

    Raises
    ------
    QueryError
        If the trial has no measured time, its job is not valid, or its job did
        not time the control on all workloads: another job's control is never used.
    """
    with store.reading() as session:
        return over_control(session, _measured(session, trial_id), control)


def compare(store: Store, first_id: int, second_id: int) -> Comparison:
    """Two trials against each other; only within one job, or both modelled.

    The verdict has three values; see :func:`leaderboard.contrast`.

    Raises
    ------
    QueryError
        Across jobs, clocks, methods, cache states or sets of workloads.
    """
    with store.reading() as session:
        first, second = _passed(session, first_id), _passed(session, second_id)
        pair = f"trials {first_id} and {second_id}"
        for what, a, b in (
            ("operations", first.operation, second.operation),
            ("versions of the operation", first.operation_version, second.operation_version),
            ("clocks", first.trial.clock, second.trial.clock),
            ("sets of workloads", first.workloads, second.workloads),
            ("methods", first.trial.method, second.trial.method),
            ("cache states", first.trial.cache, second.trial.cache),
        ):
            if a != b:
                raise QueryError(f"{pair} cannot be compared: other {what}, {a} and {b}")
        if not first.modelled:
            if first.trial.job_id != second.trial.job_id:
                raise QueryError(
                    f"{pair} were timed in different jobs ({first.trial.job_id} and "
                    f"{second.trial.job_id}): re-time them together, or look at each one's "
                    "ratio to a control of its job, if it has one"
                )
            _valid(first)
        medians = {} if first.modelled else trial_medians(session, [first, second])
        samples = {} if first.modelled else trial_samples(session, [first, second])
        whole = contrast(samples[first_id], samples[second_id]) if samples else None
        return Comparison(
            first_id=first_id,
            second_id=second_id,
            job_id=None if first.modelled else first.trial.job_id,
            clock=first.trial.clock,
            first_us=first.trial.score_us,
            second_us=second.trial.score_us,
            ratio=first.trial.score_us / second.trial.score_us,
            low=None if whole is None else whole.low,
            high=None if whole is None else whole.high,
            verdict=None if whole is None else whole.verdict,
            shapes=tuple(
                judged(shape, samples[first_id], samples[second_id])
                for shape in shape_ratios(first.workloads, medians[first_id], medians[second_id])
            )
            if medians
            else (),
        )


def _passed(session: Session, trial_id: int) -> Entry:
    trial = session.get(TrialRow, trial_id)
    if trial is None:
        raise UnknownError(f"no trial {trial_id}")
    if trial.status != TrialStatus.PASSED.value:
        raise QueryError(f"trial {trial_id} is {trial.status}: it carries no time")
    campaign = session.get_one(CampaignRow, trial.campaign_id)
    job = None if trial.job_id is None else session.get_one(JobRow, trial.job_id)
    return entry_of(trial, campaign, job)


def _measured(session: Session, trial_id: int) -> Entry:
    entry = _passed(session, trial_id)
    if entry.modelled:
        raise QueryError(f"trial {trial_id} is modelled: its time is over no control")
    _valid(entry)
    return entry


def _valid(entry: Entry) -> None:
    if entry.job_status != JobStatus.VALID.value:
        raise QueryError(
            f"job {entry.trial.job_id} of trial {entry.trial.id} is {entry.job_status}: "
            "its times do not count"
        )
