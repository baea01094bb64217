"""The gate: right in every regime within the declared bound, on every workload, or out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from factory.device.bank import Bank, Draw, same_bytes
from factory.device.probes import ask_probes
from factory.device.process import Child
from factory.device.protocol import Case, Run
from factory.device.verdicts import judge
from factory.stages.base import StageResult
from leaderboard.records import ErrorRecord, StageStatus
from operations import Operation, Regime, Workload

__all__ = ["Gate", "in_order"]

_RUNS = 3
"""Calls on equal inputs: twice while the device is idle, then beside a busy stream."""
_BUSY = 2


def in_order(regimes: Sequence[Regime]) -> list[Regime]:
    """Gating regimes, the severity sweep first and from mild to steep."""
    sweep = sorted(
        (r for r in regimes if r.role == "sweep" and r.gates),
        key=lambda r: -(r.severity if r.severity is not None else r.gate_floor),
    )
    return [*sweep, *(r for r in regimes if r.gates and r.role != "sweep")]


@dataclass(frozen=True)
class Gate:
    """Runs loaded candidates over regimes and workloads and compares them with the oracle.

    Parameters
    ----------
    operation : Operation
    bank : Bank
    regimes : sequence of Regime
    probed : Workload
        Handed to the operation's probes.
    limit_s : float
        For one message to a candidate.
    after : callable
        Called after each message; raises if the device is lost.
    """

    operation: Operation
    bank: Bank
    regimes: Sequence[Regime]
    probed: Workload
    limit_s: float
    after: Callable[[], None] = lambda: None

    def run(
        self,
        child: Child,
        workloads: Sequence[Workload],
        *,
        gate_bound: float | None,
        stage: str = "gate",
        thorough: bool = False,
    ) -> StageResult:
        """Judge one candidate; stops at the first regime that fails.

        One message per regime.  Every case runs three times into outputs of
        its own, the last time beside a busy stream, and must give the same
        bytes.  The severity sweep comes first, so that its first breach is
        found; the operation's probes come last, on production and on slow gates.

        Parameters
        ----------
        gate_bound : float or None
            Declared bound; regimes that go below it are recorded as out of
            contract and not run.
        thorough : bool
            Whether to ask also what a candidate may have to compile for.

        Raises
        ------
        ChildFailure
            If the candidate's process does not answer.
        HarnessError
            If inputs, oracle or comparison fail.
        """
        errors: list[ErrorRecord] = []
        outside: list[str] = []
        sweep: list[dict[str, Any]] = []
        details: dict[str, Any] = {
            "out_of_contract": outside,
            "sweep": sweep,
            "first_breach": None,
        }
        for regime in in_order(self.regimes):
            if gate_bound is not None and regime.gate_floor < gate_bound:
                outside.append(regime.name)
                errors.append(_out_of_contract(regime, stage))
                continue
            found, reason = self._one_regime(child, regime, workloads, stage)
            self.after()
            errors += found
            if regime.role == "sweep":
                sweep.append(_swept(regime, found))
                if sweep[-1]["breached"]:
                    details["first_breach"] = regime.name
                    bound = regime.severity if regime.severity is not None else regime.gate_floor
                    reason = f"first breach at a bound of {bound:g}: {reason}"
            if reason:
                return StageResult(StageStatus.REJECTED, reason, details, tuple(errors))
        if any(r.role == "production" and r.name in outside for r in self.regimes):
            reason = (
                f"declared for gates down to {gate_bound:g} only: production is out of its contract"
            )
            return StageResult(StageStatus.REJECTED, reason, details, tuple(errors))
        for role in ("production", "slow"):
            asked = next((r for r in self.regimes if r.role == role), None)
            if asked is None or asked.name in outside:
                continue
            answer = ask_probes(
                self.operation,
                self.bank,
                child,
                self.probed,
                asked,
                limit_s=self.limit_s,
                stage=stage,
                thorough=thorough,
            )
            self.after()
            details.setdefault("probes", {})[asked.name] = answer.details
            if answer.reason:
                errors += answer.errors
                return StageResult(StageStatus.REJECTED, answer.reason, details, tuple(errors))
        return StageResult(StageStatus.PASSED, details=details, errors=tuple(errors))

    def _one_regime(
        self, child: Child, regime: Regime, workloads: Sequence[Workload], stage: str
    ) -> tuple[list[ErrorRecord], str]:
        errors: list[ErrorRecord] = []
        slices: dict[str, ErrorRecord] = {}
        first = ""
        bank = self.bank
        draws = [Draw(w, regime) for w in workloads]
        with bank.use(draws) as entries, bank.scratch() as scratch:
            cases = []
            for entry in entries:
                sets = tuple(scratch.bound(entry) for _ in range(_RUNS))
                cases.append(Case(entry.draw.label, entry.draw.workload, sets, busy=(_BUSY,)))
            bank.settle()
            child.ask(Run(tuple(cases)), self.limit_s)
            for entry, case in zip(entries, cases, strict=True):
                changed = bank.altered(entry)
                runs = [{n: bank.view(r) for n, r in b.outputs.items()} for b in case.sets]
                judged = judge(self.operation, entry, runs[0], stage)
                errors += judged.records
                for name, record in judged.slices.items():
                    slices[name] = max(slices.get(name, record), record, key=_size)
                reason = judged.reason
                if changed is not None:
                    reason = f"{case.label}: input changed: {changed}"
                elif not reason:
                    reason = _unsteady(case.label, runs)
                first = first or reason
        known = {(e.workload, e.tensor, e.scope) for e in errors}
        errors += [s for s in slices.values() if (s.workload, s.tensor, s.scope) not in known]
        return errors, first


def _unsteady(label: str, runs: Sequence[dict[str, Any]]) -> str:
    """Which run on equal inputs gave other bytes than the first; empty if none."""
    for number, run in enumerate(runs[1:], 1):
        for name, tensor in run.items():
            if not same_bytes(runs[0][name], tensor):
                beside = " when another stream is busy" if number == _BUSY else ""
                return f"{label}: two runs on equal inputs differ in {name}{beside}"
    return ""


def _size(record: ErrorRecord) -> tuple[bool, float]:
    return (not record.finite, max(record.max_rel or 0.0, record.rms_rel or 0.0))


def _swept(regime: Regime, errors: Sequence[ErrorRecord]) -> dict[str, Any]:
    """One step of the severity sweep, with the largest error of each output."""
    worst: dict[str, float | None] = {}
    for tensor in dict.fromkeys(e.tensor for e in errors):
        mine = [e for e in errors if e.tensor == tensor]
        finite = all(e.finite for e in mine)
        worst[tensor] = max(e.max_rel or 0.0 for e in mine) if finite else None
    return {
        "regime": regime.name,
        "severity": regime.severity,
        "max_rel": worst,
        "breached": not all(e.within for e in errors),
    }


def _out_of_contract(regime: Regime, stage: str) -> ErrorRecord:
    return ErrorRecord(
        stage=stage,
        regime=regime.name,
        workload="*",
        tensor="*",
        scope="all",
        max_rel=None,
        rms_rel=None,
        finite=True,
        within=True,
        seed=0,
        out_of_contract=True,
    )
