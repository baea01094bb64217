"""Is the schedule's arithmetic right?  Its CPU emulation against the fp64 oracle.

Every gating regime within the candidate's declared gate bound, on reduced
workloads; the first breach decides.  Regimes past the bound are recorded as
out of contract and not run.  What is rejected is still walked through the
severity sweep where it broke, for whoever asks from which severity on it is wrong.
"""

from __future__ import annotations

import sys
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from candidates import BuildError, Family, Schedule
from factory.stages.base import HarnessError, StageResult
from leaderboard.records import ErrorRecord, StageStatus
from operations import Operation, Regime, TensorError, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["HasExponents", "References", "emulate", "gating_order", "within_bound"]


@runtime_checkable
class HasExponents(Protocol):
    """A family that splits exponentials and can say how large they got."""

    def largest_exponent(self, schedule: Schedule, inputs: Mapping[str, Any]) -> float:
        """Largest exponent among the factors that the schedule forms on these inputs."""


_LARGEST_EXPONENT = 88.0
"""fp32 and bf16 overflow above ``e**88.7``."""


@dataclass(frozen=True)
class _Reference:
    inputs: dict[str, Any]
    expected: dict[str, torch.Tensor]
    bytes_: int


class References:
    """Inputs and fp64 outputs of one operation, kept up to a byte limit.

    Keyed on (regime, workload); operation and seed are fixed for its lifetime,
    so one belongs to one worker of one campaign.

    Parameters
    ----------
    operation : Operation
    seed : int
    limit_bytes : int
        Least recently used entries go first.
    """

    def __init__(
        self, operation: Operation, *, seed: int, limit_bytes: int = 512 * 1024 * 1024
    ) -> None:
        self.operation = operation
        self.seed = seed
        self._limit = limit_bytes
        self._held = 0
        self._entries: OrderedDict[tuple[str, str], _Reference] = OrderedDict()

    def get(
        self, regime: Regime, workload: Workload
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Inputs and oracle outputs; both are shared and must not be written.

        Raises
        ------
        HarnessError
            The generator or the oracle failed: never the candidate's fault.
        """
        key = (regime.name, workload.name)
        entry = self._entries.get(key)
        if entry is None:
            try:
                inputs = self.operation.generate(workload, regime, seed=self.seed)
                expected = self.operation.fast_oracle(inputs)
            except Exception as error:
                raise HarnessError(
                    f"reference of {self.operation.name} failed on regime {regime.name}, "
                    f"workload {workload.name}: {type(error).__name__}: {error}"
                ) from error
            entry = _Reference(inputs, expected, _bytes(inputs) + _bytes(expected))
            self._entries[key] = entry
            self._held += entry.bytes_
            while self._held > self._limit and len(self._entries) > 1:
                self._held -= self._entries.popitem(last=False)[1].bytes_
        self._entries.move_to_end(key)
        return entry.inputs, entry.expected

    def drop(self, regime: Regime, workload: Workload) -> None:
        """Forget a reference that a candidate has written to."""
        entry = self._entries.pop((regime.name, workload.name), None)
        if entry is not None:
            self._held -= entry.bytes_


def _bytes(tensors: Mapping[str, Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values() if hasattr(t, "element_size"))


def within_bound(regime: Regime, bound: float | None) -> bool:
    """Whether a candidate with this declared gate bound has to be right in ``regime``."""
    return bound is None or regime.gate_floor >= bound


def gating_order(operation: Operation) -> tuple[Regime, ...]:
    """Gating regimes, those that reject soonest first.

    Production before all others, then by how steep the gates are: constant
    gates at the bound break what production breaks only in its tails.
    """
    return tuple(
        sorted(
            (r for r in operation.regimes.values() if r.gates),
            key=lambda r: (r.role != "production", r.gate_floor),
        )
    )


def emulate(family: Family, schedule: Schedule, references: References) -> StageResult:
    """Gate a schedule's CPU emulation in every regime of its contract.

    Parameters
    ----------
    family : Family
    schedule : Schedule
    references : References
        Inputs and oracle outputs, shared by the candidates of one worker.

    Returns
    -------
    StageResult
        ``rejected`` at the first breach, with regime, workload, tensor and
        numbers in the reason; ``crashed`` if the emulation raises.  ``errors``
        has one record for each output met, its worst slice where that is
        outside the tolerance; after a breach also those of the sweep's regimes
        that had not been met, on the workload of the breach.

    Raises
    ------
    HarnessError
        The reference cannot be computed, or memory ran out.
    """
    operation = references.operation
    bound = family.gate_bound(schedule)
    workloads = sorted(operation.reduced(), key=operation.floor_bytes)
    errors: list[ErrorRecord] = []
    met = 0
    worst = 0.0
    for regime in gating_order(operation):
        if not within_bound(regime, bound):
            errors.append(_out_of_contract(operation, regime, references.seed))
            continue
        for workload in workloads:
            inputs, expected = references.get(regime, workload)
            versions = _versions(inputs)
            try:
                outputs = family.emulate(schedule, inputs)
            except MemoryError as error:
                raise HarnessError(
                    f"out of memory emulating {schedule.key} on {workload.name}"
                ) from error
            except BuildError as error:
                return StageResult(StageStatus.INFEASIBLE, str(error), errors=tuple(errors))
            except Exception as error:  # noqa: BLE001 - candidate code: any error is its verdict
                traceback.print_exc(file=sys.stderr)
                reason = (
                    f"regime {regime.name}, workload {workload.name}: emulation raised "
                    f"{type(error).__name__}: {error}"
                )
                return StageResult(StageStatus.CRASHED, reason, errors=tuple(errors))
            where = f"regime {regime.name}, workload {workload.name}"
            changed = [name for name, v in _versions(inputs).items() if v != versions[name]]
            if changed:
                references.drop(regime, workload)
                reason = f"{where}: input {changed[0]} changed"
                return StageResult(StageStatus.REJECTED, reason, errors=tuple(errors))
            missing = [name for name in expected if name not in outputs]
            if missing:
                reason = f"{where}: output {missing[0]} is missing"
                return StageResult(StageStatus.REJECTED, reason, errors=tuple(errors))
            seen = worst_slices(operation.compare(outputs, expected, workload, regime))
            errors += [record(e, "emulate", regime, workload, references.seed) for e in seen]
            met += 1
            worst = max([worst, *(e.max_rel for e in seen)])
            breach = next((e for e in seen if not e.within), None)
            if breach is not None:
                reason = f"{where}: {describe(operation, regime, breach, outputs)}"
                if isinstance(family, HasExponents):
                    exponent = family.largest_exponent(schedule, inputs)
                    if exponent > _LARGEST_EXPONENT:
                        reason += f" (largest exponent {exponent:.0f} > {_LARGEST_EXPONENT:.0f})"
                errors += _sweep(
                    family, schedule, references, workload, met={e.regime for e in errors}
                )
                return StageResult(StageStatus.REJECTED, reason, errors=tuple(errors))
    return StageResult(
        StageStatus.PASSED,
        details={"cases": met, "worst_max_rel": worst, "gate_bound": bound},
        errors=tuple(errors),
    )


def _sweep(
    family: Family,
    schedule: Schedule,
    references: References,
    workload: Workload,
    *,
    met: set[str],
) -> list[ErrorRecord]:
    """Errors of a rejected schedule from mild gates to steep ones; they decide nothing."""
    operation = references.operation
    errors: list[ErrorRecord] = []
    for regime in operation.regimes.values():
        if regime.severity is None or regime.name in met:
            continue
        inputs, expected = references.get(regime, workload)
        try:
            # It is known to be wrong, and may be so in any way: what it writes to is a copy.
            copied = {k: v.clone() if hasattr(v, "clone") else v for k, v in inputs.items()}
            outputs = family.emulate(schedule, copied)
            seen = worst_slices(operation.compare(outputs, expected, workload, regime))
        except Exception:  # noqa: BLE001 - candidate code, and already rejected
            traceback.print_exc(file=sys.stderr)
            break
        errors += [record(e, "emulate", regime, workload, references.seed) for e in seen]
    return errors


def worst_slices(seen: tuple[TensorError, ...]) -> list[TensorError]:
    """One error for each output: all of it, or its worst slice where that is outside."""
    by_tensor: dict[str, list[TensorError]] = {}
    for error in seen:
        by_tensor.setdefault(error.tensor, []).append(error)
    chosen = []
    for slices in by_tensor.values():
        whole = next((e for e in slices if e.scope == "all"), slices[0])
        outside = [e for e in slices if not e.within]
        if whole.within and outside:
            chosen.append(max(outside, key=lambda e: (not e.finite, e.max_rel)))
        else:
            chosen.append(whole)
    return chosen


def describe(
    operation: Operation,
    regime: Regime,
    error: TensorError,
    outputs: Mapping[str, torch.Tensor],
) -> str:
    """A breach in words and numbers."""
    scope = "" if error.scope == "all" else f" of {error.scope}"
    if not error.finite:
        total = outputs[error.tensor].numel()
        counted = f" of {total}" if error.scope == "all" else ""
        return f"{error.tensor}{scope} has {error.nonfinite_count} non-finite{counted}"
    bound = (regime.tolerances or operation.tolerances)[error.tensor]
    if error.max_rel > bound.max_rel:
        return f"{error.tensor}{scope} max error {error.max_rel:.2e} > {bound.max_rel:.1e}"
    return f"{error.tensor}{scope} rms error {error.rms_rel:.2e} > {bound.rms_rel:.1e}"


def record(
    error: TensorError, stage: str, regime: Regime, workload: Workload, seed: int
) -> ErrorRecord:
    """The storable form of an error."""
    return ErrorRecord(
        stage=stage,
        regime=regime.name,
        workload=workload.name,
        tensor=error.tensor,
        scope=error.scope,
        max_rel=error.max_rel if error.finite else None,
        rms_rel=error.rms_rel if error.finite else None,
        finite=error.finite,
        within=error.within,
        seed=seed,
    )


def _out_of_contract(operation: Operation, regime: Regime, seed: int) -> ErrorRecord:
    output = next(t.name for t in operation.tensors if t.role == "output")
    return ErrorRecord(
        stage="emulate",
        regime=regime.name,
        workload="-",
        tensor=output,
        scope="all",
        max_rel=None,
        rms_rel=None,
        finite=False,
        within=False,
        seed=seed,
        out_of_contract=True,
    )


def _versions(inputs: Mapping[str, Any]) -> dict[str, int]:
    """In-place write counters of all input tensors."""
    return {name: t._version for name, t in inputs.items() if hasattr(t, "_version")}
