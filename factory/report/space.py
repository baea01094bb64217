"""What the parameters of the space had to do with the time.

Plain statistics on a run's trials; draws nothing and knows nothing of the
operation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from leaderboard import LeaderboardRow, TrialRecord

__all__ = ["ABSENT", "Axis", "Importance", "Path", "Space", "describe_space"]

ABSENT = "-"
"""Stands for a parameter that a schedule does not have."""

_DRAWN, _FAILED = 300, 100
"""Lines of a drawing: more of them are one blot."""

_Item = TypeVar("_Item")

_FAST, _STRONG = 0.1, 30
"""Share of the trials that is drawn strong, and how many at most."""

_CHOICES = 12
"""Choices of a parameter that are listed."""


@dataclass(frozen=True)
class Importance:
    """How much of the spread of times one parameter explains alone."""

    name: str
    share: float
    """Of the variance of log time among the trials that have the parameter, adjusted for the
    number of choices; 0 to 1."""
    trials: int
    """How many have it."""
    means: tuple[tuple[str, float, int], ...]
    """Choice, geomean of its trials' times (or ratios), and how many they are; the first few."""


@dataclass(frozen=True)
class Axis:
    """One parameter and its choices, from bottom to top."""

    name: str
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Path:
    """One schedule through the axes."""

    id: int
    label: str
    choices: tuple[str, ...]
    value: float | None
    """Time or ratio; None for one that failed."""
    fast: bool
    status: str


@dataclass(frozen=True)
class Space:
    """A run's parameters."""

    importances: tuple[Importance, ...]
    """What explains most first."""
    axes: tuple[Axis, ...]
    paths: tuple[Path, ...]
    """Failed first, then from slow to fast, so that the fastest is drawn last."""
    left_out: int
    """Lines that were not drawn."""


def describe_space(
    rows: Sequence[LeaderboardRow],
    values: Mapping[int, float],
    trials: Sequence[TrialRecord],
    space: Mapping[str, Sequence[object]],
) -> Space | None:
    """Importances and lines of one run; None where no parameter has two choices.

    Parameters
    ----------
    rows : sequence of LeaderboardRow
        Best first.
    values : mapping
        Time, or ratio, by the trial's id.
    trials : sequence of TrialRecord
        Of the campaign; those that failed are drawn too.
    space : mapping
        Parameter to its choices, in order.
    """
    failed = [t for t in trials if t.status.finished and t.score_us is None]
    schedules = [r.schedule for r in rows] + [t.schedule for t in failed]
    axes = []
    for name in dict.fromkeys([*space, *(n for s in schedules for n in s)]):
        met = {_choice(s, name) for s in schedules}
        order = [str(c) for c in space.get(name, ())]
        known = [c for c in order if c in met]
        known += sorted(met - set(order) - {ABSENT})
        if len(met) > 1:
            axes.append(Axis(name, tuple([ABSENT] * (ABSENT in met) + known)))
    if not axes or not rows:
        return None
    importances = [_importance(axis.name, rows, values) for axis in axes]
    names = [a.name for a in axes]
    strong = min(max(1, round(len(rows) * _FAST)), _STRONG)
    shown = _spread(rows, _DRAWN, strong)
    lost = _spread(failed, _FAILED, 0)
    paths = [
        Path(t.id, t.schedule_key, _choices(t.schedule, names), None, False, t.status.value)
        for t in lost
    ]
    fast = {r.id for r in rows[:strong]}
    paths += [
        Path(
            r.id, r.schedule_key, _choices(r.schedule, names), values[r.id], r.id in fast, "passed"
        )
        for r in reversed(shown)
    ]
    return Space(
        tuple(sorted(importances, key=lambda i: (-i.share, -i.trials))),
        tuple(axes),
        tuple(paths),
        len(rows) + len(failed) - len(paths),
    )


def _choice(schedule: Mapping[str, object], name: str) -> str:
    return str(schedule.get(name, ABSENT))


def _choices(schedule: Mapping[str, object], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_choice(schedule, name) for name in names)


def _spread(items: Sequence[_Item], most: int, first: int) -> list[_Item]:
    """At most so many: the first ones, and evenly from the rest."""
    if len(items) <= most:
        return list(items)
    head, rest = items[: min(first, most // 2)], items[min(first, most // 2) :]
    want = most - len(head)
    return [*head, *(rest[i * len(rest) // want] for i in range(want))]


def _importance(
    name: str, rows: Sequence[LeaderboardRow], values: Mapping[int, float]
) -> Importance:
    """Epsilon squared: the share of variance between choices, less what chance gives it.

    Kelley, T. L. (1935), An unbiased correlation ratio measure, PNAS 21(9).
    """
    groups: dict[str, list[float]] = {}
    # Those that do not have it would make it explain what its parent does.
    for row in rows:
        if name in row.schedule:
            choice = _choice(row.schedule, name)
            groups.setdefault(choice, []).append(math.log(values[row.id]))
    if not groups:
        return Importance(name, 0.0, 0, ())
    every = [v for g in groups.values() for v in g]
    mean = statistics.fmean(every)
    total = math.fsum((v - mean) ** 2 for v in every)
    within = math.fsum(
        (v - m) ** 2 for g in groups.values() for m in [statistics.fmean(g)] for v in g
    )
    spare = len(every) - len(groups)
    share = 0.0
    if total > 0 and spare > 0:
        share = 1.0 - within / spare * (len(every) - 1) / total
    return Importance(
        name,
        min(max(share, 0.0), 1.0),
        len(every),
        tuple(
            (choice, math.exp(statistics.fmean(g)), len(g))
            for choice, g in sorted(groups.items(), key=lambda c: statistics.fmean(c[1]))[:_CHOICES]
        ),
    )
