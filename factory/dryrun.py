"""What a launch would do: the space, its counts and an estimate, without running anything."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from candidates import Parameter, Value
from factory.machine import cpu_count
from factory.plan import Plan
from factory.stages.emulate import gating_order

if TYPE_CHECKING:
    from leaderboard import Store

__all__ = ["combinations", "describe"]


def combinations(parameters: tuple[Parameter, ...]) -> int:
    """Schedules of a whole space, inactive parameters counted once."""

    def count(index: int, values: dict[str, Value]) -> int:
        if index == len(parameters):
            return 1
        p = parameters[index]
        if not p.active(values):
            return count(index + 1, values)
        return sum(count(index + 1, {**values, p.name: choice}) for choice in p.choices)

    return count(0, {})


def describe(plan: Plan, store: Store | None) -> dict[str, Any]:
    """The launch in numbers.

    Parameters
    ----------
    plan : Plan
    store : leaderboard.Store or None
        Earlier campaigns of the operation in it make the estimate.

    Returns
    -------
    dict
        ``name``, ``operation``, ``space``, ``clock``, ``stages``,
        ``combinations``, ``offered``, ``target``, ``infeasible``, ``cases``
        (regimes times reduced workloads), ``parameters`` (each with ``id``,
        ``choices``, ``offered`` counts by choice and ``doc``) and
        ``estimate_s`` (None if nothing was timed before).
    """
    used: dict[str, Counter[str]] = {p.name: Counter() for p in plan.family.parameters}
    for schedule in plan.offered:
        for name, value in schedule.items:
            used[name][str(value)] += 1
    return {
        "name": plan.config.name,
        "operation": plan.operation.name,
        "space": plan.config.space,
        "clock": plan.clock.value,
        "stages": list(plan.funnel.stages),
        "combinations": combinations(plan.family.parameters),
        "offered": len(plan.offered),
        "target": plan.target,
        "infeasible": sum(bool(plan.family.problems(s)) for s in plan.offered),
        "cases": len(gating_order(plan.operation)) * len(plan.operation.reduced()),
        "parameters": [
            {
                "id": p.name,
                "choices": list(p.choices),
                "offered": {str(c): used[p.name][str(c)] for c in p.choices},
                "doc": p.doc,
            }
            for p in plan.family.parameters
        ],
        "estimate_s": _estimate(plan, store),
    }


def _estimate(plan: Plan, store: Store | None) -> float | None:
    """Seconds, from the mean time of each stage in earlier campaigns of the operation."""
    if store is None:
        return None
    from leaderboard import funnel

    seconds: defaultdict[str, float] = defaultdict(float)
    entered: Counter[str] = Counter()
    for campaign in store.list_campaigns():
        if campaign.operation == plan.operation.name:
            for stage in funnel(store, campaign.id).stages:
                seconds[stage.stage] += stage.seconds
                entered[stage.stage] += stage.entered
    if not all(entered[stage] for stage in plan.funnel.stages):
        return None
    first = entered[plan.funnel.stages[0]]
    per_trial = [seconds[s] / first for s in plan.funnel.stages]
    cpu = [t for s, t in zip(plan.funnel.stages, per_trial, strict=True) if s in _SHARED]
    workers = plan.config.executor.workers or cpu_count()
    alone = math.fsum(per_trial) - math.fsum(cpu)
    return plan.target * (math.fsum(cpu) / workers + alone)


_SHARED = ("emulate", "compile")
"""Stages that run on all workers at once."""
