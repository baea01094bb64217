"""A campaign as one self-contained web page.

It opens offline, without a server: style, drawings (inline SVG), data and
script are inside it.  It must not know SQL, and draws only what
:mod:`leaderboard`'s queries and the operation say.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leaderboard import CampaignRecord, Store

__all__ = ["build_report", "write_report"]


def build_report(store: Store, campaign: CampaignRecord, *, now: datetime | None = None) -> str:
    """The report of one campaign as HTML; of a running one, as it stands.

    Parameters
    ----------
    now : datetime, optional
        Moment that the page names, in UTC; by default the present.
    """
    from factory.report.data import gather
    from factory.report.page import render

    return render(gather(store, campaign, now=now or datetime.now(UTC)))


def write_report(store: Store, campaign: CampaignRecord, path: Path) -> int:
    """Write the report to ``path``, whole or not at all; returns its size in bytes.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    from leaderboard.whole_file import whole_file

    page = build_report(store, campaign)
    with whole_file(path) as stream:
        stream.write(page)
    return len(page.encode())
