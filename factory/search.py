"""Which schedule next?  Optuna, asked and told.

The study lives in memory and is a function of what the leaderboard holds: it
is rebuilt on start and every proposal's seed depends only on the campaign's
seed and the number of proposals before it.  Only offered schedules are ever
proposed, none of them twice.

========  =====================================================  ======================
sampler   good for                                               trials under way
========  =====================================================  ======================
tpe       the default: conditional spaces, many wrong            up to a twentieth of
          schedules; milliseconds a proposal, more with every    the offer
          trial: for campaigns of hundreds
gp        small budgets of slow trials; some tenths of a second  up to about 4
          a proposal, more with every trial
random    the yardstick: evenly from what is untried             any number
grid      trying all of it, in the order of the offer            any number
========  =====================================================  ======================

What they needed on recordings is in docs/campaigns.md.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from candidates import Parameter, Schedule, Value
from leaderboard.records import ErrorRecord, StageStatus, TrialRecord, TrialStatus

if TYPE_CHECKING:
    import optuna

__all__ = ["SAMPLERS", "Outcome", "SamplerName", "Search", "outcome_of", "violation"]

SamplerName = Literal["tpe", "gp", "random", "grid"]

SAMPLERS: tuple[SamplerName, ...] = ("tpe", "gp", "random", "grid")

_ATTEMPTS = 8
"""Draws from the sampler before the nearest untried schedule is taken instead."""
_LOOKS = 512
"""Trials that all draws for one proposal may look at: each draw looks at every one, so that a
large study gets fewer, and the nearest untried schedule stands in for them."""

_CONSTRAINT = {
    TrialStatus.INFEASIBLE: "budget",
    TrialStatus.REJECTED: "gate",
    TrialStatus.CRASHED: "runs",
    TrialStatus.TIMEOUT: "runs",
}
"""Constraint that a verdict violates, by its name in the study."""


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
        self._offered = tuple(dict.fromkeys(offered))
        self._sampler: SamplerName = sampler
        self._seed = seed
        self._untried = dict.fromkeys(self._offered)
        """In the order of the offer; of a large one only what is left is looked at."""
        self._first = tuple(first)
        for schedule in self._first:
            if schedule not in self._untried:
                raise ValueError(f"{schedule} is not offered")
        self._known = frozenset(self._offered)
        # Schedules under way; with their trial where the study is kept from ask to ask.
        self._open: dict[Schedule, optuna.trial.Trial | None] = {}
        self._study = _new_study() if sampler == "tpe" else None
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
        return tuple(self._untried)

    def ask(self) -> Schedule | None:
        """Propose an untried offered schedule; None when there is none left."""
        if not self._untried:
            return None
        for schedule in self._first:
            if schedule in self._untried:
                return self._take(schedule)
        if self._sampler == "gp":
            return self._take(self._ask_gp(self.untried))
        if self._sampler == "random":
            return self._take(random.Random(self._draw_seed(0)).choice(self.untried))
        if self._study is None:
            return self._take(next(iter(self._untried)))
        last: dict[str, Value] = {}
        for attempt in range(min(_ATTEMPTS, max(1, _LOOKS // max(1, self._proposals)))):
            self._study.sampler = self._new_sampler(attempt)
            trial = self._study.ask()
            last = self._suggest(trial)
            schedule = Schedule.of(self._parameters, last)
            if schedule in self._untried:
                return self._take(schedule, trial)
            self._forget(trial)
        return self._take(min(self._untried, key=lambda s: _distance(s, last)))

    def _ask_gp(self, untried: Sequence[Schedule]) -> Schedule:
        from factory.gaussian import draw

        wanted = draw(self._parameters, self._told, tuple(self._open), seed=self._draw_seed(0))
        return min(untried, key=lambda s: _distance(s, wanted))

    def take(self, schedule: Schedule) -> None:
        """Count a schedule as proposed without asking the sampler, for example to run it again.

        Raises
        ------
        ValueError
            It is not offered, or was proposed before.
        """
        if schedule not in self._known:
            raise ValueError(f"{schedule} is not offered")
        if schedule not in self._untried:
            raise ValueError(f"{schedule} was proposed before")
        self._take(schedule)

    def tell(self, outcome: Outcome) -> None:
        """Report what became of a proposed schedule.

        Raises
        ------
        ValueError
            It was not proposed, or told before.
        """
        if outcome.schedule in self._untried or outcome.schedule not in self._known:
            raise ValueError(f"{outcome.schedule} was never proposed")
        if outcome.schedule not in self._open:
            raise ValueError(f"{outcome.schedule} was told before")
        trial = self._open.pop(outcome.schedule)
        if outcome.status is not TrialStatus.ABANDONED and self._study is None:
            self._told.append(outcome)
        if trial is None or self._study is None:
            return
        from optuna.trial import TrialState

        if outcome.status is TrialStatus.ABANDONED:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        for name, value in _constraints(outcome).items():
            trial.set_constraint(name, value)
        if outcome.status is TrialStatus.PASSED:
            self._study.tell(trial, _value(outcome))
            return
        if outcome.score_us is not None:
            trial.report(math.log(outcome.score_us), step=0)
        self._study.tell(trial, state=TrialState.PRUNED)

    def _take(self, schedule: Schedule, trial: optuna.trial.Trial | None = None) -> Schedule:
        """Count a proposal; without the sampler's own trial of it the study is given one."""
        self._untried.pop(schedule, None)
        self._proposals += 1
        if trial is None and self._study is not None:
            self._study.enqueue_trial(schedule.as_dict())
            trial = self._study.ask()
            self._suggest(trial)
        self._open[schedule] = trial
        return schedule

    def _suggest(self, trial: optuna.trial.Trial) -> dict[str, Value]:
        """Draw the active parameters only, parents first."""
        values: dict[str, Value] = {}
        for p in self._parameters:
            if p.active(values):
                chosen = trial.suggest_categorical(p.name, p.choices)
                assert isinstance(chosen, int | str)
                values[p.name] = chosen
        return values

    def _forget(self, trial: optuna.trial.Trial) -> None:
        """End a draw that is never run, so that the sampler learns nothing from it."""
        from optuna.trial import TrialState

        assert self._study is not None
        self._study.tell(trial, state=TrialState.FAIL)

    def _new_sampler(self, attempt: int) -> optuna.samplers.BaseSampler:
        from optuna.samplers import TPESampler

        seed = self._draw_seed(attempt)
        # Not multivariate: children of unchosen parents are absent from most
        # trials, and independent estimators use every trial that has the knob.
        return TPESampler(seed=seed, n_startup_trials=8, constant_liar=True, multivariate=False)

    def _draw_seed(self, attempt: int) -> int:
        text = f"{self._seed}:{self._proposals}:{attempt}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def _restore(self, outcome: Outcome) -> None:
        if outcome.status is TrialStatus.ABANDONED:
            return
        self._untried.pop(outcome.schedule, None)
        self._proposals += 1
        self._learn(outcome)

    def _learn(self, outcome: Outcome) -> None:
        """Enter a trial that ended elsewhere, or in an earlier launch."""
        if self._study is None:
            self._told.append(outcome)
            return
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import TrialState, create_trial

        choices = {p.name: p.choices for p in self._parameters}
        passed = outcome.status is TrialStatus.PASSED
        known = not passed and outcome.score_us is not None
        self._study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if passed else TrialState.PRUNED,
                value=_value(outcome) if passed else None,
                params=outcome.schedule.as_dict(),
                distributions={
                    name: CategoricalDistribution(choices[name])
                    for name in outcome.schedule.as_dict()
                },
                intermediate_values={0: _value(outcome)} if known else {},
                constraints=_constraints(outcome),
            )
        )


def _new_study() -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="minimize")


def _value(outcome: Outcome) -> float:
    """Logarithm of the score: a gain of a tenth counts the same at every size."""
    if outcome.score_us is None:
        raise ValueError(f"{outcome.schedule} passed without a score")
    return math.log(outcome.score_us)


def _constraints(outcome: Outcome) -> dict[str, float]:
    violated = _CONSTRAINT.get(outcome.status)
    return {
        name: outcome.violation if name == violated else 0.0 for name in ("budget", "gate", "runs")
    }


def _distance(schedule: Schedule, values: Mapping[str, Value]) -> int:
    """Knobs in which a schedule differs from ``values``."""
    own = schedule.as_dict()
    return sum(own.get(name) != values.get(name) for name in {*own, *values})
