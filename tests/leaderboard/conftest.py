from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import board
import pytest

from leaderboard import Store, open_store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'board.db'}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A database with one campaign (two workloads) and one open job."""
    with open_store(url) as opened:
        opened.create_campaign(board.campaign())
        opened.put_fingerprint(board.FINGERPRINT)
        opened.open_job(board.job("job-1"))
        yield opened
