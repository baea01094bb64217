"""Jobs that the actors of a test cluster open; imported there by name."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from fake_device import FakeJob
from toy_scale import ToyRunnable
from waiting import until

import candidates
import operations
from candidates import Baseline
from factory import device
from factory.device.simulated import SimulatedDevice
from factory.stages.base import HarnessError
from leaderboard.records import StageStatus


def fake_job(context, **options):
    return FakeJob(number=os.getpid(), **options)


def fake_slow_to_close(context, *, seconds):
    """Reads its controls once more, which takes that long."""
    wait = partial(time.sleep, seconds)
    return FakeJob(number=os.getpid(), during=lambda what: what == "close" and wait())


def fake_in_company(context, *, told):
    """Measures nothing before it is told that other GPUs are open too."""
    wait = partial(waited_for, Path(told))
    return FakeJob(number=os.getpid(), during=wait)


def waited_for(path, what):
    if what.startswith("gate"):
        until(path.exists, "the opening of all GPUs")


def held_in_its_first_screen(folder, what):
    """Stays in the first screen of all, so that the process can be killed in it."""
    if what.startswith("screen") and not (folder / "killed").exists():
        (folder / "screening").touch()
        until((folder / "killed").exists)


def fake_opening_once_badly(context, *, mark):
    """Opens, then fails once: a GPU whose last owner has not let go yet."""
    with open(mark, "a") as file:
        file.write(".")
    if os.path.getsize(mark) == 2:
        raise HarnessError("out of memory: the dead one has not let go yet")
    during = partial(held_in_its_first_screen, Path(mark).parent)
    return FakeJob(number=os.getpid(), during=during)


class SecondThoughts(FakeJob):
    """Rejects at its gate what the job before it let pass."""

    def gate(self, handle):
        result = super().gate(handle)
        return replace(result, status=StageStatus.REJECTED, reason="y off")


def fake_with_second_thoughts(context, *, mark):
    with open(mark, "a") as file:
        file.write(".")
    kind = FakeJob if os.path.getsize(mark) == 1 else SecondThoughts
    during = partial(held_in_its_first_screen, Path(mark).parent)
    return kind(number=os.getpid(), during=during)


def fake_without_the_second_gpu(context):
    if os.environ["CUDA_VISIBLE_DEVICES"] == "1":
        raise HarnessError("no sm90 GPU is visible")
    return FakeJob(number=os.getpid())


class Steady(Baseline):
    """A control that every job times: without one, jobs cannot be compared."""

    name = "steady"
    operation = "toy_scale"
    input_form = "activated"

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return "steady 1"

    def load(self, workload, raw):
        return ToyRunnable(20.0, 1.0)


def simulated(context):
    return device.open_job(
        operations.get("toy_scale"),
        candidates.get("toy_scale"),
        seed=context.seed,
        limits=device.Limits(load_s=60, gate_s=30, screen_s=30, time_s=30),
        log_dir=context.log_dir,
        baselines=(Steady(),),
        device=SimulatedDevice(),
    )
