"""Offered schedules of which some are left, laid out so that the nearest are found in one pass."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from candidates import Parameter, Schedule, Value

__all__ = ["Offer"]

_ABSENT = -1


class Offer:
    """A space's offered schedules, in their order; those that were taken are gone.

    Parameters
    ----------
    parameters : sequence of Parameter
    offered : sequence of Schedule
    """

    def __init__(self, parameters: Sequence[Parameter], offered: Sequence[Schedule]) -> None:
        self._numbers = [(p.name, {c: n for n, c in enumerate(p.choices)}) for p in parameters]
        self._all = tuple(dict.fromkeys(offered))
        self._place = {schedule: n for n, schedule in enumerate(self._all)}
        self._left = dict.fromkeys(self._all)
        """Of a large offer only what is left is looked at."""
        codes = [self._code(s.as_dict()) for s in self._all]
        # A row a knob: one pass is over all schedules, not over the few knobs of each.
        self._codes = np.array(codes, dtype=np.int32).T.copy()
        self._is_left = np.ones(len(self._all), dtype=bool)

    def __contains__(self, schedule: Schedule) -> bool:
        """Whether it is left."""
        return schedule in self._left

    def __len__(self) -> int:
        """How many are left."""
        return len(self._left)

    def __iter__(self) -> Iterator[Schedule]:
        """Those that are left, in the order of the offer."""
        return iter(self._left)

    def knows(self, schedule: Schedule) -> bool:
        """Whether it is offered at all."""
        return schedule in self._place

    def take(self, schedule: Schedule) -> None:
        """Count it as gone; one that is gone or not offered may be named."""
        if schedule in self._left:
            del self._left[schedule]
            self._is_left[self._place[schedule]] = False

    def nearest(
        self, values: Mapping[str, Value], count: int = 1, *, seed: int | None = None
    ) -> list[Schedule]:
        """Those that are left and differ from ``values`` in the fewest knobs, the nearest first.

        Parameters
        ----------
        values : mapping
            Need not be a schedule; a parameter that is absent differs from one that is not.
        count : int
            So many, or all that are left.
        seed : int, optional
            Of chance, which decides among those that are equally near; without it they
            come in the order of the offer.
        """
        wanted = np.array(self._code(values), dtype=np.int32)
        distance = (self._codes != wanted[:, np.newaxis]).sum(axis=0, dtype=np.int32)
        rng = None if seed is None else random.Random(seed)
        found: list[Schedule] = []
        for step in range(len(self._numbers) + 1):
            ring = np.flatnonzero(self._is_left & (distance == step)).tolist()
            wanting = min(len(ring), count - len(found))
            chosen = ring[:wanting] if rng is None else rng.sample(ring, wanting)
            found += [self._all[n] for n in chosen]
            if len(found) == count:
                break
        return found

    def _code(self, values: Mapping[str, Value]) -> list[int]:
        return [numbers[values[n]] if n in values else _ABSENT for n, numbers in self._numbers]
