"""Controls and our schedules side by side: one job, in turns, by the campaign's own clock.

Runs what :mod:`factory.bench_entries` chose; :mod:`factory.bench_rows` arranges what was seen.
It prints nothing and writes no database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from candidates import Baseline, Family, Schedule
from factory.bench_entries import Entry, Missing
from factory.device.protocol import TUNING_S, Limits
from factory.errors import UserError
from factory.stages.base import StageResult
from leaderboard.records import (
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageStatus,
)
from operations import Operation, Workload

if TYPE_CHECKING:
    from factory.device.hardware import Device
    from factory.device.job import DeviceJob

__all__ = ["Benched", "Contestant", "Floor", "bench", "floor_of"]

LIMITS = Limits(gate_s=120.0, time_s=180.0, control_s=TUNING_S)

_COPY_BYTES_PER_S = {
    "NVIDIA H200": (4.25e12, "a streaming copy, measured on one H200 SXM, 2026-11-30"),
}
"""By what the GPU's name holds; others are held to their data sheet."""

_RAW = "_raw"
"""Behind the name of ours: the same schedule, fed raw inputs."""

FeedRaw = Callable[[Schedule, str], Baseline]
OnEvent = Callable[[str, str], None]


@dataclass(frozen=True)
class Contestant:
    """A column of the table.

    Parameters
    ----------
    id : str
        ``"ours"``, ``"ours_2"``, ... as they were asked for, the same with ``_raw`` where it is
        fed raw inputs, or a baseline's name.
    what : str
        Schedule key, or distribution and version.
    origin : str
        Of a schedule; empty for a baseline.
    input_form : {"activated", "raw"}
    largest_error : dict
        Regime to the largest max error of any output on any shape, on inputs
        that all contestants share.
    inexact : tuple of str
        Regimes on which an output is beyond the tolerances that ours meets: a
        control is timed all the same.
    """

    id: str
    what: str
    origin: str
    input_form: str
    largest_error: dict[str, float]
    inexact: tuple[str, ...] = ()


@dataclass(frozen=True)
class Floor:
    """Least time that the bytes of an operation take.

    Parameters
    ----------
    bytes_per_s : float
    source : str
        Of that bandwidth.
    us : dict
        Workload to microseconds, of activated inputs.
    raw_us : dict
        The same of raw ones, which are fewer bytes.
    """

    bytes_per_s: float
    source: str
    us: dict[str, float]
    raw_us: dict[str, float]

    def of(self, input_form: str) -> dict[str, float]:
        """Workload to microseconds of that form of inputs."""
        return self.raw_us if input_form == "raw" else self.us


@dataclass(frozen=True)
class Benched:
    """One bench.

    Parameters
    ----------
    operation : Operation
    workloads : tuple of str
    contestants : tuple of Contestant
        Those with a time, ours first.
    measurements : dict
        Contestant's id to its pooled times.
    entries : dict
        Contestant's id to the entry, for ours.
    missing : tuple of Missing
    refused : tuple of str
        Keys of schedules that failed the gate or a turn, on one form of inputs or the other.
    floor : Floor
    job : JobRecord
    fingerprint : FingerprintRecord
    rounds : int
    """

    operation: Operation
    workloads: tuple[str, ...]
    contestants: tuple[Contestant, ...]
    measurements: dict[str, tuple[MeasurementRecord, ...]]
    entries: dict[str, Entry]
    missing: tuple[Missing, ...]
    refused: tuple[str, ...]
    floor: Floor
    job: JobRecord
    fingerprint: FingerprintRecord
    rounds: int

    @property
    def void(self) -> str:
        """Why the times do not count; empty if they do."""
        return self.job.note if self.job.status is JobStatus.VOID else ""

    @property
    def reference(self) -> str | None:
        """The contestant that ratios are of: the first of ours; None if none was timed."""
        ours = (c for c in self.contestants if c.id in self.entries)
        return next((c.id for c in ours if c.input_form != "raw"), None)

    @property
    def raw_reference(self) -> str | None:
        """The same schedule on raw inputs, which those that are fed raw ones are held to."""
        name = f"{self.reference}{_RAW}"
        return name if name in self.entries else None

    def held_to(self, contestant: Contestant) -> str | None:
        """Whose time stands over this one's: ours on the same form of inputs.

        None for the reference itself.  Where ours has no time on raw inputs it is that on
        activated ones, as for the reference on raw inputs.
        """
        if contestant.id == self.reference:
            return None
        if contestant.input_form == "raw" and contestant.id != self.raw_reference:
            return self.raw_reference or self.reference
        return self.reference


def floor_of(operation: Operation, workloads: Sequence[str], device: Device, gpu: str) -> Floor:
    """Bytes that any implementation must move, over what memory gives.

    The bandwidth is that of a copy where one was measured, else the data sheet's.
    """
    rate, source = next(
        (known for word, known in _COPY_BYTES_PER_S.items() if word in gpu),
        (device.peak_bytes_per_s, f"the data sheet's bandwidth, nothing measured on {gpu}"),
    )

    def us(floor_bytes: Callable[[Workload], int]) -> dict[str, float]:
        return {w: floor_bytes(operation.workloads[w]) / rate * 1e6 for w in workloads}

    return Floor(rate, source, us(operation.floor_bytes), us(operation.raw_floor_bytes))


# -- timing ----------------------------------------------------------------------------------


@dataclass
class _Seen:
    contestants: list[Contestant] = field(default_factory=list)
    measurements: dict[str, tuple[MeasurementRecord, ...]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def bench(
    operation: Operation,
    family: Family,
    entries: Sequence[Entry],
    *,
    device: Device,
    baselines: Sequence[Baseline],
    log_dir: Path | str,
    seed: int | None = None,
    rounds: int = 3,
    limits: Limits = LIMITS,
    workloads: Sequence[str] | None = None,
    missing: Sequence[Missing] = (),
    fed_raw: FeedRaw | None = None,
    on_event: OnEvent | None = None,
) -> Benched:
    """Time entries and baselines in turns on all tuned shapes.

    Every entry first passes the gate on the two regimes that are timed, the
    first production one and the first slow one.  It is timed on activated
    inputs, and on raw ones where the operation has such and ``fed_raw`` feeds
    them; what it computes of these is held to the same tolerances.

    Parameters
    ----------
    entries : sequence of Entry
        The first one that gets a time is what ratios are of.
    device : Device
    baselines : sequence of Baseline
        Those that cannot run here are named as missing.
    log_dir : Path or str
        Receives one log file for each process.
    seed : int, optional
        All inputs derive from it; default: a fresh one.
    rounds : int
        Turns of each contestant.
    workloads : sequence of str, optional
        Tuned workloads to keep; default: all.
    missing : sequence of Missing
        Known before; reported with the rest.
    fed_raw : callable, optional
        See :func:`candidates.fed_raw`.
    on_event : callable, optional
        Takes a word and a line.

    Raises
    ------
    UserError
        If there is nothing to time.
    HarnessError
        If the machine, the toolchain or the oracle fails.
    """
    from factory.device.job import open_job

    event = on_event or (lambda kind, line: None)
    seen = _Seen(missing=list(missing))
    present = []
    for baseline in baselines:
        reason = baseline.missing()
        if reason is None:
            present.append(baseline)
        else:
            seen.missing.append(Missing(baseline.name, reason))
    if not entries and not present:
        told = "; ".join(f"{m.id}: {m.reason}" for m in seen.missing)
        raise UserError(f"nothing to time: {told or 'no schedule and no control'}")
    ours = {f"ours_{n}" if n > 1 else "ours": entry for n, entry in enumerate(entries, 1)}
    raw = _raw(seen, operation, family, ours, fed_raw)
    with open_job(
        operation,
        family,
        seed=seed,
        limits=limits,
        log_dir=log_dir,
        baselines=[*present, *raw.values()],
        on_event=event,
        workloads=workloads,
        regimes=_timed(operation),
        device=device,
    ) as job:
        beside = f"{len(present)} controls"
        if raw:
            beside = f"{len(raw)} on raw inputs and {beside}"
        results, controls = _run(job, entries, beside, rounds, event)
    for name, entry in ours.items():
        _add_ours(seen, name, entry, results[entry.schedule])
        if name in seen.entries and name in raw:
            _add_control(seen, raw[name], controls, job.record, entry)
    for baseline in present:
        _add_control(seen, baseline, controls, job.record)
    names = tuple(w.name for w in operation.tuned() if workloads is None or w.name in workloads)
    return Benched(
        operation=operation,
        workloads=names,
        contestants=tuple(seen.contestants),
        measurements=seen.measurements,
        entries=seen.entries,
        missing=tuple(seen.missing),
        refused=tuple(seen.refused),
        floor=floor_of(operation, names, device, job.record.gpu),
        job=job.record,
        fingerprint=job.fingerprint,
        rounds=rounds,
    )


def _raw(
    seen: _Seen,
    operation: Operation,
    family: Family,
    ours: Mapping[str, Entry],
    fed_raw: FeedRaw | None,
) -> dict[str, Baseline]:
    """What feeds each of ours raw inputs, by its name on activated ones."""
    found: dict[str, Baseline] = {}
    if not ours or not _has_raw_form(operation):
        return found
    if fed_raw is None:
        reason = f"nothing feeds schedules of {family.name} raw inputs; ours is fed activated ones"
        seen.missing.append(Missing("ours, raw inputs", reason))
        return found
    for name, entry in ours.items():
        contestant = fed_raw(entry.schedule, name + _RAW)
        lacking = contestant.missing()
        if lacking is None:
            found[name] = contestant
        else:
            seen.missing.append(Missing(contestant.name, lacking))
    return found


def _has_raw_form(operation: Operation) -> bool:
    workload = operation.reduced()[0]
    regimes = (r for r in operation.regimes.values() if r.ranks)
    return any(operation.raw_form(workload, r, seed=0) is not None for r in regimes)


def _timed(operation: Operation) -> list[str]:
    """The first production regime and the first slow one."""
    first: dict[str, str] = {}
    for regime in operation.regimes.values():
        first.setdefault(regime.role, regime.name)
    return [first[role] for role in ("production", "slow") if role in first]


def _run(
    job: DeviceJob,
    entries: Sequence[Entry],
    beside: str,
    rounds: int,
    event: OnEvent,
) -> tuple[dict[Schedule, StageResult], tuple[MeasurementRecord, ...]]:
    """Gate ours, then let them and the controls take turns."""
    handles = {e.schedule: job.prepare(e.schedule) for e in entries}
    try:
        results: dict[Schedule, StageResult] = {}
        for entry in entries:
            event("gate", entry.schedule.key)
            results[entry.schedule] = job.gate(handles[entry.schedule])
        passed = [s for s, r in results.items() if r.status is StageStatus.PASSED]
        event("time", f"{rounds} rounds of {len(passed)} of ours, {beside}")
        done = job.rounds([handles[s] for s in passed], rounds=rounds)
        return {**results, **done.results}, done.controls
    finally:
        for handle in handles.values():
            job.release(handle)


def _add_ours(seen: _Seen, name: str, entry: Entry, result: StageResult) -> None:
    key = entry.schedule.key
    if result.status is not StageStatus.PASSED:
        seen.refused.append(key)
        seen.missing.append(Missing(key, f"{result.status.value}: {result.reason}"))
        return
    worst = _largest((e.regime, e.max_rel) for e in result.errors)
    seen.contestants.append(Contestant(name, key, entry.origin, "activated", worst))
    seen.measurements[name] = result.measurements
    seen.entries[name] = entry


def _add_control(
    seen: _Seen,
    baseline: Baseline,
    controls: Sequence[MeasurementRecord],
    job: JobRecord,
    entry: Entry | None = None,
) -> None:
    """A control, or with an entry that one on raw inputs: it may fail no more than on activated."""
    name = baseline.name
    seen.missing += [Missing(name, why) for why in job.details["left_out"].get(name, ())]
    mine = tuple(m for m in controls if m.control == name)
    errors = job.details["control_errors"].get(name, ())
    worst = _largest((e["regime"], e["max_rel"]) for e in errors)
    beyond = tuple(dict.fromkeys(e["regime"] for e in errors if not e["within"]))
    failed = name in job.details["failed"]
    if entry is not None and (beyond or failed or not mine):
        seen.refused.append(entry.schedule.key)
        if beyond:
            reason = f"outputs of timed calls are beyond tolerance: {', '.join(beyond)}"
            seen.missing.append(Missing(name, f"{StageStatus.REJECTED.value}: {reason}"))
        return
    if not mine:
        return
    origin = "" if entry is None else entry.origin
    seen.contestants.append(
        Contestant(name, baseline.version(), origin, baseline.input_form, worst, beyond)
    )
    seen.measurements[name] = mine
    if entry is not None:
        seen.entries[name] = entry


def _largest(errors: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for regime, value in errors:
        if value is not None:
            worst[regime] = max(value, worst.get(regime, 0.0))
    return worst
