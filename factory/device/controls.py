"""Controls: other implementations on the same inputs, read before, between and after.

What a control's time does in the course of a job says whether the machine held
still; a control that fails is reported and left out, never a candidate's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from candidates import Baseline
from factory.device.process import Child, ChildFailure
from factory.device.protocol import Limits, Sampling, Target
from factory.device.timing import Timed, Timer
from factory.device.verdicts import geomean, medians
from leaderboard.records import MeasurementRecord
from operations import Regime, Workload

__all__ = ["Controls"]

# A control of thousands of small kernels gets few samples: a recording holds them all.
_FIRST = Sampling(gpu=30, per_call=12, pipelined=4, cold=9, budget_s=0.1)
_AGAIN = Sampling(gpu=30, budget_s=0.1)
_CLOSING = "after"
_SLOW_S = 2.0
"""A control whose reading takes longer is read at the two ends of the job only."""


@dataclass
class _Control:
    baseline: Baseline
    child: Child | None = None
    lost: bool = False
    reading_s: float = 0.0
    """What its first reading of ``gpu`` time took on the last regime that it serves, without the
    first calls, in which some tune themselves."""


class Controls:
    """The baselines of one job.

    Parameters
    ----------
    baselines : sequence of Baseline
        Those that can run here.
    timer : Timer
    workloads : sequence of Workload
    production, slow : Regime or None
    job_id, method : str
        For the records.
    limits : Limits
    start : callable
        Starts a child for a target, under a name.
    stop : callable
        Ends a child.
    event : callable
        Takes a word and a line.
    """

    def __init__(
        self,
        baselines: Sequence[Baseline],
        timer: Timer,
        *,
        workloads: Sequence[Workload],
        production: Regime | None,
        slow: Regime | None,
        job_id: str,
        method: str,
        limits: Limits,
        start: Callable[[Target, str], Child],
        stop: Callable[[Child], None],
        event: Callable[[str, str], None],
    ) -> None:
        self._controls = [_Control(b) for b in baselines]
        self._timer = timer
        self._workloads = workloads
        self._regimes = [r for r in (production, slow) if r is not None]
        self._job_id = job_id
        self._method = method
        self._limits = limits
        self._start = start
        self._stop = stop
        self._event = event
        self._readings: list[tuple[str, MeasurementRecord]] = []
        """Phase and record, in order; a phase may come several times."""
        self._course: dict[str, list[dict[str, float]]] = {}
        """Control to the medians of each of its readings, by workload."""
        self.errors: dict[str, list[dict[str, Any]]] = {}
        """Control to its errors: all of the first reading, and what is out of tolerance later."""
        self.left_out: dict[str, list[str]] = {}
        """Control to why it was not timed, wholly or on some regime."""
        self.failed: dict[str, None] = {}
        """Controls that failed a turn, by name in order: their readings are not all there."""
        self.closed = False
        """Whether the closing reading was taken."""

    @property
    def readings(self) -> tuple[MeasurementRecord, ...]:
        """All readings of the job, in order."""
        return tuple(record for _, record in self._readings)

    def load(self) -> None:
        """Start the children that do not run and wait for them, before anything is stopped."""
        for control in self._controls:
            if not control.lost and (control.child is None or not control.child.alive):
                target = Target(baseline=control.baseline)
                control.child = self._start(target, f"control-{control.baseline.name}")
        for control in self._controls:
            if control.child is not None:
                try:
                    control.child.ready()
                except ChildFailure as failure:
                    self._lose(control, str(failure))

    def read(
        self, phase: str, *, sampling: Sampling | None = None
    ) -> tuple[MeasurementRecord, ...]:
        """Time every control that is loaded.

        The first reading takes all clocks and also the slow regime; later ones
        take ``gpu`` time on production, which is what drift is judged by.

        Parameters
        ----------
        phase : str
            For the records.
        sampling : Sampling, optional
            Take this instead, on both regimes, and of slow controls too.

        Raises
        ------
        HarnessError
            If inputs or oracle fail.
        """
        first = not self._readings
        found: list[MeasurementRecord] = []
        for control in self._controls:
            if control.child is None:
                continue
            brief = sampling is None and not first and phase != _CLOSING
            if brief and control.reading_s > _SLOW_S:
                continue
            try:
                found += self._one(control, control.child, phase, first, sampling)
            except ChildFailure as failure:
                self._lose(control, str(failure))
        self._readings += [(phase, record) for record in found]
        self.closed = self.closed or phase == _CLOSING
        return tuple(found)

    def _one(
        self,
        control: _Control,
        child: Child,
        phase: str,
        first: bool,
        sampling: Sampling | None,
    ) -> list[MeasurementRecord]:
        name = control.baseline.name
        found: list[MeasurementRecord] = []
        for regime in self._regimes if first or sampling else self._regimes[:1]:
            production = regime is self._regimes[0]
            usual = _FIRST if first and production else _AGAIN
            timed = self._timer.take(
                child,
                regime,
                self._workloads,
                sampling or usual,
                declared=None,
                limit_s=self._limits.control_s,
                stage="control",
                input_form=control.baseline.input_form,
            )
            self._report(control, regime, timed)
            if first:
                control.reading_s = timed.took_s if timed.samples else control.reading_s
            found_errors = [e.model_dump() for e in timed.errors if first or not e.within]
            self.errors.setdefault(name, []).extend(found_errors)
            if timed.wrong and production:
                self._lose(control, f"{regime.name}: {timed.wrong}")
                return []
            if timed.wrong:
                self.failed[name] = None
                continue
            records = self._timer.records(
                timed,
                regime,
                job_id=self._job_id,
                method=self._method,
                cache="warm",
                held_out=False,
                phase=phase,
                control=name,
                input_form=control.baseline.input_form,
            )
            found += records
            if production:
                self._course.setdefault(name, []).append(medians(records))
        return found

    def _report(self, control: _Control, regime: Regime, timed: Timed) -> None:
        name = control.baseline.name
        if timed.skipped:
            reason = next(iter(timed.skipped.values()))
            self._note(name, f"{regime.name}: {reason}")
            self._event("control", f"{name}: {regime.name} left out: {reason}")
        if timed.wrong:
            self._note(name, f"{regime.name}: {timed.wrong}")
            self._event("control", f"{name}: {regime.name} not timed: {timed.wrong}")
        if timed.inexact:
            self._event("control", f"{name}: {regime.name} timed, but {timed.inexact}")
        elif timed.errors and not timed.wrong:
            worst = max(e.max_rel or 0.0 for e in timed.errors)
            self._event("control", f"{name}: {regime.name}: largest error max {worst:.2e}")

    def _lose(self, control: _Control, reason: str) -> None:
        control.lost = True
        self.failed[control.baseline.name] = None
        if control.child is not None:
            self._stop(control.child)
            control.child = None
        self._note(control.baseline.name, reason)
        self._event("control", f"{control.baseline.name} is left out: {reason}")

    def _note(self, name: str, reason: str) -> None:
        known = self.left_out.setdefault(name, [])
        if reason not in known:
            known.append(reason)

    def drift(self) -> float | None:
        """Largest relative change of a control's geomean against its first reading.

        None if no control was read twice.
        """
        changes: list[float] = []
        for readings in self._course.values():
            for later in readings[1:]:
                shared = [w for w in later if w in readings[0]]
                if shared:
                    changes.append(abs(geomean(later[w] / readings[0][w] for w in shared) - 1.0))
        return max(changes, default=None)

    def objection(self, timed: bool) -> str:
        """Why the job's times do not rank; empty if they do."""
        drift = self.drift()
        if drift is not None and drift > self._limits.drift:
            return (
                f"controls drifted by {drift:.1%}, more than {self._limits.drift:.1%}:"
                " the machine did not hold still"
            )
        if timed and self._course and not self.closed:
            return "cut short: no closing reading of the controls"
        return ""
