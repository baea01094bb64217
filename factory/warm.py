"""What earlier campaigns know: prior trials for the sampler, outside the budget.

Their times come from other jobs.  They order schedules for the sampler and never rank.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from factory.errors import UserError
from factory.machine import sm90_gpus
from factory.plan import Plan
from factory.search import Outcome, outcome_of
from leaderboard.records import CampaignRecord, Clock, JobStatus, TrialStatus

if TYPE_CHECKING:
    from leaderboard import Store

__all__ = ["earlier_campaigns", "earlier_outcomes"]


def earlier_campaigns(
    plan: Plan, store: Store, *, before: datetime | None = None
) -> tuple[CampaignRecord, ...]:
    """Campaigns that ``warm_start`` means, oldest first.

    Parameters
    ----------
    plan : Plan
    store : leaderboard.Store
    before : datetime, optional
        Only campaigns that were made before: a resume knows what its launch
        knew.

    Raises
    ------
    UserError
        A campaign that the list names is not there, or its trials say nothing
        here: another operation or version, source, clock or set of workloads.
    """
    wanted = plan.config.warm_start
    if wanted is False:
        return ()
    known = [c for c in store.list_campaigns() if before is None or c.created_at < before]
    if wanted is True:
        return tuple(c for c in known if _difference(plan, c) is None)
    chosen: list[CampaignRecord] = []
    for ref in wanted:
        named = [c for c in known if ref in (c.id, c.name)]
        if not named:
            raise UserError(f"warm_start: no campaign {ref!r} in {store.name}; see factory status")
        fitting = [c for c in named if _difference(plan, c) is None]
        if not fitting:
            raise UserError(
                f"warm_start: {named[-1].id} has {_difference(plan, named[-1])}, so its trials "
                "say nothing here; leave it out"
            )
        chosen += [c for c in fitting if c not in chosen]
    return tuple(chosen)


def earlier_outcomes(plan: Plan, store: Store, *, before: datetime) -> list[Outcome]:
    """Finished trials of the campaigns that ``warm_start`` means.

    Left out are times of jobs that are void or open, and, where this machine has
    sm90 GPUs, times of other models; and what ended at ``before`` or later.
    """
    campaigns = earlier_campaigns(plan, store, before=before)
    if not campaigns:
        return []
    here = {g.name for g in sm90_gpus()} if plan.clock is not Clock.MODELLED else set()
    found: list[Outcome] = []
    for campaign in campaigns:
        usable = {
            job.id
            for job in store.list_jobs(campaign.id)
            if job.status is JobStatus.VALID and (not here or job.gpu in here)
        }
        for trial in store.load_trials(campaign.id):
            if not trial.status.finished or trial.ended_at is None or trial.ended_at >= before:
                continue
            timed = trial.status in (TrialStatus.PASSED, TrialStatus.SLOW)
            if timed and trial.job_id not in usable:
                continue
            found.append(outcome_of(trial, plan.family.schedule(trial.schedule)))
    return found


def _difference(plan: Plan, campaign: CampaignRecord) -> str | None:
    """Why trials of ``campaign`` say nothing in this one, in words."""
    own = {
        "operation": plan.operation.name,
        "operation_version": plan.operation.version,
        "family": plan.family.name,
        "source_hash": plan.family.source_hash(),
        "clock": plan.clock,
        "workloads": tuple(w.name for w in plan.operation.tuned()),
    }
    words = {"operation_version": "version of the operation", "workloads": "set of workloads"}
    for field, value in own.items():
        if getattr(campaign, field) != value:
            return f"another {words.get(field, field.removesuffix('_hash'))}"
    return None
