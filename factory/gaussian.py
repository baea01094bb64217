"""What a Gaussian process would try next.

Optuna's process models the parameters that all trials share, which in a conditional space are
few.  Here the space is laid out flat: a parameter that does not apply has the value
:data:`ABSENT`, so that every trial has every parameter.  The study is made anew from what is
known for each draw and forgotten after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from candidates import Parameter, Schedule, Value
from leaderboard.records import TrialStatus

if TYPE_CHECKING:
    from factory.search import Outcome

__all__ = ["ABSENT", "draw"]

ABSENT = "(absent)"
"""Value of a parameter where it does not apply."""

_STARTUP = 8
"""Trials that are drawn at random before a process is fitted."""


def draw(
    parameters: Sequence[Parameter],
    told: Sequence[Outcome],
    running: Sequence[Schedule],
    *,
    seed: int,
) -> dict[str, Value]:
    """Draw values of all parameters, :data:`ABSENT` left out.

    Parameters
    ----------
    parameters : sequence of Parameter
    told : sequence of Outcome
        Of what violates a constraint there is no time: it enters with the
        worst time that is known, and the constraint says by how much.
    running : sequence of Schedule
        Proposed and not told.
    seed : int

    Returns
    -------
    dict
        Not always a schedule: the process does not know which parameters
        apply beside which, it has only seen it.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {
        p.name: CategoricalDistribution((*p.choices, ABSENT) if p.active_when else p.choices)
        for p in parameters
    }
    timed = [math.log(o.score_us) for o in told if o.score_us is not None]
    sampler: optuna.samplers.BaseSampler
    if timed:
        sampler = optuna.samplers.GPSampler(
            seed=seed, n_startup_trials=_STARTUP, warn_independent_sampling=False
        )
    else:
        sampler = optuna.samplers.RandomSampler(seed=seed)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    fails = any(_fails(o) for o in told)
    for outcome in told if timed else ():
        if outcome.score_us is None and not _fails(outcome):
            continue  # slow, and by how much was not kept
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE,
                value=max(timed) if outcome.score_us is None else math.log(outcome.score_us),
                params=_flat(parameters, outcome.schedule.as_dict()),
                distributions=dict(space),
                constraints={"fails": outcome.violation if _fails(outcome) else 0.0}
                if fails
                else {},
            )
        )
    for schedule in running:
        study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=_flat(parameters, schedule.as_dict()),
                distributions=dict(space),
            )
        )
    trial = study.ask()
    drawn: dict[str, Value] = {}
    for name, distribution in space.items():
        value = trial.suggest_categorical(name, distribution.choices)
        assert isinstance(value, int | str)
        if value != ABSENT:
            drawn[name] = value
    return drawn


def _fails(outcome: Outcome) -> bool:
    return outcome.status not in (TrialStatus.PASSED, TrialStatus.SLOW)


def _flat(parameters: Sequence[Parameter], values: Mapping[str, Value]) -> dict[str, Value]:
    return {p.name: values.get(p.name, ABSENT) for p in parameters}
