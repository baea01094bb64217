"""Results that come with the package: read-only, and never beside a user's own.

They are export files under ``leaderboard/shipped/`` and are loaded into a
database in memory, of which a copy is kept for the next process.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from threading import Lock
from typing import Any

import sqlalchemy as sa

from leaderboard._engine import SHIPPED, engine_of, make_engine, normalise
from leaderboard._kept import kept
from leaderboard.store import DEFAULT_URL, Store, open_store
from leaderboard.transfer import import_open
from leaderboard.whole_file import COMPRESSED

__all__ = ["open_for_reading", "shipped_files", "shipped_store"]


def shipped_files() -> tuple[Traversable, ...]:
    """Export files of the installed package, by name; empty if none came with it."""
    folder = files("leaderboard") / "shipped"
    if not folder.is_dir():
        return ()
    found = [f for f in folder.iterdir() if f.name.removesuffix(COMPRESSED).endswith(".jsonl")]
    return tuple(sorted(found, key=lambda f: f.name))


_loaded: dict[str, bytes] = {}
"""The database that the files last made, by :func:`_key`: a process may open them often."""
_loading = Lock()


def shipped_store() -> Store:
    """The shipped results, read-only; its ``name`` says so, or that there are none.

    For the thread that opens them.

    Raises
    ------
    TransferError
        If a shipped file is damaged.
    """
    found = [(file.name, file.read_bytes()) for file in shipped_files()]
    name = "the shipped results" if found else "the shipped results (none in this version)"
    key = _key(found)
    with _loading:
        if key not in _loaded:
            database = kept("shipped", key, lambda: _imported(found))
            _loaded.clear()
            _loaded[key] = database
        engine = engine_of(_loaded[key])
    with engine.connect() as connection:
        connection.execute(sa.text("PRAGMA query_only = ON"))
    return Store(engine, name=name, read_only=True)


def _imported(found: list[tuple[str, bytes]]) -> bytes:
    """A database of these files: seconds of checks and of rows."""
    engine = make_engine(normalise("sqlite://"), read_only=False)
    with Store(engine, name="the shipped results", read_only=False) as loader:
        for file_name, content in found:
            import_open(loader, io.BytesIO(content), file_name, name=f"shipped {file_name}")
        driver: Any = engine.raw_connection().driver_connection
        database: bytes = driver.serialize()
    return database


def _key(found: list[tuple[str, bytes]]) -> str:
    """Digest of the files and of the source that reads, checks and stores them."""
    digest = hashlib.sha256()
    for file_name, content in [*found, *_sources(files("leaderboard"))]:
        digest.update(f"{file_name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources(folder: Traversable) -> Iterator[tuple[str, bytes]]:
    for entry in sorted(folder.iterdir(), key=lambda f: f.name):
        if entry.is_dir():
            yield from _sources(entry)
        elif entry.name.endswith(".py"):
            yield entry.name, entry.read_bytes()


def open_for_reading(url: str | None = None) -> Store:
    """What a reading command looks at.

    ``url`` if given, else the database in the working directory if there is
    one, else the shipped results; always read-only.  The word ``"shipped"`` in the
    place of a URL names those whatever is in the working directory.
    """
    if url == SHIPPED:
        return shipped_store()
    if url is not None:
        return open_store(url, read_only=True)
    default = normalise(DEFAULT_URL).database
    if default is not None and Path(default).exists():
        return open_store(DEFAULT_URL, read_only=True)
    return shipped_store()
