"""The gate's further questions: causality, and arguments that must be honoured.

What is asked is the operation's knowledge (:meth:`operations.Operation.probes`);
here it is run and judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from factory.device.bank import Bank, same_bytes
from factory.device.process import Child
from factory.device.protocol import Case, Run
from factory.device.verdicts import judge
from leaderboard.records import ErrorRecord
from operations import Operation, Probe, Regime, Region, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["Answer", "ask_probes", "largest_move"]


@dataclass
class Answer:
    """How a candidate answered the probes of one regime.

    Parameters
    ----------
    reason : str
        The first that it failed, with the number; empty if none.
    errors : list of ErrorRecord
        Of the probe that failed against the oracle.
    details : dict
        How many were asked, and by how much outputs moved that may move a
        little, over the bound's own unit.
    """

    reason: str = ""
    errors: list[ErrorRecord] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


def ask_probes(
    operation: Operation,
    bank: Bank,
    child: Child,
    workload: Workload,
    regime: Regime,
    *,
    limit_s: float,
    stage: str,
    thorough: bool,
) -> Answer:
    """Put the operation's probes to a loaded candidate, in one message.

    Parameters
    ----------
    thorough : bool
        Whether probes of another form are asked too.

    Raises
    ------
    ChildFailure, HarnessError
    """
    said = child.ready()
    strict = bool(said.get("bitwise_causal", False))
    known = bank.probes(workload, regime, said.get("chunk"))
    asked = [(p, e) for p, e in known if thorough or not p.other_form]
    answer = Answer(details={"asked": len(asked), "bitwise_causal": strict})
    if not asked:
        return answer
    with bank.scratch() as scratch:
        cases = [Case(e.draw.label, p.workload, (scratch.bound(e),)) for p, e in asked]
        bank.settle()
        child.ask(Run(tuple(cases)), limit_s)
        seen: dict[str, Mapping[str, torch.Tensor]] = {}
        moved = 0.0
        for (probe, entry), case in zip(asked, cases, strict=True):
            outputs = {n: bank.view(r) for n, r in case.sets[0].outputs.items()}
            seen[probe.name] = outputs
            changed = bank.altered(entry)
            judged = judge(operation, entry, outputs, stage)
            reason = judged.reason
            if changed is not None:
                reason = f"{case.label}: input changed: {changed}"
            elif not reason and probe.base is not None:
                move, objection = _against(probe, seen[probe.base], outputs, strict)
                moved = max(moved, move)
                reason = f"{case.label}: {objection}" if objection else ""
            if reason and not answer.reason:
                answer.reason, answer.errors = reason, judged.records
    answer.details["largest_move"] = moved
    return answer


def _against(
    probe: Probe,
    base: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    strict: bool,
) -> tuple[float, str]:
    """Largest move of what may move a little, and what is wrong with it or the rest."""
    for region in probe.same:
        for begin, end in region.rows:
            if not same_bytes(base[region.tensor][begin:end], outputs[region.tensor][begin:end]):
                return 0.0, (
                    f"{region.tensor}[{begin}:{end}] changed, which nothing before it"
                    " or in its own sequence did"
                )
    moved = max((largest_move(r, base, outputs) for r in probe.near), default=0.0)
    if strict and moved > 0.0:
        return moved, f"claims bitwise causality, but earlier rows moved by {moved:.2e}"
    if moved > probe.bound:
        return moved, (
            f"earlier rows of the same chunk moved by {moved:.2e} of their head's largest"
            f" (accepted {probe.bound:.0e})"
        )
    return moved, ""


def largest_move(
    region: Region, base: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> float:
    """Largest difference inside a region over the base's largest magnitude in the same head.

    Any difference counts as infinite in a head whose base is all zero.
    """
    import torch

    heads = base[region.tensor].shape[1:2].numel()
    old, new = (
        x[region.tensor].double().reshape(-1, heads, x[region.tensor].shape[2:].numel())
        for x in (base, outputs)
    )
    largest = old.abs().amax((0, 2))
    worst = 0.0
    for begin, end in region.rows:
        if begin < end:
            moved = (new[begin:end] - old[begin:end]).abs().amax((0, 2))
            share = torch.where(moved > 0, moved / largest, torch.zeros_like(moved))
            worst = max(worst, float(share.max()))
    return worst
