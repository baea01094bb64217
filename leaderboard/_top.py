"""The first rows of every ranking, without reading the rest.

Passed trials of one campaign, job, clock, method, cache state and source are a *stratum*: the
rules of :mod:`leaderboard._ranking` treat them alike, so that within it the score alone orders.
The rules are asked about strata, each represented by its best score; then only the strata that
can reach the first rows are read, each from the best down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from leaderboard._ranking import Entry, Filters, build_board, entry_of
from leaderboard.models import CampaignRow, JobRow, TrialRow
from leaderboard.records import Clock, JobStatus, TrialStatus

__all__ = ["top"]

_SAME = (
    TrialRow.campaign_id,
    TrialRow.job_id,
    TrialRow.clock,
    TrialRow.method,
    TrialRow.cache,
    TrialRow.source_hash,
)
"""What trials of one stratum have in common; the order is that of ``ix_kf_trials_ranking``."""


def top(
    session: Session, filters: Filters, *, jobs: Iterable[JobStatus], limit: int | None
) -> list[list[Entry]]:
    """The first ``limit`` entries of each run that may be ordered; all of them for None."""
    if limit is None:  # every trial is read anyway, and in one statement
        return [list(group) for group in build_board(session, filters, jobs=jobs).groups]
    board = build_board(session, filters, jobs=jobs, entries=_strata(session, filters))
    return [_first(session, strata, limit) for strata in board.groups]


def _strata(session: Session, filters: Filters) -> Iterator[Entry]:
    """One entry for each stratum, with its best score and its first trial's id."""
    best = (
        sa.select(
            *_SAME,
            sa.func.min(TrialRow.score_us).label("score_us"),
            sa.func.min(TrialRow.id).label("id"),
        )
        .where(TrialRow.status == TrialStatus.PASSED.value)
        .group_by(*_SAME)
    )
    if filters.campaign_id is not None:
        best = best.where(TrialRow.campaign_id == filters.campaign_id)
    if filters.clock is not None:
        best = best.where(TrialRow.clock == filters.clock.value)
    found = best.subquery()
    query = (
        sa.select(found, CampaignRow, JobRow)
        .join(CampaignRow, CampaignRow.id == found.c.campaign_id)
        .outerjoin(JobRow, JobRow.id == found.c.job_id)
        .where(*filters.of_campaign)
        .order_by(found.c.id)
    )
    if filters.gpu is not None:
        query = query.where(JobRow.gpu == filters.gpu, found.c.clock != Clock.MODELLED.value)
    for row in session.execute(query):
        yield entry_of(row, row.CampaignRow, row.JobRow, source_hash=filters.source_hash)


def _first(session: Session, strata: Iterable[Entry], limit: int) -> list[Entry]:
    """Merge strata, which come ordered by the value of their best."""
    placed: list[Entry] = []
    for stratum in strata:
        if len(placed) == limit and _value(stratum) > _value(placed[-1]):
            break  # nor can any of those behind it reach the first rows
        for row in _best_of(session, stratum, limit):
            ratio = None if stratum.control_us is None else row.score_us / stratum.control_us
            placed.append(replace(stratum, trial=row, ratio=ratio))
        placed.sort(key=lambda e: (_value(e), e.trial.id))
        del placed[limit:]
    return placed


def _value(entry: Entry) -> float:
    """What orders it in its run."""
    value: float = entry.trial.score_us
    return entry.ratio if entry.provisional and entry.ratio is not None else value


def _best_of(session: Session, stratum: Entry, limit: int) -> Iterable[Any]:
    query = (
        sa.select(TrialRow.__table__)
        .where(
            TrialRow.status == TrialStatus.PASSED.value,
            *(column == getattr(stratum.trial, column.key) for column in _SAME),  # or IS NULL
        )
        .order_by(TrialRow.score_us, TrialRow.id)
        .limit(limit)
    )
    return session.execute(query)
