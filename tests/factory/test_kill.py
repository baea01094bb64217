"""Campaigns that are killed or interrupted at any moment, and then resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from process_tree import children_of, workers_of

from leaderboard import CampaignStatus, StoreError, TrialStatus, open_store, ranked

COMMAND = [sys.executable, "-c", "from factory.cli import main; main()"]
BUDGET = 12

on_sqlite = pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
"""For what has nothing to do with the database."""


@dataclass(frozen=True)
class Site:
    """Where a campaign is launched from, and the database it writes."""

    folder: Path
    url: str

    def write(self, *, space="many", sampler="tpe", executor="inline"):
        (self.folder / "many.toml").write_text(
            f'name = "many"\noperation = "toy_scale"\nspace = "{space}"\nbudget = {BUDGET}\n'
            f'sampler = "{sampler}"\n[executor]\nkind = "{executor}"\nworkers = 2\n'
        )


@pytest.fixture
def site(new_database, tmp_path):
    """A campaign of slow toy trials, on either database."""
    made = Site(tmp_path, new_database())
    made.write()
    return made


def start(site, *more, emulate_s=0.05):
    return subprocess.Popen(
        [*COMMAND, "launch", "many.toml", "--db", site.url, *more],
        cwd=site.folder,
        env={**os.environ, "TOY_EMULATE_S": str(emulate_s)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trials(site, statuses=()):
    with open_store(site.url, read_only=True) as store:
        campaigns = store.list_campaigns()
        return store.list_trials(campaigns[-1].id, statuses) if campaigns else []


def stored(site):
    """Whether a campaign got as far as the database."""
    try:
        with open_store(site.url, read_only=True) as store:
            return bool(store.list_campaigns())
    except StoreError:  # killed before its schema was whole
        return False


def wait_for_finished(site, count, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stored(site) and sum(t.status.finished for t in trials(site)) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{count} trials did not finish in {seconds} s")


def finish(site, *more, code=0):
    process = start(site, *more)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out, err


def check_whole(site):
    """Total budget kept, no schedule finished twice, none open, one rerun for one kill."""
    all_trials = trials(site)
    done = [t for t in all_trials if t.status.finished]
    assert len(done) == BUDGET
    assert len({t.schedule_key for t in done}) == BUDGET
    assert not [t for t in all_trials if t.status is TrialStatus.RUNNING]
    by_schedule = {}
    for trial in all_trials:
        by_schedule.setdefault(trial.schedule_key, []).append(trial)
    for attempts in by_schedule.values():
        assert [t.attempt for t in attempts] == list(range(1, len(attempts) + 1))
        assert {t.status for t in attempts[:-1]} <= {TrialStatus.ABANDONED}
        assert attempts[-1].status.finished
    with open_store(site.url, read_only=True) as store:
        campaigns = store.list_campaigns()
        assert len(campaigns) == 1
        assert campaigns[0].status is CampaignStatus.FINISHED
        assert len(ranked(store, campaign_id=campaigns[0].id)) == BUDGET


@pytest.mark.parametrize(
    ("new_database", "executor"),
    [
        ("sqlite", "inline"),
        ("postgresql", "inline"),
        ("postgresql", "ray"),
        pytest.param("sqlite", "ray", marks=pytest.mark.soak),
    ],
    indirect=["new_database"],
)
def test_c2_c3_a_worker_and_then_the_driver_are_killed_and_the_budget_stays(site, executor):
    site.write(executor=executor)
    first = start(site, emulate_s=0.5)
    wait_for_finished(site, 2)
    busy = []
    while not busy:
        busy = workers_of(first.pid)
    os.kill(busy[0], signal.SIGKILL)
    # It may take the driver longer to see this than others take to finish two trials.
    told = "died of SIGKILL in emulate; once more in a new worker"
    assert any(told in line for line in first.stderr)
    wait_for_finished(site, 4)
    first.kill()
    first.communicate()
    before = {t.id for t in trials(site) if t.status.finished}
    assert 4 <= len(before) < BUDGET
    assert trials(site, [TrialStatus.RUNNING])  # it was killed inside trials

    refused = start(site)
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "is unfinished" in err
    assert "--resume" in err
    assert len(err.strip().splitlines()) == 1

    finish(site, "--resume", "--budget", str(BUDGET))
    check_whole(site)
    assert before <= {t.id for t in trials(site) if t.status.finished}


@on_sqlite
def test_ctrl_c_stops_cleanly_and_says_how_to_resume(site):
    process = start(site)
    wait_for_finished(site, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"resume with: factory launch many.toml --db {site.url} --resume" in err
    assert "interrupted" in out
    assert "Traceback" not in err
    assert not trials(site, [TrialStatus.RUNNING])
    with open_store(site.url, read_only=True) as store:
        kept = store.get_campaign("many")
        assert (kept.status, kept.driver) == (CampaignStatus.INTERRUPTED, None)
    finish(site, "--resume")
    check_whole(site)


@pytest.mark.parametrize("new_database", ["postgresql"], indirect=True)
def test_a_second_driver_is_told_who_holds_the_campaign(site):
    first = start(site, emulate_s=0.2)
    wait_for_finished(site, 1)
    second = start(site, "--resume")
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f":{first.pid}" in err
    assert "is held by" in err
    first.kill()
    first.communicate()


@on_sqlite
def test_workers_inside_a_task_end_with_their_driver(site):
    site.write(space="hanging", sampler="grid")
    process = start(site, emulate_s=0.0)
    wait_for_finished(site, 2)  # what is left hangs for an hour
    workers = children_of(process.pid)
    assert workers
    process.kill()
    process.communicate()
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < end, "a worker outlived its driver"
        time.sleep(0.05)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random_moments_until_it_is_done(site, seed):
    rng = random.Random(seed)
    for _ in range(40):
        process = start(site, *(["--resume"] if stored(site) else []), emulate_s=0.1)
        try:
            process.wait(timeout=rng.uniform(0.1, 4.0))
        except subprocess.TimeoutExpired:
            process.kill()
        _, err = process.communicate()
        if process.returncode == 0 or "is finished after" in err:
            break
        assert process.returncode == -signal.SIGKILL, err
    check_whole(site)
