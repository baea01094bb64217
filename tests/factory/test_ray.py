"""The ray executor: the verdicts of inline, and no work lost, doubled or left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import waiting
from ray_jobs import (
    fake_in_company,
    fake_job,
    fake_opening_once_badly,
    fake_slow_to_close,
    fake_with_second_thoughts,
    fake_without_the_second_gpu,
    simulated,
)

import candidates
from factory.campaign import launch
from factory.config import CampaignConfig
from factory.errors import MachineError
from factory.executors import _ray_cluster
from factory.executors.base import (
    Finalist,
    FinalsFinished,
    HarnessFault,
    JobClosed,
    JobOpened,
    Limits,
    StageFinished,
    Task,
    TaskLost,
    WorkerContext,
)
from factory.executors.inline import InlineExecutor
from factory.executors.ray import RayExecutor
from factory.plan import make_plan
from factory.progress import Silent
from leaderboard import Clock, JobStatus, finals, open_store, ranked
from leaderboard.records import StageStatus

FAMILY = candidates.get("toy_scale")
SIXTY_FOUR_MB = 64 << 20


def toy(kind: str, **values):
    return FAMILY.schedule({"kind": kind, **values})


# -- without a cluster ---------------------------------------------------------------


def test_a_small_shm_is_not_used():
    assert _ray_cluster.plasma_directory(free=SIXTY_FOUR_MB) == tempfile.gettempdir()
    assert _ray_cluster.plasma_directory("/nowhere/at/all") == tempfile.gettempdir()
    assert _ray_cluster.plasma_directory(free=1 << 30) == "/dev/shm"


@pytest.fixture
def refusal(monkeypatch):
    """What is said of an address before Ray is asked, which takes minutes to give up."""

    def join(**options):
        pytest.fail("Ray was asked to join")

    monkeypatch.setattr(
        _ray_cluster, "import_ray", lambda: SimpleNamespace(init=join, shutdown=str)
    )
    monkeypatch.setattr(_ray_cluster, "_REACH_S", waiting.HANG_S)

    def said(address: str) -> str:
        context = WorkerContext("c", "toy_scale", 0, Limits(), "logs")
        with pytest.raises(MachineError) as caught:
            RayExecutor(context, address=address)
        return str(caught.value)

    return said


def test_a_dead_address_is_refused_at_once_with_the_fix(refusal):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    message = refusal(f"127.0.0.1:{port}")
    assert message.startswith(f"no Ray cluster at 127.0.0.1:{port}: Connection refused")
    assert "ray start --head" in message


def test_a_stale_address_that_accepts_and_says_nothing_is_refused(refusal, monkeypatch):
    monkeypatch.setattr(_ray_cluster, "_REACH_S", 0.5)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        assert "does not answer within 0.5 s" in refusal(f"127.0.0.1:{mute.getsockname()[1]}")


def test_a_foreign_server_is_refused(refusal):
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert "something else listens there" in refusal(f"127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "host:99999", "host:port"])
def test_a_malformed_address_is_refused(refusal, address):
    assert "give host:port" in refusal(address)


def test_a_client_address_is_refused(refusal):
    assert "Ray Client addresses are not supported" in refusal("ray://127.0.0.1:10001")


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'ray':
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from factory.cli import main
main()
"""


def test_a_missing_ray_is_one_line_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(MachineError) as caught:
        RayExecutor(WorkerContext("c", "toy_scale", 0, Limits(), "logs"))
    assert str(caught.value).startswith("executor 'ray' needs ray, and it does not import")
    assert "pip install 'ray>=2.50', or use --executor inline" in str(caught.value)


def test_a_campaign_on_the_inline_executor_needs_no_ray(tmp_path):
    (tmp_path / "one.toml").write_text(
        'name = "one"\noperation = "toy_scale"\nspace = "many"\nbudget = 1\n'
        "[executor]\nworkers = 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", ABSENT, "launch", "one.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


OF_TWO = """
import json, os
from functools import partial
from factory.executors import _ray_cluster
from factory.machine import Gpu
names = ((3, "GPU-three"), (1, "GPU-one"))
visible = [Gpu(n, "NVIDIA H200", uuid, "d", "9.0") for n, uuid in names]
_ray_cluster.sm90_gpus = lambda: tuple(visible)
_ray_cluster.cpu_count = lambda: 2
_ray_cluster.plasma_directory = partial(_ray_cluster.plasma_directory, free=64 << 20)
cluster = _ray_cluster.start(workers=2, measured=True, most_ahead=1)
class Lane:
    def gpu(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]
lanes = [cluster.ray.remote(num_gpus=1, num_cpus=0)(Lane).remote() for _ in range(2)]
print(json.dumps(cluster.ray.get([lane.gpu.remote() for lane in lanes])))
cluster.close()
"""


def test_each_actor_has_one_of_the_gpus_that_are_visible_by_its_own_name(tmp_path):
    """Whatever their numbers: a job's fingerprint names the GPU that it was handed."""
    done = subprocess.run(
        [sys.executable, "-c", OF_TWO], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == ["GPU-one", "GPU-three"]


# -- on one cluster of this machine ----------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """Two CPUs, two GPUs that are only counted, and no room in /dev/shm."""
    with pytest.MonkeyPatch.context() as patch:
        small = partial(_ray_cluster.plasma_directory, free=SIXTY_FOUR_MB)
        patch.setattr(_ray_cluster, "plasma_directory", small)
        patch.setattr(_ray_cluster, "cpu_count", lambda: 2)
        patch.setattr(_ray_cluster, "sm90_gpus", lambda: ())
        patch.setenv("RAY_AUTH_MODE", "")  # Ray sets it and leaves it set: undone at the end
        patch.delenv("RAY_AUTH_MODE")
        here = Path(__file__).parent  # for the workers to find ray_jobs and what it needs
        path = [str(here), str(here.parent), os.environ["PYTHONPATH"]]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        started = _ray_cluster.start(workers=2, measured=True, most_ahead=4, gpus=2)
        yield started
        started.close()


def processes(title: str) -> list[int]:
    """Ray's workers of that title below this process."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/cmdline") as file:
                named = file.read().startswith(title)
        except OSError:
            continue
        if named and os.getpid() in ancestors(int(entry)):
            found.append(int(entry))
    return found


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.append(pid)
    return found


class Collected(list):
    """Events so far, and how to wait for more."""

    def __init__(self, executor):
        super().__init__()
        self.executor = executor

    def until(self, enough):
        waiting.until(lambda: enough() or self.poll(), lambda: f"more than {list(self)}")
        return self

    def poll(self):
        self += self.executor.poll(0.2)

    def of(self, kind):
        return [e for e in self if isinstance(e, kind)]


@pytest.fixture
def make(cluster, tmp_path):
    opened = []

    def build(*, operation="toy_scale", limits=None, **options) -> RayExecutor:
        context = WorkerContext("c", operation, 0, limits or Limits(), str(tmp_path / "logs"))
        opened.append(RayExecutor(context, **options))
        return opened[-1]

    yield build
    for executor in opened:
        executor.close(cancel=True)


def task(tmp_path, number, schedule, stage="emulate"):
    return Task(number, stage, schedule, str(tmp_path / f"{number}.log"))


def test_a_killed_ray_worker_loses_its_trial_and_no_other(make, tmp_path):
    executor = make(workers=1)
    executor.submit(task(tmp_path, 1, toy("hangs")))
    executor.submit(task(tmp_path, 2, toy("exact", block=1)))
    events = Collected(executor)
    events.until(lambda: (tmp_path / "1.log").exists())
    (pid,) = processes("ray::run_task")
    os.kill(pid, signal.SIGKILL)
    events.until(lambda: len(events) == 2)
    lost = next(e for e in events if e.trial_id == 1)
    assert isinstance(lost, TaskLost)
    assert (lost.stage, lost.kind) == ("emulate", "crashed")
    assert "Ray worker lost in emulate" in lost.reason
    served = next(e for e in events if e.trial_id == 2)
    assert served.result.status is StageStatus.PASSED


def test_limits_faults_and_logs_are_those_of_the_worker_processes(make, tmp_path):
    executor = make(workers=1, limits=Limits(emulate_s=0.5))
    executor.submit(task(tmp_path, 1, toy("hangs")))
    events = Collected(executor)
    (late,) = events.until(lambda: events)
    assert late.reason == "emulate took longer than its limit of 0.5 s"
    executor = make(workers=2)
    executor.submit(task(tmp_path, 2, toy("raises")))
    executor.submit(task(tmp_path, 3, toy("no_dsl"), "compile"))
    events = Collected(executor)
    events.until(lambda: len(events) == 2)
    by_trial = {e.trial_id: e for e in events}
    assert by_trial[2].result.status is StageStatus.CRASHED
    assert "RuntimeError: made to raise" in (tmp_path / "2.log").read_text()
    assert isinstance(by_trial[3], HarnessFault)
    assert "nvidia-cutlass-dsl is not installed" in by_trial[3].message


def test_cancelling_ends_what_runs(make, tmp_path):
    executor = make(workers=1)
    executor.submit(task(tmp_path, 1, toy("hangs")))
    Collected(executor).until(lambda: (tmp_path / "1.log").exists())
    assert executor.close(cancel=True) == []
    assert executor.close() == []
    waiting.until(lambda: not processes("ray::run_task"), "the end of the task")


def passed_through(events, trial):
    return [e.stage for e in events.of(StageFinished) if e.trial_id == trial]


def test_jobs_are_one_for_each_gpu_and_kept_apart(make, tmp_path):
    executor = make(measured=True, workers=1, open_job=fake_job)
    assert executor.gpu_slots == 8
    events = Collected(executor)
    executor.poll(0)  # starts the actors
    events.until(lambda: len(events.of(JobOpened)) == 2)
    for number in range(6):
        executor.submit(task(tmp_path, number, toy("exact", block=4 + number), "measure"))
    events.until(lambda: sum(e.stage == "time" for e in events.of(StageFinished)) == 6)
    by_trial = {
        n: {e.job_id for e in events.of(StageFinished) if e.trial_id == n} for n in range(6)
    }
    assert all(len(jobs) == 1 for jobs in by_trial.values())  # a trial stays in its job
    assert len(set.union(*by_trial.values())) == 2  # and both GPUs worked
    executor.finals([Finalist(n, toy("exact", block=4 + n)) for n in range(3)])
    events.until(lambda: events.of(FinalsFinished))
    assert events.of(FinalsFinished)[0].order == (0, 1, 2)
    closed = [e for e in executor.close() if isinstance(e, JobClosed)]
    assert {e.job.status for e in closed} == {JobStatus.VALID}
    assert len({e.job.id for e in closed}) == 2


def test_the_last_reading_may_take_longer_than_a_cancelled_stage(make, monkeypatch):
    """A job that is cut in it is void, and none of its trials ranks."""
    monkeypatch.setattr("factory.executors.ray._CANCEL_S", 0.5)
    slow = partial(fake_slow_to_close, seconds=3.0)
    for cancel, status in ((False, JobStatus.VALID), (True, JobStatus.VOID)):
        executor = make(measured=True, workers=1, gpus=1, open_job=slow)
        events = Collected(executor)
        executor.poll(0)  # starts the actor
        events.until(lambda found=events: found.of(JobOpened))
        (closed,) = [e for e in executor.close(cancel=cancel) if isinstance(e, JobClosed)]
        assert closed.job.status is status


def killed_in_its_screen(folder):
    """Kill the one process that holds a GPU; its number."""
    waiting.until((folder / "screening").exists)
    (pid,) = processes("ray::MeasureActor")
    os.kill(pid, signal.SIGKILL)
    (folder / "killed").touch()
    return pid


def test_a_dead_gpu_process_costs_one_trial_and_is_replaced(make, tmp_path, monkeypatch):
    monkeypatch.setattr("factory.executors.ray._PAUSE_S", 0.1)
    opening = partial(fake_opening_once_badly, mark=str(tmp_path / "opened"))
    executor = make(measured=True, workers=1, open_job=opening, gpus=1)
    events = Collected(executor)
    for number in (1, 2):
        executor.submit(task(tmp_path, number, toy("exact", block=3 + number), "measure"))
    events.until(lambda: passed_through(events, 1) == ["gate"])
    pid = killed_in_its_screen(tmp_path)
    events.until(lambda: events.of(TaskLost))
    (lost,) = events.of(TaskLost)
    assert (lost.trial_id, lost.stage, lost.kind) == (1, "screen", "crashed")
    (closed,) = events.of(JobClosed)
    assert closed.job.status is JobStatus.VOID
    assert closed.job.id == f"job-{pid}"

    executor.submit(task(tmp_path, 1, toy("exact", block=4), "measure"))
    events.until(lambda: {"time"} <= {*passed_through(events, 1)} & {*passed_through(events, 2)})
    # the gate of trial 1 was recorded before: it is not told again
    assert Counter(passed_through(events, 1)) == Counter(["gate", "screen", "time"])
    assert Counter(passed_through(events, 2)) == Counter(["gate", "screen", "time"])
    assert len({e.job.id for e in events.of(JobOpened)}) == 2
    assert not events.of(HarnessFault)


@pytest.mark.soak
def test_a_worse_second_answer_ends_the_trial_at_its_next_stage(make, tmp_path, monkeypatch):
    monkeypatch.setattr("factory.executors.ray._PAUSE_S", 0.1)
    opening = partial(fake_with_second_thoughts, mark=str(tmp_path / "opened"))
    executor = make(measured=True, workers=1, open_job=opening, gpus=1)
    events = Collected(executor)
    executor.submit(task(tmp_path, 1, toy("exact", block=4), "measure"))
    events.until(lambda: passed_through(events, 1) == ["gate"])
    killed_in_its_screen(tmp_path)
    events.until(lambda: events.of(TaskLost))
    executor.submit(task(tmp_path, 1, toy("exact", block=4), "measure"))
    events.until(lambda: passed_through(events, 1) == ["gate", "screen"])
    last = events.of(StageFinished)[-1].result
    assert (last.status, last.reason) == (StageStatus.REJECTED, "at its second gate: y off")


def test_a_gpu_that_does_not_open_is_left_out_while_another_serves(make, tmp_path):
    notes = []
    opening = fake_without_the_second_gpu
    executor = make(measured=True, workers=1, open_job=opening, note=notes.append)
    events = Collected(executor)
    executor.submit(task(tmp_path, 1, toy("exact", block=4), "measure"))
    executor.submit(task(tmp_path, 2, toy("exact", block=5), "measure"))
    events.until(lambda: sum(e.stage == "time" for e in events.of(StageFinished)) == 2)
    events.until(lambda: any("is left out: no sm90 GPU is visible" in note for note in notes))
    assert not events.of(HarnessFault)
    assert executor.gpu_slots == 4


def test_a_gpu_fault_is_a_fault_and_no_verdict(make, tmp_path):
    executor = make(measured=True, workers=1, open_job=partial(fake_job, breaks_at="screen"))
    executor.submit(task(tmp_path, 1, toy("exact", block=4), "measure"))
    events = Collected(executor)
    events.until(lambda: events.of(HarnessFault))
    assert "the GPU fell off the bus at screen" in events.of(HarnessFault)[0].message
    assert passed_through(events, 1) == ["gate"]


# -- the same campaign on both executors --------------------------------------------------


def campaign(folder, executor, **values):
    """Run a campaign; the executor is a function of context and plan."""
    config = CampaignConfig(
        **{"name": "toy", "operation": "toy_scale", "sampler": "grid", **values}
    )
    store = open_store(f"sqlite:///{folder}/t.db")
    done = launch(
        make_plan(config, need_gpu_here=False),
        store,
        stored=None,
        make_executor=lambda context, plan, view: executor(context),
        view=Silent(),
        log_root=folder / "runs",
    )
    return done, store


def said(done, store):
    """All that a campaign concluded, without ids, times of day and places."""
    return {
        t.schedule_key: (
            t.status,
            t.stage,
            t.reason,
            t.score_us,
            t.slow_us,
            [s.stage for s in t.stages],
            [e.model_dump(exclude={"trial_id"}) for e in t.errors],
        )
        for t in store.load_trials(done.campaign.id)
    }


def both(tmp_path, inline, ray, **values):
    """The same campaign on both; what each concluded, and its jobs."""
    concluded, jobs = [], []
    for name, executor in (("inline", inline), ("ray", ray)):
        folder = tmp_path / name
        folder.mkdir()
        Path(os.environ["TOY_MARK"]).unlink(missing_ok=True)  # to die once under each
        done, store = campaign(folder, executor, **values)
        with store:
            of_it = {"campaign_id": done.campaign.id, "clock": Clock(values["clock"])}
            found = said(done, store)
            found["order"] = [(r.schedule_key, r.score_us) for r in ranked(store, **of_it)]
            found["finals"] = [f.schedule_key for f in finals(store, done.campaign.id)]
            concluded.append(found)
            jobs.append(store.list_jobs(done.campaign.id))
    return concluded, jobs


@pytest.mark.parametrize("space", ["six", "deadly"])
def test_a_modelled_campaign_concludes_what_inline_concludes(cluster, tmp_path, space):
    concluded, _ = both(
        tmp_path,
        lambda context: InlineExecutor(context, workers=1),
        lambda context: RayExecutor(context, workers=2),
        space=space,
        clock="modelled",
    )
    assert concluded[0]["order"]
    assert concluded[0] == concluded[1]


class InCompany(RayExecutor):
    """Tells its jobs when all of them are known to be open, which they wait for."""

    def __init__(self, context, told, **options):
        super().__init__(context, open_job=partial(fake_in_company, told=str(told)), **options)
        self._told = told

    def poll(self, timeout_s):
        events = super().poll(timeout_s)
        if all(gpu.job is not None for gpu in self._gpus):
            self._told.touch()
        return events


def test_a_measured_campaign_on_two_gpus_concludes_what_inline_concludes(cluster, tmp_path):
    """Jobs are faked; on simulated devices the long form below does it in full."""
    concluded, jobs = both(
        tmp_path,
        lambda c: InlineExecutor(c, workers=1, open_job=partial(fake_job, c)),
        lambda c: InCompany(c, tmp_path / "all-are-open", workers=1, measured=True),
        space="many",
        clock="gpu",
        budget=8,
    )
    check_measured(concluded, jobs)


@pytest.mark.soak
def test_a_measured_campaign_on_simulated_devices_concludes_what_inline_concludes(
    cluster, tmp_path
):
    concluded, jobs = both(
        tmp_path,
        lambda c: InlineExecutor(c, workers=1, open_job=partial(simulated, c)),
        lambda c: RayExecutor(c, workers=1, measured=True, open_job=simulated),
        space="measured",
        clock="gpu",
    )
    check_measured(concluded, jobs)


def check_measured(concluded, jobs):
    assert concluded[0]["finals"]
    assert concluded[0]["order"]
    assert concluded[0] == concluded[1]
    assert [len(j) for j in jobs] == [1, 2]
    assert {j.status for j in jobs[1]} == {JobStatus.VALID}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_quickstart_concludes_what_inline_concludes(cluster, tmp_path):
    concluded, _ = both(
        tmp_path,
        lambda context: InlineExecutor(context, workers=2),
        lambda context: RayExecutor(context, workers=2),
        name="quickstart",
        operation="kda_prefill",
        space="quickstart",
        budget=12,
        stop_after="compile",
        clock="modelled",
    )
    assert len(concluded[0]) > 10
    assert concluded[0]["order"]
    assert concluded[0] == concluded[1]
