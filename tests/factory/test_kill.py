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
from held import Hold
from process_tree import children_of
from waiting import HANG_S, until

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
    hold: Hold

    def write(self, *, space="many", sampler="tpe", executor="inline"):
        (self.folder / "many.toml").write_text(
            f'name = "many"\noperation = "toy_scale"\nspace = "{space}"\nbudget = {BUDGET}\n'
            f'sampler = "{sampler}"\n[executor]\nkind = "{executor}"\nworkers = 2\n'
        )


@pytest.fixture
def site(new_database, tmp_path):
    """A campaign of toy trials that can be held, on either database."""
    made = Site(tmp_path, new_database(), Hold(tmp_path / "hold"))
    made.write()
    return made


def start(site, *more, emulate_s=0.0):
    return subprocess.Popen(
        [*COMMAND, "launch", "many.toml", "--db", site.url, *more],
        cwd=site.folder,
        env={
            **os.environ,
            "TOY_EMULATE_S": str(emulate_s),
            "TOY_HOLD": str(site.hold.folder),
        },
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


def finished(site):
    return sum(t.status.finished for t in trials(site)) if stored(site) else 0


def wait_for_finished(site, count):
    until(lambda: finished(site) >= count, f"the end of {count} trials")


def finish(site, *more, code=0):
    process = start(site, *more)
    out, err = process.communicate(timeout=HANG_S)
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
    site.write(executor=executor, sampler="grid")
    site.hold.after(2)
    first = start(site)
    wait_for_finished(site, 2)
    os.kill(site.hold.worker_of(3), signal.SIGKILL)
    told = "died of SIGKILL in emulate; once more in a new worker"
    assert any(told in line for line in first.stderr)
    site.hold.after(4)
    wait_for_finished(site, 4)
    site.hold.worker_of(5)
    first.kill()  # inside trials
    first.communicate()
    before = {t.id for t in trials(site) if t.status.finished}
    assert len(before) == 4
    assert trials(site, [TrialStatus.RUNNING])
    site.hold.none()

    refused = start(site)
    _, err = refused.communicate(timeout=HANG_S)
    assert refused.returncode == 2
    assert "is unfinished" in err
    assert "--resume" in err
    assert len(err.strip().splitlines()) == 1

    finish(site, "--resume", "--budget", str(BUDGET))
    check_whole(site)
    assert before <= {t.id for t in trials(site) if t.status.finished}


@on_sqlite
def test_ctrl_c_stops_cleanly_and_says_how_to_resume(site):
    site.write(sampler="grid")
    site.hold.after(2)
    process = start(site)
    wait_for_finished(site, 2)
    site.hold.worker_of(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert f"resume with: factory launch many.toml --db {site.url} --resume" in err
    assert "interrupted" in out
    assert "Traceback" not in err
    assert not trials(site, [TrialStatus.RUNNING])
    with open_store(site.url, read_only=True) as store:
        kept = store.get_campaign("many")
        assert (kept.status, kept.driver) == (CampaignStatus.INTERRUPTED, None)
    site.hold.none()
    finish(site, "--resume")
    check_whole(site)


@pytest.mark.parametrize("new_database", ["postgresql"], indirect=True)
def test_a_second_driver_is_told_who_holds_the_campaign(site):
    site.write(sampler="grid")
    site.hold.after(2)
    first = start(site)
    wait_for_finished(site, 2)
    second = start(site, "--resume")
    _, err = second.communicate(timeout=HANG_S)
    assert second.returncode == 2
    assert f":{first.pid}" in err
    assert "is held by" in err
    first.kill()
    first.communicate()


@on_sqlite
def test_workers_inside_a_task_end_with_their_driver(site):
    site.write(space="hanging", sampler="grid")
    process = start(site)
    wait_for_finished(site, 2)  # what is left hangs for an hour
    workers = children_of(process.pid)
    assert workers
    process.kill()
    process.communicate()
    until(
        lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers),
        "the end of workers after that of their driver",
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_random_moments_until_it_is_done(site, seed):
    rng = random.Random(seed)
    for _ in range(40):
        process = start(site, *(["--resume"] if stored(site) else []), emulate_s=0.1)
        # While it starts, or some time after so many trials, however fast it is.
        goal = finished(site) + rng.randrange(4)
        while finished(site) < goal and process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 1.0 if goal else 4.0))
        process.kill()
        _, err = process.communicate()
        if process.returncode == 0 or "is finished after" in err:
            break
        assert process.returncode == -signal.SIGKILL, err
    check_whole(site)
