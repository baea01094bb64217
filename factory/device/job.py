"""One stretch of measuring on one GPU: candidates in, verdicts out.

The job owns the inputs, the right answers and the clock's rules.  Each
candidate runs in a process of its own and is handed tensors, nothing else.
One thread uses a job.
"""

from __future__ import annotations

import pickle
import re
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from candidates import Baseline, Family, Schedule
from candidates.user import UserFamily
from factory import machine
from factory.artefacts import Store, key_of
from factory.device.bank import Bank
from factory.device.controls import Controls
from factory.device.finals import Finals, run_finals
from factory.device.gate import Gate
from factory.device.hardware import Device
from factory.device.measure import Measurer, declared
from factory.device.process import Child, ChildFailure, Spawner
from factory.device.protocol import Limits, Load, Open, Sampling, Target
from factory.device.rounds import IN_TURNS, PHASE, Rounds, run_rounds
from factory.device.smoke import Smoke, run_smoke
from factory.device.timing import Timer
from factory.device.verdicts import of_failure
from factory.provenance import fingerprint
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import (
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageStatus,
)
from operations import Operation, Regime, Workload

__all__ = ["DeviceJob", "Finals", "Handle", "Rounds", "open_job"]

_LEAST_HOST_BYTES = 8 << 30
"""What a child has in any case: libraries of torch, CUDA and the DSL are resident in part, and
compiling takes more."""

TIMED_BETWEEN = 8
"""Candidates timed between two readings of the controls."""

OnEvent = Callable[[str, str], None]


@dataclass
class Handle:
    """A candidate whose process is loading, ready or gone."""

    schedule: Schedule
    child: Child
    log_path: Path
    failed: StageResult | None = None
    """Set once; every later stage answers the same."""


def open_job(
    operation: Operation,
    family: Family,
    *,
    seed: int | None = None,
    limits: Limits | None = None,
    log_dir: Path | str,
    baselines: Sequence[Baseline] | None = None,
    on_event: OnEvent | None = None,
    workloads: Sequence[str] | None = None,
    regimes: Sequence[str] | None = None,
    device: Device | None = None,
    artefacts: Store | None = None,
) -> DeviceJob:
    """Take a GPU and show that it works.

    Parameters
    ----------
    operation : Operation
    family : Family
        Picklable: its schedules are loaded in other processes.
    seed : int, optional
        All inputs derive from it.  Default: a fresh one; either stands in the
        job's record, and the same seed draws the same inputs again.
    limits : Limits, optional
    log_dir : Path or str
        Receives one log file for each child.
    baselines : sequence of Baseline, optional
        Controls; default: those of the operation.  Those that are missing are
        reported and left out.
    on_event : callable, optional
        Takes a word (``control``, ``smoke``, ``fault``) and a line.
    workloads, regimes : sequences of str, optional
        Names to keep; default: all tuned workloads and all regimes.
    device : Device, optional
        Default: the first visible sm90 GPU.
    artefacts : Store, optional
        Where schedules may lie compiled already; default: all are compiled here.

    Returns
    -------
    DeviceJob
        A context manager.

    Raises
    ------
    HarnessError
        If there is no such GPU or the smoke kernel fails; names versions.
    """
    if device is None:
        from factory.device.cuda import CudaDevice

        device = CudaDevice.find()
    tuned = tuple(w for w in operation.tuned() if workloads is None or w.name in workloads)
    kept = tuple(r for r in operation.regimes.values() if regimes is None or r.name in regimes)
    if not tuned or not any(r.ranks for r in kept):
        raise ValueError("a job needs a tuned workload and a production regime")
    if seed is None:
        seed = secrets.randbits(31)
    job = DeviceJob(
        operation, family, device, tuned, kept, seed, limits or Limits(), Path(log_dir), on_event
    )
    job._artefacts = artefacts
    try:
        job._start(baselines)
    except BaseException:
        job.close()
        raise
    return job


class DeviceJob:
    """See :func:`open_job`.

    Attributes
    ----------
    record : JobRecord
        ``campaign_id`` is left to the caller.
    fingerprint : FingerprintRecord
    """

    def __init__(
        self,
        operation: Operation,
        family: Family,
        device: Device,
        workloads: tuple[Workload, ...],
        regimes: tuple[Regime, ...],
        seed: int,
        limits: Limits,
        log_dir: Path,
        on_event: OnEvent | None,
    ) -> None:
        self._operation = operation
        self._family = family
        self._device = device
        self._workloads = workloads
        self._regimes = regimes
        self._limits = limits
        self._log_dir = log_dir
        self._event = on_event or (lambda kind, line: None)
        self._spawner = Spawner()
        self._children: list[Child] = []
        self._timed = 0
        self._started = 0
        """Processes so far; numbers their logs."""
        self._closed = False
        self._artefacts: Store | None = None
        self._controls: Controls | None = None
        described = device.describe()
        self.fingerprint: FingerprintRecord = fingerprint(
            family.source_hash(),
            {
                **described,
                "operation": operation.name,
                "operation_version": operation.version,
                "clock_method": device.method,
            },
        )
        self.record = JobRecord(
            id=f"job-{uuid.uuid4().hex[:12]}",
            campaign_id=None,
            fingerprint_id=self.fingerprint.id,
            gpu=str(described["gpu"]),
            status=JobStatus.OPEN,
            started_at=datetime.now(UTC),
            seed=seed,
        )
        free = device.free_bytes()
        try:
            self._arena = device.create_arena(int(min(limits.arena_bytes, free * 0.3)))
        except RuntimeError as error:
            raise HarnessError(f"memory to share with candidates: {error}") from error
        self._bank = Bank(
            operation,
            device,
            self._arena,
            seed=seed,
            private_bytes=int(min(limits.answer_bytes, free * 0.45)),
        )
        self._timer = Timer(
            operation,
            self._bank,
            device.peak_bytes_per_s,
            clock_share=limits.clock_share,
            real_time=device.real_time,
        )
        production = self._first("production")
        assert production is not None
        self._measurer = Measurer(
            operation,
            family,
            self._timer,
            workloads=workloads,
            production=production,
            slow=self._first("slow"),
            job_id=self.record.id,
            method=device.method,
            limits=limits,
            alone=self._alone,
        )

    def __enter__(self) -> DeviceJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(note="" if error is None else f"cut short: {kind.__name__ if kind else ''}")

    # -- stages ------------------------------------------------------------------

    def prepare(self, schedule: Schedule, *, log_path: Path | str | None = None) -> Handle:
        """Start a candidate's process, which imports and loads it; returns at once.

        Its output is appended to ``log_path``; default: a file of its own in ``log_dir``.
        """
        objects = None
        if self._artefacts is not None:
            objects = self._artefacts.folder(key_of(self._family, schedule))
        target = Target(self._family, schedule, objects=None if objects is None else str(objects))
        return self._prepare(target, schedule, log_path=log_path)

    def load(self, handle: Handle) -> StageResult:
        """Wait until a candidate is imported and launchable; the other stages do it by themselves.

        ``details`` holds the prefixes of kernel names that it declares.

        Raises
        ------
        HarnessError
            If the machine or the toolchain fails.
        """
        return self._stage(handle, lambda: _loaded(handle.child))

    def gate(self, handle: Handle, *, thorough: bool = False) -> StageResult:
        """Run a candidate in every regime within its bound on every tuned workload.

        Parameters
        ----------
        thorough : bool
            Ask also for calls of another form (an optional tensor left out),
            which a candidate may have to compile for.  Finalists always are.

        Raises
        ------
        HarnessError
            If the machine, the toolchain or the oracle fails.
        """
        return self._stage(
            handle, lambda: self._gate(handle, self._workloads, "gate", thorough=thorough)
        )

    def screen(self, handle: Handle) -> StageResult:
        """Time the smallest workloads briefly; hopeless candidates end here.

        Raises
        ------
        HarnessError
        """
        return self._stage(handle, lambda: self._measurer.screen(handle.child))

    def time(self, handle: Handle) -> StageResult:
        """Time all tuned workloads: three clocks at production gates, ``gpu`` at slow ones.

        ``score_us`` is the geomean of ``gpu`` medians on the first production
        regime, ``slow_us`` that on the first slow one.  Controls are read
        before the first candidate and again after every eight.

        Raises
        ------
        HarnessError
        """
        if self._timed % TIMED_BETWEEN == 0:
            self._read_controls("before" if self._timed == 0 else "between")
        self._timed += 1
        return self._stage(handle, lambda: self._measurer.time(handle.schedule, handle.child))

    def release(self, handle: Handle) -> None:
        """End a candidate's process; idempotent."""
        handle.child.kill()
        if handle.child in self._children:
            self._children.remove(handle.child)

    def controls(self, phase: str | None = None) -> tuple[MeasurementRecord, ...]:
        """Read the controls.

        Parameters
        ----------
        phase : {"before", "between", "after"}, optional
            Read now under this name and return that reading.  Without it the
            closing reading is taken, if anything was read or timed, and all
            readings of the job are returned.

        Raises
        ------
        HarnessError
        """
        if phase is not None:
            return self._read_controls(phase)
        if self._timed and self._controls is not None and not self._controls.closed:
            self._read_controls("after")
        return self._controls.readings if self._controls is not None else ()

    def finals(self, schedules: Sequence[Schedule], *, rounds: int = 3) -> Finals:
        """Gate finalists on held-out workloads and time them in turns.

        Each round times every finalist and every control once, so that all of
        them see the same stretch of time; samples of all rounds are pooled.

        Raises
        ------
        HarnessError
        """
        handles = {s: self.prepare(s) for s in dict.fromkeys(schedules)}
        held_out = self._operation.held_out()
        try:
            return run_finals(
                list(handles),
                self._operation,
                self._measurer,
                rounds=rounds,
                stage=lambda s, work: self._stage(handles[s], lambda: work(handles[s].child)),
                gate=lambda child, s: self._gate(handles[s], held_out, "final", thorough=True),
                controls=lambda: self._read_controls("final"),
            )
        finally:
            for handle in handles.values():
                self.release(handle)

    def rounds(self, handles: Sequence[Handle], *, rounds: int = 3) -> Rounds:
        """Time candidates and controls in turns: all clocks, at production and at slow gates.

        A handle that failed a stage before stays failed and is left out.

        Raises
        ------
        HarnessError
        """
        by_schedule = {h.schedule: h for h in handles}
        return run_rounds(
            list(by_schedule),
            self._measurer,
            rounds=rounds,
            stage=lambda s, work: self._stage(by_schedule[s], lambda: work(by_schedule[s].child)),
            controls=lambda: self._read_controls(PHASE, IN_TURNS),
        )

    def close(self, note: str = "") -> JobRecord:
        """End all processes, give the GPU back and settle the job's status; idempotent.

        Raises
        ------
        HarnessError
            If a process does not end; everything else has ended then, and the job is void.
        """
        if self._closed:
            return self.record
        self._closed = True
        try:
            with ExitStack() as ending:  # each of them is called, whatever others raise
                for end in (self._spawner.close, self._arena.close):
                    ending.callback(end)
                for child in reversed(self._children):  # those of controls among them
                    ending.callback(child.kill)
        except BaseException as error:
            note = note or f"not ended: {error}"
            raise
        finally:
            self._children.clear()
            self._settle(note)
        return self.record

    def _settle(self, note: str) -> None:
        """The job's status and why, for good."""
        drift = self._controls.drift() if self._controls is not None else None
        if not note and self._controls is not None:
            note = self._controls.objection(self._timed > 0)
        throttled = list(dict.fromkeys(self._timer.throttled))
        if not note and throttled:
            note = (
                f"throttled: the SM clock stayed below {self._limits.clock_share:.0%} of its"
                f" maximum on {throttled[0]}, four attempts in a row"
            )
        self.record = self.record.model_copy(
            update={
                "status": JobStatus.VOID if note else JobStatus.VALID,
                "ended_at": datetime.now(UTC),
                "drift": drift,
                "note": note,
                "details": {
                    "control_errors": {} if self._controls is None else self._controls.errors,
                    "left_out": {} if self._controls is None else self._controls.left_out,
                    "failed": [] if self._controls is None else list(self._controls.failed),
                    "throttled": throttled,
                },
            }
        )

    # -- how ---------------------------------------------------------------------

    def _start(self, baselines: Sequence[Baseline] | None) -> None:
        try:
            self._smoke()
        except ChildFailure as failure:
            raise HarnessError(
                f"the smoke kernel failed on {self.record.gpu}: {failure}; {self._versions()}"
            ) from failure
        if baselines is None:
            import candidates

            baselines = candidates.baselines(self._operation.name)
        present: list[Baseline] = []
        for baseline in baselines:
            reason = baseline.missing()
            if reason is None:
                present.append(baseline)
            else:
                self._event("control", f"{baseline.name}: {reason}")
        self._controls = Controls(
            present,
            self._timer,
            workloads=self._workloads,
            production=self._first("production"),
            slow=self._first("slow"),
            job_id=self.record.id,
            method=self._device.method,
            limits=self._limits,
            start=lambda target, name: self._prepare(target, None, name).child,
            stop=self._drop,
            event=self._event,
        )

    def _prepare(
        self,
        target: Target,
        schedule: Schedule | None,
        name: str = "",
        log_path: Path | str | None = None,
    ) -> Handle:
        try:
            packed = pickle.dumps(target)
        except Exception as error:
            raise HarnessError(
                f"{type(target.family or target.baseline).__name__} cannot be sent to another"
                f" process: {error}"
            ) from error
        self._started += 1
        slug = re.sub(r"[^A-Za-z0-9=._-]+", "_", name or (schedule.key if schedule else ""))[:80]
        own = self._log_dir / f"{self.record.id}-{self._started:03}-{slug}.log"
        log_path = own if log_path is None else Path(log_path)
        child = Child(
            self._spawner,
            Open(self._device, self._arena.handle, self._limits.gpu_bytes, self._limits.file_bytes),
            Load(packed),
            load_s=self._limits.load_s,
            host_bytes=_host_bytes(self._limits.host_bytes),
            log_path=log_path,
            baseline=target.baseline is not None,
            believed=partial(_believed, target),
        )
        self._children.append(child)
        return Handle(schedule or Schedule(()), child, log_path)

    def _drop(self, child: Child) -> None:
        child.kill()
        if child in self._children:
            self._children.remove(child)

    def _stage(self, handle: Handle, work: Callable[[], StageResult]) -> StageResult:
        """Run one stage, turning what the child did into a verdict."""
        if handle.failed is not None:
            return handle.failed
        try:
            result = work()
        except ChildFailure as failure:
            handle.child.kill()
            self._bank.settle()
            result = self._blamed(failure)
        if result.status is not StageStatus.PASSED:
            handle.failed = result
        return result

    def _blamed(self, failure: ChildFailure) -> StageResult:
        if failure.kind != "harness":
            return of_failure(failure)
        # Something outside the candidate's own call failed in its process: the
        # machine's fault unless a known kernel still works on it.
        self._event("fault", str(failure))
        try:
            self._smoke()
        except ChildFailure as again:
            raise HarnessError(f"{failure}; the smoke kernel fails too: {again}") from again
        return StageResult(
            StageStatus.CRASHED, f"{failure} (the smoke kernel works on the same machine)"
        )

    def _smoke(self) -> None:
        """A known kernel through the same process, memory and clock.

        Raises
        ------
        ChildFailure
        """
        handle = self._prepare(Target(baseline=Smoke()), None, "smoke")
        try:
            run_smoke(handle.child, self._bank, self._limits.load_s)
        finally:
            self.release(handle)

    def _versions(self) -> str:
        values = self.fingerprint.values
        names = ("driver", "cuda", "torch", "dsl", "tvm_ffi", "python")
        return ", ".join(f"{n} {values[n]}" for n in names if values.get(n))

    def _first(self, role: str) -> Regime | None:
        return next((r for r in self._regimes if r.role == role), None)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing else of this job runs meanwhile: processes still loading are stopped."""
        waiting = [c for c in self._children if c.alive]
        for child in waiting:
            child.pause()
        try:
            yield
        finally:
            for child in waiting:
                child.resume()

    def _gate(
        self, handle: Handle, workloads: Sequence[Workload], stage: str, *, thorough: bool
    ) -> StageResult:
        declared(handle.child)
        gate = Gate(
            self._operation,
            self._bank,
            self._regimes,
            self._workloads[0],
            self._limits.gate_s,
            self._bank.settle,
        )
        return gate.run(
            handle.child,
            workloads,
            gate_bound=self._family.gate_bound(handle.schedule),
            stage=stage,
            thorough=thorough,
        )

    def _read_controls(
        self, phase: str, sampling: Sampling | None = None
    ) -> tuple[MeasurementRecord, ...]:
        assert self._controls is not None
        self._controls.load()
        with self._alone():
            return self._controls.read(phase, sampling=sampling)


def _loaded(child: Child) -> StageResult:
    names = child.ready()["kernel_names"]
    return StageResult(StageStatus.PASSED, details={"kernel_names": list(names)})


def _host_bytes(limit: int) -> int:
    """Host memory of a child: the limit, or most of what the machine has left.

    Never less than an honest child may need: a machine whose memory grows as it is used says
    too little, and where there really is so little, a child is the first that the system ends.
    """
    left = machine.available_bytes()
    return limit if left is None else min(limit, max(left * 4 // 5, _LEAST_HOST_BYTES))


def _believed(target: Target, said: str) -> bool:
    """Whether a process that loads this may blame the toolchain.

    A user's file may not, but for a distribution that is not there: the job
    looks for itself.
    """
    if not isinstance(target.family, UserFamily):
        return True
    named = re.search(r" imports '(\w+)', which is not installed", said)
    try:
        return named is not None and find_spec(named[1]) is None
    except ValueError:  # a module that is there, without a spec
        return False
