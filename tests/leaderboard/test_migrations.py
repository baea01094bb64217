from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from leaderboard import Store, migrations, open_store
from leaderboard.models import Base


def schema(engine: sa.Engine) -> dict[str, object]:
    inspector = sa.inspect(engine)
    tables: dict[str, object] = {}
    for name in inspector.get_table_names():
        if name == migrations.VERSION_TABLE:
            continue
        tables[name] = {
            "columns": [
                (c["name"], repr(c["type"]), c["nullable"], c["primary_key"])
                for c in inspector.get_columns(name)
            ],
            "primary": inspector.get_pk_constraint(name),
            "foreign": sorted(map(repr, inspector.get_foreign_keys(name))),
            "unique": sorted(map(repr, inspector.get_unique_constraints(name))),
            "checks": sorted(map(repr, inspector.get_check_constraints(name))),
            "indexes": sorted(map(repr, inspector.get_indexes(name))),
        }
    return tables


def test_migrations_arrive_at_the_models(store: Store) -> None:
    with store.reading() as session:
        context = MigrationContext.configure(
            session.connection(),
            opts={
                "version_table": migrations.VERSION_TABLE,
                "compare_type": True,
                "compare_server_default": True,
            },
        )
        assert compare_metadata(context, Base.metadata) == []


def test_migrations_make_the_same_constraints_as_the_models(tmp_path: Path) -> None:
    # Autogenerate does not see CHECK constraints and names.
    migrated = sa.create_engine(f"sqlite:///{tmp_path / 'migrated.db'}")
    migrations.upgrade(migrated)
    created = sa.create_engine(f"sqlite:///{tmp_path / 'created.db'}")
    Base.metadata.create_all(created)
    assert schema(migrated) == schema(created)
    assert schema(created)["kf_trials"]["checks"]  # type: ignore[index]


def test_upgrade_is_idempotent_and_names_its_head(store: Store, url: str) -> None:
    with open_store(url) as again, again.reading() as session:
        assert migrations.current(session.connection()) == migrations.head()
        assert migrations.knows(migrations.head())
        assert not migrations.knows("v3.0.0.d")


def test_a_failed_migration_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.db"

    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE kf_half (x INTEGER)"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(migrations, "upgrade_connection", fail)
        with pytest.raises(KeyboardInterrupt):
            open_store(f"sqlite:///{path}")
    with open_store(f"sqlite:///{path}") as opened, opened.reading() as session:
        assert "kf_half" not in sa.inspect(session.connection()).get_table_names()


def test_migrations_can_be_undone(tmp_path: Path) -> None:
    from alembic import command

    engine = sa.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    migrations.upgrade(engine)
    with engine.begin() as connection:
        config = migrations._config()
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert schema(engine) == {}
