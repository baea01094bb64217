"""The statements that every trial costs, built once: what a driver's own time goes into.

They are of tables, not of models: no objects are made, and none are looked for.
"""

from __future__ import annotations

import sqlalchemy as sa

from leaderboard.models import (
    CampaignRow,
    ErrorRow,
    JobRow,
    MeasurementRow,
    StageRow,
    TrialRow,
    table,
)

__all__ = [
    "ADD_ERRORS",
    "ADD_MEASUREMENTS",
    "ADD_STAGE",
    "ADD_TRIAL",
    "ATTEMPTS",
    "BEAT",
    "JOB",
    "LEASE",
    "LOCKED_JOB",
    "RUNNING",
    "SCORED",
    "SET_STAGE",
    "SET_VERDICT",
    "STAGES",
    "TIMES",
    "TRIAL",
]

_campaigns, _jobs, _trials = table(CampaignRow).c, table(JobRow).c, table(TrialRow).c
_stages, _times = table(StageRow).c, table(MeasurementRow).c
_of_campaign = _campaigns.id == sa.bindparam("of_campaign")
_of_job = _jobs.id == sa.bindparam("of_job")
_of_trial = _trials.id == sa.bindparam("of_trial")

LEASE = (
    sa.select(_campaigns.id, _campaigns.driver, _campaigns.heartbeat_at)
    .where(_of_campaign)
    .with_for_update()
)
"""Lock a campaign: who holds it."""
BEAT = sa.update(table(CampaignRow)).where(_of_campaign).values(heartbeat_at=sa.bindparam("now"))

LOCKED_JOB = sa.select(_jobs.campaign_id, _jobs.status).where(_of_job).with_for_update()
JOB = sa.select(_jobs.campaign_id).where(_of_job)

ATTEMPTS = (
    sa.select(_trials.id, _trials.number, _trials.status, _trials.attempt)
    .where(
        _trials.campaign_id == sa.bindparam("of_campaign"),
        _trials.schedule_key == sa.bindparam("of_schedule"),
    )
    .order_by(_trials.attempt)
)
"""Earlier trials of a schedule."""
ADD_TRIAL = sa.insert(table(TrialRow)).returning(_trials.id)
RUNNING = (
    sa.select(
        _campaigns.id,
        _campaigns.driver,
        _campaigns.heartbeat_at,
        _trials.id.label("trial_id"),
        _trials.status,
        _trials.stage,
    )
    .join_from(table(TrialRow), table(CampaignRow), _campaigns.id == _trials.campaign_id)
    .where(_of_trial)
    .with_for_update()
)
"""Lock a trial and its campaign: who holds it, and how the trial stands."""
SET_STAGE = sa.update(table(TrialRow)).where(_of_trial).values(stage=sa.bindparam("reached"))
SET_VERDICT = (
    sa.update(table(TrialRow))
    .where(_of_trial)
    .values(
        {
            name: sa.bindparam(f"new_{name}")
            for name in (
                "status",
                "finished",
                "stage",
                "reason",
                "ended_at",
                "job_id",
                "clock",
                "score_us",
                "slow_us",
                "method",
                "cache",
            )
        }
    )
)
TRIAL = sa.select(table(TrialRow)).where(_of_trial)

STAGES = sa.select(_stages.stage, _stages.status).where(
    _stages.trial_id == sa.bindparam("of_trial")
)
ADD_STAGE = sa.insert(table(StageRow))
ADD_ERRORS = sa.insert(table(ErrorRow))
ADD_MEASUREMENTS = sa.insert(table(MeasurementRow))

SCORED = sa.select(
    _campaigns.id, _campaigns.workloads, _campaigns.ranking_regime, _campaigns.slow_regime
).where(_of_campaign)
"""What a score of a campaign has to be made of."""
TIMES = (
    sa.select(
        _times.job_id,
        _times.clock,
        _times.phase,
        _times.held_out,
        _times.method,
        _times.cache,
        _times.workload,
        _times.regime,
        _times.median_us,
    )
    .where(_times.trial_id == sa.bindparam("of_trial"), _times.job_id == sa.bindparam("of_job"))
    .order_by(_times.id)
)
"""What may be behind the score of a trial."""
