"""From a database URL to an engine with the right schema, or one clear line.

Knows the two databases' habits (pragmas, drivers, locks) and nothing of what
is stored.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from leaderboard import migrations
from leaderboard._errors import AbsentError, OlderError, StoreError, UnreachableError
from leaderboard._types import load_json
from leaderboard.models import Base

__all__ = [
    "BUSY_SECONDS",
    "SHIPPED",
    "WRITES",
    "describe",
    "engine_of",
    "in_memory",
    "make_engine",
    "normalise",
]

SHIPPED = "shipped"
"""In the place of a URL: the results that come with the package, for reading."""


BUSY_SECONDS = 60
"""How long a transaction waits for another process's before it gives up."""

WRITES = "kf_writes"
"""Execution option of a connection whose transactions write."""

# Any fixed number: processes that migrate one PostgreSQL database queue on it.
_MIGRATION_LOCK = 7_310_604_118


def normalise(url: str) -> URL:
    """Parse ``url`` and pick the driver.

    Raises
    ------
    StoreError
        If it is no URL or names a database that is not supported.
    """
    if url == SHIPPED:
        raise StoreError(
            "the shipped results are for reading only; name a database to write to: sqlite:///FILE"
        )
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # no URL, or a port or host that is none
        raise StoreError(
            f"{url!r} is not a database URL; use sqlite:///FILE, postgresql://USER@HOST/NAME, "
            f"or {SHIPPED} where results are read"
        ) from None
    backend = parsed.get_backend_name()
    if backend in ("postgresql", "postgres"):
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if not parsed.database:
            raise StoreError(f"{describe(parsed)} names no database; end it with /NAME")
        return parsed
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if parsed.host or parsed.username:
            raise StoreError(
                f"{describe(parsed)} has a host; SQLite takes sqlite:///FILE "
                "(four slashes for an absolute path)"
            )
        if parsed.query:
            raise StoreError(
                f"SQLite takes no options in its URL: {', '.join(sorted(parsed.query))}; use "
                "sqlite:///FILE"
            )
        return parsed
    raise StoreError(
        f"unsupported database {parsed.drivername!r}; use sqlite:///FILE or "
        "postgresql://USER@HOST/NAME"
    )


def in_memory(url: URL) -> bool:
    """Whether nothing of it is left when the process ends."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def describe(url: URL) -> str:
    """``url`` as it may be shown: without its password."""
    return url.render_as_string(hide_password=True)


def make_engine(url: URL, *, read_only: bool) -> Engine:
    """Connect, and bring the schema up to date unless ``read_only``.

    Raises
    ------
    StoreError
        Missing driver, unwritable path, not a database, foreign or newer
        schema, server not reachable.
    """
    shown = describe(url)
    try:
        if url.get_backend_name() == "sqlite":
            engine = _sqlite(url, read_only)
        else:
            engine = sa.create_engine(url, pool_pre_ping=True, json_deserializer=load_json)
            if read_only:
                engine = engine.execution_options(postgresql_readonly=True)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{shown} needs the driver {error.name!r}; install it with "
            "pip install 'kernel-factory[postgresql]'"
        ) from None
    except SQLAlchemyError as error:
        raise StoreError(f"cannot use {shown}: {first_line(error)}") from None
    try:
        _bring_schema(engine, shown, read_only)
    except StoreError:
        engine.dispose()
        raise
    except (DBAPIError, sqlite3.Error) as error:
        engine.dispose()
        said = first_line(error)
        # What a server says itself, of a password or a name, begins with FATAL.
        away = engine.dialect.name == "postgresql" and isinstance(error, OperationalError)
        kind = UnreachableError if away and "FATAL" not in str(error) else StoreError
        raise kind(f"cannot open {shown}: {said}") from None
    return engine


def engine_of(content: bytes) -> Engine:
    """A database in memory with the contents of another, as its driver serialised them."""
    engine = _sqlite(normalise("sqlite://"), read_only=False)
    driver: Any = engine.raw_connection().driver_connection
    driver.deserialize(content)
    return engine


def first_line(error: Exception) -> str:
    """The driver's own message, without SQL, parameters and line breaks."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__


def _sqlite(url: URL, read_only: bool) -> Engine:
    if in_memory(url):
        engine = sa.create_engine(url, poolclass=StaticPool, json_deserializer=load_json)
        _habits(engine)
        return engine
    path = Path(str(url.database))
    _check_path(path, read_only)
    if read_only:
        location = f"file:{quote(str(path.absolute()))}?mode=ro"
        if not _has_wal(path) and not _writable(path.parent):
            # WAL needs its side files; where none can be made nobody writes either.
            location += "&immutable=1"
    else:
        location = f"file:{quote(str(path.absolute()))}?mode=rwc"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            location, uri=True, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None
        )

    if not read_only:
        _use_wal(connect, str(path))
    engine = sa.create_engine(
        url, creator=connect, pool_size=5, max_overflow=10, json_deserializer=load_json
    )
    _habits(engine, query_only=read_only)
    return engine


def _check_path(path: Path, read_only: bool) -> None:
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name a file in it, for example {path}/factory.db")
    if not path.exists():
        if read_only:
            raise AbsentError(f"there is no database at {path}")
        if not path.parent.is_dir():
            raise StoreError(f"cannot create {path}: the folder {path.parent} does not exist")
        if not _writable(path.parent):
            raise StoreError(f"cannot create {path}: the folder {path.parent} is not writable")
        return
    # Looked at from outside only: opening the file here and closing it again
    # would drop the locks of every SQLite connection this process has on it.
    if not os.access(path, os.R_OK if read_only else os.R_OK | os.W_OK):
        needed = "readable" if read_only else "writable"
        raise StoreError(f"cannot open {path}: it is not {needed}")


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _has_wal(path: Path) -> bool:
    wal = path.with_name(path.name + "-wal")
    return wal.exists() and wal.stat().st_size > 0


def _use_wal(connect: Any, shown: str) -> None:
    # Changing the journal mode does not wait for other connections as a
    # transaction does, so processes that open one new file together retry.
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        connection = None
        try:
            connection = connect()
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            if mode != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "lock" not in str(error) or time.monotonic() > deadline:
                raise StoreError(f"cannot open {shown}: {error}") from None
            time.sleep(0.02)
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"{shown} is not a SQLite database ({error}); name another file"
            ) from None
        finally:
            if connection is not None:
                connection.close()


def _habits(engine: Engine, *, query_only: bool = False) -> None:
    @sa.event.listens_for(engine, "connect")
    def _pragmas(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # transactions are begun below
        connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
        connection.execute("PRAGMA foreign_keys = ON")
        # In WAL mode NORMAL survives kill -9 whole; a power cut may cost the last commits.
        connection.execute("PRAGMA synchronous = NORMAL")
        if query_only:
            connection.execute("PRAGMA query_only = ON")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and writes later cannot wait for its
        # lock (SQLITE_BUSY at once), so writers take it from the start.
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _bring_schema(engine: Engine, shown: str, read_only: bool) -> None:
    with engine.begin() as connection:
        found = migrations.current(connection)
    if found is not None and not migrations.knows(found):
        raise StoreError(
            f"{shown} was written by a newer version (schema {found}, this one knows up to "
            f"{migrations.head()}); upgrade kernel-factory"
        )
    if found == migrations.head():
        return
    if read_only:
        state = "holds no leaderboard" if found is None else f"has the older schema {found}"
        kind = AbsentError if found is None else OlderError
        raise kind(f"{shown} {state}; open it once for writing (factory launch does)")
    with engine.execution_options(**{WRITES: True}).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
        found = migrations.current(connection)  # another process may have been first
        if found is None:
            taken = set(sa.inspect(connection).get_table_names()) & set(Base.metadata.tables)
            if taken:
                raise StoreError(
                    f"{shown} already holds tables of these names that are not ours: "
                    f"{', '.join(sorted(taken))}; name another database"
                )
        if found != migrations.head():
            migrations.upgrade_connection(connection)
