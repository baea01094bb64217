"""Worker processes: verdicts come back, and a dying or hanging task harms only itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from waiting import until

import candidates
from factory.executors.base import (
    HarnessFault,
    Limits,
    StageFinished,
    Task,
    TaskLost,
    WorkerContext,
)
from factory.executors.inline import InlineExecutor
from leaderboard.records import StageStatus

FAMILY = candidates.get("toy_scale")


def toy(kind: str, **values):
    return FAMILY.schedule({"kind": kind, **values})


@pytest.fixture
def make(tmp_path):
    opened = []

    def build(workers=1, operation="toy_scale", **limits) -> InlineExecutor:
        context = WorkerContext("c", operation, 0, Limits(**limits), str(tmp_path))
        opened.append(InlineExecutor(context, workers=workers))
        return opened[-1]

    yield build
    for executor in opened:
        executor.close(cancel=True)


def run(executor, tasks):
    for task in tasks:
        executor.submit(task)
    return {e.trial_id: e for e in polled(executor, len(tasks))}


def polled(executor, count):
    events = []

    def enough():
        events.extend(executor.poll(0.5))
        return len(events) >= count

    until(enough, lambda: f"{count} events but only {events}")
    return events


def task(tmp_path, number, schedule, stage="emulate"):
    return Task(number, stage, schedule, str(tmp_path / f"{number}.log"))


def test_verdicts_and_logs_come_back(make, tmp_path):
    tasks = [
        task(tmp_path, 1, toy("exact", block=1)),
        task(tmp_path, 2, toy("offset")),
        task(tmp_path, 3, toy("exact", block=1), "compile"),
        task(tmp_path, 4, toy("raises")),
    ]
    events = run(make(workers=2), tasks)
    assert all(isinstance(e, StageFinished) for e in events.values()), events
    statuses = [events[n].result.status for n in (1, 2, 3, 4)]
    assert statuses == [
        StageStatus.PASSED,
        StageStatus.REJECTED,
        StageStatus.PASSED,
        StageStatus.CRASHED,
    ]
    log = (tmp_path / "4.log").read_text()
    assert log.startswith("== emulate: kind=raises")
    assert "RuntimeError: made to raise" in log


def test_a_dying_task_is_lost_and_the_next_one_is_served(make, tmp_path):
    tasks = [task(tmp_path, 1, toy("dies")), task(tmp_path, 2, toy("exact", block=1))]
    events = run(make(workers=1), tasks)
    assert isinstance(events[1], TaskLost)
    assert (events[1].kind, events[1].reason) == ("crashed", "worker died of SIGKILL in emulate")
    assert events[2].result.status is StageStatus.PASSED


def test_a_hanging_task_is_ended_at_its_limit(make, tmp_path, monkeypatch):
    now = 1000.0  # time passes only where the test says so
    monkeypatch.setattr("factory.executors.pool.time", SimpleNamespace(monotonic=lambda: now))
    executor = make(workers=1, emulate_s=60.0)
    executor.submit(task(tmp_path, 1, toy("hangs")))
    executor.submit(task(tmp_path, 2, toy("exact", block=1)))
    until(lambda: executor.poll(0.1) or (tmp_path / "1.log").exists())
    now += 60.0
    assert executor.poll(0.0) == []
    now += 0.01
    (lost,) = polled(executor, 1)
    assert isinstance(lost, TaskLost)
    assert lost.kind == "timeout"
    assert lost.reason == "emulate took longer than its limit of 60 s"
    (served,) = polled(executor, 1)
    assert (served.trial_id, served.result.status) == (2, StageStatus.PASSED)


def test_a_limit_runs_out_while_nothing_is_heard(make, tmp_path):
    executor = make(workers=1, emulate_s=0.1)
    executor.submit(task(tmp_path, 1, toy("hangs")))
    (lost,) = polled(executor, 1)
    assert lost.reason == "emulate took longer than its limit of 0.1 s"


def test_compile_time_does_not_count_against_the_emulation_limit(make, tmp_path):
    limits = Limits(emulate_s=1.0, compile_s=60.0)
    assert (limits.of("emulate"), limits.of("compile")) == (1.0, 60.0)


def test_a_broken_toolchain_is_a_fault_and_no_verdict(make, tmp_path):
    events = run(make(), [task(tmp_path, 1, toy("no_dsl"), "compile")])
    assert isinstance(events[1], HarnessFault)
    assert "nvidia-cutlass-dsl is not installed" in events[1].message


def test_a_worker_that_cannot_start_is_reported(make, tmp_path):
    executor = make(operation="nothing_of_the_kind")
    executor.submit(task(tmp_path, 1, toy("exact", block=1)))
    events = polled(executor, 1)
    assert isinstance(events[0], HarnessFault)
    assert "unknown operation 'nothing_of_the_kind'" in events[0].message


def test_closing_without_cancel_finishes_what_is_queued(make, tmp_path):
    executor = make(workers=1)
    for n in range(3):
        executor.submit(task(tmp_path, n, toy("exact", block=1)))
    assert sorted(e.trial_id for e in executor.close()) == [0, 1, 2]
    assert executor.close() == []


def test_what_a_worker_answered_before_it_died_counts(make, tmp_path, monkeypatch):
    executor = make(workers=1)
    pool = executor._pool
    read, killed = pool._read, []

    def late(worker):
        """Looks just before the answer comes, and the worker is gone when it has."""
        if killed or worker.task is None:
            return read(worker)
        until(worker.tasks.poll, "an answer")
        worker.process.kill()
        worker.process.join()
        killed.append(worker)
        return []

    monkeypatch.setattr(pool, "_read", late)
    executor.submit(task(tmp_path, 1, toy("exact", block=1)))
    (event,) = polled(executor, 1)
    assert killed
    assert isinstance(event, StageFinished)
    executor.submit(task(tmp_path, 2, toy("exact", block=1)))  # to the next worker
    assert [type(e) for e in polled(executor, 1)] == [StageFinished]


def test_a_worker_killed_while_it_starts_is_replaced(make, tmp_path):
    executor = make(workers=1)
    executor.submit(task(tmp_path, 1, toy("exact", block=1)))
    executor._pool._workers[0].process.kill()
    events = polled(executor, 1)
    assert [type(e) for e in events] == [StageFinished]


def test_workers_that_always_die_before_they_are_ready_are_the_machines_fault(
    make, tmp_path, monkeypatch
):
    executor = make(workers=1)
    monkeypatch.setattr(executor._pool, "_read", lambda worker: worker.process.kill() or [])
    executor.submit(task(tmp_path, 1, toy("exact", block=1)))
    (event,) = polled(executor, 1)
    assert isinstance(event, HarnessFault)
    assert event.message == "worker did not start: it died of SIGKILL"
