"""Results that come with the package: read-only, and never beside a user's own.

They are export files under ``leaderboard/shipped/`` and are loaded into a
database in memory.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import BinaryIO, cast

import sqlalchemy as sa

from leaderboard._engine import SHIPPED, make_engine, normalise
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


def shipped_store() -> Store:
    """The shipped results, read-only; its ``name`` says so, or that there are none.

    Raises
    ------
    TransferError
        If a shipped file is damaged.
    """
    found = shipped_files()
    name = "the shipped results" if found else "the shipped results (none in this version)"
    engine = make_engine(normalise("sqlite://"), read_only=False)
    loader = Store(engine, name=name, read_only=False)
    for file in found:
        with file.open("rb") as raw:
            import_open(loader, cast("BinaryIO", raw), file.name, name=f"shipped {file.name}")
    with engine.connect() as connection:
        connection.execute(sa.text("PRAGMA query_only = ON"))
    return Store(engine, name=name, read_only=True)


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
