"""A small measured campaign of KDA prefill, as lines to import: three fused schedules, two shapes.

Its times are made up, so that a test decides who wins, where, and by how much.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import candidates
import operations
from leaderboard import FingerprintRecord, Store, import_lines, interval

OPERATION = operations.get("kda_prefill")
FAMILY = candidates.get("kda_prefill")
SCHEDULES = [s for s in FAMILY.offered("fused") if FAMILY.gate_bound(s) is not None][:3] or list(
    FAMILY.offered("fused")[:3]
)
"""The first one wins."""

SHAPES = ("2048/12/1", "8192/12/4")
HELD_OUT = "odd-500/5"
MOMENT = "2026-11-30T07:45:40+00:00"
CAMPAIGN, JOB = "survey-of-tests", "job-of-tests"
FINGERPRINT = FingerprintRecord.of(
    {
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11",
        "dsl": None,
        "ptxas": "nvidia-cutlass-dsl-libs-base 4.8.1",
    }
)

Times = Mapping[tuple[int, str, str], float]
"""(number of the schedule, shape, regime) to median microseconds."""

EVEN: Times = {
    (n, shape, regime): us * (1 + n / 10)
    for n in range(3)
    for shape, us in zip(SHAPES, (26.0, 95.0), strict=True)
    for regime in ("production", "slow")
}
"""Each schedule 10% behind the one before, everywhere."""


def samples(median: float) -> list[float]:
    return [round(median * (1 + k / 1000), 6) for k in range(-10, 11)]


def uid(*parts: object) -> str:
    return "-".join(map(str, parts))


def lines(times: Times = EVEN, **changes: Any) -> Iterator[str]:
    """The campaign; ``finals=False`` leaves these out, ``source`` is what it was measured with.

    With ``build`` the compile stage of the first schedule is a real one.
    """
    source = changes.get("source", FAMILY.source_hash())
    made = [
        {"kind": "header", "format": "kernel-factory leaderboard", "version": 1},
        {"kind": "fingerprint", **FINGERPRINT.model_dump()},
        {"kind": "campaign", "id": CAMPAIGN, "name": "survey", "operation": OPERATION.name,
         "operation_version": changes.get("version", OPERATION.version), "family": FAMILY.name,
         "source_hash": source, "config": {}, "space_hash": "b", "space": {}, "seed": 1,
         "budget": 3, "status": "finished", "clock": "gpu", "workloads": list(SHAPES),
         "ranking_regime": "production", "slow_regime": "slow", "created_at": MOMENT,
         "updated_at": MOMENT},
        {"kind": "job", "id": JOB, "campaign_id": CAMPAIGN, "fingerprint_id": FINGERPRINT.id,
         "gpu": "NVIDIA H200", "status": "valid", "started_at": MOMENT, "ended_at": MOMENT,
         "drift": 0.004, "note": "", "seed": 7, "details": {}},
    ]  # fmt: skip
    for n, schedule in enumerate(SCHEDULES):
        made.append(_trial(n, schedule, times, source, _build(n, schedule, **changes)))
    for n in range(len(SCHEDULES)):
        for phase in ("search", "final"):
            if phase == "final" and (n == 2 or not changes.get("finals", True)):
                continue  # the third is no finalist
            for shape in SHAPES:
                for regime in ("production", "slow"):
                    made.append(_time(n, shape, regime, phase, times[n, shape, regime]))
            if phase == "final":
                made.append(_time(n, HELD_OUT, "production", phase, 20.0 + n, held_out=True))
    made.append({"kind": "end", "lines": len(made) - 1})
    return (json.dumps(item) for item in made)


def _build(n: int, schedule: Any, *, build: bool = False, **_: Any) -> dict[str, Any]:
    """Details of a compile stage."""
    if not build or n:
        kernels = [{"name": f"kda_fused_{n}", "registers": 96, "stack_bytes": 0, "threads": 640}]
        return {"kernels": kernels, "cubin_sha256": "c" * 64}
    made = FAMILY.compile(schedule)
    return {"kernels": [asdict(k) for k in made.kernels], "cubin_sha256": made.cubin_sha256}


def _trial(
    n: int, schedule: Any, times: Times, source: str, build: dict[str, Any]
) -> dict[str, Any]:
    def geomean(regime: str) -> float:
        return math.exp(sum(math.log(times[n, s, regime]) for s in SHAPES) / len(SHAPES))

    return {
        "kind": "trial", "uid": uid("trial", n), "campaign_id": CAMPAIGN, "number": n,
        "schedule_key": schedule.key, "schedule": schedule.as_dict(), "status": "passed",
        "stage": "time", "reason": "", "attempt": 1, "clock": "gpu",
        "score_us": geomean("production"), "slow_us": geomean("slow"), "method": "cupti",
        "cache": "warm", "job_id": JOB, "source_hash": source, "gate_bound": None,
        "started_at": MOMENT, "ended_at": MOMENT, "log_path": None,
        "stages": [{"stage": "compile", "status": "passed", "reason": "", "seconds": 1.0,
                    "details": build}],
        "errors": [{"stage": "gate", "regime": "production", "workload": SHAPES[0], "tensor": "o",
                    "scope": "all", "max_rel": 0.006, "rms_rel": 0.004, "finite": True,
                    "within": True, "seed": 1, "out_of_contract": False}],
    }  # fmt: skip


def _time(
    n: int, shape: str, regime: str, phase: str, us: float, *, held_out: bool = False
) -> dict[str, Any]:
    drawn = samples(us)
    _, low, high = interval(drawn)
    return {
        "kind": "measurement", "uid": uid("time", n, shape, regime, phase),
        "trial_uid": uid("trial", n), "job_id": JOB, "control": None, "workload": shape,
        "regime": regime, "clock": "gpu", "cache": "warm", "method": "cupti",
        "input_form": "activated", "median_us": us, "low_us": low, "high_us": high,
        "samples_us": drawn, "kernels": [f"kda_fused_{n}"], "held_out": held_out, "phase": phase,
    }  # fmt: skip


def fill(store: Store, times: Times = EVEN, **changes: Any) -> Store:
    import_lines(store, lines(times, **changes))
    return store
