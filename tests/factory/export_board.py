"""A small measured campaign of an operation, as lines to import: three schedules, two shapes.

Its times are made up, so that a test decides who wins, where, and by how much.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import candidates
import operations
from candidates import Family, Schedule
from factory.export.select import Selection, select
from leaderboard import FingerprintRecord, Store, import_lines, interval, open_store
from operations import Operation


@dataclass(frozen=True)
class Subject:
    """What was measured; the first of the schedules wins."""

    operation: Operation
    family: Family
    schedules: tuple[Schedule, ...]
    shapes: tuple[str, str]
    held_out: str


def _kda() -> Subject:
    family = candidates.get("kda_prefill")
    offered = family.offered("fused")
    bounded = [s for s in offered if family.gate_bound(s) is not None]
    return Subject(
        operations.get("kda_prefill"),
        family,
        tuple(bounded[:3] or offered[:3]),
        ("2048/12/1", "8192/12/4"),
        "odd-500/5",
    )


def _gdn() -> Subject:
    family = candidates.get("gdn_prefill")
    return Subject(
        operations.get("gdn_prefill"),
        family,
        family.offered("quickstart")[:3],
        ("2048/4/8/1", "8192/8/16/64"),
        "odd-500/5/10",
    )


KDA, GDN = _kda(), _gdn()
OPERATION, FAMILY, SCHEDULES, SHAPES = KDA.operation, KDA.family, KDA.schedules, KDA.shapes
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


def even(subject: Subject) -> Times:
    """Each schedule 10% behind the one before, everywhere."""
    return {
        (n, shape, regime): us * (1 + n / 10)
        for n in range(3)
        for shape, us in zip(subject.shapes, (26.0, 95.0), strict=True)
        for regime in ("production", "slow")
    }


EVEN = even(KDA)
FASTER = {**EVEN, (2, "8192/12/4", "production"): 90.0, (2, "8192/12/4", "slow"): 97.0}
"""The third schedule wins 5% on one shape and loses 2% of it at slow gates."""


def samples(median: float) -> list[float]:
    return [round(median * (1 + k / 1000), 6) for k in range(-10, 11)]


def uid(*parts: object) -> str:
    return "-".join(map(str, parts))


def lines(times: Times | None = None, subject: Subject = KDA, **changes: Any) -> Iterator[str]:
    """The campaign; ``finals=False`` leaves these out, ``source`` is what it was measured with.

    With ``build`` the compile stage of the first schedule is a real one.
    """
    times = even(subject) if times is None else times
    source = changes.get("source", subject.family.source_hash())
    made = [
        {"kind": "header", "format": "kernel-factory leaderboard", "version": 1},
        {"kind": "fingerprint", **FINGERPRINT.model_dump()},
        {"kind": "campaign", "id": CAMPAIGN, "name": "survey", "operation": subject.operation.name,
         "operation_version": changes.get("version", subject.operation.version),
         "family": subject.family.name,
         "source_hash": source, "config": {}, "space_hash": "b", "space": {}, "seed": 1,
         "budget": 3, "status": "finished", "clock": "gpu", "workloads": list(subject.shapes),
         "ranking_regime": "production", "slow_regime": "slow", "created_at": MOMENT,
         "updated_at": MOMENT},
        {"kind": "job", "id": JOB, "campaign_id": CAMPAIGN, "fingerprint_id": FINGERPRINT.id,
         "gpu": "NVIDIA H200", "status": "valid", "started_at": MOMENT, "ended_at": MOMENT,
         "drift": 0.004, "note": "", "seed": 7, "details": {}},
    ]  # fmt: skip
    for n in range(len(subject.schedules)):
        made.append(_trial(n, subject, times, source, _build(n, subject, **changes)))
    for n in range(len(subject.schedules)):
        for phase in ("search", "final"):
            if phase == "final" and (n == 2 or not changes.get("finals", True)):
                continue  # the third is no finalist
            for shape in subject.shapes:
                for regime in ("production", "slow"):
                    made.append(_time(n, shape, regime, phase, times[n, shape, regime]))
            if phase == "final":
                made.append(
                    _time(n, subject.held_out, "production", phase, 20.0 + n, held_out=True)
                )
    made.append({"kind": "end", "lines": len(made) - 1})
    return (json.dumps(item) for item in made)


def _build(n: int, subject: Subject, *, build: bool = False, **_: Any) -> dict[str, Any]:
    """Details of a compile stage."""
    if not build or n:
        kernels = [{"name": f"kda_fused_{n}", "registers": 96, "stack_bytes": 0, "threads": 640}]
        return {"kernels": kernels, "cubin_sha256": "c" * 64}
    made = subject.family.compile(subject.schedules[n])
    return {"kernels": [asdict(k) for k in made.kernels], "cubin_sha256": made.cubin_sha256}


def _trial(
    n: int, subject: Subject, times: Times, source: str, build: dict[str, Any]
) -> dict[str, Any]:
    schedule, shapes = subject.schedules[n], subject.shapes

    def geomean(regime: str) -> float:
        return math.exp(sum(math.log(times[n, s, regime]) for s in shapes) / len(shapes))

    return {
        "kind": "trial", "uid": uid("trial", n), "campaign_id": CAMPAIGN, "number": n,
        "schedule_key": schedule.key, "schedule": schedule.as_dict(), "status": "passed",
        "stage": "time", "reason": "", "attempt": 1, "clock": "gpu",
        "score_us": geomean("production"), "slow_us": geomean("slow"), "method": "cupti",
        "cache": "warm", "job_id": JOB, "source_hash": source, "gate_bound": None,
        "started_at": MOMENT, "ended_at": MOMENT, "log_path": None,
        "stages": [{"stage": "compile", "status": "passed", "reason": "", "seconds": 1.0,
                    "details": build},
                   {"stage": "gate", "status": "passed", "reason": "", "seconds": 2.0,
                    "details": {}}],
        "errors": [{"stage": "gate", "regime": "production", "workload": shapes[0], "tensor": "o",
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


def selected(times: Times | None = None, subject: Subject = KDA, **changes: Any) -> Selection:
    """What is exported where this is the only campaign; keywords as for :func:`lines`."""
    with open_store("sqlite://") as store:
        fill(store, times, subject=subject, **changes)
        return select(subject.operation, subject.family, [store])


def on_another_gpu(text: Iterator[str], gpu: str) -> Iterator[str]:
    """The same campaign as it would be of that GPU, with identities of its own."""
    machine = FingerprintRecord.of({**FINGERPRINT.values, "gpu": gpu})
    for line in text:
        other = line.replace(FINGERPRINT.id, machine.id).replace("NVIDIA H200", gpu)
        for name in (CAMPAIGN, JOB, "trial-", "time-"):
            other = other.replace(f'"{name}', f'"other-{name}')
        yield other


def fill(store: Store, times: Times | None = None, **changes: Any) -> Store:
    import_lines(store, lines(times, **changes))
    return store
