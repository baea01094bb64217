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
from leaderboard.whole_file import whole_file

HERE = Path(__file__).parent
BUDGET = 200
KILLS = 20


def start(url: str, folder: Path, sampler: str, budget: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", HERE / "soak_driver.py", url, folder / "logs", sampler, str(budget)],
        stdout=subprocess.PIPE,
        stderr=(folder / "said").open("a"),
        text=True,
        env={**os.environ, "TOY_TASKS": str(folder / "tasks")},
        start_new_session=True,
    )


def finished(store: Store) -> int:
    return sum(t.status.finished for c in store.list_campaigns() for t in store.list_trials(c.id))


def undisturbed(url: str, folder: Path, sampler: str, budget: int) -> None:
    (folder / "tasks").mkdir(parents=True)
    process = start(url, folder, sampler, budget)
    process.communicate()
    assert process.returncode == 0, (folder / "said").read_text()


def disturbed(url: str, folder: Path, sampler: str, budget: int, kills: int) -> dict[str, int]:
    """Kill drivers and workers at random moments of a campaign, then let it finish.

    Between two kills it may go on by some trials and no further, however late the next one is.
    """
    (folder / "tasks").mkdir(parents=True)
    screened, allowed = folder / "screened", folder / "allowed"
    screened.touch()
    rng = random.Random(sampler)
    victims = [*rng.choices(("worker", "driver"), k=kills - 2), "driver", "worker"]
    done = {"driver": 0, "worker": 0}
    hit: set[str] = set()
    open_store(url).close()
    with open_store(url, read_only=True) as store:
        process = None
        for number, victim in enumerate(victims):
            before = finished(store)
            further = rng.randint(1, max(1, (budget - before) // (2 * (kills - number) + 2)))
            _write(allowed, str(screened.stat().st_size + further))
            process = process or start(url, folder, sampler, budget)
            while finished(store) < before + further:
                assert process.poll() is None, (folder / "said").read_text()
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 0.2))
            if victim == "worker" and kill_a_worker(process.pid, folder / "tasks", hit, rng):
                done["worker"] += 1
                continue
            process.kill()
            process.wait()
            process = None
            done["driver"] += 1
        _write(allowed, str(10**9))
        process = process or start(url, folder, sampler, budget)
        process.communicate()
        assert process.returncode == 0, (folder / "said").read_text()
    return done


def kill_a_worker(driver: int, tasks: Path, hit: set[str], rng: random.Random) -> bool:
    """Kill one whose candidate has not lost a worker before: the second would be its fault.

    Of those that had no task yet three in a row would be the machine's fault: none is taken.
    """
    pids = workers_of(driver)
    rng.shuffle(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that it stays where it says it is
        said = tasks / str(pid)
        key = said.read_text() if said.exists() else ""
        if key and key not in hit:
            os.kill(pid, signal.SIGKILL)
            hit.add(key)
            return True
        os.kill(pid, signal.SIGCONT)
    return False


def _write(file: Path, text: str) -> None:
    with whole_file(file) as stream:
        stream.write(text)


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


def test_a_short_campaign_with_kills_ends_as_if_there_were_none(tmp_path: Path) -> None:
    check(f"sqlite:///{tmp_path}/rough.db", tmp_path, "grid", budget=30, kills=3)


@pytest.mark.soak
@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_a_campaign_of_200_trials_with_20_kills_ends_as_if_there_were_none(
    new_database, tmp_path: Path, sampler: str
) -> None:
    check(new_database(), tmp_path, sampler, BUDGET, KILLS)
