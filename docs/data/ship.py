"""``python -m docs.data.ship CAMPAIGN``: put a campaign among the shipped results.

It gets a file of its own under ``leaderboard/shipped/``; those that are there stay.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import leaderboard
from docs.data.pages import ROOT
from leaderboard import CampaignRecord, Store

__all__ = ["ship"]

_FOLDER = ROOT / "leaderboard" / "shipped"


def ship(store: Store, campaign: CampaignRecord, folder: Path = _FOLDER) -> Path:
    """Export a finished, measured campaign into ``folder``; returns the file.

    Raises
    ------
    ValueError
        If the campaign is not finished, or none of its times counts.
    """
    if campaign.status.value != "finished":
        raise ValueError(f"campaign {campaign.id} is {campaign.status.value}, not finished")
    rows = leaderboard.ranked(store, campaign_id=campaign.id, clock=leaderboard.Clock.GPU)
    if not rows:
        raise ValueError(f"campaign {campaign.id} has no measured time that counts")
    gpu = re.sub(r"\W+", "-", str(rows[0].gpu).removeprefix("NVIDIA ")).lower()
    path = folder / f"{campaign.operation}-{gpu}-{campaign.created_at:%Y%m%d-%H%M%S}.jsonl.xz"
    folder.mkdir(parents=True, exist_ok=True)
    leaderboard.export_file(store, path, [campaign.id])
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.data.ship", description=__doc__)
    parser.add_argument("campaign", help="id or name; of several of a name the newest")
    parser.add_argument("--db", default=leaderboard.DEFAULT_URL, metavar="URL")
    asked = parser.parse_args()
    try:
        with leaderboard.open_store(asked.db, read_only=True) as store:
            path = ship(store, store.get_campaign(asked.campaign))
    except (ValueError, leaderboard.StoreError) as error:
        sys.stderr.write(f"ship: {error}\n")
        return 2
    sys.stdout.write(f"shipped {path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
