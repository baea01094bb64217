"""What a bench saw, as rows: every time with its floor and its ratio, and geomeans of them.

Pure arithmetic on :class:`factory.bench.Benched`; it times nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from factory.bench import Benched
from factory.device.verdicts import geomean
from leaderboard import Contrast, Verdict, contrast
from leaderboard.records import Clock, MeasurementRecord

__all__ = ["Geomean", "Row", "geomeans", "rows"]


@dataclass(frozen=True)
class Row:
    """One time.

    Parameters
    ----------
    contestant, workload, regime, clock, cache, input_form : str
    us, low_us, high_us : float
        Median and its 95% interval.
    samples : int
    over_floor : float
        Median over the floor of the workload, of inputs of this form.
    held_to : str or None
        The contestant, one of ours, whose time ``against`` has over this one.
    against : Contrast or None
        Our time over this one, of the same workload, regime, clock and cache;
        None for ours itself, or where we have no time.
    kernels : tuple of str
        What was launched; of the ``gpu`` clock only.
    """

    contestant: str
    workload: str
    regime: str
    clock: str
    cache: str
    input_form: str
    us: float
    low_us: float
    high_us: float
    samples: int
    over_floor: float
    held_to: str | None
    against: Contrast | None
    kernels: tuple[str, ...]

    @property
    def beats_ours(self) -> bool:
        """Whether we lose this shape to it, beyond what samples can tell apart."""
        return self.against is not None and self.against.verdict is Verdict.SLOWER


@dataclass(frozen=True)
class Geomean:
    """A contestant over all shapes of the bench, on one regime, clock and cache.

    Parameters
    ----------
    us : float or None
        None where it has no time on some shape.
    held_to : str or None
        As in :class:`Row`.
    against : Contrast or None
        As in :class:`Row`, over the shapes that both were timed on.
    shapes : int
        How many those are; without ours, those that it was timed on.
    losses : tuple of str
        Shapes on which it is faster than ours.
    """

    contestant: str
    regime: str
    clock: str
    cache: str
    us: float | None
    held_to: str | None
    against: Contrast | None
    shapes: int
    losses: tuple[str, ...]


_Cell = tuple[str, str, str]
"""Regime, clock and cache."""


def _cell(m: MeasurementRecord) -> _Cell:
    return (m.regime, m.clock.value, m.cache)


def rows(found: Benched) -> tuple[Row, ...]:
    """Every time, by regime, clock and cache, then shape, then contestant."""
    made = []
    for c in found.contestants:
        ours = _samples(found, found.held_to(c))
        for m in found.measurements[c.id]:
            mine = ours.get(_cell(m), {}).get(m.workload)
            made.append(
                Row(
                    contestant=c.id,
                    workload=m.workload,
                    regime=m.regime,
                    clock=m.clock.value,
                    cache=m.cache,
                    input_form=m.input_form,
                    us=m.median_us,
                    low_us=m.low_us,
                    high_us=m.high_us,
                    samples=len(m.samples_us),
                    over_floor=m.median_us / found.floor.of(m.input_form)[m.workload],
                    held_to=found.held_to(c),
                    against=None if mine is None else contrast(mine, m.samples_us),
                    kernels=m.kernels,
                )
            )
    cells = list(dict.fromkeys((r.regime, r.clock, r.cache) for r in made))
    order = {cell: n for n, cell in enumerate(sorted(cells, key=lambda c: _place(found, c)))}
    return tuple(
        sorted(
            made,
            key=lambda r: (order[r.regime, r.clock, r.cache], found.workloads.index(r.workload)),
        )
    )


def _place(found: Benched, cell: _Cell) -> tuple[bool, int, bool]:
    regime, clock, cache = cell
    ranks = found.operation.regimes[regime].ranks
    return (not ranks, [c.value for c in Clock].index(clock), cache != "warm")


def _samples(found: Benched, contestant: str | None) -> dict[_Cell, dict[str, tuple[float, ...]]]:
    by_cell: dict[_Cell, dict[str, tuple[float, ...]]] = {}
    for m in found.measurements.get(contestant or "", ()):
        by_cell.setdefault(_cell(m), {})[m.workload] = m.samples_us
    return by_cell


def geomeans(found: Benched, times: Sequence[Row]) -> tuple[Geomean, ...]:
    """Each contestant over all shapes, in the order of ``times`` (:func:`rows`)."""
    made = []
    for cell in dict.fromkeys((r.regime, r.clock, r.cache) for r in times):
        for c in found.contestants:
            mine = [r for r in times if r.contestant == c.id and _of(r) == cell]
            if not mine:
                continue
            theirs = _samples(found, c.id)[cell]
            shared = _samples(found, found.held_to(c)).get(cell, {})
            both = [w for w in theirs if w in shared]
            made.append(
                Geomean(
                    contestant=c.id,
                    regime=cell[0],
                    clock=cell[1],
                    cache=cell[2],
                    us=geomean(r.us for r in mine) if len(mine) == len(found.workloads) else None,
                    held_to=found.held_to(c),
                    against=contrast({w: shared[w] for w in both}, {w: theirs[w] for w in both})
                    if both
                    else None,
                    shapes=len(both or mine),
                    losses=tuple(r.workload for r in mine if r.beats_ours),
                )
            )
    return tuple(made)


def _of(row: Row) -> _Cell:
    return (row.regime, row.clock, row.cache)
