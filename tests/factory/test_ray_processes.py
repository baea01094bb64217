"""Whole commands on Ray: interrupted, killed, and joining a cluster that somebody else runs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from waiting import HANG_S, until

from factory.errors import MachineError
from factory.executors import _ray_cluster
from leaderboard import StoreError, TrialStatus, open_store, ranked

pytestmark = pytest.mark.soak

COMMAND = [sys.executable, "-c", "from factory.cli import main; main()", "launch"]
BUDGET = 40


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "many.toml").write_text(
        f'name = "many"\noperation = "toy_scale"\nspace = "many"\nbudget = {BUDGET}\n'
        '[executor]\nkind = "ray"\nworkers = 2\n'
    )
    yield tmp_path
    for process in _started:
        process.kill()
        process.communicate()
    _started.clear()


_started: list[subprocess.Popen] = []
"""Commands of the test under way."""


def start(folder, *more, emulate_s=0.2):
    process = subprocess.Popen(
        [*COMMAND, "many.toml", *more],
        cwd=folder,
        env={**os.environ, "TOY_EMULATE_S": str(emulate_s), "FACTORY_TEST": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def left(folder) -> list[str]:
    """Command lines of processes that a command in ``folder`` started and that still run."""
    mark = f"FACTORY_TEST={folder}\0".encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(Path(f"/proc/{entry}/cmdline").read_text()[:80])
        except OSError:
            continue
    return found


def wait_until_nothing_is_left(folder):
    until(lambda: not left(folder), lambda: f"the end of {left(folder)}")


def trials(folder, statuses=()):
    try:
        with open_store(f"sqlite:///{folder}/factory.db", read_only=True) as store:
            campaigns = store.list_campaigns()
            return store.list_trials(campaigns[-1].id, statuses) if campaigns else []
    except StoreError:  # it is not there yet, or not whole
        return []


def wait_for_finished(folder, count):
    def enough():
        return sum(t.status.finished for t in trials(folder)) >= count

    until(enough, f"the end of {count} trials")


def finish(folder, *more):
    process = start(folder, "--resume", *more, emulate_s=0.0)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    done = [t for t in trials(folder) if t.status.finished]
    assert len(done) == len({t.schedule_key for t in done}) == BUDGET
    assert not trials(folder, [TrialStatus.RUNNING])
    return out


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_leaves_nothing_running(folder, presses):
    process = start(folder)
    wait_for_finished(folder, 3)
    for _ in range(presses):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        time.sleep(0.1)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    if presses == 1:  # it has ended its cluster itself, which Ray's agents see only by and by
        assert not any("raylet" in line or "gcs_server" in line for line in left(folder))
    wait_until_nothing_is_left(folder)
    finish(folder)


def test_a_killed_driver_takes_its_cluster_along_and_is_resumed(folder):
    process = start(folder)
    wait_for_finished(folder, 3)
    before = {t.id for t in trials(folder) if t.status.finished}
    process.kill()
    process.communicate()
    wait_until_nothing_is_left(folder)  # Ray's own agents look for their parent now and then
    out = finish(folder, "--json")
    assert out.lstrip().startswith("{")  # nothing of Ray's on standard output
    assert before <= {t.id for t in trials(folder) if t.status.finished}


def test_it_runs_in_64_mb_of_shared_memory(folder):
    """In a mount namespace of its own; asks for the right to make one."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no right to mount a small /dev/shm")
    small = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    done = subprocess.run(
        [*small, *COMMAND, "many.toml", "--budget", "4"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert sum(t.status is TrialStatus.PASSED for t in trials(folder)) == 4


def answers(address):
    try:
        _ray_cluster.probe(address)
    except MachineError:
        return False
    return True


@pytest.fixture
def head(tmp_path, monkeypatch):
    """A cluster of another owner; its nodes can import the toy operation, and not this project."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # both sides, whatever ran here before
    options = ["start", "--head", "--block", "--include-dashboard=false"]
    options += ["--num-cpus=2", "--num-gpus=0", "--object-store-memory=80000000"]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "FACTORY_TEST": str(tmp_path)}
    env["PYTHONPATH"] = str(Path(__file__).parent / "plugins")
    with tempfile.TemporaryDirectory(prefix="ray-") as temp:  # short: sockets lie below it
        started = subprocess.Popen(
            [*ray, *options, f"--port={port}", f"--temp-dir={temp}"],
            cwd=temp,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        address = f"127.0.0.1:{port}"
        until(lambda: answers(address), "the start of the cluster")
        yield address
        started.terminate()
        started.wait(HANG_S)


def test_a_cluster_is_joined_and_left_running(folder, head):
    process = start(folder, "--ray-address", head, "--clock", "modelled", "--budget", "6")
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    with open_store(f"sqlite:///{folder}/factory.db", read_only=True) as store:
        assert len(ranked(store, campaign_id=store.list_campaigns()[-1].id)) == 6
    logs = sorted((folder / "factory-runs").rglob("trial-*.log"))
    assert len(logs) == 6
    assert "== emulate: kind=exact" in logs[0].read_text()  # it came from the node
    _ray_cluster.probe(head)

    # Its GPUs are asked for next, and it has none.
    process = start(folder, "--ray-address", head, "--clock", "gpu", "--name", "other")
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 3, err
    assert re.search(r"the Ray cluster at \S+ has no free GPU", err)
    with open_store(f"sqlite:///{folder}/factory.db", read_only=True) as store:
        assert not store.list_trials(store.list_campaigns()[-1].id)


def test_a_cluster_with_another_source_is_refused(folder, head, monkeypatch):
    monkeypatch.setenv("TOY_SOURCE", "1" * 64)
    process = start(folder, "--ray-address", head, "--clock", "modelled")
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 3, err
    assert "source of toy_scale" in err
    assert not trials(folder)


def test_a_frozen_cluster_is_refused(folder, head):
    frozen = [int(p) for p in os.listdir("/proc") if p.isdigit() and is_gcs(p, head)]
    assert len(frozen) == 1
    os.kill(frozen[0], signal.SIGSTOP)
    try:
        process = start(folder, "--ray-address", head, "--clock", "modelled")
        _, err = process.communicate(timeout=HANG_S)
    finally:
        os.kill(frozen[0], signal.SIGCONT)
    assert process.returncode == 3, err
    assert "does not answer" in err
    assert not trials(folder)


def is_gcs(pid, address):
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    port = address.rpartition(":")[2]
    return words[0].endswith("gcs_server") and any(w.endswith(f"port={port}") for w in words)
