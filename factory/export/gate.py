"""The export gate: the written folder itself, through its own tests, the gate and the clock.

Nothing is a winner before this.  The folder runs in fresh processes; it and the campaign's
candidate are gated alike and timed in turns in one job, on tuned and on held-out shapes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candidates import Baseline, Schedule
from factory.device.protocol import TUNING_S, Limits
from factory.device.verdicts import geomean
from factory.export.contest import CANDIDATE, EXPORT, Contest
from factory.machine import end_marked
from factory.provenance import digest
from factory.stages.base import StageResult
from leaderboard.records import (
    ClaimRecord,
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
    from leaderboard import ClaimView, Store

__all__ = ["BOUND", "PHASE", "Gated", "OwnTests", "claim_from", "gate", "own_tests", "store_claim"]

BOUND = 1.02
"""Largest time of the folder over that of the campaign's candidate."""

PHASE = "claim"

_MARK = "FACTORY_EXPORT_TESTS"
"""Environment variable by which the processes of a folder's tests are known."""
_TESTS_S = 600.0

_LIMITS = Limits(control_s=TUNING_S)

_RUN_TESTS = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--junitxml", sys.argv[2], sys.argv[1]]))
"""
_BLOCKED = (
    "factory", "candidates", "operations", "leaderboard", "ray", "optuna", "sqlalchemy", "alembic",
    "fla",
)  # fmt: skip
"""What a fresh environment does not have: the folder is judged by what it needs alone."""

OnEvent = Callable[[str, str], None]


@dataclass(frozen=True)
class OwnTests:
    """What a folder's own tests said.

    Parameters
    ----------
    passed, skipped, failed : int
    on_gpu : int
        Those that passed of the part that needs a GPU.
    first : str
        The first failure in a line; empty if there is none.
    """

    passed: int
    skipped: int
    failed: int
    on_gpu: int
    first: str = ""


@dataclass(frozen=True)
class Gated:
    """One pass through the export gate.

    Parameters
    ----------
    refused : str
        Why nothing can be claimed; empty if the folder passed.
    tested : OwnTests
    results : dict
        Schedule of the contest to its result in the job; empty if it came to none.
    controls : tuple of MeasurementRecord
    job : JobRecord or None
    fingerprint : FingerprintRecord or None
    """

    refused: str
    tested: OwnTests
    results: dict[Schedule, StageResult] = field(default_factory=dict)
    controls: tuple[MeasurementRecord, ...] = ()
    job: JobRecord | None = None
    fingerprint: FingerprintRecord | None = None

    @property
    def void(self) -> str:
        """Why the job does not count; empty if it does."""
        return self.job.note if self.job is not None and self.job.status is JobStatus.VOID else ""


def own_tests(folder: Path, log: Path) -> OwnTests:
    """Run a folder's tests in a process that cannot import this project, Ray, Optuna, SQL or fla.

    Raises
    ------
    HarnessError
        If they do not run at all.
    """
    from factory.stages.base import HarnessError

    files = sorted((folder / "tests").glob("test_*.py"))
    if not files:
        raise HarnessError(f"{folder} has no tests")
    found: list[OwnTests] = []
    with tempfile.TemporaryDirectory(prefix="export-gate-") as elsewhere, log.open("wb") as stream:
        running: list[tuple[Path, subprocess.Popen[bytes]]] = []
        mark = uuid.uuid4().hex
        try:
            for file in files:  # all at once: each compiles a lot
                running.append((file, _start(file, Path(elsewhere), mark)))
            deadline = time.monotonic() + _TESTS_S
            for file, child in running:
                try:
                    said, _ = child.communicate(timeout=max(deadline - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    _end(child)
                    said, _ = child.communicate()
                    why = f"{file.name} did not end within {_TESTS_S:.0f} s"
                    found.append(OwnTests(0, 0, 1, 0, why))
                else:
                    found.append(_outcome(file, child.returncode, Path(elsewhere), said))
                stream.write(said)
        finally:
            for _, child in running:
                _end(child)
                child.wait()
            end_marked(_MARK, mark)  # what a test that has ended left behind
    return OwnTests(
        passed=sum(f.passed for f in found),
        skipped=sum(f.skipped for f in found),
        failed=sum(f.failed for f in found),
        on_gpu=sum(f.on_gpu for f in found),
        first=next((f.first for f in found if f.first), ""),
    )


def _start(file: Path, elsewhere: Path, mark: str) -> subprocess.Popen[bytes]:
    code = _RUN_TESTS.format(blocked=_BLOCKED)
    return subprocess.Popen(
        [sys.executable, "-c", code, file, elsewhere / f"{file.stem}.xml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=elsewhere,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", _MARK: mark, **_one_gpu()},
        start_new_session=True,
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child that was not waited for, with all that it started: they hold GPU and pipe."""
    if child.returncode is None:  # a reaped leader's number may be somebody else's
        os.killpg(child.pid, signal.SIGKILL)


_NO_TESTS = 5
"""How pytest ends where a whole file is skipped."""


def _outcome(file: Path, code: int, elsewhere: Path, said: bytes) -> OwnTests:
    from factory.stages.base import HarnessError

    report = elsewhere / f"{file.stem}.xml"
    if not report.is_file():
        lines = said.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "silent"
        raise HarnessError(f"the folder's {file.name} did not run: {last}")
    found = _read(report)
    if code not in (0, _NO_TESTS) and not found.failed:
        return OwnTests(found.passed, found.skipped, 1, found.on_gpu, f"pytest ended with {code}")
    return found


def _one_gpu() -> dict[str, str]:
    """The GPU that the job measures on, alone."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": "0" if seen is None else seen.partition(",")[0]}


def _read(report: Path) -> OwnTests:
    passed = skipped = failed = on_gpu = 0
    first = ""
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((e for e in case if e.tag in ("failure", "error")), None)
        if bad is not None:
            failed += 1
            said = (bad.get("message") or "").splitlines()
            first = first or f"{case.get('name')}: {said[0] if said else 'failed'}"
        elif any(e.tag == "skipped" for e in case):
            skipped += 1
        else:
            passed += 1
            on_gpu += (case.get("classname") or "").rpartition(".")[2].endswith("_gpu")
    return OwnTests(passed, skipped, failed, on_gpu, first)


def gate(
    operation: Operation,
    contest: Contest,
    *,
    device: Device,
    baselines: Sequence[Baseline],
    log_dir: Path,
    seed: int | None = None,
    rounds: int = 3,
    workloads: Sequence[str] | None = None,
    on_event: OnEvent | None = None,
    many_rows: bool = True,
) -> Gated:
    """Put an exported folder through the gate.

    Its own tests first, in a process of their own.  Then one job: the gate on every tuned shape in
    every regime within the bound, asked thoroughly; the gate on held-out shapes; and the clock,
    folder and candidate in turns.

    Parameters
    ----------
    operation : Operation
    contest : Contest
    device : Device
    baselines : sequence of Baseline
        Controls.
    log_dir : Path
    seed : int, optional
    rounds : int
        Turns that each takes.
    workloads : sequence of str, optional
        Tuned workloads to keep; a claim needs all.
    on_event : callable, optional
    many_rows : bool
        Whether the dispatch table has more than one schedule: only then may the folder be faster
        than the candidate.

    Raises
    ------
    HarnessError
        If the machine, the toolchain or the oracle fails.
    """
    from factory.device.job import open_job

    event = on_event or (lambda kind, line: None)
    event("tests", f"the folder's own, in a process without this project; log in {log_dir}")
    tested = own_tests(Path(contest.vendored.folder), log_dir / "own-tests.log")
    event("tests", f"{tested.passed} passed ({tested.on_gpu} on the GPU), {tested.skipped} skipped")
    if tested.failed:
        return Gated(f"its own tests: {tested.failed} failed: {tested.first}", tested)
    if device.real_time and not tested.on_gpu:
        return Gated("its own tests: none of those for a GPU ran", tested)
    with open_job(
        operation,
        contest,
        seed=seed,
        limits=_LIMITS,
        log_dir=log_dir,
        baselines=baselines,
        on_event=event,
        workloads=workloads,
        device=device,
    ) as job:
        event("gate", "the folder, every regime on every tuned shape")
        handle = job.prepare(EXPORT)
        try:
            gated = job.gate(handle, thorough=True)
        finally:
            job.release(handle)
        results: dict[Schedule, StageResult] = {EXPORT: gated}
        controls: tuple[MeasurementRecord, ...] = ()
        if gated.status is StageStatus.PASSED:
            event("time", f"folder and candidate in {rounds} rounds, and held-out shapes")
            finals = job.finals([EXPORT, CANDIDATE], rounds=rounds)
            results, controls = dict(finals.results), finals.controls
    found = Gated("", tested, results, controls, job.record, job.fingerprint)
    return Gated(_refused(found, many_rows), tested, results, controls, job.record, job.fingerprint)


def _refused(found: Gated, many_rows: bool) -> str:
    for schedule, result in found.results.items():
        if result.status is not StageStatus.PASSED:
            who = "the folder" if schedule == EXPORT else "the campaign's candidate"
            return f"{who}: {result.status.value}: {result.reason}"
    ratio, held_out = _ratios(found)
    for what, value in (("tuned", ratio), ("held-out", held_out)):
        if value is not None and value > BOUND:
            return (
                f"the folder takes {value:.3f} of its candidate's time over the {what} shapes,"
                f" {BOUND:g} is allowed"
            )
    if not many_rows and ratio < 1 / BOUND:
        return (
            f"the folder takes {ratio:.3f} of the time of the very schedule that it is of:"
            " something else was timed"
        )
    return ""


def _medians(result: StageResult, *, held_out: bool, regime: str) -> dict[str, float]:
    return {
        m.workload: m.median_us
        for m in result.measurements
        if m.clock is Clock.GPU
        and m.cache == "warm"
        and m.held_out is held_out
        and m.regime == regime
    }


def _ratios(found: Gated) -> tuple[float, float | None]:
    """Folder over candidate, on tuned and on held-out shapes."""
    ours, theirs = found.results[EXPORT], found.results[CANDIDATE]
    regime = next(m.regime for m in ours.measurements if m.held_out is False)
    assert ours.score_us is not None
    assert theirs.score_us is not None
    a, b = (_medians(r, held_out=True, regime=regime) for r in (ours, theirs))
    shared = sorted(set(a) & set(b))
    held_out = geomean(a[w] / b[w] for w in shared) if shared else None
    return ours.score_us / theirs.score_us, held_out


# -- the claim ---------------------------------------------------------------------------


def claim_from(
    found: Gated,
    operation: Operation,
    contest: Contest,
    *,
    table: list[dict[str, Any]],
    campaign_id: str,
    trial_uid: str,
    standing: Sequence[ClaimView] = (),
) -> ClaimRecord:
    """The claim of a folder that passed.

    Parameters
    ----------
    found : Gated
        Not refused, of a valid job.
    operation : Operation
    contest : Contest
    table : list of dict
        Rows of the dispatch table.
    campaign_id, trial_uid : str
        The candidate's.
    standing : sequence of ClaimView
        Claims of this operation so far; the one that this is better than is superseded.

    Raises
    ------
    ValueError
        If it was refused, or its job is void.
    """
    if found.refused or found.void or found.job is None:
        raise ValueError(found.refused or found.void or "no job")
    ours, theirs = found.results[EXPORT], found.results[CANDIDATE]
    regime = next(m.regime for m in ours.measurements if m.held_out is False)
    ratio, held_out_ratio = _ratios(found)
    held = [_medians(r, held_out=True, regime=regime) for r in (ours, theirs)]
    control = _fastest_control(found, operation, regime)
    export_hash = contest.vendored.export_hash
    score, candidate_us = ours.score_us, theirs.score_us
    assert score is not None
    assert candidate_us is not None
    record = ClaimRecord(
        id=f"claim-{digest([export_hash, found.job.id])[:12]}",
        operation=operation.name,
        operation_version=operation.version,
        family=contest.family.name,
        export_hash=export_hash,
        source_hash=contest.family.source_hash(),
        table=table,
        campaign_id=campaign_id,
        trial_uid=trial_uid,
        job_id=found.job.id,
        gpu=found.job.gpu,
        score_us=score,
        slow_us=ours.slow_us,
        held_out_us=geomean(held[0].values()) if held[0] else None,
        candidate_us=candidate_us,
        candidate_held_out_us=geomean(held[1].values()) if held[1] else None,
        ratio=ratio,
        held_out_ratio=held_out_ratio,
        bound=BOUND,
        control=None if control is None else control[0],
        control_form=None if control is None else control[1],
        control_us=None if control is None else control[2],
        control_ratio=None if control is None else score / control[2],
        kernels=tuple(sorted({k for m in ours.measurements for k in m.kernels})),
        details={
            "largest_errors": _largest_errors(ours),
            "own_tests": {
                "passed": found.tested.passed,
                "on_gpu": found.tested.on_gpu,
                "skipped": found.tested.skipped,
            },
            "tuned_us": _medians(ours, held_out=False, regime=regime),
            "candidate_tuned_us": _medians(theirs, held_out=False, regime=regime),
            "held_out_us": held[0],
            "candidate_held_out_us": held[1],
        },
        created_at=datetime.now(UTC),
    )
    beaten = next((c for c in standing if _beats(record, c)), None)
    return record if beaten is None else record.model_copy(update={"supersedes": beaten.id})


def _beats(record: ClaimRecord, older: ClaimView) -> bool:
    """Whether a claim that stands, of another folder, is beaten: by time over a common control.

    Times of two jobs do not compare by themselves.
    """
    return (
        older.superseded_by is None
        and older.export_hash != record.export_hash
        and (older.operation, older.operation_version, older.gpu)
        == (record.operation, record.operation_version, record.gpu)
        and (older.control, older.control_form) == (record.control, record.control_form)
        and older.control_ratio is not None
        and record.control_ratio is not None
        and record.control_ratio < older.control_ratio
    )


def _fastest_control(
    found: Gated, operation: Operation, regime: str
) -> tuple[str, str, float] | None:
    """Name, form of inputs and geomean of the fastest control that met every tuned shape."""
    by_control: dict[tuple[str, str], dict[str, list[float]]] = {}
    for m in found.controls:
        counts = m.clock is Clock.GPU and m.cache == "warm" and m.regime == regime
        if counts and m.control is not None and not m.held_out:
            shapes = by_control.setdefault((m.control, m.input_form), {})
            shapes.setdefault(m.workload, []).append(m.median_us)
    wanted = {w.name for w in operation.tuned()}
    complete = [
        (name, form, geomean(sum(us) / len(us) for us in shapes.values()))
        for (name, form), shapes in by_control.items()
        if wanted <= set(shapes)
    ]
    return min(complete, key=lambda c: c[2], default=None)


def _largest_errors(result: StageResult) -> dict[str, dict[str, float]]:
    worst: dict[str, dict[str, float]] = {}
    for e in result.errors:
        if not e.out_of_contract and e.max_rel is not None and e.rms_rel is not None:
            mine = worst.setdefault(e.tensor, {"max_rel": 0.0, "rms_rel": 0.0})
            mine["max_rel"] = max(mine["max_rel"], e.max_rel)
            mine["rms_rel"] = max(mine["rms_rel"], e.rms_rel)
    return worst


def store_claim(store: Store, found: Gated, record: ClaimRecord, trial_id: int) -> None:
    """Store the job with all its times, then the claim that rests on it."""
    assert found.job is not None
    assert found.fingerprint is not None
    times = [
        m.model_copy(update={"trial_id": trial_id, "phase": PHASE})
        for m in found.results[CANDIDATE].measurements
    ]
    own = {"trial_id": None, "control": f"export {record.export_hash[:12]}", "phase": PHASE}
    times += [m.model_copy(update=own) for m in found.results[EXPORT].measurements]
    times += [m.model_copy(update={"phase": PHASE}) for m in found.controls]
    store.put_fingerprint(found.fingerprint)
    opened: dict[str, Any] = {"status": JobStatus.OPEN, "ended_at": None, "details": {}}
    store.open_job(found.job.model_copy(update=opened))
    store.add_measurements(times)
    store.close_job(
        found.job.id,
        found.job.status,
        drift=found.job.drift,
        note=found.job.note,
        details=found.job.details,
    )
    store.add_claim(record)
