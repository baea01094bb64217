"""The trials that lead the measured ranking of an operation, as the source is now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderboard.records import Clock

if TYPE_CHECKING:
    from candidates import Family
    from leaderboard import LeaderboardRow, Store
    from operations import Operation

__all__ = ["leaders"]


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
