"""The campaign that the pages show, and its times by who, where and clock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import leaderboard
import operations
from leaderboard import CampaignRecord, JobRecord, LeaderboardRow, Store
from operations import Operation

__all__ = ["CLOCKS", "COPY_BYTES_PER_US", "Column", "Shown", "Times", "choose"]

COPY_BYTES_PER_US = 4.25e6
"""What a plain copy reaches on an H200; see docs/kernel.md."""

_STEADY = 0.05
"""A schedule whose time differs by at most so much between production and slow gates, on each tuned
shape, is one that does not depend on them."""

_NO_COMPETITOR = "torch"
"""The control that checks arithmetic: chunked fp32 code in plain PyTorch."""


class Column(NamedTuple):
    """How a time was read."""

    head: str
    regime: str
    clock: str
    cache: str
    phase: str


CLOCKS = (
    Column("`gpu`", "production", "gpu", "warm", "search"),
    Column("`gpu`, cold", "production", "gpu", "cold", "search"),
    Column("`per_call`", "production", "per_call", "warm", "search"),
    Column("`pipelined`", "production", "pipelined", "warm", "search"),
    Column("`gpu`, slow gates", "slow", "gpu", "warm", "search"),
    Column("`gpu`, finals", "production", "gpu", "warm", "final"),
)


class Times:
    """Times of one trial in the job of its score, and of the controls beside it."""

    def __init__(self, store: Store, trial: int, job_id: str | None) -> None:
        self._rows = {
            (r.workload, r.regime, r.clock.value, r.cache, r.phase): r
            for r in leaderboard.shapes(store, trial)
            if r.job_id == job_id
        }

    def of(
        self, who: str | None, column: Column, names: Iterable[str], *, mean: bool = True
    ) -> list[float | None]:
        """Medians in microseconds, of the trial itself where ``who`` is None.

        The last one is the geomean, or None where one of them is missing.
        """
        found: list[float | None] = []
        for name in names:
            row = self._rows.get((name, *column[1:]))
            us: dict[str | None, float] = {}
            if row is not None:
                us = {c.control: c.median_us for c in row.controls} | {None: row.median_us}
            found.append(us.get(who))
        if not mean:
            return found
        known = [v for v in found if v is not None]
        whole = known and len(known) == len(found)
        return [*found, statistics.geometric_mean(known) if whole else None]

    @property
    def controls(self) -> list[str]:
        """Names of the controls that have any time beside the trial."""
        return sorted({c.control for r in self._rows.values() for c in r.controls})


@dataclass(frozen=True)
class Shown:
    """One measured campaign with a valid job."""

    store: Store
    campaign: CampaignRecord
    operation: Operation
    rows: tuple[LeaderboardRow, ...]
    """Of the job of the winner, best first."""
    winner: LeaderboardRow
    """Of the finals, or the first."""
    steady: LeaderboardRow | None
    """The fastest whose time does not depend on the gates; None if that is the winner."""

    @property
    def equal(self) -> float:
        """Relative difference to a control that says nothing: a job may drift by so much."""
        return float(self.campaign.config["device"]["drift"])

    @property
    def tuned(self) -> list[str]:
        return list(self.campaign.workloads)

    @cached_property
    def job(self) -> JobRecord:
        assert self.winner.job_id is not None
        return self.store.get_job(self.winner.job_id)

    @cached_property
    def fingerprint(self) -> dict[str, object]:
        return dict(self.store.get_fingerprint(self.job.fingerprint_id).values)

    def times(self, row: LeaderboardRow) -> Times:
        return Times(self.store, row.id, row.job_id)

    @cached_property
    def controls(self) -> list[str]:
        """Controls with a time on every tuned shape, fastest first; not the check of arithmetic."""
        times = self.times(self.winner)
        means = {c: times.of(c, CLOCKS[0], self.tuned)[-1] for c in times.controls}
        known = {c: us for c, us in means.items() if us is not None and c != _NO_COMPETITOR}
        return sorted(known, key=known.__getitem__)

    @property
    def floors(self) -> list[float]:
        """Microseconds that any implementation needs, with their geomean."""
        bytes_ = [self.operation.floor_bytes(self.operation.workloads[w]) for w in self.tuned]
        found = [b / COPY_BYTES_PER_US for b in bytes_]
        return [*found, statistics.geometric_mean(found)]

    def name(self, row: LeaderboardRow) -> str:
        """What a table calls a schedule: its form, where that tells the two apart."""
        form = str(row.schedule.get("form", "")) or f"trial {row.id}"
        other = self.steady if row.id == self.winner.id else self.winner
        if other is not None and other.schedule.get("form") == row.schedule.get("form"):
            return "winner" if row.id == self.winner.id else "steady"
        return form

    @property
    def ours(self) -> list[LeaderboardRow]:
        return [self.winner, *([self.steady] if self.steady else [])]


def choose(store: Store, operation: str) -> Shown:
    """The newest finished campaign of an operation that ranks by ``gpu``.

    Raises
    ------
    LookupError
        If there is none.
    """
    campaigns: Sequence[CampaignRecord] = store.list_campaigns()
    for campaign in reversed([c for c in campaigns if c.operation == operation]):
        if campaign.status.value != "finished" or campaign.clock.value != "gpu":
            continue
        ranked = leaderboard.ranked(store, campaign_id=campaign.id, clock=campaign.clock)
        if not ranked:
            continue
        first = leaderboard.winner(store, campaign.id)
        winner = next((r for r in ranked if first is not None and r.id == first.id), ranked[0])
        rows = tuple(r for r in ranked if r.job_id == winner.job_id)
        steady = next((r for r in rows if _is_steady(store, campaign, r)), None)
        return Shown(
            store,
            campaign,
            operations.get(campaign.operation),
            rows,
            winner,
            None if steady is None or steady.id == winner.id else steady,
        )
    raise LookupError(f"{store.name} holds no finished campaign of {operation} that was measured")


def _is_steady(store: Store, campaign: CampaignRecord, row: LeaderboardRow) -> bool:
    """Whether no tuned shape's time depends on the gates; not if one of them has no time."""
    times = Times(store, row.id, row.job_id)
    read = next(c for c in CLOCKS if c.regime == "slow")
    slow = times.of(None, read, campaign.workloads, mean=False)
    other = times.of(None, read._replace(regime="production"), campaign.workloads, mean=False)
    return all(a and b and abs(a / b - 1) <= _STEADY for a, b in zip(slow, other, strict=True))
