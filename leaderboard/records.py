"""Records the leaderboard stores and returns: frozen, validated, storage-free.

They know nothing of SQL and nothing of torch, operations or candidates: names
and numbers only.  Times are microseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "FREE_ON_RESUME",
    "CampaignRecord",
    "CampaignStatus",
    "ClaimRecord",
    "Clock",
    "ErrorRecord",
    "FingerprintRecord",
    "JobRecord",
    "JobStatus",
    "MeasurementRecord",
    "StageRecord",
    "StageStatus",
    "TrialRecord",
    "TrialStatus",
]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Clock(StrEnum):
    """Kinds of time; they are never ranked together."""

    GPU = "gpu"
    PER_CALL = "per_call"
    PIPELINED = "pipelined"
    MODELLED = "modelled"


class CampaignStatus(StrEnum):
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    FAILED = "failed"


class TrialStatus(StrEnum):
    """How a trial stands.  Only ``passed`` may carry a time."""

    RUNNING = "running"
    PASSED = "passed"
    """Went through every stage of its campaign."""
    REJECTED = "rejected"
    """Wrong: the emulation or the gate refused it."""
    INFEASIBLE = "infeasible"
    """Breaks a stated budget (validate or compile)."""
    CRASHED = "crashed"
    """The candidate killed its process or its CUDA context."""
    TIMEOUT = "timeout"
    """The candidate outlived a limit."""
    SLOW = "slow"
    """Right, but hopeless at the screen; no time on all shapes."""
    ABANDONED = "abandoned"
    """Interrupted or stopped by a harness fault; says nothing on the candidate."""

    @property
    def finished(self) -> bool:
        """Whether the trial counts against the budget and is never run again."""
        return self not in (TrialStatus.RUNNING, TrialStatus.ABANDONED)


class StageStatus(StrEnum):
    PASSED = "passed"
    REJECTED = "rejected"
    INFEASIBLE = "infeasible"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    SLOW = "slow"


class JobStatus(StrEnum):
    OPEN = "open"
    VALID = "valid"
    VOID = "void"
    """Its controls drifted beyond the bound or it was cut short: its times do not rank."""


class FingerprintRecord(_Record):
    """Machine and toolchain; part of a result's identity."""

    id: str
    """sha256 over the canonical JSON of ``values``."""
    values: dict[str, Any]
    """Names to versions, for example ``gpu``, ``gpu_uuid``, ``driver``, ``torch``, ``dsl``."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FingerprintRecord:
        """The fingerprint of these contents, under its id."""
        text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return cls(id=hashlib.sha256(text.encode()).hexdigest(), values=dict(values))


FREE_ON_RESUME = frozenset({"budget", "gpu_minutes", "patience", "executor"})
"""Keys of a campaign's configuration that may change when it is resumed: they do not change
any verdict."""


class CampaignRecord(_Record):
    id: str
    """Unique, for example ``kda_prefill-20261130-071502-3f2a``."""
    name: str
    operation: str
    operation_version: str
    family: str
    source_hash: str
    """sha256 of the family's source at launch."""
    config: dict[str, Any]
    space_hash: str
    """sha256 over parameters, choices and offered schedules."""
    space: dict[str, Any]
    """Parameter name to its choices, so that a changed space can be named."""
    seed: int = Field(ge=-(2**63), lt=2**63)
    budget: int = Field(ge=1, lt=2**31)
    """Trials in all, resumed ones included."""
    status: CampaignStatus
    clock: Clock
    """The clock that orders its trials."""
    workloads: tuple[str, ...] = ()
    """Names of all tuned workloads: a measured trial passes only with a time on each of them."""
    ranking_regime: str = "production"
    """Regime whose times make the score."""
    slow_regime: str | None = "slow"
    """Regime timed beside it; None if the campaign has none."""
    created_at: datetime
    updated_at: datetime
    driver: str | None = None
    """Who holds it: ``host:pid``."""
    heartbeat_at: datetime | None = None


class JobRecord(_Record):
    """One stretch of measuring on one GPU: the unit of comparison."""

    id: str
    campaign_id: str | None
    fingerprint_id: str
    gpu: str
    """GPU name as its driver gives it, for example ``NVIDIA H200``."""
    status: JobStatus
    started_at: datetime
    ended_at: datetime | None = None
    drift: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Largest relative change of a control's median between its readings."""
    note: str = ""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """All inputs of the job derive from it: the same seed draws them again."""
    details: dict[str, Any] = Field(default_factory=dict)
    """What else the job saw: errors of the controls, readings of the GPU's clock."""


class StageRecord(_Record):
    stage: str
    """validate, emulate, compile, gate, screen or time; finals for a finalist."""
    status: StageStatus
    reason: str = ""
    """One line with the numbers, empty when passed."""
    seconds: float = Field(ge=0, allow_inf_nan=False)
    details: dict[str, Any] = Field(default_factory=dict)
    """What the stage saw, for example resources of each kernel."""


class ErrorRecord(_Record):
    """Error of one output against the oracle."""

    stage: str
    regime: str
    workload: str
    tensor: str
    scope: str
    """``all`` or the worst slice, for example ``head 3``."""
    max_rel: float | None
    """None where not finite."""
    rms_rel: float | None
    finite: bool
    within: bool
    seed: int = Field(ge=-(2**63), lt=2**63)
    out_of_contract: bool = False
    """Regime past the declared gate bound: recorded, not run, no error."""


class MeasurementRecord(_Record):
    """One time: a candidate or a control on one workload, regime and clock."""

    job_id: str
    trial_id: int | None = None
    control: str | None = None
    """Baseline name when this is a control's time."""
    workload: str
    regime: str
    clock: Clock
    cache: str
    """``warm`` or ``cold``: state of the L2 cache when a sample starts."""
    method: str
    """How it was read, as ``cupti busy`` or ``cost model``; methods never rank together."""
    input_form: str = "activated"
    """``activated`` or ``raw``."""
    median_us: float = Field(gt=0, allow_inf_nan=False)
    low_us: float = Field(gt=0, allow_inf_nan=False)
    high_us: float = Field(gt=0, allow_inf_nan=False)
    samples_us: tuple[float, ...] = ()
    kernels: tuple[str, ...] = ()
    """Kernel names really launched."""
    held_out: bool = False
    phase: str = "search"
    """``search``, ``before``/``between``/``after`` (controls), ``final`` (finalists),
    ``bench`` (controls and a winner in turns) or ``claim`` (an exported folder, the
    campaign's candidate and controls in turns)."""

    @model_validator(mode="after")
    def _one_owner(self) -> MeasurementRecord:
        if (self.trial_id is None) == (self.control is None):
            raise ValueError("a measurement belongs to a trial or a control, not both or neither")
        if not self.low_us <= self.median_us <= self.high_us:
            raise ValueError("low_us <= median_us <= high_us must hold")
        return self


class TrialRecord(_Record):
    """One schedule of one campaign and all that was seen of it."""

    id: int
    """Row number in this database; other databases number differently."""
    uid: str = ""
    """The same everywhere: survives export and import."""
    campaign_id: str
    number: int = Field(ge=0, lt=2**31)
    """0-based order of proposal within the campaign."""
    schedule_key: str
    schedule: dict[str, int | str]
    status: TrialStatus
    stage: str
    """Last stage reached."""
    reason: str = ""
    attempt: int = Field(default=1, ge=1, lt=2**31)
    clock: Clock | None = None
    score_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Geomean over all tuned workloads on the production regime; only when passed."""
    slow_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The same on the slow regime; None for modelled."""
    method: str | None = None
    """How the score was read; set by the store from the measurements of a passed trial."""
    cache: str | None = None
    """``warm`` or ``cold``; set by the store likewise."""
    job_id: str | None = None
    source_hash: str
    gate_bound: float | None = None
    started_at: datetime
    ended_at: datetime | None = None
    log_path: str | None = None
    stages: tuple[StageRecord, ...] = ()
    errors: tuple[ErrorRecord, ...] = ()
    measurements: tuple[MeasurementRecord, ...] = ()

    @model_validator(mode="after")
    def _no_time_on_a_failure(self) -> TrialRecord:
        if self.status is not TrialStatus.PASSED and self.score_us is not None:
            raise ValueError(f"a {self.status} trial cannot carry a time")
        if self.status is TrialStatus.PASSED and (self.score_us is None or self.clock is None):
            raise ValueError("a passed trial needs a score and its clock")
        return self


class ClaimRecord(_Record):
    """An exported folder passed the export gate: what it was timed at, against what, and where.

    Claims are never changed: a better one names the claim that it supersedes.
    """

    id: str
    """Unique, for example ``claim-3f2a9c01b7de``."""
    operation: str
    operation_version: str
    family: str
    export_hash: str = Field(min_length=64, max_length=64)
    """Of the folder's sources and dispatch table: the claim is on these bytes."""
    source_hash: str
    """Of the family's source that the folder was made from."""
    table: list[dict[str, Any]]
    """Rows of the dispatch table: ``shape``, ``schedule_key``, ``trial``."""
    campaign_id: str
    trial_uid: str
    """The campaign's candidate that the folder was timed in turns with."""
    job_id: str
    gpu: str
    score_us: float = Field(gt=0, allow_inf_nan=False)
    """The folder's own entry point: geomean of ``gpu`` medians over the tuned workloads, ranking
    regime."""
    slow_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    held_out_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    candidate_us: float = Field(gt=0, allow_inf_nan=False)
    """The same of the candidate, in the same job and turns."""
    candidate_held_out_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    ratio: float = Field(gt=0, allow_inf_nan=False)
    """``score_us / candidate_us``."""
    held_out_ratio: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    bound: float = Field(gt=1)
    """Largest ratio that was allowed."""
    control: str | None = None
    """Fastest control of the job that was timed on all tuned workloads, if there was one."""
    control_form: str | None = None
    control_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    control_ratio: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """``score_us / control_us``: how claims of two jobs compare."""
    kernels: tuple[str, ...]
    """Names of all kernels that the folder was seen to launch."""
    details: dict[str, Any] = Field(default_factory=dict)
    """Largest errors by output, times by workload, controls."""
    supersedes: str | None = None
    """The claim that this one is better than."""
    created_at: datetime

    @model_validator(mode="after")
    def _within_the_bound(self) -> ClaimRecord:
        for name in ("ratio", "held_out_ratio"):
            value = getattr(self, name)
            if value is not None and value > self.bound:
                raise ValueError(f"{name} is {value:.3f}, beyond {self.bound:g}: that is no claim")
        return self
