"""The same trials by another regime or clock than their score's.

Obeys the rules of the score: a trial has such a time only if it was read on every tuned
workload, in the job of its score, in the same state of the cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import sqlalchemy as sa
from sqlalchemy.orm import Session

from leaderboard._ranking import Entry, chunks
from leaderboard._scores import geomean
from leaderboard.models import MeasurementRow, TrialRow
from leaderboard.records import Clock

__all__ = ["Times", "rebased", "times_of"]


@dataclass(frozen=True)
class Times:
    """A trial on one workload, microseconds."""

    us: float
    low_us: float
    high_us: float


_Found = Mapping[int, Mapping[str, Mapping[str, Times]]]
"""By trial, method and workload."""


def times_of(
    session: Session, entries: Sequence[Entry], *, regime: str | None, clock: Clock | None
) -> _Found:
    """Times of the search in each trial's job, on the tuned workloads.

    Parameters
    ----------
    regime, clock : optional
        By default those of each trial's score.
    """
    m = MeasurementRow
    found: dict[int, dict[str, dict[str, Times]]] = defaultdict(lambda: defaultdict(dict))
    regimes = {e.trial.id: regime or e.regime for e in entries}
    for chunk in chunks(sorted(regimes)):
        query = (
            sa.select(m.trial_id, m.regime, m.method, m.workload, m.median_us, m.low_us, m.high_us)
            .join(TrialRow, TrialRow.id == m.trial_id)
            .where(
                m.trial_id.in_(chunk),
                m.job_id == TrialRow.job_id,
                m.clock == (TrialRow.clock if clock is None else clock.value),
                m.cache == TrialRow.cache,
                m.phase == "search",
                m.held_out.is_(False),
            )
            .order_by(m.id)  # the last reading counts, as when the trial passed
        )
        for trial_id, of, method, workload, *us in session.execute(query):
            if trial_id is not None and of == regimes[trial_id]:
                found[trial_id][method][workload] = Times(*us)
    return found


def rebased(
    session: Session, entries: Iterable[Entry], *, regime: str | None, clock: Clock
) -> tuple[list[Entry], list[tuple[Entry, str]]]:
    """Entries with another time for their score, and those that have none and why.

    Modelled ones have no other time and are left out.
    """
    measured = [e for e in entries if not e.modelled]
    found = times_of(session, measured, regime=regime, clock=clock)
    placed: list[Entry] = []
    left: list[tuple[Entry, str]] = []
    for e in measured:
        on = regime or e.regime
        whole = {
            method: [by[w].us for w in e.workloads]
            for method, by in sorted(found.get(e.trial.id, {}).items())
            if e.workloads and all(w in by for w in e.workloads)
        }
        if not whole:
            left.append((e, f"it has no {clock.value} time on every workload of regime {on}"))
            continue
        # A clock is read by one method; were there two, the score's own comes first.
        method = e.trial.method if e.trial.method in whole else next(iter(whole))
        values = {c.name: getattr(e.trial, c.name) for c in TrialRow.__table__.columns}
        values |= {"score_us": geomean(whole[method]), "clock": clock.value, "method": method}
        placed.append(replace(e, trial=SimpleNamespace(**values), regime=on))
    return placed, left
