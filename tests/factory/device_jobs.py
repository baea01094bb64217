"""Opens jobs on the simulated device and runs fakes through their stages."""

from __future__ import annotations

from pathlib import Path

import device_fakes as fakes

from candidates import Schedule
from factory.device import DeviceJob, Limits, open_job
from factory.device.simulated import SimulatedDevice
from factory.stages.base import StageResult
from leaderboard.records import StageStatus

LIMITS = Limits(load_s=120, gate_s=60, screen_s=60, time_s=60, host_bytes=1 << 30)


def schedule(kind: str) -> Schedule:
    return fakes.FAMILY.schedule({"kind": kind})


def start(tmp_path: Path, **changes: object) -> DeviceJob:
    given: dict[str, object] = {
        "operation": fakes.OPERATION,
        "family": fakes.FAMILY,
        "seed": 1,
        "limits": LIMITS,
        "log_dir": tmp_path,
        "baselines": (),
        "device": SimulatedDevice(),
        **changes,
    }
    return open_job(**given)  # type: ignore[arg-type]


def through(job: DeviceJob, kind: str, *stages: str) -> StageResult:
    """Verdict of the last of the stages, or of the first that does not pass."""
    handle = job.prepare(schedule(kind))
    try:
        for stage in stages or ("gate",):
            result: StageResult = getattr(job, stage)(handle)
            if result.status is not StageStatus.PASSED:
                break
        return result
    finally:
        job.release(handle)
