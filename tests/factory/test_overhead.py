"""What a driver itself costs: many fake devices, and nothing else to do."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import postgresql_server
import pytest
import sqlalchemy as sa
from fleet import Fleet

from factory.campaign import launch
from factory.config import CampaignConfig
from factory.plan import make_plan
from factory.progress import Silent
from leaderboard import CampaignStatus, open_store

_log = logging.getLogger(__name__)
MOST_TRANSACTIONS = 130
"""Three times what a trial cost when this was written."""


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


def transaction_ms(url: str) -> float:
    """CPU time of a transaction that writes one small row: what this machine is like just now."""
    row = sa.Table("yardstick", sa.MetaData(), *(sa.Column(f"x{n}", sa.Text) for n in range(8)))
    best = float("inf")
    with open_store(url) as store:
        row.create(store._engine)
        for _ in range(10):
            began = time.process_time()
            for _ in range(50):
                with store.writing() as session:
                    session.execute(sa.insert(row), {c.name: "a few words" for c in row.columns})
            best = min(best, time.process_time() - began)
    return 1e3 * best / 50


def test_a_trial_costs_its_driver_some_transactions(new_database, tmp_path: Path) -> None:
    # In milliseconds the long form below tells it; those are of one machine that does nothing else.
    for attempt in range(3):
        seen = drive(
            new_database(),
            tmp_path / str(attempt),
            devices=64,
            trial_s=0.1,
            rounds=3,
            sampler="random",
        )
        one_ms = transaction_ms(new_database())
        _log.info("%.1f transactions of %.2f ms", seen.cpu_ms / one_ms, one_ms)
        if seen.cpu_ms < MOST_TRANSACTIONS * one_ms:
            return
    pytest.fail(f"{seen.cpu_ms:.1f} ms a trial where a transaction takes {one_ms:.2f} ms")


@pytest.mark.soak
@pytest.mark.parametrize("sampler", ["grid", "random", "tpe"])
def test_one_driver_keeps_64_devices_busy(tmp_path: Path, sampler: str) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    seen = drive(url, tmp_path, devices=64, trial_s=1.0, rounds=16, sampler=sampler)
    assert seen.cpu_ms < 5
    assert seen.idle < 0.05


@pytest.mark.soak
def test_what_a_trial_costs_hardly_grows_with_the_campaign(tmp_path: Path) -> None:
    short, long = (
        drive(
            f"sqlite:///{tmp_path}/{rounds}.db",
            tmp_path / str(rounds),
            devices=64,
            trial_s=0.2,
            rounds=rounds,
            sampler="tpe",
        )
        for rounds in (16, 64)
    )
    assert long.cpu_ms < 1.3 * short.cpu_ms


@pytest.mark.soak
def test_a_server_costs_a_driver_twice_as_much(
    postgresql: postgresql_server.Server, tmp_path: Path
) -> None:
    seen = drive(postgresql.new(), tmp_path, devices=64, trial_s=1.0, rounds=16, sampler="random")
    assert seen.cpu_ms < 10


@pytest.mark.soak
@pytest.mark.parametrize("sampler", ["random", "tpe"])
@pytest.mark.parametrize(("devices", "trial_s"), [(256, 4.0), (1024, 16.0)])
def test_what_a_trial_costs_hardly_grows_with_the_devices(
    tmp_path: Path, devices: int, trial_s: float, sampler: str
) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    seen = drive(url, tmp_path, devices=devices, trial_s=trial_s, rounds=4, sampler=sampler)
    assert seen.cpu_ms < 10
    assert seen.idle < 0.05
