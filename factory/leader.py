"""The trial that leads the measured ranking of an operation, as the source is now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderboard.records import Clock

if TYPE_CHECKING:
    from candidates import Family
    from leaderboard import LeaderboardRow, Store
    from operations import Operation

__all__ = ["leader"]


def leader(store: Store, operation: Operation, family: Family) -> LeaderboardRow | None:
    """First of the ranking by ``gpu`` at the operation's version; None if nothing was measured.

    Trials of other source than the family's stand behind those of its own.
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
    return rows[0] if rows else None
