"""What may happen to a campaign's database, disk, clock and processes, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
import record_makers as make
import sqlalchemy as sa
from test_campaign import InProcess
from waiting import HANG_S, until

from factory import machine
from factory.campaign import find_resumable, launch
from factory.cli import _run
from factory.config import CampaignConfig
from factory.errors import MachineError
from factory.executors.base import HarnessFault, Limits, StageFinished, Task, WorkerContext
from factory.executors.pool import ProcessPool
from factory.plan import make_plan
from factory.progress import Silent
from leaderboard import LEASE_SECONDS, CampaignStatus, HeldError, TrialStatus, open_store

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 8
on_sqlite = pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("new_database", ["postgresql"], indirect=True)


@pytest.fixture
def url(new_database):
    return new_database()


@pytest.fixture
def store(url):
    with open_store(url) as opened:
        yield opened


class Disturbed(InProcess):
    """Runs in this process; before its ``at``-th stage something happens."""

    def __init__(self, *args, at, happens):
        super().__init__(*args)
        self._at, self._happens = at, happens

    def _run(self, task):
        if len(self.ran) == self._at:
            self._happens()
        return super()._run(task)


@pytest.fixture
def go(tmp_path):
    def run(store, *, resume=False, at=-1, happens=None, budget=BUDGET):
        config = CampaignConfig(name="toy", operation="toy_scale", space="many", budget=budget)
        return launch(
            make_plan(config),
            store,
            stored=find_resumable(store, "toy") if resume else None,
            make_executor=lambda *made: Disturbed(*made, at=at, happens=happens),
            view=Silent(),
            log_root=tmp_path / "runs",
        )

    return run


def check(store, finished=BUDGET):
    """The total budget, nothing twice, nothing open."""
    (campaign,) = store.list_campaigns()
    assert campaign.status is CampaignStatus.FINISHED
    trials = store.list_trials(campaign.id)
    done = [t.schedule_key for t in trials if t.status.finished]
    assert len(done) == len(set(done)) == finished
    assert not [t for t in trials if t.status is TrialStatus.RUNNING]
    return trials


# -- the database ---------------------------------------------------------------------


def test_a_database_locked_for_a_while_is_waited_for(store, url, go):
    order = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", LOCKER, url], cwd=ROOT, **pipes) as holder:

        def release():
            order.append("released")
            print(file=holder.stdin, flush=True)

        def lock():
            print(file=holder.stdin, flush=True)
            assert holder.stdout.readline() == "locked\n"
            for when, then in (("before", asks), ("after", gets)):
                sa.event.listen(store._engine, f"{when}_cursor_execute", then)

        def asks(connection, cursor, statement, *rest):
            # The first that has to wait; on SQLite those that only read need not.
            if not order and (store._engine.dialect.name != "sqlite" or "IMMEDIATE" in statement):
                order.append("asked")
                threading.Timer(0.3, release).start()

        def gets(*_):
            if order in (["asked"], ["asked", "released"]):
                order.append("got")

        go(store, at=5, happens=lock)
    assert holder.returncode == 0
    assert order == ["asked", "released", "got"]
    assert {t.attempt for t in check(store)} == {1}


LOCKER = """
import sys
import sqlalchemy as sa
from leaderboard._engine import normalise
sys.stdin.readline()
engine = sa.create_engine(normalise(sys.argv[1]), isolation_level="AUTOCOMMIT")
with engine.connect() as connection:
    if engine.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql("LOCK TABLE kf_trials, kf_campaigns IN ACCESS EXCLUSIVE MODE")
    print("locked", flush=True)
    sys.stdin.readline()
    connection.exec_driver_sql("ROLLBACK")
"""


@on_sqlite
def test_a_deleted_database_is_noticed_and_named(store, url, go):
    path = Path(url.removeprefix("sqlite:///"))
    with pytest.raises(MachineError, match=r"board0\.db was deleted or replaced while"):
        go(store, at=5, happens=path.unlink)


def test_a_working_directory_that_changes_is_no_deleted_database(tmp_path, monkeypatch, go):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///here.db") as store:
        go(store, at=5, happens=lambda: os.chdir(tmp_path / "elsewhere"))
        check(store)


@on_postgresql
def test_lost_connections_to_the_server_cost_nothing(store, url, go):
    def cut():
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    go(store, at=5, happens=cut)
    assert {t.attempt for t in check(store)} == {1}


@on_postgresql
def test_a_connection_lost_inside_a_write_stops_the_campaign_and_a_resume_finishes(store, go):
    def cut_in_a_write():
        @sa.event.listens_for(store._engine, "after_cursor_execute", once=True)
        def die(connection, *rest):
            connection.connection.dbapi_connection.close()

    with pytest.raises(MachineError, match="the leaderboard failed"):
        go(store, at=5, happens=cut_in_a_write)
    go(store, resume=True)
    check(store)


@on_sqlite
def test_a_full_disk_under_the_database_stops_the_campaign_and_a_resume_finishes(url, go):
    with open_store(url) as store:

        def fill():
            with store.reading() as session:
                pages = session.execute(sa.text("PRAGMA page_count")).scalar_one()
                session.execute(sa.text(f"PRAGMA max_page_count = {pages}"))

        with pytest.raises(MachineError, match="database or disk is full"):
            go(store, at=1, happens=fill, budget=40)
    with open_store(url) as store:  # there is room again
        go(store, resume=True, budget=40)
        check(store, 40)


def test_a_full_disk_under_the_logs_is_no_verdict(tmp_path):
    context = WorkerContext("c", "toy_scale", 0, Limits(), str(tmp_path))
    schedule = make_plan(CampaignConfig(name="x", operation="toy_scale", space="many")).offered[0]
    pool = ProcessPool(context, 1)
    try:
        events = []
        for log in ("/dev/full", str(tmp_path / "log")):
            pool.submit(Task(1, "emulate", schedule, log))
            while not (found := pool.collect()):
                time.sleep(0.01)
            events += found
    finally:
        pool.close(cancel=True)
    assert isinstance(events[0], HarnessFault)
    assert events[0].message == "cannot write /dev/full: No space left on device"
    assert isinstance(events[1], StageFinished)  # the worker goes on


# -- drivers and time -----------------------------------------------------------------


def test_a_clock_that_is_stepped_changes_nothing(store, go, leaderboard_now):
    steps = iter([0, 4000, -9000, 600, 0, -86400] * 100)
    leaderboard_now(lambda: datetime.now(UTC) + timedelta(seconds=next(steps)))
    go(store)
    check(store)


def test_a_live_but_slow_trial_keeps_its_campaign(store, url, go, monkeypatch, leaderboard_now):
    # As from another host: there only signs of life tell.
    monkeypatch.setattr("leaderboard.store.driver_name", lambda: "elsewhere:1")
    began, seconds = datetime.now(UTC), 0.0  # time passes only where the test says so
    leaderboard_now(lambda: began + timedelta(seconds=seconds))
    clock = SimpleNamespace(monotonic=lambda: 1e6 + seconds, perf_counter=time.perf_counter)
    monkeypatch.setattr("factory.driver.time", clock)
    refused = []

    class Slow(InProcess):
        def poll(self, timeout_s):
            nonlocal seconds
            if len(self.ran) == 3 and len(refused) < 20:
                seconds += 45
                with pytest.raises(HeldError) as caught:
                    rival.acquire(rival.list_campaigns()[0].id, "second:2")
                refused.append(str(caught.value))
                return []
            return super().poll(timeout_s)

    monkeypatch.setattr(sys.modules[__name__], "Disturbed", lambda *made, **_: Slow(*made))
    with open_store(url) as rival:
        go(store)
    assert len(refused) * 45 >= 3 * LEASE_SECONDS
    assert all("is held by elsewhere:1 (last sign 45 s ago)" in line for line in refused)
    assert {t.attempt for t in check(store)} == {1}


RACE = """
import os, sys, traceback
from leaderboard import HeldError, open_store
url, campaign = sys.argv[1:]
ready, start, answered, end = (os.pipe() for _ in range(4))

def drive():
    os.close(start[1])
    os.close(end[1])
    with open_store(url) as store:
        store.list_campaigns()  # it is connected
        os.write(ready[1], b".")
        os.read(start[0], 1)  # all at once
        try:
            store.acquire(campaign)
            said = f"holds {os.getpid()}"
        except HeldError as error:
            said = f"refused {error.holder.rpartition(':')[2]}"
        os.write(1, f"{said}\\n".encode())  # in one piece
        os.write(answered[1], b".")
        os.read(end[0], 1)  # who ends holds nothing any more

for number in range(8):
    if os.fork() == 0:
        try:
            drive()
        except BaseException:
            traceback.print_exc()
            os.write(ready[1], b"x")
            os.write(answered[1], b"x")
        os._exit(0)
for told, then in ((ready, start), (answered, end)):
    for number in range(8):
        os.read(told[0], 1)
    os.close(then[1])
"""


def test_of_drivers_that_start_at_the_same_instant_one_holds_and_all_others_know_who(
    store, url, go
):
    go(store, budget=2)
    (campaign,) = store.list_campaigns()
    done = subprocess.run(
        [sys.executable, "-c", RACE, url, campaign.id],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    said = [line.split() for line in done.stdout.splitlines()]
    holders = {pid for word, pid in said if word == "holds"}
    assert (len(said), len(holders)) == (8, 1), done
    assert {pid for word, pid in said if word == "refused"} == holders


def test_status_tells_a_dead_driver_from_a_live_one(store, url, go, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    go(store, budget=2)
    (campaign,) = store.list_campaigns()
    with store.writing() as session:
        session.execute(sa.text("UPDATE kf_campaigns SET status = 'running'"))
    make.begin(store, 7, campaign.id, source_hash=campaign.source_hash)
    for driver, told, trial in (
        ("elsewhere:1", "running", "1 running"),
        (dead_driver(), "interrupted", "1 cut off"),
    ):
        store.acquire(campaign.id, driver)
        assert _run(["status", campaign.id, "--db", url]) == 0
        out = capsys.readouterr().out
        assert f"{campaign.id}  {told}" in out
        assert trial in out.splitlines()[1]
        with store.writing() as session:
            session.execute(sa.text("UPDATE kf_campaigns SET driver = NULL"))


def dead_driver():
    import socket

    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return f"{socket.gethostname()}:{process.pid}"


# -- what is left behind --------------------------------------------------------------


def test_a_refused_import_leaves_no_database(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{}\n")
    assert _run(["leaderboard", "import", "bad.jsonl"]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl"]
    assert len(capsys.readouterr().err.splitlines()) == 1


RUNAWAY = """
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        up = "import time; print('up', flush=True); time.sleep(600)"
        subprocess.run([sys.executable, "-c", up])
    os._exit(0)
"""


def test_what_left_its_group_and_lost_its_parent_is_found_by_its_mark():
    mark = f"mark-{os.getpid()}"
    environment = {**os.environ, "KF_TEST": mark}
    parent = subprocess.Popen(
        [sys.executable, "-c", RUNAWAY], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "up\n"
    assert parent.wait() == 0
    assert machine.end_marked("KF_TEST", "another") == 0
    assert machine.end_marked("KF_TEST", mark) >= 2
    # What was killed takes a moment to be gone.
    until(lambda: not machine.end_marked("KF_TEST", mark), "the end of what was killed")
    parent.stdout.close()
