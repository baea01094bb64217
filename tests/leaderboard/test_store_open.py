from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import board
import postgresql_server
import pytest
import sqlalchemy as sa

from leaderboard import Store, StoreError, migrations, open_store, shipped_store
from leaderboard._engine import normalise


@board.on_sqlite
def test_sqlite_is_opened_in_wal_with_foreign_keys(store: Store) -> None:
    with store.reading() as session:
        for pragma, value in (
            ("journal_mode", "wal"),
            ("foreign_keys", 1),
            ("busy_timeout", 60000),
        ):
            assert session.execute(sa.text(f"PRAGMA {pragma}")).scalar() == value


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not a database URL"),
        ("", "not a database URL"),
        ("board.db", "not a database URL"),
        ("mysql://user@host/name", "unsupported database 'mysql'"),
        ("sqlite+aiosqlite:///x.db", "unsupported database 'sqlite.aiosqlite'"),
        ("sqlite://x.db", "has a host"),
        ("sqlite:////no/such/folder/x.db", "/no/such/folder does not exist"),
        ("sqlite:////proc/x.db", "/proc"),
        ("postgresql://host", "names no database"),
        ("postgresql://user:hunter2@127.0.0.1:1/name", "127.0.0.1"),
    ],
)
def test_a_url_that_cannot_work_gets_one_line(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_folder_is_not_a_database(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is a folder"):
        open_store(f"sqlite:///{tmp_path}")


def test_another_file_is_not_a_database_and_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes, not a database at all\n")
    with pytest.raises(StoreError, match="not a SQLite database"):
        open_store(f"sqlite:///{notes}")
    assert notes.read_text() == "my notes, not a database at all\n"


def test_a_damaged_database_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 4096)
    with pytest.raises(StoreError) as caught:
        open_store(f"sqlite:///{path}")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="not writable"):
            open_store(f"sqlite:///{tmp_path / 'x.db'}")
    finally:
        tmp_path.chmod(0o700)


def test_a_missing_driver_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"'psycopg'.*pip install 'kernel-factory\[postgresql\]'"):
        open_store("postgresql://user@127.0.0.1:1/name")


def test_a_newer_database_is_refused(store: Store, url: str) -> None:
    with store.writing() as session:
        session.execute(sa.text(f"UPDATE {migrations.VERSION_TABLE} SET version_num = '9999'"))
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"newer version \(schema 9999.*upgrade"):
            open_store(url, read_only=read_only)


def by_another(url: str, *statements: str) -> None:
    """Run statements as a program that knows nothing of us does."""
    engine = sa.create_engine(normalise(url))
    with engine.begin() as theirs:
        for statement in statements:
            theirs.execute(sa.text(statement))
    engine.dispose()


def test_tables_of_others_are_not_overwritten(url: str) -> None:
    by_another(url, "CREATE TABLE kf_trials (x INTEGER)")
    with pytest.raises(StoreError, match="not ours: kf_trials"):
        open_store(url)


def test_a_database_may_be_shared_with_optuna_tables(url: str) -> None:
    by_another(
        url,
        "CREATE TABLE trials (x INTEGER)",
        "CREATE TABLE alembic_version (version_num TEXT)",
        "INSERT INTO alembic_version VALUES ('v3.0.0.d')",
    )
    with open_store(url) as opened:
        assert opened.list_campaigns() == []


def test_an_empty_server_database_is_no_leaderboard_yet(
    postgresql: postgresql_server.Server,
) -> None:
    url = postgresql.new()
    with pytest.raises(StoreError, match="holds no leaderboard"):
        open_store(url, read_only=True)
    with open_store(url) as opened:
        assert opened.list_campaigns() == []
        assert opened.name.startswith("postgresql+psycopg://")
    with pytest.raises(StoreError, match="no_such_name") as caught:
        open_store(url.replace("/board", "/no_such_name"))
    assert "\n" not in str(caught.value)


def test_a_password_is_sent_and_never_shown(postgresql: postgresql_server.Server) -> None:
    url = postgresql.new().replace("@/", ":hunter2@/")
    with open_store(url) as opened:
        assert "hunter2" not in opened.name
        with pytest.raises(StoreError, match="holds no campaign") as caught:
            opened.get_campaign()
    assert "hunter2" not in str(caught.value)


def test_read_only_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "absent.db"
    with pytest.raises(StoreError, match="no database at"):
        open_store(f"sqlite:///{path}", read_only=True)
    assert not path.exists()
    sqlite3.connect(path).execute("CREATE TABLE x (y)").connection.close()
    with pytest.raises(StoreError, match="holds no leaderboard"):
        open_store(f"sqlite:///{path}", read_only=True)


def test_read_only_reads_and_refuses_writes(store: Store, url: str) -> None:
    trial = board.modelled(store, 0, 3.0)
    with open_store(url, read_only=True) as reader:
        assert reader.get_trial(trial.id).score_us == 3.0
        for write in (
            lambda: reader.create_campaign(board.campaign("other")),
            lambda: reader.acquire("kda-1"),
            lambda: board.begin(reader, 1),
            lambda: reader.abandon_open_trials("kda-1"),
        ):
            with pytest.raises(StoreError, match="read-only"):
                write()
        # Not only by politeness: the database itself refuses.
        with pytest.raises(StoreError, match=r"read-?only"), reader.reading() as session:
            session.execute(sa.text("DELETE FROM kf_trials"))


@board.on_sqlite
def test_read_only_works_where_no_side_files_can_be_made(store: Store, url: str) -> None:
    board.modelled(store, 0, 3.0)
    store.close()
    path = Path(url.removeprefix("sqlite:///"))
    path.parent.chmod(0o500)
    try:
        code = (
            "import sys; from leaderboard import open_store\n"
            "print(len(open_store(sys.argv[1], read_only=True).list_trials('kda-1')))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, url],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
    finally:
        path.parent.chmod(0o700)
    assert done.stdout.strip() == "1", done.stderr


def test_threads_open_stores_at_once(tmp_path: Path) -> None:
    """A new database each, and the shipped results: what brings schemas up to date is shared."""

    def opens(number: int) -> list[str]:
        with open_store(f"sqlite:///{tmp_path / f'{number}.db'}") as store:
            own = [c.id for c in store.list_campaigns()]
        with shipped_store() as store:
            return own + [c.id for c in store.list_campaigns()]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(opens, range(12)))
    assert found[0]
    assert found == found[:1] * 12
