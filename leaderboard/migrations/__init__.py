"""Schema of the leaderboard, step by step; run by the program, never by hand.

Knows nothing of records or queries: only how to bring a database to the newest
schema and how to tell where it stands.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine

__all__ = ["VERSION_TABLE", "current", "head", "knows", "upgrade", "upgrade_connection"]

VERSION_TABLE = "kf_schema_version"
"""Own version table: a database may hold another project's ``alembic_version``."""


def _config() -> Config:
    config = Config()
    # Alembic reads options through configparser, where % starts a reference.
    folder = str(Path(__file__).parent).replace("%", "%%")
    config.set_main_option("script_location", folder)
    config.set_main_option("path_separator", "os")
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


def head() -> str:
    """Newest revision this code knows."""
    revision = _scripts().get_current_head()
    assert revision is not None, "the package ships at least one migration"
    return revision


def knows(revision: str) -> bool:
    """Whether ``revision`` is one of this code's own."""
    return revision in {script.revision for script in _scripts().walk_revisions()}


def current(connection: Connection) -> str | None:
    """Revision of the database behind ``connection``, or None for an empty one."""
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()


_ONE_AT_A_TIME = Lock()
"""Alembic keeps what it is at in its own module, for all threads."""


def upgrade_connection(connection: Connection) -> None:
    """Bring the database to :func:`head` inside the caller's transaction."""
    config = _config()
    config.attributes["connection"] = connection
    with _ONE_AT_A_TIME:
        command.upgrade(config, "head")


def upgrade(engine: Engine) -> None:
    """Bring the database behind ``engine`` to :func:`head` in one transaction."""
    with engine.begin() as connection:
        upgrade_connection(connection)
