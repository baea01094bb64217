"""What queries answer: frozen rows, each with its ``id`` where it is a trial's.

Times are microseconds.  A ratio is time over time: below 1 the first is faster.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict

from leaderboard._verdicts import Verdict
from leaderboard.records import ClaimRecord, Clock, MeasurementRecord, StageStatus, TrialStatus

__all__ = [
    "BestPoint",
    "ClaimView",
    "Comparison",
    "ControlSpan",
    "ControlTime",
    "FinalRow",
    "Funnel",
    "LeaderboardRow",
    "NamedTime",
    "Ratio",
    "RejectedRow",
    "ResultRow",
    "ShapeRatio",
    "ShapeResult",
    "ShapeRow",
    "StageCount",
    "TrialError",
    "UnrankedRow",
    "WorstError",
]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LeaderboardRow(_View):
    """One ranked trial."""

    id: int
    uid: str
    rank: int
    """1-based within rows that may be ordered: same operation and version,
    workloads, clock, GPU, method, cache state and ``superseded``."""
    campaign_id: str
    campaign: str
    operation: str
    operation_version: str
    family: str
    number: int
    schedule_key: str
    schedule: dict[str, int | str]
    source_hash: str
    clock: Clock
    score_us: float
    slow_us: float | None
    method: str | None
    cache: str | None
    gpu: str | None
    """None for modelled scores."""
    job_id: str | None
    control: str | None
    """The baseline ``ratio`` is over, timed in the same job."""
    control_form: str | None
    """Which form of the inputs the control was fed: ``raw`` or ``activated``."""
    control_us: float | None
    ratio: float | None
    """``score_us / control_us``."""
    losses: tuple[str, ...]
    """Workloads on which the control was faster."""
    provisional: bool
    """Ordered across jobs, by ``ratio``."""
    superseded: bool
    """Its source is not the one that was asked for."""


class ResultRow(_View):
    """One trial as :func:`leaderboard.query` gives it: those that failed too, without times."""

    id: int
    uid: str
    run: int | None
    """Number of the ranking that the row has its place in; rows of different runs must not be
    compared.  None where it has no place."""
    rank: int | None
    """Within the run, whatever was filtered but the campaign, which is ranked alone if it was;
    ``reason`` says why there is none."""
    status: TrialStatus
    stage: str
    reason: str
    """Why it failed, or why a passed one has no place; else empty."""
    campaign_id: str
    campaign: str
    operation: str
    operation_version: str
    family: str
    number: int
    schedule_key: str
    schedule: dict[str, int | str]
    source_hash: str
    clock: Clock | None = None
    regime: str | None = None
    """Whose inputs were timed."""
    score_us: float | None = None
    """Geomean over all tuned workloads, by this clock on this regime."""
    slow_us: float | None = None
    method: str | None = None
    cache: str | None = None
    gpu: str | None = None
    job_id: str | None = None
    control: str | None = None
    """The baseline that ``ratio`` is over, timed in the same job."""
    control_form: str | None = None
    control_us: float | None = None
    ratio: float | None = None
    losses: tuple[str, ...] = ()
    """Workloads on which the control was faster."""
    provisional: bool = False
    superseded: bool = False
    started_at: datetime
    ended_at: datetime | None = None


class ShapeResult(_View):
    """One trial of a :func:`leaderboard.query` on one workload."""

    id: int
    run: int | None
    rank: int | None
    campaign_id: str
    schedule_key: str
    workload: str
    regime: str | None
    clock: Clock | None
    gpu: str | None
    job_id: str | None
    us: float
    low_us: float
    high_us: float
    control: str | None
    """The baseline of the row's ratio, timed in the same job; None if it has none."""
    control_us: float | None
    ratio: float | None
    lost: bool
    """The control's median was lower, by however little."""
    verdict: Verdict | None
    """How the trial stands to the control: its whole interval has to be beyond what the campaign
    let controls drift by within a job (`device.drift`), else they are not told apart."""


class UnrankedRow(_View):
    """One passed trial that does not rank."""

    id: int
    uid: str
    campaign_id: str
    number: int
    schedule_key: str
    clock: Clock
    score_us: float
    job_id: str | None
    reason: str


class RejectedRow(_View):
    """One trial that failed, with the first error beyond its bound."""

    id: int
    uid: str
    campaign_id: str
    number: int
    schedule_key: str
    status: TrialStatus
    stage: str
    reason: str
    breach: WorstError | None
    """First error recorded beyond tolerance, if the failure was one."""


class WorstError(_View):
    """Largest error of one output in one regime."""

    regime: str
    workload: str
    tensor: str
    scope: str
    max_rel: float | None
    """None where not finite."""
    rms_rel: float | None
    finite: bool
    within: bool
    out_of_contract: bool


class TrialError(_View):
    """Largest error of one output of one trial in one regime, as one stage saw it."""

    id: int
    stage: str
    regime: str
    tensor: str
    max_rel: float | None
    """None where not finite."""
    rms_rel: float | None
    finite: bool
    within: bool


class StageCount(_View):
    """How many trials one stage saw."""

    stage: str
    entered: int
    passed: int
    failed: dict[StageStatus, int]
    seconds: float
    """Spent in it, all trials together."""


class Funnel(_View):
    """Where the trials of one campaign ended; abandoned attempts are not in ``stages``."""

    campaign_id: str
    budget: int
    finished: int
    statuses: dict[TrialStatus, int]
    stages: tuple[StageCount, ...]


class BestPoint(_View):
    """A trial that was the best of its campaign when it finished."""

    id: int
    number: int
    schedule_key: str
    gpu: str | None
    job_id: str | None
    score_us: float
    ratio: float | None
    provisional: bool
    ended_at: datetime | None


class ControlTime(_View):
    """A control's mean median on one workload, and the trial's time over it."""

    control: str
    input_form: str
    median_us: float
    ratio: float


class ClaimView(ClaimRecord):
    """A claim and how it stands."""

    superseded_by: str | None
    """The better claim, if there is one."""
    jobs: int
    """Jobs in which this very folder passed the gate."""
    replicated: bool
    """Whether these are two or more."""


class NamedTime(_View):
    """A measurement and the name that is its own in every database."""

    uid: str
    record: MeasurementRecord


class ControlSpan(_View):
    """A control on one workload over all its readings in a job."""

    control: str
    input_form: str
    workload: str
    regime: str
    clock: Clock
    cache: str
    method: str
    median_us: float
    """Mean of the readings' medians."""
    low_us: float
    """Lowest of the readings' low ends."""
    high_us: float
    """Highest of their high ends."""
    readings: int


class ShapeRow(_View):
    """One trial on one workload, regime and clock, with the controls of its job."""

    id: int
    workload: str
    regime: str
    clock: Clock
    cache: str
    method: str
    phase: str
    held_out: bool
    job_id: str
    median_us: float
    low_us: float
    high_us: float
    kernels: tuple[str, ...]
    controls: tuple[ControlTime, ...]


class ShapeRatio(_View):
    """Two times on one workload; where both have samples, also how they stand."""

    workload: str
    first_us: float
    second_us: float
    ratio: float
    low: float | None = None
    high: float | None = None
    """Interval of the ratio by the samples (:func:`leaderboard.contrast`)."""
    verdict: Verdict | None = None


class Ratio(_View):
    """A trial's score over a control of its own job."""

    id: int
    job_id: str
    clock: Clock
    control: str
    control_form: str
    score_us: float
    control_us: float
    ratio: float
    low: float
    high: float
    """Interval of the ratio by the samples."""
    verdict: Verdict
    """How the trial stands to the control; not told apart within what a job may drift by."""
    shapes: tuple[ShapeRatio, ...]


class Comparison(_View):
    """Two trials of one job; ``ratio`` is first over second."""

    first_id: int
    second_id: int
    job_id: str | None
    clock: Clock
    first_us: float
    second_us: float
    ratio: float
    low: float | None = None
    high: float | None = None
    """Interval of the ratio by the samples (:func:`leaderboard.contrast`); None for modelled."""
    verdict: Verdict | None = None
    """How the first stands to the second; None for modelled scores, which have no samples."""
    shapes: tuple[ShapeRatio, ...]
    """On the ranking regime; empty for modelled scores."""


class FinalRow(_View):
    """A finalist, re-timed with the others in one job."""

    id: int
    rank: int | None
    """None if it missed a tuned or a held-out workload that another finalist met."""
    group: int | None = None
    """Finalists of one group, counted from 1, are not told apart: their order says nothing."""
    campaign_id: str
    schedule_key: str
    job_id: str
    gpu: str
    clock: Clock
    method: str
    cache: str
    score_us: float | None
    slow_us: float | None
    held_out_us: float | None
    """Geomean over the held-out workloads, ranking regime."""
    missing: tuple[str, ...]


RejectedRow.model_rebuild()
