"""A trial over a control of the same job: ratios, and where the two are told apart.

The samples decide, as between two trials.  But a control is read at several times of a job, and
a valid job may have drifted meanwhile: a lead that is no larger than that bound is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from leaderboard._consistent import drift_bound
from leaderboard._errors import QueryError
from leaderboard._ranking import (
    Control,
    Entry,
    complete_controls,
    control_cells,
    trial_medians,
    trial_samples,
)
from leaderboard._verdicts import THRESHOLD, contrast
from leaderboard.models import CampaignRow, MeasurementRow
from leaderboard.views import Ratio, ShapeRatio

__all__ = ["judged", "least_lead", "over_control", "shape_ratios"]

_Samples = Mapping[str, Sequence[float]]


def over_control(session: Session, entry: Entry, control: str) -> Ratio:
    """See :func:`leaderboard.ratio`.

    Raises
    ------
    QueryError
        If the control was not timed on all workloads in the trial's job.
    """
    key, trial_id = entry.cell_key, entry.trial.id
    cells = control_cells(session, [key[0]])
    complete = complete_controls(cells, key, entry.workloads)
    found = sorted((us, c) for c, us in complete.items() if c[0] == control)
    if not found:
        there = ", ".join(sorted({c[0] for c in complete})) or "none"
        raise QueryError(
            f"job {key[0]} of trial {trial_id} did not time control {control!r} on all its "
            f"workloads (complete there: {there}); a control of another job is no measure"
        )
    us, chosen = found[0]
    medians = trial_medians(session, [entry])[trial_id]
    mine = trial_samples(session, [entry])[trial_id]
    theirs = _samples(session, entry, chosen)
    campaign = session.get_one(CampaignRow, entry.trial.campaign_id)
    threshold = least_lead(campaign.config)
    whole = contrast(mine, theirs, threshold=threshold)
    return Ratio(
        id=trial_id,
        job_id=key[0],
        clock=entry.trial.clock,
        control=chosen[0],
        control_form=chosen[1],
        score_us=entry.trial.score_us,
        control_us=us,
        ratio=entry.trial.score_us / us,
        low=whole.low,
        high=whole.high,
        verdict=whole.verdict,
        shapes=tuple(
            judged(shape, mine, theirs, threshold=threshold)
            for shape in shape_ratios(entry.workloads, medians, cells[key][chosen])
        ),
    )


def least_lead(config: Mapping[str, Any] | None) -> float:
    """Of a campaign: up to it a lead over a control is none, relative."""
    return max(THRESHOLD, drift_bound(config))


def shape_ratios(
    workloads: Sequence[str], first: Mapping[str, float], second: Mapping[str, float]
) -> tuple[ShapeRatio, ...]:
    """Medians of two on each workload."""
    return tuple(
        ShapeRatio(workload=w, first_us=first[w], second_us=second[w], ratio=first[w] / second[w])
        for w in workloads
    )


def judged(
    shape: ShapeRatio, first: _Samples, second: _Samples, *, threshold: float = THRESHOLD
) -> ShapeRatio:
    """The same with the verdict of the samples."""
    found = contrast(first[shape.workload], second[shape.workload], threshold=threshold)
    return shape.model_copy(update={"low": found.low, "high": found.high, "verdict": found.verdict})


def _samples(session: Session, entry: Entry, control: Control) -> dict[str, list[float]]:
    """Samples of all readings of a control beside the score, together, by workload."""
    m = MeasurementRow
    job, regime, clock, method, cache = entry.cell_key
    name, form = control
    rows = session.scalars(
        sa.select(m)
        .where(
            m.control == name,
            m.input_form == form,
            m.job_id == job,
            m.regime == regime,
            m.clock == clock,
            m.method == method,
            m.cache == cache,
            m.phase != "final",
            m.workload.in_(entry.workloads),
            m.held_out.is_(False),
        )
        .order_by(m.id)
    )
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.workload, []).extend(row.samples_us or [row.median_us])
    return found
