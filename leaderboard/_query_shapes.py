"""The rows of a query on each workload, beside the control of their ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from leaderboard._against import least_lead
from leaderboard._basis import Times, times_of
from leaderboard._ranking import Entry, Filters, chunks, control_cells, passed_entries
from leaderboard._verdicts import Verdict
from leaderboard.models import CampaignRow, StageRow
from leaderboard.records import Clock
from leaderboard.store import Store
from leaderboard.views import ResultRow, ShapeResult

__all__ = ["query_shapes"]


def query_shapes(store: Store, results: Iterable[ResultRow]) -> list[ShapeResult]:
    """The rows of a :func:`query` on each tuned workload, beside the control of their ratio.

    Rows without a time are left out.  Beside the control's time stands a verdict: faster, slower,
    or not told apart.
    """
    rows = [row for row in results if row.score_us is not None and row.clock is not None]
    found: list[ShapeResult] = []
    with store.reading() as session:
        scores = {row.id: row for row in rows}
        entries = {e.trial.id: e for e in passed_entries(session, Filters(), ids=list(scores))}
        modelled = _modelled(session, [r.id for r in rows if r.clock is Clock.MODELLED])
        by_basis: dict[tuple[str | None, Clock | None], list[ResultRow]] = {}
        for row in rows:
            if row.clock is not Clock.MODELLED:
                by_basis.setdefault((row.regime, row.clock), []).append(row)
        times: dict[int, Mapping[str, Times]] = {}
        for (regime, clock), mine in by_basis.items():
            seen = times_of(session, [entries[r.id] for r in mine], regime=regime, clock=clock)
            times |= {r.id: seen[r.id].get(r.method or "", {}) for r in mine if r.id in seen}
        controls = _controls(session, by_basis, entries)
        bounds = _bounds(session, rows)
        for row in rows:
            for workload in entries[row.id].workloads:
                if row.clock is Clock.MODELLED:
                    us = modelled.get(row.id, {}).get(workload)
                    at = None if us is None else Times(us, us, us)
                else:
                    at = times.get(row.id, {}).get(workload)
                if at is not None:
                    over = controls(row, workload)
                    found.append(_shape(row, workload, at, over, bounds[row.campaign_id]))
    return found


def _controls(
    session: Session,
    by_basis: Mapping[tuple[str | None, Clock | None], Sequence[ResultRow]],
    entries: Mapping[int, Entry],
) -> Callable[[ResultRow, str], float | None]:
    """Looks up a row's own control in its own job."""
    cells = control_cells(
        session, {r.job_id for mine in by_basis.values() for r in mine if r.job_id and r.control}
    )

    def of(row: ResultRow, workload: str) -> float | None:
        if row.control is None or row.clock is None or row.job_id is None:
            return None
        regime = row.regime or entries[row.id].regime
        cell = cells.get((row.job_id, regime, row.clock, row.method or "", row.cache or ""), {})
        return cell.get((row.control, row.control_form or ""), {}).get(workload)

    return of


def _modelled(session: Session, ids: Sequence[int]) -> dict[int, Mapping[str, float]]:
    """What the cost model said of each workload, from the stage that asked it."""
    found: dict[int, Mapping[str, float]] = {}
    for chunk in chunks(ids):
        statement = sa.select(StageRow.trial_id, StageRow.details).where(
            StageRow.trial_id.in_(chunk)
        )
        for trial_id, details in session.execute(statement):
            if "modelled_us" in details:
                found[trial_id] = details["modelled_us"]
    return found


def _bounds(session: Session, rows: Iterable[ResultRow]) -> dict[str, float]:
    """Of each campaign the lead over a control that is too small to name."""
    found: dict[str, float] = {}
    for chunk in chunks(sorted({row.campaign_id for row in rows})):
        statement = sa.select(CampaignRow.id, CampaignRow.config).where(CampaignRow.id.in_(chunk))
        for campaign, config in session.execute(statement):
            found[campaign] = least_lead(config)
    return found


def _verdict(at: Times, control_us: float, bound: float) -> Verdict:
    if at.high_us < control_us / (1 + bound):
        return Verdict.FASTER
    if at.low_us > control_us * (1 + bound):
        return Verdict.SLOWER
    return Verdict.NOT_TOLD_APART


def _shape(
    row: ResultRow, workload: str, at: Times, control_us: float | None, bound: float
) -> ShapeResult:
    return ShapeResult(
        id=row.id,
        run=row.run,
        rank=row.rank,
        campaign_id=row.campaign_id,
        schedule_key=row.schedule_key,
        workload=workload,
        regime=row.regime,
        clock=row.clock,
        gpu=row.gpu,
        job_id=row.job_id,
        us=at.us,
        low_us=at.low_us,
        high_us=at.high_us,
        control=row.control if control_us is not None else None,
        control_us=control_us,
        ratio=None if control_us is None else at.us / control_us,
        lost=control_us is not None and at.us > control_us,
        verdict=None if control_us is None else _verdict(at, control_us, bound),
    )
