"""What is kept between processes: read again, made again where it cannot be."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import leaderboard
from leaderboard import shipped
from leaderboard._kept import kept

A, B = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kernel-factory" / "numbers"


@pytest.fixture
def make() -> Callable[[], bytes]:
    """Says how often it was asked."""
    made = iter(range(100))
    return lambda: f"made {next(made)}".encode()


def test_what_was_made_is_read_again_and_the_newest_is_kept(
    folder: Path, make: Callable[[], bytes]
) -> None:
    assert kept("numbers", A, make) == kept("numbers", A, make) == b"made 0"
    assert kept("others", A, make) == b"made 1"
    assert kept("numbers", B, make) == b"made 2"
    assert [p.name for p in folder.iterdir()] == [B]
    assert kept("numbers", A, make) == b"made 3"


def test_what_a_killed_process_left_goes_and_what_another_writes_stays(
    folder: Path, make: Callable[[], bytes]
) -> None:
    folder.mkdir(parents=True)
    for name, age_s in ((".partial-old", 7200), (".partial-new", 60), ("thesis.txt", 7200)):
        (folder / name).write_bytes(b"half")
        then = time.time() - age_s
        os.utime(folder / name, (then, then))
    kept("numbers", A, make)
    assert sorted(p.name for p in folder.iterdir()) == [".partial-new", A, "thesis.txt"]


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 40])
def test_what_is_damaged_is_made_again(
    folder: Path, make: Callable[[], bytes], damage: bytes
) -> None:
    kept("numbers", A, make)
    (folder / A).write_bytes(damage)
    assert kept("numbers", A, make) == b"made 1"
    assert kept("numbers", A, make) == b"made 1", "and is whole again"


def test_where_nothing_can_be_kept_it_is_made_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], bytes]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert (kept("numbers", A, make), kept("numbers", A, make)) == (b"made 0", b"made 1")


def test_a_pipe_in_its_place_does_not_stop_anybody(folder: Path, make: Callable[[], bytes]) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / A)
    assert kept("numbers", A, make) == kept("numbers", A, make) == b"made 0"


def test_an_entry_that_cannot_be_made_leaves_none(folder: Path) -> None:
    def fails() -> bytes:
        raise ValueError("a damaged file")

    with pytest.raises(ValueError, match="a damaged file"):
        kept("numbers", A, fails)
    assert not folder.exists()


def test_a_second_process_reads_the_shipped_results_without_importing_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> list[str]:
        monkeypatch.setattr(shipped, "_loaded", {})  # as a new process begins
        with leaderboard.shipped_store() as store:
            with pytest.raises(leaderboard.StoreError):
                store.heartbeat("nobody")
            return [row.schedule_key for row in leaderboard.ranked(store)]

    first = read()
    assert len(first) > 100
    with monkeypatch.context() as without:
        without.setattr(shipped, "import_open", None)
        assert read() == first
    (kept_one,) = (folder.parent / "shipped").iterdir()
    kept_one.write_bytes(b"damaged")
    assert read() == first


def test_other_files_or_other_source_are_another_database(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("a.jsonl", b"1"), ("b.jsonl", b"2")]
    keys = {shipped._key(found), shipped._key(found[:1]), shipped._key([("a.jsonl", b"12")])}
    monkeypatch.setattr(shipped, "_sources", lambda _: iter([("store.py", b"")]))
    assert len({*keys, shipped._key(found)}) == 4
    assert all(len(key) == 64 for key in keys)
