"""The artefact store: whole or not there, shared, bounded, and never fatal."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from answers import ask
from waiting import HANG_S

import candidates
from candidates import BuildError, ToolchainError
from factory import device
from factory.artefacts import Store, default_store, key_of
from factory.device.simulated import SimulatedDevice
from factory.stages.compile import compile_schedule
from leaderboard.records import StageStatus

FAMILY = candidates.get("toy_scale")
ONE, TWO = FAMILY.offered("many")[:2]
COMMAND = [sys.executable, "-c", "from factory.cli import main; main()", "launch", "toy.toml"]


def key(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


K = key("k")


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """What the toy family was asked to do, counted."""
    path = tmp_path / "notes"
    path.touch()
    monkeypatch.setenv("TOY_NOTES", str(path))

    def read() -> Counter[str]:
        found = Counter(line.partition(" ")[0] for line in path.read_text().splitlines())
        path.write_text("")
        return found

    return read


def test_what_is_kept_comes_back_and_is_named_by_all_that_decides_it(store, monkeypatch):
    one = key_of(FAMILY, ONE)
    assert store.get(one) is None
    assert store.put(one, {"a": b"1", "b": b"\0" * 9})
    assert store.get(one) == {"a": b"1", "b": b"\0" * 9}
    assert store.folder(one) == store.root / one
    assert key_of(FAMILY, TWO) != one
    monkeypatch.setenv("TOY_SOURCE", "1" * 64)
    assert key_of(FAMILY, ONE) != one
    monkeypatch.delenv("TOY_SOURCE")
    assert key_of(FAMILY, ONE) == one
    monkeypatch.setattr("factory.artefacts.installed", lambda name: "4.9.0")
    assert key_of(FAMILY, ONE) != one


def test_the_later_of_two_writers_is_kept_whole(store):
    store.put(K, {"a": b"1", "old": b"x"})
    store.put(K, {"a": b"2"})
    assert store.get(K) == {"a": b"2"}
    assert [p.name for p in store.root.iterdir()] == [K]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: cut(entry / "a"),
        lambda entry: (entry / "a").unlink(),
        lambda entry: (entry / "manifest.json").unlink(),
        lambda entry: cut(entry / "manifest.json"),
        lambda entry: (entry / "manifest.json").write_text("[]"),
        lambda entry: (entry / "manifest.json").write_text('{"sha256": {"a": "0"}}'),
    ],
)
def test_a_damaged_entry_is_dropped_and_made_again(store, damage):
    store.put(K, {"a": b"12345"})
    damage(store.root / K)
    assert store.get(K) is None
    assert not (store.root / K).exists()
    store.put(K, {"a": b"12345"})
    assert store.get(K) == {"a": b"12345"}


def test_the_longest_unused_go_first(store):
    for age, name in enumerate(map(key, "abcd")):
        store.put(name, {"x": bytes(1000)})
        os.utime(store.root / name, (1e9 - age, 1e9 - age))
    assert store.get(key("d")) is not None  # used now
    size = sum(f.stat().st_size for f in (store.root / key("a")).iterdir())
    told = store.collect(2 * size, dry_run=True)
    assert (told.kept, told.freed, told.freed_bytes) == (2, 2, 2 * size)
    assert len(list(store.root.iterdir())) == 4
    assert store.collect(2 * size) == told
    assert sorted(p.name for p in store.root.iterdir()) == sorted(map(key, "ad"))


def test_a_store_stays_under_its_size_and_takes_nothing_larger(tmp_path):
    store = Store(tmp_path / "small", max_bytes=5000)
    for n in range(20):
        assert store.put(key(f"{n}"), {"x": bytes(1000)})
        os.utime(store.root / key(f"{n}"), (1e9 + n, 1e9 + n))
    kept = sorted(p.name for p in store.root.iterdir())
    assert key("19") in kept
    assert 2 <= len(kept) <= 4
    assert not store.put(key("big"), {"x": bytes(6000)})
    assert not Store(tmp_path / "none", max_bytes=0).put(K, {"x": b""})
    assert not (tmp_path / "none").exists()


def test_what_dead_writers_left_aside_goes_and_what_is_being_written_stays(store):
    store.put(K, {"x": b"1"})
    for name, used in ((".factory-aside-old", 1e9), (".factory-aside-new", time.time())):
        (store.root / name).mkdir()
        os.utime(store.root / name, (used, used))
    assert store.collect(1 << 20).kept == 1
    assert sorted(p.name for p in store.root.iterdir()) == [".factory-aside-new", K]


def test_what_is_not_its_own_is_never_touched(store, monkeypatch, tmp_path):
    store.put(K, {"x": b"1"})
    mine = store.root / "thesis"
    mine.mkdir()
    (mine / "manifest.json").write_text("{}")
    (store.root / "notes.txt").write_text("mine")
    assert store.collect(0).freed == 1
    assert sorted(p.name for p in store.root.iterdir()) == ["notes.txt", "thesis"]
    with pytest.raises(ValueError, match="is no key"):
        store.put("thesis", {"x": b"1"})
    # Keeping nothing is not a store in the working directory.
    monkeypatch.setenv("FACTORY_ARTEFACTS", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / K).mkdir()
    assert default_store().collect(0).freed == 0
    assert (tmp_path / K).exists()


def write_and_read(root: str, number: int) -> int:
    """Wrong reads while all processes write the same few keys and make room."""
    store = Store(Path(root), max_bytes=1200)
    wrong = 0
    for n in range(120):
        one = key(f"{(n * 7 + number) % 5}")
        store.put(one, {"x": one.encode() * 2, "y": bytes([number]) * 50})
        found = store.get(one)
        wrong += found is not None and (found["x"] != one.encode() * 2 or len(set(found["y"])) != 1)
    return wrong


def test_processes_share_it(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        wrong = pool.starmap(write_and_read, [(str(tmp_path / "s"), n) for n in range(4)])
    assert wrong == [0, 0, 0, 0]
    assert not [p for p in (tmp_path / "s").iterdir() if p.name.startswith(".")]


def test_a_store_that_cannot_be_written_costs_a_compilation_and_no_more(tmp_path, notes):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "below")
    for _ in range(2):
        assert compile_schedule(FAMILY, ONE, store=store).status is StageStatus.PASSED
    assert notes() == {"compiled": 2}


def test_nothing_is_compiled_twice(store, notes):
    first = compile_schedule(FAMILY, ONE, store=store)
    again = compile_schedule(FAMILY, ONE, store=store)
    assert notes() == {"compiled": 1}
    assert (first.details["kept"], again.details["kept"]) == (False, True)
    assert {**first.details, "kept": True} == again.details
    # For a GPU there is more to keep; what was kept without it is completed.
    for _ in range(2):
        compile_schedule(FAMILY, ONE, store=store, objects=True)
    assert notes() == {"ahead": 1}
    cut(store.root / key_of(FAMILY, ONE) / "build.json")
    assert compile_schedule(FAMILY, ONE, store=store, objects=True).details == first.details
    assert notes() == {"compiled": 1, "ahead": 1}


def test_nothing_is_made_for_a_store_that_keeps_nothing(tmp_path, notes):
    store = Store(tmp_path / "none", max_bytes=0)
    result = compile_schedule(FAMILY, ONE, store=store, objects=True)
    assert (result.status, result.details["kept"]) == (StageStatus.PASSED, False)
    assert notes() == {"compiled": 1}


@pytest.mark.parametrize("error", [BuildError, ToolchainError])
def test_what_cannot_be_made_ahead_is_left_to_the_gpus_process(store, notes, monkeypatch, error):
    def fail(self, schedule):
        raise error("no room for objects")

    monkeypatch.setattr(type(FAMILY), "objects", fail)
    for _ in range(2):
        done = compile_schedule(FAMILY, ONE, store=store, objects=True)
        assert done.status is StageStatus.PASSED
    assert notes() == {"compiled": 1}


def test_an_entry_of_another_format_is_compiled_again(store, notes):
    store.put(key_of(FAMILY, ONE), {"build.json": b'{"kernels": [{"name": "x"}], "problems": []}'})
    assert not compile_schedule(FAMILY, ONE, store=store).details["kept"]
    assert notes() == {"compiled": 1}


def test_a_process_on_the_gpu_loads_what_was_compiled_ahead(store, notes, tmp_path):
    import operations

    for schedule in (ONE, TWO):
        compile_schedule(FAMILY, schedule, store=store, objects=True)
    other = store.get(key_of(FAMILY, ONE))
    store.put(key_of(FAMILY, TWO), other)  # whole, and not what it should be
    notes()
    with device.open_job(
        operations.get("toy_scale"),
        FAMILY,
        log_dir=tmp_path,
        baselines=(),
        device=SimulatedDevice(),
        artefacts=store,
    ) as job:
        handles = [job.prepare(s) for s in (ONE, TWO)]
        assert [job.gate(h).status for h in handles] == [StageStatus.PASSED] * 2
        for handle in handles:
            job.release(handle)
    assert notes() == {"linked": 1, "loaded": 1}
    assert "toy.o is of another schedule" in handles[1].log_path.read_text()


def test_a_second_launch_compiles_nothing_again(tmp_path, notes):
    (tmp_path / "toy.toml").write_text(
        'name = "toy"\noperation = "toy_scale"\nspace = "many"\nbudget = 3\nsampler = "grid"\n'
        "[executor]\nworkers = 2\n"
    )
    second = ["--name", "second", "--budget", "4"]
    for more, compiled in (([], {"compiled": 3}), (second, {"compiled": 1})):
        done = subprocess.run(
            [*COMMAND, *more],
            cwd=tmp_path,
            env={**os.environ, "FACTORY_ARTEFACTS": str(tmp_path / "store")},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, done.stderr
        assert notes() == compiled


def test_gc_says_what_it_freed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FACTORY_ARTEFACTS", str(tmp_path / "store"))
    store = default_store()
    for name in map(key, "ab"):
        store.put(name, {"x": bytes(2048)})

    def run(*argv: str) -> str:
        code, out, err = ask(capsys, "gc", *argv)
        assert code == 0, err
        return out

    assert run("--max-size", "0", "--dry-run").startswith("would free 4.2 KiB of 2 entries; 0 B")
    told = json.loads(run("--max-size", "3K", "--json"))
    assert (told["kept"], told["freed"], told["dry_run"]) == (1, 1, False)
    assert told["store"] == str(tmp_path / "store")
    assert run().startswith("freed 0 B of 0 entries; 2.1 KiB of 1 stay")
    assert run("--max-size", "0").startswith("freed 2.1 KiB of 1 entries; 0 B of 0 stay")
    code, _, err = ask(capsys, "gc", "--max-size", "much")
    assert code == 2
    assert "'much' is no size" in err
