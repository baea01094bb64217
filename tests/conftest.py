"""What holds for every test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import postgresql_server
import pytest

from factory.machine import sm90_gpus

# The DSL reads it once, when it is first imported, by whichever test comes first.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
# No test learns from what another, or its user, compiled before; those of the store name one.
os.environ["FACTORY_ARTEFACTS"] = ""
# Nor from what its user kept; the processes of one run share what they keep.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="factory-tests-cache-")
    os.environ["XDG_CACHE_HOME"] = _cache.name


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU is skipped where there is none, by whatever else it was chosen."""
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu and not sm90_gpus():
        for item in for_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an sm90 GPU"))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[postgresql_server.Server]:
    """A real server of this test run."""
    if postgresql_server.binaries() is None:
        said = "no PostgreSQL server here; tests/install_postgresql.sh brings one"
        if os.environ.get(postgresql_server.REQUIRED):
            pytest.fail(said)
        pytest.skip(said)
    with postgresql_server.running() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes an empty database and returns its URL: once on SQLite, once on PostgreSQL."""
    if request.param == "postgresql":
        new: Callable[[], str] = request.getfixturevalue("postgresql").new
        return new
    made = iter(range(1000))
    return lambda: f"sqlite:///{tmp_path / f'board{next(made)}.db'}"


@pytest.fixture
def leaderboard_now(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], datetime]], None]:
    """Makes a function the clock of the leaderboard."""

    def be(now: Callable[[], datetime]) -> None:
        for module in ("_base", "_trials", "store"):
            monkeypatch.setattr(f"leaderboard.{module}.now_utc", now)

    return be
