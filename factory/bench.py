"""Controls and our schedules side by side: one job, in turns, by the campaign's own clock.

Chooses what to time and runs it; :mod:`factory.bench_rows` arranges what was seen.
It prints nothing and writes no database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candidates import Baseline, Family, Schedule
from factory.device.protocol import TUNING_S, Limits
from factory.errors import UserError
from factory.stages.base import StageResult
from leaderboard.records import (
    Clock,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageStatus,
)
from operations import Operation

if TYPE_CHECKING:
    from factory.device.hardware import Device
    from factory.device.job import DeviceJob
    from leaderboard import Store

__all__ = [
    "WINNER",
    "Benched",
    "Contestant",
    "Entry",
    "Floor",
    "Missing",
    "bench",
    "choose",
    "floor_of",
    "named",
]

WINNER = "winner"
"""Instead of a schedule's key: the leaderboard's current winner."""

LIMITS = Limits(gate_s=120.0, time_s=180.0, control_s=TUNING_S)

_COPY_BYTES_PER_S = {
    "NVIDIA H200": (4.25e12, "a streaming copy, measured on one H200 SXM, 2026-11-30"),
}
"""By what the GPU's name holds; others are held to their data sheet."""

OnEvent = Callable[[str, str], None]


@dataclass(frozen=True)
class Missing:
    """What is not in the table, and why, in one line."""

    id: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """One of our schedules.

    Parameters
    ----------
    schedule : Schedule
    origin : str
        Where it comes from, in words.
    trial_id : int or None
        Its ranked trial of the same source in the leaderboard asked, if any.
    """

    schedule: Schedule
    origin: str
    trial_id: int | None = None


@dataclass(frozen=True)
class Contestant:
    """A column of the table.

    Parameters
    ----------
    id : str
        ``"ours"``, ``"ours_2"``, ... or a baseline's name.
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
        Workload to microseconds.
    """

    bytes_per_s: float
    source: str
    us: dict[str, float]


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
        Keys of schedules that failed the gate or a turn.
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
        return next((c.id for c in self.contestants if c.id in self.entries), None)


# -- what is timed ---------------------------------------------------------------------------


def choose(
    operation: Operation, family: Family, keys: Sequence[str], stores: Sequence[Store]
) -> tuple[tuple[Entry, ...], tuple[Missing, ...]]:
    """Our schedules to time: by key, or as the current winner.

    Parameters
    ----------
    operation : Operation
    family : Family
    keys : sequence of str
        Schedule keys, as the leaderboard prints them, or :data:`WINNER`.
    stores : sequence of Store
        Asked in turn for a winner, and all of them for the trial of a key.

    Raises
    ------
    UserError
        If a key is no schedule of the family, or one that cannot be built.
    """
    entries: dict[Schedule, Entry] = {}
    missing = []
    for key in keys:
        if key == WINNER:
            found = _winner(operation, family, stores)
            if isinstance(found, Missing):
                missing.append(found)
            else:
                entries.setdefault(found.schedule, found)
        else:
            schedule = named(family, key)
            entries.setdefault(schedule, _asked_for(operation, family, schedule, stores))
    return tuple(entries.values()), tuple(missing)


def _winner(operation: Operation, family: Family, stores: Sequence[Store]) -> Entry | Missing:
    """First of the finals of the campaign that leads the ranking, else its leader."""
    from leaderboard import ranked, winner

    for store in stores:
        leaders = ranked(
            store,
            operation=operation.name,
            operation_version=operation.version,
            clock=Clock.GPU,
            source_hash=family.source_hash(),
            limit=1,
        )
        if not leaders:
            continue
        leader = leaders[0]
        final = winner(store, leader.campaign_id)
        trial = store.get_trial(leader.id if final is None else final.id)
        where = f"trial {trial.id} of {trial.campaign_id} in {store.name}"
        try:
            schedule = family.schedule(trial.schedule)
            problems = family.problems(schedule)
        except ValueError as error:
            problems = (str(error),)
        if problems:
            return Missing(
                "winner", f"{trial.schedule_key} ({where}) cannot be built any more: {problems[0]}"
            )
        if trial.source_hash != family.source_hash():
            return Entry(schedule, f"{where}, measured with other source")
        return Entry(schedule, where, trial.id)
    names = " or ".join(s.name for s in stores)
    return Missing(
        "winner",
        f"no measured trial of {operation.name} {operation.version} in {names};"
        " run factory launch, or name a schedule with --schedule",
    )


def named(family: Family, key: str) -> Schedule:
    """The schedule of a key, as the leaderboard prints it.

    Raises
    ------
    UserError
        If it is none of the family's, or cannot be built.
    """
    choices = {p.name: {str(c): c for c in p.choices} for p in family.parameters}
    values: dict[str, Any] = {}
    for item in key.split():
        name, _, text = item.partition("=")
        values[name] = choices.get(name, {}).get(text, text)
    try:
        schedule = family.schedule(values)
    except ValueError as error:
        raise UserError(f"no schedule {key!r}: {error}") from error
    problems = family.problems(schedule)
    if problems:
        raise UserError(f"schedule {key!r} cannot be built: {problems[0]}")
    return schedule


def _asked_for(
    operation: Operation, family: Family, schedule: Schedule, stores: Sequence[Store]
) -> Entry:
    from leaderboard import ranked

    current = family.source_hash()
    for store in stores:
        for row in ranked(
            store,
            operation=operation.name,
            operation_version=operation.version,
            clock=Clock.GPU,
            source_hash=current,
        ):
            if row.schedule_key == schedule.key and not row.superseded:
                where = f"trial {row.id} of {row.campaign_id} in {store.name}"
                return Entry(schedule, f"named; {where}", row.id)
    return Entry(schedule, "named")


def floor_of(operation: Operation, workloads: Sequence[str], device: Device, gpu: str) -> Floor:
    """Bytes that any implementation must move, over what memory gives.

    The bandwidth is that of a copy where one was measured, else the data sheet's.
    """
    rate, source = next(
        (known for word, known in _COPY_BYTES_PER_S.items() if word in gpu),
        (device.peak_bytes_per_s, f"the data sheet's bandwidth, nothing measured on {gpu}"),
    )
    us = {w: operation.floor_bytes(operation.workloads[w]) / rate * 1e6 for w in workloads}
    return Floor(rate, source, us)


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
    on_event: OnEvent | None = None,
) -> Benched:
    """Time entries and baselines in turns on all tuned shapes.

    Every entry first passes the gate on the two regimes that are timed, the
    first production one and the first slow one.

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
    if _has_raw_form(operation):
        seen.missing.append(
            Missing(
                "ours, raw inputs",
                f"no schedule of {family.name} takes raw inputs; ours is fed activated ones",
            )
        )
    with open_job(
        operation,
        family,
        seed=seed,
        limits=limits,
        log_dir=log_dir,
        baselines=present,
        on_event=event,
        workloads=workloads,
        regimes=_timed(operation),
        device=device,
    ) as job:
        results, controls = _run(job, entries, len(present), rounds, event)
    for entry in entries:
        _add_ours(seen, entry, results[entry.schedule])
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
    controls: int,
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
        event("time", f"{rounds} rounds of {len(passed)} of ours and {controls} controls")
        done = job.rounds([handles[s] for s in passed], rounds=rounds)
        return {**results, **done.results}, done.controls
    finally:
        for handle in handles.values():
            job.release(handle)


def _add_ours(seen: _Seen, entry: Entry, result: StageResult) -> None:
    key = entry.schedule.key
    if result.status is not StageStatus.PASSED:
        seen.refused.append(key)
        seen.missing.append(Missing(key, f"{result.status.value}: {result.reason}"))
        return
    number = len(seen.entries) + 1
    name = "ours" if number == 1 else f"ours_{number}"
    worst = _largest((e.regime, e.max_rel) for e in result.errors)
    seen.contestants.append(Contestant(name, key, entry.origin, "activated", worst))
    seen.measurements[name] = result.measurements
    seen.entries[name] = entry


def _add_control(
    seen: _Seen, baseline: Baseline, controls: Sequence[MeasurementRecord], job: JobRecord
) -> None:
    name = baseline.name
    seen.missing += [Missing(name, why) for why in job.details["left_out"].get(name, ())]
    mine = tuple(m for m in controls if m.control == name)
    if not mine:
        return
    errors = job.details["control_errors"].get(name, ())
    worst = _largest((e["regime"], e["max_rel"]) for e in errors)
    beyond = tuple(dict.fromkeys(e["regime"] for e in errors if not e["within"]))
    seen.contestants.append(
        Contestant(name, baseline.version(), "", baseline.input_form, worst, beyond)
    )
    seen.measurements[name] = mine


def _largest(errors: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for regime, value in errors:
        if value is not None:
            worst[regime] = max(value, worst.get(regime, 0.0))
    return worst
