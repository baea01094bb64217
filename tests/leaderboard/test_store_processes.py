"""Many processes on one database, and processes that die in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import board
import pytest
from waiting import until

from leaderboard import JobStatus, Store, StoreError, TrialRecord, TrialStatus, open_store, ranked

ROOT = Path(__file__).parents[2]
HELPERS = (ROOT / "tests", Path(__file__).parent)

WRITER = """
import sys, board
from leaderboard import Clock, TrialStatus, open_store
url, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open_store(url) as store:
    for number in range(first, first + count):
        board.passed(store, number, "job-1", 10.0 + number)
"""

# Processes part once everything is imported: what is tested is that they write together.
TOGETHER = """
import os, sys, traceback
import board, psycopg
from leaderboard import open_store
url, action, count = sys.argv[1:4]

def open_new(number):
    with open_store(url) as store:
        assert store.list_campaigns() == []

def write(number):
    with open_store(url) as store:
        campaign, job = f"c{number}", f"job-c{number}"
        store.create_campaign(board.campaign(campaign))
        store.acquire(campaign)
        store.put_fingerprint(board.FINGERPRINT)
        store.open_job(board.job(job, campaign))
        for trial in range(20):
            board.passed(store, trial, job, 10.0 + trial, campaign_id=campaign)
        store.release(campaign)

sys.stdin.readline()
children = []
for number in range(int(count)):
    child = os.fork()
    if child == 0:
        try:
            {"open": open_new, "write": write}[action](number)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""

# Dies by its own hand between the statements of one transaction.
KILLED_IN_TRANSACTION = """
import os, signal, sys, board
import sqlalchemy as sa
from leaderboard import open_store
store = open_store(sys.argv[1])
board.passed(store, 0, "job-1", 10.0)
trial = board.begin(store, 1)
def die(connection, cursor, statement, *rest):
    if statement.startswith("INSERT INTO kf_measurements"):
        os.kill(os.getpid(), signal.SIGKILL)
sa.event.listen(store._engine, "after_cursor_execute", die)
store.record_stage(
    trial.id,
    board.stage("time"),
    errors=[board.error()],
    measurements=board.times("job-1", trial.id, 10.0, 50.0),
)
"""

DRIVER = """
import sys
from leaderboard import HeldError, open_store
store = open_store(sys.argv[1])
try:
    store.acquire("kda-1")
    print("holds", flush=True)
    sys.stdin.read()  # until it is killed
except HeldError as error:
    print("refused:", error, flush=True)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *HELPERS)))},
    )


def test_c1_sixteen_campaigns_write_while_a_reader_polls(store: Store, url: str) -> None:
    campaigns, each = 16, 20
    writers = start(TOGETHER, url, "write", str(campaigns))
    seen = polls = 0
    with open_store(url, read_only=True) as reader:
        assert every_trial(reader) == []
        assert writers.stdin is not None
        print(file=writers.stdin, flush=True)  # only now they begin
        while writers.poll() is None:
            finished = sum(t.status.finished for t in every_trial(reader))
            assert finished >= seen
            seen, polls = finished, polls + 1
            time.sleep(0.02)
    _, errors = writers.communicate()
    assert (writers.returncode, errors) == (0, "")
    assert polls > 0
    trials = every_trial(store)
    assert len(trials) == campaigns * each
    assert {t.status for t in trials} == {TrialStatus.PASSED}
    whole = [t for n in range(campaigns) for t in store.load_trials(f"c{n}")]
    assert {(len(t.stages), len(t.errors), len(t.measurements)) for t in whole} == {(2, 1, 4)}


def every_trial(store: Store) -> list[TrialRecord]:
    return [t for c in store.list_campaigns() for t in store.list_trials(c.id)]


@board.on_sqlite
def test_opening_a_database_again_leaves_the_first_connections_locks_alone(
    store: Store, url: str
) -> None:
    # POSIX drops a process's locks on a file when it closes any descriptor of
    # it; another process, the last by its locks, then deletes the live WAL.
    with open_store(url) as second, open_store(url, read_only=True) as third:
        first_time = start(WRITER, url, "0", "1")
        assert first_time.communicate() == ("", "")
        for view in (store, second, third):
            assert len(view.list_trials("kda-1")) == 1
        board.begin(store, 1)
        for view in (store, second, third):
            assert len(view.list_trials("kda-1")) == 2
        wal = Path(url.removeprefix("sqlite:///") + "-wal")
        assert wal.exists()
    with open_store(url, read_only=True) as last:
        assert len(last.list_trials("kda-1")) == 2


def test_eight_processes_open_a_new_database_at_once(url: str) -> None:
    opening = start(TOGETHER, url, "open", "8")
    _, errors = opening.communicate()
    assert (opening.returncode, errors) == (0, "")


def test_a_writer_killed_inside_a_transaction_loses_only_that_one(store: Store, url: str) -> None:
    process = start(KILLED_IN_TRANSACTION, url)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    with open_store(url) as reopened:
        done, cut = reopened.load_trials("kda-1")
        assert (done.status, len(done.measurements)) == (TrialStatus.PASSED, 4)
        assert cut.status is TrialStatus.RUNNING
        assert (cut.stages, cut.errors, cut.measurements) == ((), (), ())
        assert reopened.abandon_open_trials("kda-1") == 1
        with pytest.raises(StoreError, match="already passed"):
            board.begin(reopened, 0)
        assert board.passed(reopened, 1, "job-1", 9.0).attempt == 2
        reopened.close_job("job-1", JobStatus.VALID)
        assert [row.number for row in ranked(reopened)] == [1, 0]


def test_writers_killed_at_any_moment_leave_whole_trials(store: Store, url: str) -> None:
    for number, delay in enumerate((0.05, 0.15, 0.3)):
        first = number * 1000
        process = start(WRITER, url, str(first), "1000")
        until(lambda first=first: any(t.number >= first for t in store.list_trials("kda-1")))
        time.sleep(delay)  # any moment will do
        process.kill()
        process.communicate()
        with open_store(url) as reopened:
            reopened.abandon_open_trials("kda-1")
            trials = reopened.load_trials("kda-1")
        assert {t.status for t in trials} <= {TrialStatus.PASSED, TrialStatus.ABANDONED}
        for trial in trials:
            if trial.status is TrialStatus.PASSED:
                assert (len(trial.stages), len(trial.measurements)) == (2, 4)
        # One process has at most one trial open.
        assert sum(t.status is TrialStatus.ABANDONED for t in trials) <= number + 1


def test_the_second_of_two_drivers_is_told_and_takes_over_when_the_first_dies(
    store: Store, url: str
) -> None:
    first = start(DRIVER, url)
    assert first.stdout is not None
    assert first.stdout.readline() == "holds\n"
    second = start(DRIVER, url)
    output, errors = second.communicate()
    assert output.startswith("refused: campaign kda-1 is held by "), errors
    assert f":{first.pid} (last sign " in output
    first.kill()
    first.communicate()
    third = start(DRIVER, url)
    assert third.stdout is not None
    assert third.stdout.readline() == "holds\n"
    third.kill()
    third.communicate()
