"""The ray executor on real GPUs: which one an actor holds, jobs apart, and a death on one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from factory.campaign import launch
from factory.config import CampaignConfig
from factory.executors.base import (
    Event,
    JobClosed,
    JobOpened,
    Limits,
    StageFinished,
    Task,
    TaskLost,
    WorkerContext,
)
from factory.executors.ray import RayExecutor
from factory.machine import sm90_gpus
from factory.plan import make_plan
from factory.progress import Silent
from leaderboard import JobStatus, open_store, ranked, winner
from leaderboard.records import StageStatus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

GPUS = sm90_gpus()
two = pytest.mark.skipif(len(GPUS) < 2, reason="needs two sm90 GPUs")


def context(folder: Path) -> WorkerContext:
    return WorkerContext("c", "kda_prefill", 0, Limits(), str(folder), controls=("torch",))


def wait_for(
    executor: RayExecutor, events: list[Event], enough: Callable[[], bool], seconds: float = 300
) -> None:
    end = time.monotonic() + seconds
    while not enough():
        assert time.monotonic() < end, events
        events += executor.poll(0.5)


def users_of_gpus() -> list[int]:
    """Processes that hold memory of a GPU, by the driver."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return [int(line) for line in answer.split() if line.isdigit()]


@two
@pytest.mark.parametrize("visible", ["1", "1,0"])
def test_each_actor_holds_its_own_visible_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    wanted = {GPUS[int(token)].uuid for token in visible.split(",")}
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", ",".join(str(GPUS[int(t)].index) for t in visible.split(","))
    )
    executor = RayExecutor(context(tmp_path), measured=True)
    events: list[Event] = []
    try:
        wait_for(
            executor, events, lambda: sum(isinstance(e, JobOpened) for e in events) == len(wanted)
        )
    finally:
        executor.close(cancel=True)
    held = [e.fingerprint.values["gpu_uuid"] for e in events if isinstance(e, JobOpened)]
    assert sorted(held) == sorted(wanted)


@two
def test_a_campaign_on_two_gpus_keeps_its_jobs_apart_and_names_a_winner(tmp_path: Path) -> None:
    before = users_of_gpus()
    config = CampaignConfig(
        name="two",
        operation="kda_prefill",
        space="quickstart",
        clock="gpu",
        budget=10,
        finalists=2,
        controls=["torch"],
    )
    with open_store(f"sqlite:///{tmp_path}/t.db") as store:
        done = launch(
            make_plan(config),
            store,
            stored=None,
            make_executor=lambda context, plan, view: RayExecutor(context, measured=True, gpus=2),
            view=Silent(),
            log_root=tmp_path / "runs",
        )
        jobs = store.list_jobs(done.campaign.id)
        assert len(jobs) == 2
        assert {j.status for j in jobs} == {JobStatus.VALID}
        rows = ranked(store, campaign_id=done.campaign.id)
        assert len(rows) == done.passed
        trials = {t.id: t for t in store.load_trials(done.campaign.id)}
        for row in rows:  # what ranks a trial was measured in one job
            mine = {m.job_id for m in trials[row.id].measurements if m.phase == "search"}
            assert mine == {trials[row.id].job_id}
        assert {trials[r.id].job_id for r in rows} == {j.id for j in jobs}
        assert winner(store, done.campaign.id) is not None
    assert set(users_of_gpus()) <= set(before)


@pytest.mark.skipif(not GPUS, reason="needs an sm90 GPU")
def test_a_gpu_whose_actor_died_is_opened_again(tmp_path: Path) -> None:
    import candidates

    family = candidates.get("kda_prefill")
    schedule = next(
        s for s in family.offered("kda_prefill") if s.get("bt") == 32 and s.get("segments") == 1
    )
    task = Task(1, "measure", schedule, str(tmp_path / "1.log"))
    executor = RayExecutor(context(tmp_path), measured=True, gpus=1)
    events: list[Event] = []
    try:
        executor.submit(task)
        wait_for(executor, events, lambda: any(isinstance(e, JobOpened) for e in events))
        (pid,) = actors()
        os.kill(pid, signal.SIGKILL)
        wait_for(executor, events, lambda: any(isinstance(e, TaskLost) for e in events))
        assert [e.job.status for e in events if isinstance(e, JobClosed)] == [JobStatus.VOID]
        executor.submit(task)
        wait_for(executor, events, lambda: _passed(events, "time"))
        assert len({e.job.id for e in events if isinstance(e, JobOpened)}) == 2
    finally:
        executor.close(cancel=True)


def _passed(events: list[Event], stage: str) -> bool:
    found = [e for e in events if isinstance(e, StageFinished)]
    assert all(e.result.status is StageStatus.PASSED for e in found), found
    return any(e.stage == stage for e in found)


def actors() -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = Path(f"/proc/{entry}/cmdline").read_text()
        except OSError:
            continue
        if title.startswith("ray::MeasureActor"):
            found.append(int(entry))
    return found
