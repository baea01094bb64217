"""A long campaign whose driver and workers are killed again and again ends as if nobody had."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_tree import workers_of

from leaderboard import CampaignStatus, Store, TrialStatus, finals, open_store, winner

HERE = Path(__file__).parent
BUDGET = 200
KILLS = 20


def start(url: str, folder: Path, sampler: str, budget: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", HERE / "soak_driver.py", url, folder / "logs", sampler, str(budget)],
        stdout=subprocess.PIPE,
        stderr=(folder / "said").open("a"),
        text=True,
        start_new_session=True,
    )


def finished(store: Store) -> int:
    return sum(t.status.finished for c in store.list_campaigns() for t in store.list_trials(c.id))


def undisturbed(url: str, folder: Path, sampler: str, budget: int) -> None:
    folder.mkdir()
    process = start(url, folder, sampler, budget)
    process.communicate(timeout=1200)
    assert process.returncode == 0, (folder / "said").read_text()


def disturbed(url: str, folder: Path, sampler: str, budget: int, kills: int) -> dict[str, int]:
    """Kill drivers and workers at random moments of a campaign until it is done."""
    folder.mkdir()
    rng = random.Random(sampler)
    done = {"driver": 0, "worker": 0}
    open_store(url).close()
    with open_store(url, read_only=True) as store:
        process = start(url, folder, sampler, budget)
        deadline = time.monotonic() + 1800
        while process.poll() is None or process.returncode == -signal.SIGKILL:
            assert time.monotonic() < deadline, (folder / "said").read_text()
            if process.poll() is not None:
                process = start(url, folder, sampler, budget)
            left = kills - sum(done.values())
            pace = max(1, (budget - finished(store)) // (2 * left + 2)) if left > 0 else budget
            until = finished(store) + rng.randint(1, pace)
            while finished(store) < until and process.poll() is None:
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 0.2))
            if left <= 0 or process.poll() is not None:
                process.wait()
                continue
            victim = "driver" if rng.random() < 0.5 else "worker"
            pids = [process.pid] if victim == "driver" else workers_of(process.pid)
            if not pids:  # none has come up yet
                continue
            os.kill(rng.choice(pids), signal.SIGKILL)
            done[victim] += 1
            if victim == "driver":
                process.wait()
        assert process.returncode == 0, (folder / "said").read_text()
    return done


def check(url: str, folder: Path, sampler: str, budget: int, kills: int) -> None:
    urls = [f"sqlite:///{folder}/calm.db", url]
    undisturbed(urls[0], folder / "calm", sampler, budget)
    done = disturbed(urls[1], folder / "rough", sampler, budget, kills)
    assert sum(done.values()) >= kills, done
    assert min(done.values()) > 0, done
    sets, first = [], []
    for one in urls:
        with open_store(one, read_only=True) as store:
            (campaign,) = store.list_campaigns()
            assert campaign.status is CampaignStatus.FINISHED
            trials = store.list_trials(campaign.id)
            keys = [t.schedule_key for t in trials if t.status.finished]
            assert len(keys) == len(set(keys)) == budget
            assert not [t for t in trials if t.status is TrialStatus.RUNNING]
            assert {t.status for t in trials if t.status.finished} <= {
                TrialStatus.PASSED,
                TrialStatus.REJECTED,
            }
            best = winner(store, campaign.id)
            assert best is not None
            assert best == finals(store, campaign.id)[0]
            sets.append(set(keys))
            first.append(best)
    if sampler == "grid":
        assert sets[0] == sets[1]
        assert first[0].schedule_key == first[1].schedule_key
    else:
        assert abs(first[1].score_us / first[0].score_us - 1) <= 0.03


@pytest.mark.timeout(120)
def test_a_short_campaign_with_kills_ends_as_if_there_were_none(tmp_path: Path) -> None:
    check(f"sqlite:///{tmp_path}/rough.db", tmp_path, "grid", budget=30, kills=3)


@pytest.mark.soak
@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_a_campaign_of_200_trials_with_20_kills_ends_as_if_there_were_none(
    new_database, tmp_path: Path, sampler: str
) -> None:
    check(new_database(), tmp_path, sampler, BUDGET, KILLS)
