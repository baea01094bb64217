"""One candidate from a user's file through the funnel: what passed, what failed, what did not run.

Everything that can run on this machine runs; the rest is listed with the reason.
The file's code runs in processes of their own, never in this one, and nothing
here writes a database.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from candidates import Baseline, Schedule
from candidates.user import UserFamily
from factory.device.protocol import TUNING_S, Limits
from factory.stages.base import StageResult
from leaderboard import Contrast, contrast
from leaderboard.records import (
    Clock,
    ErrorRecord,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageStatus,
)
from operations import Operation

if TYPE_CHECKING:
    from factory.device.hardware import Device
    from factory.device.job import DeviceJob, Handle

__all__ = [
    "STAGES",
    "Against",
    "Checked",
    "CheckedStage",
    "against",
    "check",
    "on_reduced_workloads",
]

STAGES = ("declaration", "load", "emulate", "gate", "screen", "time", "finals")
"""In the order of the funnel; a verdict table has each of them once."""

_CPU_MEMORY_BYTES = 2 << 30

_LIMITS = Limits(gate_s=120.0, control_s=TUNING_S)
"""A user's kernel may be compiled, or tune itself, on its first calls: those of the gate."""

OnEvent = Callable[[str, str], None]


@dataclass(frozen=True)
class CheckedStage:
    """One line of the verdict table.

    Parameters
    ----------
    stage : str
        One of :data:`STAGES`.
    verdict : {"passed", "failed", "not run"}
    reason : str
        What was seen: the numbers of a failure, or why it did not run.
    seconds : float
    where : str
        ``"cpu"`` or the GPU's name; empty where nothing ran.
    status : StageStatus or None
        The stage's own status; None where it did not run.
    details : Mapping
        As the stage gave them, JSON-serialisable.
    log : str
        File with the output of the candidate's process; empty where there was none.
    """

    stage: str
    verdict: Literal["passed", "failed", "not run"]
    reason: str = ""
    seconds: float = 0.0
    where: str = ""
    status: StageStatus | None = None
    details: dict[str, Any] = field(default_factory=dict)
    log: str = ""


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Parameters
    ----------
    seed : int
        Replays the same inputs.
    stages : tuple of CheckedStage
        All of :data:`STAGES`.
    errors : tuple of ErrorRecord
    measurements : tuple of MeasurementRecord
        Of the candidate, ``trial_id`` 0.
    controls : tuple of MeasurementRecord
    job : JobRecord or None
        The GPU job; None where there was no GPU.
    fingerprint : FingerprintRecord or None
        Machine and toolchain of the last job, on the GPU or the CPU.
    score_us, slow_us : float or None
        Geomeans of ``gpu`` medians; of the re-timing where there was one.
    """

    seed: int
    stages: tuple[CheckedStage, ...]
    errors: tuple[ErrorRecord, ...] = ()
    measurements: tuple[MeasurementRecord, ...] = ()
    controls: tuple[MeasurementRecord, ...] = ()
    job: JobRecord | None = None
    fingerprint: FingerprintRecord | None = None
    score_us: float | None = None
    slow_us: float | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing that ran failed."""
        return all(s.verdict != "failed" for s in self.stages)

    @property
    def void(self) -> str:
        """Why the job's times do not count; empty if they do or there are none."""
        if self.job is not None and self.job.status is JobStatus.VOID:
            return self.job.note
        return ""


@dataclass(frozen=True)
class Against:
    """The candidate against one control of the same job, by warm ``gpu`` time on one regime.

    Parameters
    ----------
    control : str
    regime : str
    shapes : dict
        Workload to contrast, where both were timed.
    all_shapes : Contrast or None
        Over all of them together; None if the control does not serve each.
    """

    control: str
    regime: str
    shapes: dict[str, Contrast]
    all_shapes: Contrast | None


def against(found: Checked) -> tuple[Against, ...]:
    """Compare the candidate's times with those of every control on the regime that ranks.

    Only readings of the same part of the job meet: those of the finals where
    they were run, else the candidate's with all earlier ones of the control.
    """
    mine = _samples([m for m in found.measurements if not m.held_out])
    if not mine:
        return ()
    regime = next(m.regime for m in found.measurements if m.clock is Clock.GPU)
    names = dict.fromkeys(c.control for c in found.controls if c.control is not None)
    compared = []
    for name in names:
        theirs = _samples([c for c in found.controls if c.control == name])
        shapes, pairs = {}, {}
        for (where, workload, phase), samples in mine.items():
            other = theirs.get((where, workload, phase))
            if where == regime and other:
                shapes[workload] = contrast(samples, other)
                pairs[workload] = (samples, other)
        wanted = {workload for where, workload, _ in mine if where == regime}
        whole = None
        if shapes and set(shapes) == wanted:
            whole = contrast(
                {w: a for w, (a, _) in pairs.items()}, {w: b for w, (_, b) in pairs.items()}
            )
        compared.append(Against(name, regime, shapes, whole))
    return tuple(compared)


def _samples(
    measurements: Sequence[MeasurementRecord],
) -> dict[tuple[str, str, str], list[float]]:
    """Warm ``gpu`` samples by regime, workload and part of the job, the last part only."""
    gpu = [m for m in measurements if m.clock is Clock.GPU and m.cache == "warm"]
    last = "final" if any(m.phase == "final" for m in gpu) else "search"
    found: dict[tuple[str, str, str], list[float]] = {}
    for m in gpu:
        if (m.phase == "final") is (last == "final"):
            found.setdefault((m.regime, m.workload, last), []).extend(m.samples_us)
    return found


def on_reduced_workloads(operation: Operation) -> Operation:
    """The same operation with its reduced workloads as the only ones: small enough for a CPU."""
    small = copy.copy(operation)
    small.workloads = {w.name: w for w in operation.reduced()}
    return small


def check(
    candidate: UserFamily,
    operation: Operation,
    *,
    device: Device | None,
    seed: int,
    log_dir: Path | str,
    limits: Limits | None = None,
    workloads: Sequence[str] | None = None,
    regimes: Sequence[str] | None = None,
    baselines: Sequence[Baseline] | None = None,
    on_event: OnEvent | None = None,
) -> Checked:
    """Take a user file as far as this machine can.

    On the CPU: ``emulate``, where the file defines it, and the gate, where it
    declares ``"cpu"`` and there is no GPU; both on the reduced workloads.  On
    the GPU: gate, screen, time and finals with all controls.

    Parameters
    ----------
    candidate : UserFamily
    operation : Operation
    device : Device or None
        The GPU to use; None if there is none.
    seed : int
        All inputs derive from it.
    log_dir : Path or str
        Receives one log file for each process.
    limits : Limits, optional
        Default: those of a campaign, but 120 s for one message to the gate.
    workloads, regimes : sequences of str, optional
        Names to keep; production is always met.  With either, finals do not run.
    baselines : sequence of Baseline, optional
        Controls of the GPU job; default: those of the operation.
    on_event : callable, optional
        Takes a word and a line.

    Raises
    ------
    HarnessError
        If the machine, the toolchain or the oracle fails: no verdict then.
    """
    run = _Check(candidate, operation, seed, Path(log_dir), limits or _LIMITS, on_event)
    run.keep(workloads, regimes)
    run.note(CheckedStage("declaration", "passed", _declared(candidate)))
    wanted = candidate.declaration.devices
    on_gpu = device is not None and "cuda" in wanted
    if candidate.declaration.emulates or not on_gpu:
        run.on_cpu(gate="cpu" in wanted and not on_gpu)
    if on_gpu:
        assert device is not None
        run.on_gpu(device, baselines)
    return run.checked(_why_no_gpu(device, wanted))


def _declared(candidate: UserFamily) -> str:
    said = candidate.declaration
    bound = "any gate" if said.gate_bound is None else f"gates down to {said.gate_bound:g}"
    return (
        f"{said.operation}, {bound}, kernels {', '.join(f'{k}*' for k in said.kernels)},"
        f" on {' and '.join(said.devices)}"
    )


def _why_no_gpu(device: Device | None, wanted: Sequence[str]) -> str:
    if "cuda" not in wanted:
        return 'the file declares DEVICES = ("cpu",): nothing to measure'
    return "no sm90 GPU is visible (H100, H200)" if device is None else ""


class _Check:
    """Collects stages; the first one that fails ends its line."""

    def __init__(
        self,
        candidate: UserFamily,
        operation: Operation,
        seed: int,
        log_dir: Path,
        limits: Limits,
        on_event: OnEvent | None,
    ) -> None:
        self._candidate = candidate
        self._operation = operation
        self._seed = seed
        self._log_dir = log_dir
        self._limits = limits
        self._event = on_event or (lambda kind, line: None)
        self._workloads: Sequence[str] | None = None
        self._regimes: Sequence[str] | None = None
        self._stages: dict[str, CheckedStage] = {}
        self._found = Checked(seed, ())

    def keep(self, workloads: Sequence[str] | None, regimes: Sequence[str] | None) -> None:
        self._workloads = workloads
        if regimes is not None:
            always = [r.name for r in self._operation.regimes.values() if r.ranks]
            self._regimes = [*dict.fromkeys([*regimes, *always])]

    def note(self, stage: CheckedStage) -> None:
        self._stages[stage.stage] = stage
        if stage.verdict != "not run":
            word = stage.verdict if stage.status is None else stage.status.value
            self._event(stage.stage, f"{word}{': ' if stage.reason else ''}{stage.reason}")

    def on_cpu(self, *, gate: bool) -> None:
        from factory.device.job import open_job
        from factory.device.simulated import SimulatedDevice

        with open_job(
            on_reduced_workloads(self._operation),
            self._candidate,
            seed=self._seed,
            limits=self._limits,
            log_dir=self._log_dir,
            baselines=(),
            on_event=self._event,
            workloads=self._workloads,
            regimes=self._regimes,
            device=SimulatedDevice(memory_bytes=_CPU_MEMORY_BYTES, gpu="CPU"),
        ) as job:
            self._found = replace(self._found, fingerprint=job.fingerprint)
            if self._candidate.declaration.emulates:
                with self._loaded(job, self._candidate.emulation, "cpu") as handle:
                    if handle is not None:
                        self._run("emulate", lambda: _gate(job, handle), handle, "cpu")
            if self._failed():
                return
            with self._loaded(job, self._candidate.kernel, "cpu") as handle:
                if gate and handle is not None:
                    self._run("gate", lambda: _gate(job, handle), handle, "cpu")

    def on_gpu(self, device: Device, baselines: Sequence[Baseline] | None) -> None:
        from factory.device.job import open_job

        if self._failed():
            return
        with open_job(
            self._operation,
            self._candidate,
            seed=self._seed,
            limits=self._limits,
            log_dir=self._log_dir,
            baselines=baselines,
            on_event=self._event,
            workloads=self._workloads,
            regimes=self._regimes,
            device=device,
        ) as job:
            self._found = replace(self._found, fingerprint=job.fingerprint)
            self._measure(job, job.record.gpu)
            self._found = replace(self._found, controls=job.controls())
        self._found = replace(self._found, job=job.record)

    def _measure(self, job: DeviceJob, gpu: str) -> None:
        with self._loaded(job, self._candidate.kernel, gpu) as handle:
            if handle is None:
                return
            for name, work in (
                ("gate", lambda: _gate(job, handle)),
                ("screen", lambda: job.screen(handle)),
                ("time", lambda: job.time(handle)),
            ):
                if not self._run(name, work, handle, gpu):
                    return
        if self._workloads is None and self._regimes is None:
            schedule = self._candidate.kernel
            self._run("finals", lambda: job.finals([schedule]).results[schedule], None, gpu)

    @contextmanager
    def _loaded(self, job: DeviceJob, schedule: Schedule, where: str) -> Iterator[Handle | None]:
        """A candidate's process that has imported the file; None if it could not."""
        handle = job.prepare(schedule)
        try:
            done = self._run("load", lambda: _load(self._candidate, job, handle), handle, where)
            yield handle if done else None
        finally:
            job.release(handle)

    def _run(
        self, stage: str, work: Callable[[], StageResult], handle: Handle | None, where: str
    ) -> bool:
        start = time.perf_counter()
        result = work()
        passed = result.status is StageStatus.PASSED
        # An emulation meets the gate itself, which signs its errors.
        errors = tuple(
            e.model_copy(update={"stage": stage}) if stage == "emulate" else e
            for e in result.errors
        )
        self.note(
            CheckedStage(
                stage,
                "passed" if passed else "failed",
                result.reason or _seen(stage, result),
                time.perf_counter() - start,
                where,
                result.status,
                dict(result.details),
                "" if handle is None else str(handle.log_path),
            )
        )
        self._found = replace(
            self._found,
            errors=self._found.errors + errors,
            measurements=self._found.measurements + result.measurements,
            score_us=result.score_us or self._found.score_us,
            slow_us=result.slow_us or self._found.slow_us,
        )
        return passed

    def _failed(self) -> str:
        """The stage that failed, or nothing."""
        return next((n for n, s in self._stages.items() if s.verdict == "failed"), "")

    def checked(self, no_gpu: str) -> Checked:
        """Everything, with a reason for each stage that did not run."""
        failed = self._failed()
        filtered = self._workloads is not None or self._regimes is not None
        for stage in STAGES:
            if stage in self._stages:
                continue
            if stage == "emulate" and not self._candidate.declaration.emulates:
                why = "the file defines no emulate(inputs)"
            elif failed:
                why = f"{failed} failed"
            elif stage == "finals" and filtered and not no_gpu:
                why = "only some workloads or regimes were asked for"
            else:
                why = no_gpu
            self.note(CheckedStage(stage, "not run", why))
        if failed:
            # What a refused candidate seemed to take is not a time.
            self._found = replace(self._found, measurements=(), score_us=None, slow_us=None)
        return replace(self._found, stages=tuple(self._stages[s] for s in STAGES))


def _gate(job: DeviceJob, handle: Handle) -> StageResult:
    return job.gate(handle, thorough=True)


def _load(candidate: UserFamily, job: DeviceJob, handle: Handle) -> StageResult:
    """Wait for the import; what the process then says of itself must be what the file says."""
    result = job.load(handle)
    if result.status is not StageStatus.PASSED:
        return result
    names = tuple(result.details["kernel_names"])
    if names != candidate.declaration.kernels:
        return StageResult(StageStatus.REJECTED, f"its process declares other kernels: {names!r}")
    return result


def _seen(stage: str, result: StageResult) -> str:
    """A passed stage in a few words."""
    if stage in ("gate", "emulate"):
        inside = [e for e in result.errors if not e.out_of_contract]
        outside = {e.regime for e in result.errors if e.out_of_contract}
        said = (
            f"{len({e.regime for e in inside})} regimes,"
            f" {len({e.workload for e in inside})} workloads"
        )
        worst = max((e.max_rel or 0.0 for e in inside), default=0.0)
        probes = sum(p["asked"] for p in result.details.get("probes", {}).values())
        said += f", {probes} probes" if probes else ""
        left = f"; out of contract: {', '.join(sorted(outside))}" if outside else ""
        return f"{said}; largest error max {worst:.1e}{left}"
    if result.score_us is not None:
        slow = f", {result.slow_us:.1f} us at slow gates" if result.slow_us else ""
        return f"geomean {result.score_us:.1f} us gpu{slow}"
    return ""
