"""The schema, step by step, on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import board
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from schema_steps import run_alembic

from leaderboard import Store, StoreError, TrialStatus, migrations, open_store
from leaderboard._engine import normalise
from leaderboard.models import Base

REVISIONS = sorted(script.revision for script in migrations._scripts().walk_revisions())

# Rows of the first schema, spelled out: this must not follow the models.
FIRST: dict[str, dict[str, Any]] = {
    "kf_fingerprints": {"id": board.FINGERPRINT.id, "contents": dict(board.FINGERPRINT.values)},
    "kf_campaigns": {
        "id": "kda-1",
        "name": "kda",
        "operation": "kda_prefill",
        "operation_version": "1",
        "family": "cute",
        "source_hash": "a" * 64,
        "config": {"budget": 10, "nested": {"seed": [1, 2.5, None, True]}},
        "space_hash": "b" * 64,
        "space": {"bt": [16, 32, 64], "anchor": ["start", "mid"]},
        "seed": 7,
        "budget": 10,
        "status": "running",
        "clock": "gpu",
        "workloads": list(board.WORKLOADS),
        "ranking_regime": "production",
        "slow_regime": "slow",
        "created_at": board.START,
        "updated_at": board.START,
    },
    "kf_jobs": {
        "id": "job-1",
        "campaign_id": "kda-1",
        "fingerprint_id": board.FINGERPRINT.id,
        "gpu": "NVIDIA H200",
        "status": "valid",
        "started_at": board.START,
        "ended_at": board.START,
        "drift": 0.01,
        "note": "",
        "seed": 7,
        "details": {},
    },
    "kf_trials": {
        "uid": "1" * 32,
        "campaign_id": "kda-1",
        "number": 0,
        "schedule_key": "bt=16",
        "schedule": {"bt": 16},
        "status": "passed",
        "stage": "gate",
        "reason": "",
        "attempt": 1,
        "finished": True,
        "clock": "gpu",
        "score_us": 10.0,
        "slow_us": 50.0,
        "method": "cupti",
        "cache": "warm",
        "job_id": "job-1",
        "source_hash": "a" * 64,
        "gate_bound": -5.0,
        "started_at": board.START,
        "ended_at": board.START,
    },
    "kf_stages": {
        "trial_id": 1,
        "position": 0,
        "stage": "gate",
        "status": "passed",
        "reason": "",
        "seconds": 0.25,
        "details": {"free": 1},
    },
    "kf_errors": {
        "trial_id": 1,
        "stage": "gate",
        "regime": "production",
        "workload": board.WORKLOADS[0],
        "tensor": "o",
        "scope": "all",
        "max_rel": 0.004,
        "rms_rel": 0.001,
        "finite": True,
        "within": True,
        "seed": 3,
        "out_of_contract": False,
    },
    "kf_measurements": {
        "uid": "2" * 32,
        "job_id": "job-1",
        "trial_id": 1,
        "workload": board.WORKLOADS[0],
        "regime": "production",
        "clock": "gpu",
        "cache": "warm",
        "method": "cupti",
        "input_form": "activated",
        "median_us": 10.0,
        "low_us": 9.9,
        "high_us": 10.1,
        "samples_us": [10.0, 10.5],
        "kernels": ["prep"],
        "held_out": False,
        "phase": "search",
    },
}


def _types(column: str) -> Any:
    """Types that a driver cannot tell from the value."""
    if column in ("contents", "config", "space", "workloads", "details", "schedule"):
        return sa.JSON()
    if column in ("samples_us", "kernels"):
        return sa.JSON()
    return sa.DateTime(timezone=True) if column.endswith("_at") else None


def schema(engine: sa.Engine) -> dict[str, object]:
    inspector = sa.inspect(engine)
    tables: dict[str, object] = {}
    for name in inspector.get_table_names():
        if name == migrations.VERSION_TABLE:
            continue
        tables[name] = {
            "columns": [
                (c["name"], repr(c["type"]), c["nullable"], c.get("primary_key"))
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


@pytest.fixture
def new_engine(new_database: Callable[[], str]) -> Iterator[Callable[[], sa.Engine]]:
    """Makes bare connections to empty databases."""
    made: list[sa.Engine] = []

    def new() -> sa.Engine:
        made.append(sa.create_engine(normalise(new_database())))
        return made[-1]

    yield new
    for engine in made:
        engine.dispose()


def test_migrations_make_the_same_constraints_as_the_models(
    new_engine: Callable[[], sa.Engine],
) -> None:
    # Autogenerate does not see CHECK constraints and names.
    migrated, created = new_engine(), new_engine()
    migrations.upgrade(migrated)
    Base.metadata.create_all(created)
    assert schema(migrated) == schema(created)
    assert schema(created)["kf_trials"]["checks"]  # type: ignore[index]


def test_upgrade_is_idempotent_and_names_its_head(store: Store, url: str) -> None:
    with open_store(url) as again, again.reading() as session:
        assert migrations.current(session.connection()) == migrations.head()
        assert migrations.knows(migrations.head())
        assert not migrations.knows("v3.0.0.d")


def test_a_failed_migration_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE kf_half (x INTEGER)"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(migrations, "upgrade_connection", fail)
        with pytest.raises(KeyboardInterrupt):
            open_store(url)
    with open_store(url) as opened, opened.reading() as session:
        assert "kf_half" not in sa.inspect(session.connection()).get_table_names()


def test_migrations_can_be_undone(new_engine: Callable[[], sa.Engine]) -> None:
    engine = new_engine()
    migrations.upgrade(engine)
    run_alembic(engine, command.downgrade, "base")
    assert schema(engine) == {}


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_an_older_schema_holds_is_read_by_this_version(
    new_database: Callable[[], str], revision: str
) -> None:
    url = new_database()
    engine = sa.create_engine(normalise(url))
    run_alembic(engine, command.upgrade, revision)
    with engine.begin() as connection:
        for table, rows in FIRST.items():
            columns = [sa.column(name, _types(name)) for name in rows]
            connection.execute(sa.table(table, *columns).insert().values(**rows))
    engine.dispose()
    if revision != migrations.head():
        with pytest.raises(StoreError, match=f"older schema {revision}"):
            open_store(url, read_only=True)
    with open_store(url) as opened:
        assert opened.get_campaign("kda-1") == board.campaign()
        trial = opened.get_trial(1)
        assert (trial.status, trial.score_us) == (TrialStatus.PASSED, 10.0)
        assert trial.schedule == {"bt": 16}
        assert [s.stage for s in trial.stages] == ["gate"]
        assert [e.max_rel for e in trial.errors] == [0.004]
        assert [m.samples_us for m in trial.measurements] == [(10.0, 10.5)]
        assert opened.get_job("job-1").gpu == "NVIDIA H200"
        assert opened.get_fingerprint(board.FINGERPRINT.id) == board.FINGERPRINT
        # What was numbered by hand does not stand in the way of what comes.
        assert board.begin(opened, 1).id > 1
    with open_store(url, read_only=True) as again, again.reading() as session:
        assert migrations.current(session.connection()) == migrations.head()
