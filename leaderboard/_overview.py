"""A whole campaign at once: errors of every trial, controls of every job.

Aggregated in the database, so that the answer to ten thousand trials stays small.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from leaderboard import _rows
from leaderboard.models import ErrorRow, MeasurementRow, StageRow, TrialRow
from leaderboard.store import Store
from leaderboard.views import ControlSpan, NamedTime, TrialError

__all__ = ["control_spans", "named_times", "trial_errors", "trial_seconds"]


def trial_errors(
    store: Store, campaign_id: str, *, regimes: Iterable[str] | None = None
) -> list[TrialError]:
    """Largest error of each output of each trial, by stage and regime.

    What was out of a schedule's contract was not run and is not here.

    Parameters
    ----------
    regimes : iterable of str, optional
        Only these; by default all.
    """
    e = ErrorRow
    keys = (e.trial_id, e.stage, e.regime, e.tensor)
    query = (
        sa.select(
            *keys,
            sa.func.max(e.max_rel),
            sa.func.max(e.rms_rel),
            # A bool has no minimum in PostgreSQL.
            sa.func.min(sa.case((e.finite, 1), else_=0)),
            sa.func.min(sa.case((e.within, 1), else_=0)),
        )
        .join(TrialRow, TrialRow.id == e.trial_id)
        .where(TrialRow.campaign_id == campaign_id, e.out_of_contract.is_(False))
        .group_by(*keys)
        .order_by(*keys)
    )
    if regimes is not None:
        query = query.where(e.regime.in_(list(regimes)))
    with store.reading() as session:
        return [
            TrialError(
                id=trial_id,
                stage=stage,
                regime=regime,
                tensor=tensor,
                max_rel=max_rel if finite else None,
                rms_rel=rms_rel if finite else None,
                finite=bool(finite),
                within=bool(within),
            )
            for trial_id, stage, regime, tensor, max_rel, rms_rel, finite, within in (
                session.execute(query)
            )
        ]


def control_spans(store: Store, job_id: str) -> list[ControlSpan]:
    """Controls of one job over all their readings of the search."""
    m = MeasurementRow
    keys = (m.control, m.input_form, m.workload, m.regime, m.clock, m.cache, m.method)
    query = (
        sa.select(
            *keys,
            sa.func.avg(m.median_us),
            sa.func.min(m.low_us),
            sa.func.max(m.high_us),
            sa.func.count(),
        )
        .where(m.job_id == job_id, m.control.is_not(None), m.phase != "final")
        .group_by(*keys)
        .order_by(*keys)
    )
    names = (
        *("control", "input_form", "workload", "regime", "clock", "cache", "method"),
        *("median_us", "low_us", "high_us", "readings"),
    )
    with store.reading() as session:
        return [ControlSpan(**dict(zip(names, row, strict=True))) for row in session.execute(query)]


def trial_seconds(store: Store, campaign_id: str) -> dict[int, dict[str, float]]:
    """Seconds that each trial spent in each of its stages, by its id."""
    query = (
        sa.select(StageRow.trial_id, StageRow.stage, StageRow.seconds)
        .join(TrialRow, TrialRow.id == StageRow.trial_id)
        .where(TrialRow.campaign_id == campaign_id)
        .order_by(StageRow.id)
    )
    found: dict[int, dict[str, float]] = {}
    with store.reading() as session:
        for trial_id, stage, seconds in session.execute(query):
            found.setdefault(trial_id, {})[stage] = seconds
    return found


def named_times(store: Store, trial_id: int) -> list[NamedTime]:
    """All times of one trial, in the order they were stored, each with its uid.

    A uid is the same in every database, so that what rests on a measurement can name it.
    """
    m = MeasurementRow
    query = sa.select(m).where(m.trial_id == trial_id).order_by(m.id)
    with store.reading() as session:
        return [
            NamedTime(uid=row.uid, record=_rows.measurement_record(row))
            for row in session.scalars(query)
        ]
