"""What a driver itself costs: many fake devices, and nothing else to do."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import postgresql_server
import pytest
from fleet import Fleet

from factory.campaign import launch
from factory.config import CampaignConfig
from factory.plan import make_plan
from factory.progress import Silent
from leaderboard import CampaignStatus, open_store

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """CPU time of the driver for each trial, and the share of time that devices were idle."""

    cpu_ms: float
    idle: float
    wall_s: float


def drive(
    url: str, folder: Path, *, devices: int, trial_s: float, rounds: int, sampler: str
) -> Seen:
    budget = devices * rounds
    config = CampaignConfig(
        name="fleet",
        operation="toy_wide",
        space="wider" if devices > 8 else "wide",
        sampler=sampler,  # type: ignore[arg-type]
        budget=budget,
        clock="gpu",
    )
    plan = make_plan(config, need_gpu_here=False)
    fleet = Fleet(devices, trial_s)
    with open_store(url) as store:
        began, cpu = time.monotonic(), time.process_time()
        done = launch(
            plan,
            store,
            stored=None,
            make_executor=lambda *_: fleet,
            view=Silent(),
            log_root=folder,
        )
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    assert done.campaign.status is CampaignStatus.FINISHED
    assert done.finished == budget
    busy = sum(d.busy_s for d in fleet.devices)
    idle = sum(d.idle_s for d in fleet.devices)
    seen = Seen(1e3 * cpu_s / budget, idle / (idle + busy), wall_s)
    _log.info(
        "%s, %d devices, %g s a trial, %s, %d trials: %.2f ms of the driver's CPU a trial, "
        "%.1f%% idle, %.1f s in all",
        url.partition(":")[0],
        devices,
        trial_s,
        sampler,
        budget,
        seen.cpu_ms,
        100 * seen.idle,
        wall_s,
    )
    return seen


def test_a_trial_costs_its_driver_milliseconds(new_database, tmp_path: Path) -> None:
    # Three times the goal: another machine and its neighbours must not decide.
    seen = drive(new_database(), tmp_path, devices=64, trial_s=0.5, rounds=3, sampler="random")
    assert seen.cpu_ms < 15


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sampler", "rounds", "most_ms"), [("grid", 16, 5), ("random", 16, 5), ("tpe", 8, 25)]
)
def test_one_driver_keeps_64_devices_busy(
    tmp_path: Path, sampler: str, rounds: int, most_ms: float
) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    seen = drive(url, tmp_path, devices=64, trial_s=1.0, rounds=rounds, sampler=sampler)
    assert seen.cpu_ms < most_ms
    assert seen.idle < 0.05


@pytest.mark.soak
def test_a_server_costs_a_driver_twice_as_much(
    postgresql: postgresql_server.Server, tmp_path: Path
) -> None:
    seen = drive(postgresql.new(), tmp_path, devices=64, trial_s=1.0, rounds=16, sampler="random")
    assert seen.cpu_ms < 10


@pytest.mark.soak
@pytest.mark.parametrize(("devices", "trial_s"), [(256, 4.0), (1024, 16.0)])
def test_what_a_trial_costs_hardly_grows_with_the_devices(
    tmp_path: Path, devices: int, trial_s: float
) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    seen = drive(url, tmp_path, devices=devices, trial_s=trial_s, rounds=4, sampler="random")
    assert seen.cpu_ms < 10
    assert seen.idle < 0.05
