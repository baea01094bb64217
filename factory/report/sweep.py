"""The severity sweep of a report: error by regime, from mild gates to steep ones.

Draws nothing; the severity of a regime is the operation's word.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leaderboard import CampaignRecord, TrialError, TrialRecord

if TYPE_CHECKING:
    from operations import Operation

__all__ = ["SweepLine", "sweep_axis", "sweep_lines"]

_SWEEP_BY = ("anchor", "bt")
"""What decides the rounding of a chunked kernel; a schedule without them goes by its first two."""


@dataclass(frozen=True)
class SweepLine:
    """Worst error of schedules that share their numerics, by regime from mild to steep."""

    first: str
    second: str
    points: tuple[tuple[int, float | None], ...]
    """Position in :attr:`Report.sweep_regimes`, and the error; None where not finite."""
    trials: int

    @property
    def label(self) -> str:
        return f"{self.first} {self.second}".strip()


def sweep_axis(
    campaign: CampaignRecord,
    operation: Operation | None,
    errors: Mapping[int, Sequence[TrialError]],
) -> list[tuple[str, str, float]]:
    """Regimes from mild to steep that some trial met: the sweep, then the ranking regime."""
    met = {e.regime for found in errors.values() for e in found}
    if operation is None:
        return []
    axis = [
        (r.name, f"{r.severity:g}", r.severity)
        for r in operation.regimes.values()
        if r.severity is not None and r.name in met
    ]
    axis.sort(key=lambda a: -a[2])
    ranking = operation.regimes.get(campaign.ranking_regime)
    if ranking is not None and ranking.name in met:
        axis.append((ranking.name, ranking.name, ranking.gate_floor))
    return axis


def sweep_lines(
    trials: Sequence[TrialRecord],
    errors: Mapping[int, Sequence[TrialError]],
    regimes: Sequence[str],
) -> tuple[SweepLine, ...]:
    place = {name: i for i, name in enumerate(regimes)}
    worst: dict[tuple[str, str], dict[int, float | None]] = defaultdict(dict)
    members: Counter[tuple[str, str]] = Counter()
    for trial in trials:
        cells = _swept(errors.get(trial.id, ()), place)
        if not cells:
            continue
        group = _numerics(trial.schedule)
        members[group] += 1
        for x, value in cells.items():
            worst[group][x] = _larger(worst[group].get(x, 0.0), value)
    return tuple(
        SweepLine(*group, tuple(sorted(worst[group].items())), members[group])
        for group in sorted(worst, key=_natural)
    )


def _swept(errors: Iterable[TrialError], place: Mapping[str, int]) -> dict[int, float | None]:
    """Worst error by regime; as the GPU gave it where the gate ran, else as emulated."""
    found: dict[int, dict[str, float | None]] = defaultdict(dict)
    for e in errors:
        if e.regime in place and e.stage in ("gate", "emulate"):
            cell = found[place[e.regime]]
            cell[e.stage] = _larger(cell.get(e.stage, 0.0), e.max_rel if e.finite else None)
    return {x: cell["gate"] if "gate" in cell else cell["emulate"] for x, cell in found.items()}


def _larger(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else max(a, b)


def _numerics(schedule: Mapping[str, int | str]) -> tuple[str, str]:
    named = [n for n in _SWEEP_BY if n in schedule] or list(schedule)[:2]
    words = [f"{n}={schedule[n]}" for n in named]
    return (words[0] if words else "all", words[1] if len(words) > 1 else "")


def _natural(words: tuple[str, str]) -> list[tuple[int, str]]:
    return [
        (int(p), "") if p.isdecimal() else (-1, p) for w in words for p in re.split(r"(\d+)", w)
    ]
