from __future__ import annotations

from collections.abc import Callable, Iterator

import board
import pytest

from leaderboard import Store, open_store


@pytest.fixture
def url(new_database: Callable[[], str]) -> str:
    """A database that is not there yet, or empty; on either server."""
    return new_database()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A database with one campaign (two workloads) and one open job."""
    with open_store(url) as opened:
        opened.create_campaign(board.campaign())
        opened.put_fingerprint(board.FINGERPRINT)
        opened.open_job(board.job("job-1"))
        yield opened
