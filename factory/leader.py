"""The trials that lead: an operation's measured ranking, and a campaign on its way to finals."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from leaderboard.records import Clock, TrialRecord, TrialStatus

if TYPE_CHECKING:
    from candidates import Family
    from leaderboard import LeaderboardRow, Store
    from operations import Operation

__all__ = ["finalists", "leaders"]


def finalists(store: Store, campaign_id: str, most: int) -> list[TrialRecord]:
    """The passed trials to be timed once more, at most so many, shortest times first.

    Times of two GPUs are not compared: where a campaign has measured on several
    kinds, these take turns.  Jobs of one kind are, and void ones too, as of a
    driver that was killed: the finals are one job and read them all again.
    """
    gpus = {job.id: job.gpu for job in store.list_jobs(campaign_id)}
    kinds: dict[str | None, list[TrialRecord]] = defaultdict(list)
    passed = store.list_trials(campaign_id, [TrialStatus.PASSED])
    for trial in sorted(passed, key=lambda t: (t.score_us or 0.0, t.id)):
        kinds[gpus.get(trial.job_id or "")].append(trial)
    turns = chain.from_iterable(zip_longest(*kinds.values()))
    return [trial for trial in turns if trial is not None][:most]


def leaders(store: Store, operation: Operation, family: Family) -> dict[str, LeaderboardRow]:
    """First of the ranking by ``gpu`` at the operation's version, for each GPU.

    Times of two GPUs are not compared, so that there is no first of all.  Trials
    of other source than the family's count where no GPU has one of its own; of
    several methods or cache states on a GPU the one that was measured last.
    """
    from leaderboard import ranked

    rows = ranked(
        store,
        operation=operation.name,
        operation_version=operation.version,
        clock=Clock.GPU,
        source_hash=family.source_hash(),
        limit=1,
    )
    current = [row for row in rows if not row.superseded] or rows
    return {str(row.gpu): row for row in sorted(current, key=lambda row: row.id)}
