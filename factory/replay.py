"""A search against a recorded campaign: what a sampler would have needed, with no GPU.

A recording answers each proposal with the verdict and the time that were recorded.  Its best is
the best recorded; only where it is exhaustive is that the best there is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from candidates import Family, Parameter, Schedule
from factory.errors import UserError
from factory.executors.base import DEVICE_STAGES
from factory.plan import modelled_order
from factory.search import Outcome, SamplerName, Search, outcome_of
from leaderboard.records import CampaignRecord, Clock, TrialRecord, TrialStatus

if TYPE_CHECKING:
    from leaderboard import LeaderboardRow, Store

__all__ = ["Recording", "Replay", "Run", "load_recording", "replay", "run_once"]


@dataclass(frozen=True)
class Recording:
    """What is known of each schedule.

    Parameters
    ----------
    campaigns : tuple of str
        Ids of the campaigns it was made of.
    parameters : tuple of Parameter
    outcomes : Mapping of Schedule to Outcome
        In the order in which the family offers them, the rest after it.
    measured : frozenset of Schedule
        Those that met the GPU: neither emulation nor compilation had stopped them.
    modelled : tuple of Schedule
        In the order of the cost model, fastest first.
    whole : int
        Schedules that the family offers under any name; 0 where that is not known.
    missing : int
        Those of them without an outcome.
    clock : Clock
        Of the scores.
    """

    campaigns: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    outcomes: Mapping[Schedule, Outcome]
    measured: frozenset[Schedule]
    modelled: tuple[Schedule, ...]
    whole: int
    missing: int
    clock: Clock

    @property
    def offered(self) -> tuple[Schedule, ...]:
        """Recorded schedules."""
        return tuple(self.outcomes)

    @property
    def ranked(self) -> tuple[Outcome, ...]:
        """Passed ones, fastest first."""
        passed = [o for o in self.outcomes.values() if o.status is TrialStatus.PASSED]
        return tuple(sorted(passed, key=lambda o: (_score(o), o.schedule)))

    @property
    def best_us(self) -> float:
        """Fastest recorded score, in microseconds."""
        return _score(self.ranked[0])

    @property
    def exhaustive(self) -> bool:
        """Whether everything that the family offers has an outcome."""
        return self.whole > 0 and self.missing == 0

    @property
    def top_by_model(self) -> tuple[int, ...]:
        """Place of each of the five fastest in the order of the cost model, from 1."""
        place = {s: i for i, s in enumerate(self.modelled, 1)}
        return tuple(place[o.schedule] for o in self.ranked[:5] if o.schedule in place)


@dataclass(frozen=True)
class Run:
    """One search against a recording.

    Parameters
    ----------
    seed : int
    needed : int or None
        Trials until a score was near enough to the best; None if it never was.
    measured : int
        How many of these trials met the GPU.
    best_us : tuple of float
        Best score after each trial, in microseconds; infinite before the first
        that passed.
    """

    seed: int
    needed: int | None
    measured: int
    best_us: tuple[float, ...]


@dataclass(frozen=True)
class Replay:
    """All runs of one sampler.

    Parameters
    ----------
    sampler : str
    first : int
        Proposals by the cost model before the sampler's own.
    batch : int
        Trials under way at the same time.
    space : int
        Recorded schedules.
    runs : tuple of Run
    """

    sampler: SamplerName
    first: int
    batch: int
    space: int
    runs: tuple[Run, ...]

    @property
    def needed(self) -> float:
        """Median of trials needed; a run that never got there counts as infinite."""
        return median(self._needed)

    @property
    def measured(self) -> float:
        """Median of the GPU trials among them."""
        return median(r.measured for r in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """Fewest and most trials needed."""
        return min(self._needed), max(self._needed)

    @property
    def share(self) -> float:
        """Median of trials needed, over the recorded schedules."""
        return self.needed / self.space

    @property
    def _needed(self) -> list[float]:
        return [math.inf if r.needed is None else float(r.needed) for r in self.runs]


def load_recording(store: Store, family: Family, campaigns: Sequence[CampaignRecord]) -> Recording:
    """Join campaigns, or one, to a recording.

    Times of one job stand as they are.  Times of several jobs are each taken
    over the same control of their own job, and given in the microseconds of
    the first.

    Parameters
    ----------
    store : leaderboard.Store
    family : Family
        Of the operation; knows which parameters apply, and models.
    campaigns : sequence of CampaignRecord
        On one operation and version, source and clock.  Of a schedule that
        several have tried the first that timed it counts, else the first.

    Raises
    ------
    UserError
        They do not belong together, nothing in them ranks, a schedule is not of this
        family, or their jobs share no control.
    """
    import operations

    first = campaigns[0]
    for field in ("operation", "operation_version", "source_hash", "clock", "workloads"):
        for other in campaigns[1:]:
            if getattr(other, field) != getattr(first, field):
                raise UserError(
                    f"{first.id} and {other.id} differ in {field}: replay them one at a time"
                )
    rows = _rows(store, campaigns)
    scores = _scores(rows)
    trials = [t for c in campaigns for t in store.load_trials(c.id) if t.status.finished]
    outcomes: dict[Schedule, Outcome] = {}
    measured: set[Schedule] = set()
    for trial in sorted(trials, key=lambda t: t.id not in scores):
        passed = trial.status is TrialStatus.PASSED
        if passed and trial.id not in scores:
            continue  # of a job that does not rank
        schedule = _schedule(family, trial)
        if schedule in outcomes:
            continue
        outcome = outcome_of(trial, schedule)
        outcomes[schedule] = (
            Outcome(schedule, trial.status, scores[trial.id]) if passed else outcome
        )
        if any(s.stage in DEVICE_STAGES for s in trial.stages):
            measured.add(schedule)
    whole = dict.fromkeys(s for name in family.presets() for s in family.offered(name))
    order = [*(s for s in whole if s in outcomes), *(s for s in outcomes if s not in whole)]
    return Recording(
        campaigns=tuple(c.id for c in campaigns),
        parameters=family.parameters,
        outcomes={s: outcomes[s] for s in order},
        measured=frozenset(measured),
        modelled=modelled_order(operations.get(first.operation), family, order),
        whole=len(whole),
        missing=sum(s not in outcomes for s in whole),
        clock=first.clock,
    )


def run_once(
    recording: Recording,
    *,
    sampler: SamplerName,
    seed: int,
    first: int = 0,
    batch: int = 1,
    within: float = 0.03,
    limit: int | None = None,
) -> Run:
    """One search, until a score is near enough to the best or all is tried.

    Parameters
    ----------
    recording : Recording
    sampler : {"tpe", "gp", "random", "grid"}
    seed : int
    first : int
        Proposals by the cost model before the sampler's own.
    batch : int
        Trials under way at the same time: the sampler is told of a trial after it
        has proposed ``batch - 1`` more.
    within : float
        Near enough is at most this much above the best, relative.
    limit : int, optional
        Trials after which it gives up.
    """
    search = Search(
        recording.parameters,
        recording.offered,
        sampler=sampler,
        seed=seed,
        first=recording.modelled[:first],
    )
    enough = recording.best_us * (1 + within)
    under_way: deque[Schedule] = deque()
    best = math.inf
    course: list[float] = []
    measured = 0
    while limit is None or len(course) < limit:
        while len(under_way) < batch and (proposed := search.ask()) is not None:
            under_way.append(proposed)
        if not under_way:
            break
        schedule = under_way.popleft()
        outcome = recording.outcomes[schedule]
        search.tell(outcome)
        measured += schedule in recording.measured
        if outcome.status is TrialStatus.PASSED:
            best = min(best, _score(outcome))
        course.append(best)
        if best <= enough:
            return Run(seed, len(course), measured, tuple(course))
    return Run(seed, None, measured, tuple(course))


def replay(
    recording: Recording,
    *,
    sampler: SamplerName,
    seeds: Sequence[int] = range(20),
    first: int = 0,
    batch: int = 1,
    within: float = 0.03,
    limit: int | None = None,
) -> Replay:
    """Many searches with one sampler, each with a seed of its own; see :func:`run_once`."""
    runs = [
        run_once(
            recording,
            sampler=sampler,
            seed=seed,
            first=first,
            batch=batch,
            within=within,
            limit=limit,
        )
        for seed in seeds
    ]
    return Replay(sampler, first, batch, len(recording.outcomes), tuple(runs))


def _score(outcome: Outcome) -> float:
    assert outcome.score_us is not None
    return outcome.score_us


def _schedule(family: Family, trial: TrialRecord) -> Schedule:
    try:
        return family.schedule(trial.schedule)
    except ValueError as error:
        raise UserError(
            f"trial {trial.id} was recorded with another schedule space: {error}; "
            "replay it with the version that recorded it"
        ) from error


def _rows(store: Store, campaigns: Sequence[CampaignRecord]) -> list[LeaderboardRow]:
    """Ranked trials, each beside the same control where there is one."""
    from leaderboard import ranked

    rows: list[LeaderboardRow] = []
    control = None
    for campaign in campaigns:
        found = ranked(store, campaign_id=campaign.id, clock=campaign.clock, control=control)
        control = control or next((r.control for r in found if r.control), None)
        rows += found
    if not rows:
        named = ", ".join(c.id for c in campaigns)
        raise UserError(f"nothing to replay: no trial of {named} ranks; see factory leaderboard")
    return rows


def _scores(rows: Sequence[LeaderboardRow]) -> dict[int, float]:
    """Scores in the microseconds of the first row's job, by trial."""
    jobs = {row.job_id for row in rows}
    if len(jobs) == 1 or rows[0].clock is Clock.MODELLED:
        return {row.id: row.score_us for row in rows}
    kinds = {(row.control, row.control_form, row.gpu) for row in rows}
    scale = rows[0].control_us
    if len(kinds) > 1 or scale is None:
        raise UserError(
            f"the times come from {len(jobs)} jobs that share no control on one GPU model, so "
            "they cannot be joined; replay one campaign"
        )
    return {row.id: row.ratio * scale for row in rows if row.ratio is not None}
