"""Finalists: re-timed together in one job, then met with held-out workloads.

Only here is a winner named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import sqlalchemy as sa

from leaderboard._errors import UnknownError
from leaderboard._scores import geomean
from leaderboard._verdicts import in_groups
from leaderboard.models import CampaignRow, JobRow, MeasurementRow, TrialRow
from leaderboard.records import Clock, JobStatus, TrialStatus
from leaderboard.store import Store
from leaderboard.views import FinalRow

__all__ = ["finals", "winner"]

_Times = Mapping[tuple[bool, str, str], float]
"""Median by (held out, workload, regime)."""


def finals(store: Store, campaign_id: str) -> list[FinalRow]:
    """Finalists of the campaign's newest valid job that timed any, best first.

    Times of ``phase`` ``final`` on the campaign's clock count, the warm ones
    where there are any.  A finalist without a time on every tuned workload
    (ranking and slow regime) and on every held-out workload that the job met
    has no rank.  Finalists that are not told apart share a ``group``
    (:func:`leaderboard.in_groups`).
    """
    m = MeasurementRow
    with store.reading() as session:
        campaign = session.get(CampaignRow, campaign_id)
        if campaign is None:
            raise UnknownError(f"no campaign {campaign_id!r} in {store.name}")
        of_campaign = (
            TrialRow.campaign_id == campaign_id,
            TrialRow.status == TrialStatus.PASSED.value,
            JobRow.status == JobStatus.VALID.value,
            m.phase == "final",
            m.clock == campaign.clock,
        )
        job = session.scalars(
            sa.select(JobRow)
            .join(m, m.job_id == JobRow.id)
            .join(TrialRow, TrialRow.id == m.trial_id)
            .where(*of_campaign)
            .order_by(JobRow.started_at.desc(), JobRow.id.desc())
            .limit(1)
        ).first()
        if job is None:
            return []
        rows = session.execute(
            sa.select(m, TrialRow.schedule_key)
            .join(TrialRow, TrialRow.id == m.trial_id)
            .join(JobRow, JobRow.id == m.job_id)
            .where(*of_campaign, m.job_id == job.id)
            .order_by(m.id)
        ).all()
        bases = {(row.cache, row.method) for row, _ in rows}
        cache, method = min(bases, key=lambda b: (b[0] != "warm", b))
        times: dict[int, dict[tuple[bool, str, str], float]] = defaultdict(dict)
        keys: dict[int, str] = {}
        samples: dict[int, dict[str, list[float]]] = defaultdict(dict)
        for row, schedule_key in rows:
            if (row.cache, row.method) == (cache, method) and row.trial_id is not None:
                times[row.trial_id][row.held_out, row.workload, row.regime] = row.median_us
                keys[row.trial_id] = schedule_key
                if row.regime == campaign.ranking_regime and not row.held_out:
                    samples[row.trial_id][row.workload] = row.samples_us or [row.median_us]
        regime, slow = campaign.ranking_regime, campaign.slow_regime
        wanted = [(False, w, r) for r in (regime, slow) if r for w in campaign.workloads]
        met = {cell for cells in times.values() for cell in cells if cell[0] and cell[2] == regime}
        found = []
        for trial_id, cells in times.items():
            missing = [c for c in [*wanted, *sorted(met)] if c not in cells]
            found.append(
                FinalRow(
                    id=trial_id,
                    rank=None,
                    campaign_id=campaign_id,
                    schedule_key=keys[trial_id],
                    job_id=job.id,
                    gpu=job.gpu,
                    clock=Clock(campaign.clock),
                    method=method,
                    cache=cache,
                    score_us=_over(cells, regime, campaign.workloads),
                    slow_us=_over(cells, slow, campaign.workloads) if slow else None,
                    held_out_us=_geomean_of([cells[c] for c in sorted(met) if c in cells]),
                    missing=tuple(f"{w} on {r}" for _, w, r in missing),
                )
            )
    found.sort(key=lambda f: (bool(f.missing) or f.score_us is None, f.score_us or 0.0, f.id))
    ranked = [f for f in found if not f.missing and f.score_us is not None]
    groups = in_groups({f.id: samples[f.id] for f in ranked})
    group_of = {id_: number for number, ids in enumerate(groups, 1) for id_ in ids}
    return [
        f.model_copy(update={"rank": place, "group": group_of[f.id]}) if f.id in group_of else f
        for place, f in enumerate(found, 1)
    ]


def winner(store: Store, campaign_id: str) -> FinalRow | None:
    """The first of the :func:`finals`, if one met every workload."""
    rows = finals(store, campaign_id)
    return rows[0] if rows and rows[0].rank == 1 else None


def _over(cells: _Times, regime: str, workloads: list[str]) -> float | None:
    if not all((False, w, regime) in cells for w in workloads):
        return None
    return _geomean_of([cells[False, w, regime] for w in workloads])


def _geomean_of(values: list[float]) -> float | None:
    return geomean(values) if values else None
