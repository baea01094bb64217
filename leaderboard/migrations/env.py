"""Alembic's entry: migrate the connection that the program hands over."""

from __future__ import annotations

from alembic import context

from leaderboard.migrations import VERSION_TABLE
from leaderboard.models import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError(
        "migrations run on the connection of an open store; call leaderboard.open_store(url)"
    )
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    # Both databases roll DDL back; a half-made schema is never seen.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
