"""Which schedule next?  Optuna, asked and told.

What the sampler knows lives in memory and is a function of what the leaderboard
holds: it is rebuilt on start and every proposal's seed depends only on the
campaign's seed and the number of proposals before it.  Only offered schedules
are ever proposed, none of them twice.

========  =====================================================  ======================
sampler   good for                                               trials under way
========  =====================================================  ======================
tpe       the default: conditional spaces, many wrong            up to a twentieth of
          schedules; milliseconds a proposal, fewer with many    the offer
          under way
gp        small budgets of slow trials; some tenths of a second  up to about 4
          a proposal, more with every trial
random    the yardstick: evenly from what is untried             any number
grid      trying all of it, in the order of the offer            any number
========  =====================================================  ======================

What they needed on recordings is in docs/search.md.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from candidates import Parameter, Schedule
from factory.offer import Offer
from leaderboard.records import ErrorRecord, StageStatus, TrialRecord, TrialStatus

if TYPE_CHECKING:
    from factory.parzen import Parzen

__all__ = ["SAMPLERS", "Outcome", "SamplerName", "Search", "outcome_of", "violation"]

SamplerName = Literal["tpe", "gp", "random", "grid"]

SAMPLERS: tuple[SamplerName, ...] = ("tpe", "gp", "random", "grid")

_UNDER_WAY = 64
"""Trials under way up to which `tpe` draws for each proposal; for each so many more at once a draw
serves one proposal more.  What is under way delays what is learnt far more than that does."""


@dataclass(frozen=True)
class Outcome:
    """What became of a schedule, as the sampler may know it.

    Parameters
    ----------
    schedule : Schedule
    status : TrialStatus
        ``passed`` is a value, ``slow`` a pruned value; wrong, infeasible,
        crashed and timed out violate a constraint; ``abandoned`` is a failure
        of the infrastructure, from which nothing is learnt.
    score_us : float or None
        Geomean in microseconds; the estimate of the screen for ``slow``.
    violation : float
        How badly the constraint is violated, above 0; of no meaning for a
        status that violates none.  See :func:`violation`.
    """

    schedule: Schedule
    status: TrialStatus
    score_us: float | None = None
    violation: float = 1.0


def violation(errors: Iterable[ErrorRecord]) -> float:
    """How badly a wrong schedule is wrong: from 1 (hardly) to 2 (by all of it, or not finite).

    Parameters
    ----------
    errors : iterable of ErrorRecord
        Those within their tolerance do not count; 1 if none is beyond.
    """
    worst = 0.0
    for error in errors:
        if error.within or error.out_of_contract:
            continue
        if error.max_rel is None or not error.finite:
            return 2.0
        worst = max(worst, error.max_rel)
    return 1.0 + min(worst, 1.0)


def outcome_of(trial: TrialRecord, schedule: Schedule) -> Outcome:
    """A stored trial, with its stages and errors, as the sampler may know it."""
    score = trial.score_us
    if trial.status is TrialStatus.SLOW:
        screens = [s for s in trial.stages if s.status is StageStatus.SLOW]
        score = screens[-1].details.get("estimate_us") if screens else None
    return Outcome(schedule, trial.status, score, violation(trial.errors))


class Search:
    """Ask and tell over the offered schedules of a space.

    Parameters
    ----------
    parameters : sequence of Parameter
        Parents before children.
    offered : sequence of Schedule
        The only schedules that may be proposed.
    sampler : {"tpe", "gp", "random", "grid"}
        ``random`` draws evenly from what is untried; ``grid`` is the order of
        ``offered``.
    seed : int
    first : sequence of Schedule
        Proposed before the sampler is asked, in this order.
    prior : iterable of Outcome
        Trials of other campaigns: the sampler learns from them, and their
        schedules may be proposed all the same.
    history : iterable of Outcome
        Trials of this campaign that are finished already; abandoned ones may
        be left out.

    Raises
    ------
    ValueError
        One of ``first`` is not offered.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        offered: Sequence[Schedule],
        *,
        sampler: SamplerName = "tpe",
        seed: int = 0,
        first: Sequence[Schedule] = (),
        prior: Iterable[Outcome] = (),
        history: Iterable[Outcome] = (),
    ) -> None:
        self._parameters = tuple(parameters)
        self._offer = Offer(self._parameters, offered)
        self._sampler: SamplerName = sampler
        self._seed = seed
        self._first = tuple(first)
        for schedule in self._first:
            if schedule not in self._offer:
                raise ValueError(f"{schedule} is not offered")
        self._open: dict[Schedule, None] = {}
        """Schedules under way, in the order of their proposals."""
        self._most_open = 1
        """That were under way at once.  Fewer are when a driver is late: it is not to draw more."""
        self._parzen = _new_parzen(self._parameters) if sampler == "tpe" else None
        self._ahead: deque[Schedule] = deque()
        """Proposals that a draw for several has left."""
        self._told: list[Outcome] = []
        self._proposals = 0
        for outcome in prior:
            if outcome.status is not TrialStatus.ABANDONED:
                self._learn(outcome)
        for outcome in history:
            self._restore(outcome)

    @property
    def untried(self) -> tuple[Schedule, ...]:
        """Offered schedules that were never proposed, in the order of the offer."""
        return tuple(self._offer)

    def ask(self) -> Schedule | None:
        """Propose an untried offered schedule; None when there is none left."""
        if not self._offer:
            return None
        for schedule in self._first:
            if schedule in self._offer:
                return self._take(schedule)
        if self._sampler == "gp":
            return self._take(self._ask_gp())
        if self._sampler == "random":
            return self._take(random.Random(self._draw_seed()).choice(self.untried))
        if self._parzen is None:
            return self._take(next(iter(self._offer)))
        while self._ahead:
            if (schedule := self._ahead.popleft()) in self._offer:
                return self._take(schedule)
        seed = self._draw_seed()
        # As long as a draw is chance, neighbours of one place would be a poor beginning; and in
        # the order of the offer those that are equally near would lie to one side of it.
        served = math.ceil(self._most_open / _UNDER_WAY) if self._parzen.fitted else 1
        self._ahead.extend(self._offer.nearest(self._parzen.draw(seed), served, seed=seed))
        return self._take(self._ahead.popleft())

    def _ask_gp(self) -> Schedule:
        from factory.gaussian import draw

        running = tuple(self._open)
        wanted = draw(self._parameters, self._told, running, seed=self._draw_seed())
        return self._offer.nearest(wanted)[0]

    def take(self, schedule: Schedule) -> None:
        """Count a schedule as proposed without asking the sampler, for example to run it again.

        Raises
        ------
        ValueError
            It is not offered, or was proposed before.
        """
        if not self._offer.knows(schedule):
            raise ValueError(f"{schedule} is not offered")
        if schedule not in self._offer:
            raise ValueError(f"{schedule} was proposed before")
        self._take(schedule)

    def tell(self, outcome: Outcome) -> None:
        """Report what became of a proposed schedule.

        Raises
        ------
        ValueError
            It was not proposed, or told before.
        """
        if outcome.schedule in self._offer or not self._offer.knows(outcome.schedule):
            raise ValueError(f"{outcome.schedule} was never proposed")
        if outcome.schedule not in self._open:
            raise ValueError(f"{outcome.schedule} was told before")
        del self._open[outcome.schedule]
        if self._parzen is not None:
            self._parzen.end(outcome)
        elif outcome.status is not TrialStatus.ABANDONED:
            self._told.append(outcome)

    def _take(self, schedule: Schedule) -> Schedule:
        """Count a proposal."""
        self._offer.take(schedule)
        self._proposals += 1
        self._open[schedule] = None
        self._most_open = max(self._most_open, len(self._open))
        if self._parzen is not None:
            self._parzen.begin(schedule)
        return schedule

    def _draw_seed(self) -> int:
        text = f"{self._seed}:{self._proposals}:0"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def _restore(self, outcome: Outcome) -> None:
        if outcome.status is TrialStatus.ABANDONED:
            return
        self._offer.take(outcome.schedule)
        self._proposals += 1
        self._learn(outcome)

    def _learn(self, outcome: Outcome) -> None:
        """Enter a trial that ended elsewhere, or in an earlier launch."""
        if self._parzen is None:
            self._told.append(outcome)
        else:
            self._parzen.learn(outcome)


def _new_parzen(parameters: Sequence[Parameter]) -> Parzen:
    from factory.parzen import Parzen

    return Parzen(parameters)
