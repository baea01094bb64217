"""Timing on the job's side: lend inputs, take readings, check what was computed meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from factory.device.bank import Bank, Draw, Entry
from factory.device.process import Child
from factory.device.protocol import Bound, Case, Sampling, Time
from factory.device.verdicts import judge, measurement, undeclared
from leaderboard.records import Clock, ErrorRecord, MeasurementRecord
from operations import Operation, Regime, Workload

__all__ = ["Timed", "Timer"]

SETS = 3
"""Input sets that timed calls rotate over."""


def claimed_us(reading: Mapping[str, Any]) -> float:
    """All that a reading says was measured: no more than the job itself saw pass.

    Kernels of one sample may overlap on the device, but each sample starts and
    ends idle, with launches and waits beside it.
    """
    once = [*reading["gpu"], *reading["cold"], *reading["per_call"]]
    return float(sum(once) + reading["burst"] * sum(reading["pipelined"]))


@dataclass
class Timed:
    """Readings of one regime.

    Parameters
    ----------
    samples : dict
        Workload name to clock to samples in microseconds.
    kernels : dict
        Workload name to kernel names in order of first launch.
    skipped : dict
        Workload name to why a baseline does not serve it.
    errors : list of ErrorRecord
        Of the timed calls' outputs.
    wrong : str
        Why the times do not count; empty if they do.
    inexact : str
        How a baseline's outputs are beyond the tolerances that candidates meet; empty if they
        are not.  Its times count all the same.
    cold : dict
        Workload name to ``gpu`` samples with the L2 cache evicted before each.
    launches : dict
        Workload name to kernel name to launches in all ``gpu`` samples.
    thrown_away : int
        Samples that were taken while the clock was low, and taken again.
    sm_share : float or None
        Lowest SM clock seen, over its maximum; None where it cannot be read.
    took_s : float
        Seconds that the process says all of it took, its first calls not counted.
    """

    samples: dict[str, dict[Clock, list[float]]] = field(default_factory=dict)
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    errors: list[ErrorRecord] = field(default_factory=list)
    wrong: str = ""
    inexact: str = ""
    cold: dict[str, list[float]] = field(default_factory=dict)
    launches: dict[str, dict[str, int]] = field(default_factory=dict)
    thrown_away: int = 0
    sm_share: float | None = None
    took_s: float = 0.0


@dataclass(frozen=True)
class Timer:
    """Times a loaded child.

    Parameters
    ----------
    operation : Operation
    bank : Bank
    floor_bytes_per_s : float
        Turns an operation's bytes into a lower bound of any time.
    clock_share : float
        See :class:`~factory.device.protocol.Limits`.
    real_time : bool
        Whether the job's own clock bounds what a child says from above.
    throttled : list of str
        Workloads whose samples stayed although the clock stayed low.
    """

    operation: Operation
    bank: Bank
    floor_bytes_per_s: float
    clock_share: float = 0.0
    real_time: bool = True
    throttled: list[str] = field(default_factory=list)

    def take(
        self,
        child: Child,
        regime: Regime,
        workloads: Sequence[Workload],
        sampling: Sampling,
        *,
        declared: Sequence[str] | None,
        limit_s: float,
        stage: str,
        input_form: str = "activated",
    ) -> Timed:
        """Time one regime on several workloads in one message.

        Parameters
        ----------
        declared : sequence of str or None
            Prefixes of a candidate's kernel names.  None is for a baseline:
            it is handed raw inputs beside the activated ones, declares its
            names per workload, and its inputs stay in place, because it may
            convert them before the timed call.
        input_form : {"activated", "raw"}
            What it reads: no time below what those bytes take is believed.

        Raises
        ------
        ChildFailure, HarnessError
        """
        trusted = declared is None
        floor_bytes = self.operation.floor_bytes
        if input_form == "raw":
            floor_bytes = self.operation.raw_floor_bytes
        draws = [Draw(w, regime, i, raw=trusted) for w in workloads for i in range(SETS)]
        with self.bank.use(draws) as entries, self.bank.scratch() as scratch:
            plan: list[tuple[Case, list[Entry]]] = []
            for number, workload in enumerate(workloads):
                mine = entries[number * SETS : (number + 1) * SETS]
                sets = tuple(scratch.bound(entry) for entry in mine)
                # Bound to the second set's values; the last sample holds the first's.
                work = None if trusted else Bound(scratch.inputs(mine[1]), scratch.outputs(mine[0]))
                plan.append((Case(mine[0].draw.label, workload, sets, work), mine))
            self.bank.settle()
            sampling = replace(sampling, clock_share=self.clock_share)
            start = time.perf_counter()
            reply = child.ask(Time(tuple(case for case, _ in plan), sampling), limit_s)
            passed_s = time.perf_counter() - start
            result = Timed(took_s=reply["took_s"])
            claimed_s = sum(map(claimed_us, reply["readings"].values())) / 1e6
            if self.real_time and claimed_s > passed_s:
                self._invalid(
                    result,
                    f"{regime.name}: its process says that {claimed_s:.3f} s were measured in"
                    f" {passed_s:.3f} s",
                )
            for case, mine in plan:
                if trusted and case.label in reply["skipped"]:
                    result.skipped[case.workload.name] = reply["skipped"][case.label]
                    continue
                names = reply["kernel_names"][case.label] if declared is None else declared
                floor_us = floor_bytes(case.workload) / self.floor_bytes_per_s * 1e6
                self._read(result, case, reply["readings"][case.label], names, sampling, floor_us)
                self._check(result, case, mine, stage, trusted=trusted)
        return result

    def _read(
        self,
        result: Timed,
        case: Case,
        reading: Mapping[str, Any],
        declared: Sequence[str],
        sampling: Sampling,
        floor_us: float,
    ) -> None:
        name = case.workload.name
        result.thrown_away += int(reading["thrown_away"])
        if reading["sm_share"] is not None:
            result.sm_share = min(result.sm_share or 1.0, float(reading["sm_share"]))
        if reading["throttled"]:
            self.throttled.append(case.label)
        clocks = {Clock.GPU: sampling.gpu, Clock.PER_CALL: sampling.per_call}
        clocks[Clock.PIPELINED] = sampling.pipelined
        result.samples[name] = {
            clock: [float(s) for s in reading[clock.value]] for clock, n in clocks.items() if n
        }
        result.kernels[name] = tuple(reading["kernels"])
        result.launches[name] = {str(k): int(n) for k, n in reading["kernels"].items()}
        if reading["cold"]:
            result.cold[name] = [float(s) for s in reading["cold"]]
        if sampling.gpu:
            self._name_kernels(result, case, reading, declared)
        self._hold_to_floor(result, case, floor_us)

    def _name_kernels(
        self, result: Timed, case: Case, reading: Mapping[str, Any], declared: Sequence[str]
    ) -> None:
        foreign = undeclared(reading["kernels"], declared)
        if reading["empty"]:
            self._invalid(result, f"{case.label}: kernel identity: a timed call launched nothing")
        elif foreign:
            self._invalid(
                result, f"{case.label}: kernel identity: launched {foreign[0][:120]!r}, undeclared"
            )

    def _hold_to_floor(self, result: Timed, case: Case, floor_us: float) -> None:
        """No call that does its work is faster, whichever clock looks at it."""
        name = case.workload.name
        taken = [
            (f"{case.label}{'' if clock is Clock.GPU else f' {clock.value}'}", samples)
            for clock, samples in result.samples[name].items()
        ]
        for label, samples in (*taken, (case.label, result.cold.get(name, ()))):
            fastest = min(samples, default=floor_us)
            if fastest < floor_us:
                self._invalid(
                    result,
                    f"{label}: {fastest:.2f} us is below the {floor_us:.2f} us that its bytes"
                    " take through memory",
                )

    def _check(
        self, result: Timed, case: Case, entries: Sequence[Entry], stage: str, *, trusted: bool
    ) -> None:
        """Inputs unchanged, and the last outputs of every timed call right."""
        for entry, bound in zip(entries, case.sets, strict=True):
            if (changed := self.bank.altered(entry)) is not None:
                self._invalid(result, f"{case.label}: input changed: {changed}")
            self._judge(result, entry, bound, stage, trusted=trusted)
        if case.work is not None:
            # A count that is a multiple of the sets ends on the first one.
            if (changed := self.bank.altered(entries[0], case.work.inputs)) is not None:
                self._invalid(result, f"{case.label}: input changed: {changed}")
            self._judge(result, entries[0], case.work, stage, trusted=trusted)

    def _judge(
        self, result: Timed, entry: Entry, bound: Bound, stage: str, *, trusted: bool
    ) -> None:
        views = {n: self.bank.view(r) for n, r in bound.outputs.items()}
        judged = judge(self.operation, entry, views, stage)
        result.errors += judged.records if judged.reason or entry.draw.index == 0 else []
        if not judged.reason:
            return
        reason = f"outputs of timed calls are wrong: {judged.reason}"
        if trusted and all(e.finite for e in judged.records):
            # A peer is compared as it is: its error stands beside its time.
            result.inexact = result.inexact or reason
        else:
            self._invalid(result, reason)

    @staticmethod
    def _invalid(result: Timed, reason: str) -> None:
        result.wrong = result.wrong or reason

    def records(
        self,
        timed: Timed,
        regime: Regime,
        *,
        job_id: str,
        method: str,
        cache: str,
        held_out: bool,
        phase: str,
        control: str | None = None,
        input_form: str = "activated",
    ) -> list[MeasurementRecord]:
        """Measurements of one regime; host clocks are read by ``perf_counter``."""
        found = [
            (workload, clock, cache if clock is not Clock.PIPELINED else "warm", samples)
            for workload, clocks in timed.samples.items()
            for clock, samples in clocks.items()
        ]
        found += [
            (workload, Clock.GPU, "cold", samples) for workload, samples in timed.cold.items()
        ]
        return [
            measurement(
                samples,
                clock=clock,
                kernels=timed.kernels[workload] if clock is Clock.GPU else (),
                job_id=job_id,
                trial_id=0 if control is None else None,
                control=control,
                workload=workload,
                regime=regime.name,
                cache=state,
                method=method if clock is Clock.GPU else "perf_counter",
                input_form=input_form,
                held_out=held_out,
                phase=phase,
            )
            for workload, clock, state, samples in found
        ]
