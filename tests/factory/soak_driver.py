"""A driver for the soak: ``python soak_driver.py URL FOLDER SAMPLER BUDGET``, until it is done.

CPU stages run in worker processes; the GPU is a device of rules that answers the same each time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fake_device import FakeFinals
from fleet import _ERROR, FINGERPRINT, new_job, passed, times

from candidates import Schedule
from factory.campaign import launch, unfinished
from factory.config import CampaignConfig
from factory.executors.inline import InlineExecutor
from factory.plan import make_plan
from factory.progress import make_view
from factory.stages.base import StageResult
from leaderboard import open_store
from leaderboard.records import JobStatus, MeasurementRecord, StageStatus


class Job:
    """One stretch on a device of rules, which goes as far as the file ``allowed`` says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.record = new_job(f"job-{os.getpid()}-{time.monotonic_ns()}")
        self.fingerprint = FINGERPRINT

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        status = JobStatus.VOID if error else JobStatus.VALID
        self.record = self.record.model_copy(update={"status": status, "drift": 0.0})

    def prepare(self, schedule: Schedule) -> Schedule:
        return schedule

    def release(self, handle: Schedule) -> None:
        pass

    def gate(self, handle: Schedule) -> StageResult:
        return StageResult(StageStatus.PASSED, errors=(_ERROR,))

    def screen(self, handle: Schedule) -> StageResult:
        screened = self._folder / "screened"
        with screened.open("a") as file:
            file.write(".")
        allowed = self._folder / "allowed"
        while allowed.exists() and screened.stat().st_size > int(allowed.read_text()):
            time.sleep(0.01)
        time.sleep(0.05)  # long enough to be killed in
        return StageResult(StageStatus.PASSED)

    def time(self, handle: Schedule) -> StageResult:
        return passed(self.record.id, handle)

    def finals(self, schedules: Sequence[Schedule]) -> FakeFinals:
        results = {s: passed(self.record.id, s, phase="final") for s in schedules}
        return FakeFinals(results, tuple(sorted(results, key=lambda s: results[s].score_us or 0)))

    def controls(self) -> tuple[MeasurementRecord, ...]:
        return times(self.record.id, 110.0, control="peer", phase="before")


def main(url: str, folder: str, sampler: str, budget: str) -> None:
    config = CampaignConfig(
        name="soak",
        operation="toy_wide",
        space="wide",
        sampler=sampler,  # type: ignore[arg-type]
        budget=int(budget),
        clock="gpu",
    )
    plan = make_plan(config, need_gpu_here=False)
    with open_store(url) as store:
        launch(
            plan,
            store,
            stored=unfinished(store, "soak"),
            make_executor=lambda context, plan, view: InlineExecutor(
                context, workers=2, open_job=partial(Job, Path(folder).parent)
            ),
            view=make_view(),
            log_root=Path(folder),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
