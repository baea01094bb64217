"""Launching a campaign: new or resumed, under a lease, interruptible.

Decides which stored campaign is meant, hands it to the driver and puts the
right end to it whatever happens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from factory.budget import used_up
from factory.driver import Driver
from factory.errors import EXIT_INTERRUPTED, MachineError, UserError
from factory.executors.base import Executor, WorkerContext
from factory.plan import Plan, refuse_changes
from factory.progress import View
from factory.signals import taken
from factory.stages.base import HarnessError
from factory.tally import Tally
from factory.warm import earlier_campaigns
from leaderboard.records import CampaignRecord, CampaignStatus, Clock

if TYPE_CHECKING:
    from leaderboard import Store

__all__ = [
    "LOG_ROOT",
    "Launched",
    "MakeExecutor",
    "find_resumable",
    "launch",
    "refuse_finished",
    "unfinished",
]

LOG_ROOT = Path("factory-runs")
"""Trial logs go to ``factory-runs/<campaign id>/trial-<number>.log``."""

MakeExecutor = Callable[[WorkerContext, Plan, View], Executor]


@dataclass(frozen=True)
class Launched:
    """How a launch ended.

    Parameters
    ----------
    campaign : CampaignRecord
        Its last state.
    finished, passed : int
        Trials in all, earlier launches included.
    interrupted : bool
        Whether it was stopped by a signal and may be resumed.
    """

    campaign: CampaignRecord
    finished: int
    passed: int
    interrupted: bool


def unfinished(store: Store, name: str) -> CampaignRecord | None:
    """The newest campaign of that name, if it is not finished."""
    named = [c for c in store.list_campaigns() if c.name == name]
    if named and named[-1].status is not CampaignStatus.FINISHED:
        return named[-1]
    return None


def find_resumable(store: Store, name: str) -> CampaignRecord:
    """The campaign that ``--resume`` means: the newest of that name.

    Raises
    ------
    UserError
        There is none.
    """
    named = [c for c in store.list_campaigns() if c.name == name]
    if not named:
        raise UserError(
            f"nothing to resume: {store.name} holds no campaign named {name!r}; "
            "launch it without --resume"
        )
    return named[-1]


def refuse_finished(plan: Plan, store: Store, stored: CampaignRecord) -> None:
    """A finished campaign goes on only towards a larger budget.

    Raises
    ------
    UserError
        It is finished, and the plan has no trial left for it.
    """
    if stored.status is not CampaignStatus.FINISHED:
        return
    tally = Tally(stored.id, plan.clock.value, plan.target, plan.funnel.stages)
    tally.restore(store.load_trials(stored.id))
    how = used_up(plan.config, tally)
    if tally.finished >= plan.target:
        how = (
            "all offered schedules were tried"
            if tally.finished >= len(plan.offered)
            else "its trials are used up (raise them with --budget)"
        )
    if how is not None:
        raise UserError(
            f"nothing to resume: {stored.id} is finished after {tally.finished} trials: {how}; "
            "launch without --resume to start another"
        )


def launch(
    plan: Plan,
    store: Store,
    *,
    stored: CampaignRecord | None,
    make_executor: MakeExecutor,
    view: View,
    log_root: Path = LOG_ROOT,
) -> Launched:
    """Run a campaign to its end.

    Parameters
    ----------
    plan : Plan
    store : leaderboard.Store
    stored : CampaignRecord or None
        The campaign to resume; None starts a new one.
    make_executor : callable
        Called once the lease is held.
    view : View
    log_root : Path

    Returns
    -------
    Launched

    Raises
    ------
    UserError
        The space or a key changed since the stored launch.
    MachineError
        The machine or the harness failed; the campaign is marked failed and
        may be resumed.
    leaderboard.HeldError
        Another driver holds the campaign.
    """
    from leaderboard import HeldError, StoreError

    try:
        return _launch(plan, store, stored, make_executor, view, log_root)
    except HeldError:
        raise
    except StoreError as error:
        raise MachineError(f"the leaderboard failed: {error}") from error


def _launch(
    plan: Plan,
    store: Store,
    stored: CampaignRecord | None,
    make_executor: MakeExecutor,
    view: View,
    log_root: Path,
) -> Launched:
    if stored is not None:
        refuse_changes(plan, stored)
        refuse_finished(plan, store, stored)
    earlier_campaigns(plan, store, before=stored.created_at if stored else None)
    campaign = store.create_campaign(plan.record()) if stored is None else stored
    store.acquire(campaign.id)
    try:
        if stored is not None:
            # Its driver may have finished it between our look and our turn.
            refuse_finished(plan, store, store.get_campaign(stored.id))
            store.abandon_open_trials(campaign.id)
            store.void_open_jobs(campaign.id, "its driver was killed")
        campaign = store.set_campaign_status(
            campaign.id,
            CampaignStatus.RUNNING,
            budget=plan.target,
            config=plan.config.model_dump(),
        )
        return _run(plan, store, campaign, make_executor, view, log_root)
    finally:
        view.end()
        store.release(campaign.id)


def _run(
    plan: Plan,
    store: Store,
    campaign: CampaignRecord,
    make_executor: MakeExecutor,
    view: View,
    log_root: Path,
) -> Launched:
    log_dir = log_root / campaign.id
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write logs to {log_dir}: {error.strerror}") from error
    context = WorkerContext(
        campaign_id=campaign.id,
        operation=plan.operation.name,
        seed=plan.config.seed,
        limits=plan.config.limits.as_limits(),
        log_dir=str(log_dir),
        device=plan.config.device.model_dump(),
        controls=None if plan.config.controls is None else tuple(plan.config.controls),
        measured=plan.clock is not Clock.MODELLED,
    )
    done = False
    status = CampaignStatus.FAILED
    try:
        executor = make_executor(context, plan, view)
        driver = Driver(plan, store, campaign, executor, view, log_dir)
        with _signals(driver, view):
            done = driver.run()
        status = CampaignStatus.FINISHED if done else CampaignStatus.INTERRUPTED
    except HarnessError as error:
        raise MachineError(" ".join(str(error).split())) from error
    except KeyboardInterrupt:
        status = CampaignStatus.INTERRUPTED
        raise
    finally:
        campaign = store.set_campaign_status(campaign.id, status)
    return Launched(campaign, driver.tally.finished, driver.tally.passed, interrupted=not done)


def _signals(driver: Driver, view: View) -> AbstractContextManager[None]:
    """First Ctrl-C or SIGTERM: stop cleanly.  Second: leave at once; nothing is lost by it."""

    def stop(number: int, frame: FrameType | None) -> None:
        if driver.stop_asked:
            os._exit(EXIT_INTERRUPTED)
        driver.stop_asked = True
        view.note(f"{signal.Signals(number).name}: stopping; once more to leave at once")

    return taken((signal.SIGINT, signal.SIGTERM), stop)
