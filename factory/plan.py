"""What a launch is about to do, and whether it may continue what is stored.

Joins a configuration with its operation and family; compares it with a stored
campaign and names whatever changed.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import candidates
import operations
from candidates import Family, Schedule
from factory.config import CampaignConfig, changed_keys, with_defaults
from factory.errors import MachineError, UserError
from factory.funnel import Funnel
from factory.machine import installed, sm90_gpus
from factory.provenance import digest
from factory.stages.model import model
from leaderboard.records import CampaignRecord, CampaignStatus, Clock
from operations import Operation

__all__ = ["Plan", "choose_clock", "make_plan", "modelled_order", "refuse_changes"]


@dataclass(frozen=True)
class Plan:
    """A campaign that may be launched.

    Parameters
    ----------
    config : CampaignConfig
        With its clock and space decided.
    operation : Operation
    family : Family
    offered : tuple of Schedule
    clock : Clock
    funnel : Funnel
    """

    config: CampaignConfig
    operation: Operation
    family: Family
    offered: tuple[Schedule, ...]
    clock: Clock
    funnel: Funnel

    @property
    def target(self) -> int:
        """Finished trials at which the campaign is done."""
        return min(self.config.budget, len(self.offered))

    def first(self) -> tuple[Schedule, ...]:
        """The offered schedules that are proposed first: the fastest by the cost model."""
        return modelled_order(self.operation, self.family, self.offered)[: self.config.first]

    @property
    def space(self) -> dict[str, Any]:
        """Parameter name to its choices."""
        return {p.name: list(p.choices) for p in self.family.parameters}

    @property
    def space_hash(self) -> str:
        """sha256 over parameters, conditions and offered schedules."""
        parameters = [
            [p.name, list(p.choices), {k: list(v) for k, v in p.active_when.items()}]
            for p in self.family.parameters
        ]
        return digest([parameters, [s.key for s in self.offered]])

    def record(self) -> CampaignRecord:
        """A new campaign of this plan, with an id of its own."""
        now = datetime.now(UTC)
        slow = next((r.name for r in self.operation.regimes.values() if r.role == "slow"), None)
        return CampaignRecord(
            id=f"{self.config.name}-{now:%Y%m%d-%H%M%S}-{os.urandom(2).hex()}",
            name=self.config.name,
            operation=self.operation.name,
            operation_version=self.operation.version,
            family=self.family.name,
            source_hash=self.family.source_hash(),
            config=self.config.model_dump(),
            space_hash=self.space_hash,
            space=self.space,
            seed=self.config.seed,
            budget=self.target,
            status=CampaignStatus.RUNNING,
            clock=self.clock,
            workloads=tuple(w.name for w in self.operation.tuned()),
            ranking_regime=next(r.name for r in self.operation.regimes.values() if r.ranks),
            slow_regime=slow,
            created_at=now,
            updated_at=now,
        )


def choose_clock(asked: str | None, *, required: bool) -> Clock:
    """The clock that ranks on this machine.

    Parameters
    ----------
    asked : str or None
        None takes ``gpu`` where there is an sm90 GPU, else ``modelled``.
    required : bool
        Whether a measured clock needs a GPU here (a cluster has its own).

    Raises
    ------
    MachineError
        A measured clock was asked for and there is no sm90 GPU.
    """
    if asked == Clock.MODELLED.value:
        return Clock.MODELLED
    if not required or sm90_gpus():
        return Clock(asked or Clock.GPU)
    if asked is None:
        return Clock.MODELLED
    raise MachineError(
        f"clock {asked!r} needs an sm90 GPU and none is visible here; "
        "run on one, or leave out --clock to end at 'modelled'"
    )


def make_plan(config: CampaignConfig, *, need_gpu_here: bool = True) -> Plan:
    """Join a configuration with what it names.

    Raises
    ------
    UserError
        Unknown operation, space or control.
    MachineError
        A measured clock was asked for without a GPU.
    """
    try:
        operation = operations.get(config.operation)
        family = candidates.get(config.operation)
    except LookupError as error:
        raise UserError(str(error)) from error
    spaces = family.presets()
    space = config.space or spaces[0]
    if space not in spaces:
        near = difflib.get_close_matches(space, spaces, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choices: {', '.join(spaces)}"
        raise UserError(f"operation {operation.name!r} has no space {space!r}; {hint}")
    known = [baseline.name for baseline in candidates.baselines(operation.name)]
    for control in config.controls or ():
        if control not in known:
            near = difflib.get_close_matches(control, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
            raise UserError(f"operation {operation.name!r} has no baseline {control!r}; {hint}")
    if config.sampler == "gp" and installed("scipy") is None:
        raise UserError("sampler 'gp' needs scipy; pip install scipy, or choose 'tpe'")
    clock = choose_clock(config.clock, required=need_gpu_here)
    decided = config.model_copy(update={"space": space, "clock": clock.value})
    return Plan(
        config=decided,
        operation=operation,
        family=family,
        offered=family.offered(space),
        clock=clock,
        funnel=Funnel.of(clock, config.stop_after),
    )


def modelled_order(
    operation: Operation, family: Family, schedules: Sequence[Schedule]
) -> tuple[Schedule, ...]:
    """Schedules that break no budget, the fastest by the cost model first."""
    times = {
        s: model(operation, family, s).score_us or 0.0 for s in schedules if not family.problems(s)
    }
    return tuple(sorted(times, key=lambda s: times[s]))


def refuse_changes(plan: Plan, stored: CampaignRecord) -> None:
    """Stop a resume whose verdicts could not stand beside the stored ones.

    Raises
    ------
    UserError
        Names the parameter, the key or the version that changed.
    """
    fix = "launch it as another campaign with --name, or undo the change"
    here = f"cannot resume {stored.id}"
    changed = _changed_parameter(stored.space, plan.space)
    if changed:
        raise UserError(f"{here}: {changed}; {fix}")
    before = with_defaults(stored.config)
    keys = changed_keys(before, plan.config.model_dump())
    if keys:
        old, new = _at(before, keys[0]), _at(plan.config.model_dump(), keys[0])
        raise UserError(f"{here}: {keys[0]} was {old!r} and is now {new!r}; {fix}")
    if stored.space_hash != plan.space_hash:
        raise UserError(
            f"{here}: the schedules that space {plan.config.space!r} offers changed; {fix}"
        )
    if stored.operation_version != plan.operation.version:
        raise UserError(
            f"{here}: operation {stored.operation} was version {stored.operation_version} and "
            f"is now {plan.operation.version}; {fix}"
        )
    if stored.source_hash != plan.family.source_hash():
        raise UserError(f"{here}: the source of family {stored.family!r} changed; {fix}")


def _changed_parameter(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    for name in {**old, **new}:
        if name not in new:
            return f"parameter {name!r} is gone from the schedule space"
        if name not in old:
            return f"parameter {name!r} is new in the schedule space"
        if list(old[name]) != list(new[name]):
            return f"parameter {name!r} had choices {old[name]} and now has {new[name]}"
    return None


def _at(values: Mapping[str, Any], dotted: str) -> Any:
    found: Any = values
    for part in dotted.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
