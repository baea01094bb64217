"""Campaigns that are killed or interrupted at any moment, and then resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from leaderboard import CampaignStatus, StoreError, TrialStatus, open_store, ranked

COMMAND = [sys.executable, "-c", "from factory.cli import main; main()", "launch", "many.toml"]
BUDGET = 12
CASES = 6
"""Emulated cases of one right toy trial."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "many.toml").write_text(
        f'name = "many"\noperation = "toy_scale"\nspace = "many"\nbudget = {BUDGET}\n'
        "[executor]\nworkers = 2\n"
    )
    return tmp_path


def start(folder, *more, emulate_s=0.05):
    return subprocess.Popen(
        [*COMMAND, *more],
        cwd=folder,
        env={**os.environ, "TOY_EMULATE_S": str(emulate_s)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trials(folder, statuses=()):
    with open_store(f"sqlite:///{folder}/factory.db", read_only=True) as store:
        campaigns = store.list_campaigns()
        return store.list_trials(campaigns[-1].id, statuses) if campaigns else []


def stored(folder):
    """Whether a campaign got as far as the database."""
    try:
        with open_store(f"sqlite:///{folder}/factory.db", read_only=True) as store:
            return bool(store.list_campaigns())
    except StoreError:  # killed before its schema was whole
        return False


def wait_for_finished(folder, count, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stored(folder) and sum(t.status.finished for t in trials(folder)) >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{count} trials did not finish in {seconds} s")


def finish(folder, *more, code=0):
    process = start(folder, *more)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out, err


def check_whole(folder):
    """Total budget kept, no schedule finished twice, none open, one rerun for one kill."""
    all_trials = trials(folder)
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
    with open_store(f"sqlite:///{folder}/factory.db", read_only=True) as store:
        campaigns = store.list_campaigns()
        assert len(campaigns) == 1
        assert campaigns[0].status is CampaignStatus.FINISHED
        assert len(ranked(store, campaign_id=campaigns[0].id)) == BUDGET


def children_of(pid):
    """Processes below ``pid``, by /proc."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += [int(entry), *children_of(int(entry))]
    return found


def test_killed_twice_and_resumed_it_finishes_exactly_its_budget(folder):
    first = start(folder)
    wait_for_finished(folder, 2)
    first.kill()
    first.wait()
    before = {t.id for t in trials(folder) if t.status.finished}
    open_before = trials(folder, [TrialStatus.RUNNING])
    assert open_before  # it was killed inside trials

    refused = start(folder)
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "is unfinished" in err
    assert "--resume" in err
    assert len(err.strip().splitlines()) == 1

    second = start(folder, "--resume")
    wait_for_finished(folder, len(before) + 2)
    second.kill()
    second.wait()
    finish(folder, "--resume")
    check_whole(folder)
    assert before <= {t.id for t in trials(folder) if t.status.finished}


def test_ctrl_c_stops_cleanly_and_says_how_to_resume(folder):
    process = start(folder)
    wait_for_finished(folder, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "resume with: factory launch many.toml --resume" in err
    assert "interrupted" in out
    assert "Traceback" not in err
    assert not trials(folder, [TrialStatus.RUNNING])
    with open_store(f"sqlite:///{folder}/factory.db", read_only=True) as store:
        kept = store.get_campaign("many")
        assert (kept.status, kept.driver) == (CampaignStatus.INTERRUPTED, None)
    finish(folder, "--resume")
    check_whole(folder)


def test_a_second_driver_is_told_who_holds_the_campaign(folder):
    first = start(folder, emulate_s=0.2)
    wait_for_finished(folder, 1)
    second = start(folder, "--resume")
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f":{first.pid}" in err
    assert "is held by" in err
    first.kill()
    first.communicate()


def test_workers_inside_a_task_end_with_their_driver(folder):
    text = (folder / "many.toml").read_text().replace('"many"\nbudget', '"hanging"\nbudget')
    (folder / "many.toml").write_text('sampler = "grid"\n' + text)
    process = start(folder, emulate_s=0.0)
    wait_for_finished(folder, 2)  # what is left hangs for an hour
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
def test_killed_at_random_moments_until_it_is_done(folder, seed):
    rng = random.Random(seed)
    for _ in range(40):
        process = start(folder, *(["--resume"] if stored(folder) else []), emulate_s=0.1)
        try:
            process.wait(timeout=rng.uniform(0.1, 4.0))
        except subprocess.TimeoutExpired:
            process.kill()
        _, err = process.communicate()
        if process.returncode == 0 or "is finished after" in err:
            break
        assert process.returncode == -signal.SIGKILL, err
    check_whole(folder)
