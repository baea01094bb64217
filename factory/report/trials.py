"""The table of a report: every trial, and the kinds of failure.  Draws nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaderboard import CampaignRecord, LeaderboardRow, Store, TrialRecord, unranked

__all__ = ["TableRow", "reasons_of", "table_rows"]

_NUMBER = re.compile(r"(?<![A-Za-z_])[-+]?\d[\d.,]*(?:e[-+]?\d+)?(?:/\d+)*")


@dataclass(frozen=True)
class TableRow:
    """One trial in the table."""

    id: int
    number: int
    status: str
    rank: int | None
    us: float | None
    slow_us: float | None
    ratio: float | None
    losses: int | None
    """Shapes on which its control was faster; None without one."""
    share: float | None
    schedule: str
    note: str


def reasons_of(
    trials: Sequence[TrialRecord], most: int = 12
) -> tuple[tuple[tuple[str, str, str, int], ...], int]:
    """Kinds of failure, the most frequent first: reasons that differ in numbers only are one."""
    counts: Counter[tuple[str, str, str]] = Counter()
    example: dict[tuple[str, str, str], str] = {}
    for t in trials:
        if t.status.finished and t.reason:
            kind = (t.stage, t.status.value, _NUMBER.sub("#", t.reason))
            counts[kind] += 1
            example.setdefault(kind, t.reason)
    common = counts.most_common(most)
    shown = tuple(
        (stage, status, example[kind], n) for kind, n in common for stage, status, _ in [kind]
    )
    return shown, len(counts) - len(common)


def table_rows(
    store: Store,
    campaign: CampaignRecord,
    trials: Sequence[TrialRecord],
    rows: Sequence[LeaderboardRow],
    shares: Mapping[int, tuple[float | None, str]],
    open_jobs: set[str],
) -> tuple[TableRow, ...]:
    placed = {r.id: r for r in rows}
    left = {u.id: u.reason for u in unranked(store, campaign_id=campaign.id)}

    def row(t: TrialRecord) -> TableRow:
        r = placed.get(t.id)
        if t.reason:
            note = f"{t.stage}: {t.reason}" if t.stage else t.reason
        elif t.job_id in open_jobs:
            note = f"job {t.job_id} is open: its times may still be void"
        else:
            note = left.get(t.id, "")
        return TableRow(
            id=t.id,
            number=t.number,
            status=t.status.value,
            rank=None if r is None else r.rank,
            us=t.score_us,
            slow_us=t.slow_us,
            ratio=None if r is None else r.ratio,
            share=shares[t.id][0] if t.id in shares else None,
            losses=None if r is None or r.control is None else len(r.losses),
            schedule=t.schedule_key,
            note=note,
        )

    order = {r.id: n for n, r in enumerate(rows)}
    return tuple(
        sorted(map(row, trials), key=lambda t: (order.get(t.id, len(order)), t.number, t.id))
    )
