"""Takes a database to another schema, for tests of what earlier versions left."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from alembic.config import Config

from leaderboard import migrations


def run_alembic(engine: sa.Engine, step: Callable[[Config, str], None], revision: str) -> None:
    """``step`` is ``command.upgrade`` or ``command.downgrade`` of alembic."""
    with engine.begin() as connection:
        config = migrations._config()
        config.attributes["connection"] = connection
        step(config, revision)
