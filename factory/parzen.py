"""What Optuna's tree-structured Parzen estimators would try next.

Optuna fits its estimators anew for each knob of each draw and looks at every trial of the study
for it, so that its cost grows with the campaign.  Here the study is a view: the best trials, a
sample of the others and the latest of those under way, which bounds what a draw costs however
long the campaign and however many its devices.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Container, Sequence
from itertools import islice

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from candidates import Parameter, Schedule, Value
from factory.search import Outcome
from leaderboard.records import TrialStatus

__all__ = ["BEST", "OTHERS", "RUNNING", "Parzen"]

BEST = 32
"""Finished trials that are always shown: Optuna takes a tenth of those that it sees, 13 of 128,
for the good ones, and these are to be the best of all."""
OTHERS = 96
"""Finished trials shown beside them, drawn anew each time: what is known to be bad early in a
campaign is known in the end."""
RUNNING = 32
"""Trials under way that are shown: the latest."""

_STARTUP = 8
"""Trials that are drawn at random before an estimator is fitted."""

_CONSTRAINT = {
    TrialStatus.INFEASIBLE: "budget",
    TrialStatus.REJECTED: "gate",
    TrialStatus.CRASHED: "runs",
    TrialStatus.TIMEOUT: "runs",
}
"""Constraint that a verdict violates, by its name in the study."""


class Parzen:
    """Estimators of what is fast and right, fed trial by trial.

    Parameters
    ----------
    parameters : sequence of Parameter
        Parents before children.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._parameters = tuple(parameters)
        self._spaces = {p.name: CategoricalDistribution(p.choices) for p in self._parameters}
        self._number = 0
        self._finished: list[tuple[tuple[int, float], int, FrozenTrial]] = []
        """With rank and number, the best first: kept in order, since sorting grows with them."""
        self._running: dict[Schedule, FrozenTrial] = {}
        self._view = _View()
        self._study = optuna.create_study(direction="minimize", storage=self._view)
        self._nobody = create_trial(state=TrialState.RUNNING)
        """For whom values are drawn: Optuna leaves the one who asks out of what it looks at."""

    @property
    def fitted(self) -> bool:
        """Whether a draw is more than chance."""
        return len(self._finished) >= _STARTUP

    def begin(self, schedule: Schedule) -> None:
        """A schedule is under way."""
        self._running[schedule] = self._frozen(schedule, TrialState.RUNNING)

    def end(self, outcome: Outcome) -> None:
        """A schedule that was under way is no longer; nothing is learnt of an abandoned one."""
        began = self._running.pop(outcome.schedule)
        if outcome.status is not TrialStatus.ABANDONED:
            self._enter(self._told(outcome, began.number))

    def learn(self, outcome: Outcome) -> None:
        """A trial ended elsewhere, or in an earlier launch."""
        self._enter(self._told(outcome))

    def shown(self, seed: int) -> list[FrozenTrial]:
        """What a draw with this seed looks at, in the order in which the trials began."""
        others = range(BEST, len(self._finished))
        chosen = random.Random(seed).sample(others, min(OTHERS, len(others)))
        finished = [*self._finished[:BEST], *(self._finished[n] for n in chosen)]
        latest = list(islice(reversed(self._running.values()), RUNNING))
        return [*sorted((t for _, _, t in finished), key=lambda t: t.number), *reversed(latest)]

    def draw(self, seed: int) -> dict[str, Value]:
        """Draw values of the active parameters, parents first."""
        sampler: BaseSampler
        if self.fitted:
            # Not multivariate: children of unchosen parents are absent from most
            # trials, and independent estimators use every trial that has the knob.
            # Optuna's own count of trials is kept from draw to draw: ours decides.
            sampler = TPESampler(
                seed=seed, n_startup_trials=0, constant_liar=True, multivariate=False
            )
            self._view.trials = self.shown(seed)
        else:
            sampler = RandomSampler(seed=seed)
        values: dict[str, Value] = {}
        for p in self._parameters:
            if p.active(values):
                space = self._spaces[p.name]
                chosen = sampler.sample_independent(self._study, self._nobody, p.name, space)
                assert isinstance(chosen, int | str)
                values[p.name] = chosen
        return values

    def _enter(self, trial: FrozenTrial) -> None:
        insort(self._finished, (_rank(trial), trial.number, trial))

    def _told(self, outcome: Outcome, number: int | None = None) -> FrozenTrial:
        passed = outcome.status is TrialStatus.PASSED
        violated = _CONSTRAINT.get(outcome.status)
        known = not passed and outcome.score_us is not None
        return self._frozen(
            outcome.schedule,
            TrialState.COMPLETE if passed else TrialState.PRUNED,
            number,
            value=_value(outcome) if passed else None,
            intermediate_values={0: _value(outcome)} if known else {},
            constraints={violated: outcome.violation} if violated else None,
        )

    def _frozen(
        self,
        schedule: Schedule,
        state: TrialState,
        number: int | None = None,
        *,
        value: float | None = None,
        intermediate_values: dict[int, float] | None = None,
        constraints: dict[str, float] | None = None,
    ) -> FrozenTrial:
        params = schedule.as_dict()
        trial = create_trial(
            state=state,
            value=value,
            params=params,
            distributions={name: self._spaces[name] for name in params},
            intermediate_values=intermediate_values,
            constraints=constraints,
        )
        if number is None:
            number, self._number = self._number, self._number + 1
        trial.number = number
        return trial


class _View(InMemoryStorage):
    """A study of the trials that it is given, and not of copies of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: list[FrozenTrial] = []

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        return [t for t in self.trials if states is None or t.state in states]


def _value(outcome: Outcome) -> float:
    """Logarithm of the score: a gain of a tenth counts the same at every size."""
    if outcome.score_us is None:
        raise ValueError(f"{outcome.schedule} passed without a score")
    return math.log(outcome.score_us)


def _rank(trial: FrozenTrial) -> tuple[int, float]:
    """Where Optuna would place it: timed ones by time, then slow ones, then by what is violated."""
    wrong = sum(trial.constraints.values())
    if wrong > 0:
        return 2, wrong
    if trial.state is TrialState.COMPLETE:
        assert trial.value is not None
        return 0, trial.value
    return 1, trial.intermediate_values.get(0, math.inf)
