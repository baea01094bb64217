"""Claims: exported folders that passed the export gate, and which of them stand."""

from __future__ import annotations

from collections import defaultdict

import sqlalchemy as sa

from leaderboard import _rows
from leaderboard.models import ClaimRow
from leaderboard.store import Store
from leaderboard.views import ClaimView

__all__ = ["claim_of", "claims"]


def claims(
    store: Store, *, operation: str | None = None, export_hash: str | None = None
) -> list[ClaimView]:
    """Claims, newest first, each with the one that superseded it and whether it was replicated.

    A claim is replicated once the same folder has passed the gate in a second job.

    Parameters
    ----------
    operation, export_hash : str, optional
        Only those of it.
    """
    query = sa.select(ClaimRow).order_by(ClaimRow.created_at.desc(), ClaimRow.id.desc())
    with store.reading() as session:
        found = [_rows.claim_record(row) for row in session.scalars(query)]
    newer = {c.supersedes: c.id for c in found if c.supersedes is not None}
    jobs: dict[str, set[str]] = defaultdict(set)
    for c in found:
        jobs[c.export_hash].add(c.job_id)
    return [
        ClaimView(
            **c.model_dump(),
            superseded_by=newer.get(c.id),
            jobs=len(jobs[c.export_hash]),
            replicated=len(jobs[c.export_hash]) > 1,
        )
        for c in found
        if operation in (None, c.operation) and export_hash in (None, c.export_hash)
    ]


def claim_of(store: Store, export_hash: str) -> ClaimView | None:
    """The newest claim on a folder, by the hash of its sources and table; None if there is none."""
    return next(iter(claims(store, export_hash=export_hash)), None)
