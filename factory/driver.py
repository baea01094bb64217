"""The driver of a campaign: asks, submits, records, tells.

It alone writes the leaderboard, and holds the campaign's lease while it does.
Whatever ends it, the leaderboard stays true: every write is whole, and what was
open when it died is abandoned by the next launch.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import TYPE_CHECKING, Any

from candidates import Schedule
from factory.budget import used_up
from factory.executors.base import (
    CPU_STAGES,
    DEVICE_STAGES,
    Event,
    Executor,
    Finalist,
    FinalsFinished,
    HarnessFault,
    JobClosed,
    JobOpened,
    StageFinished,
    Task,
    TaskLost,
)
from factory.funnel import verdict
from factory.leader import finalists
from factory.plan import Plan
from factory.progress import View
from factory.provenance import fingerprint
from factory.search import Outcome, Search, outcome_of, violation
from factory.stages.base import HarnessError, StageResult
from factory.stages.model import model
from factory.stages.validate import validate
from factory.tally import Tally
from factory.warm import earlier_outcomes
from leaderboard.records import (
    CampaignRecord,
    Clock,
    JobRecord,
    JobStatus,
    StageRecord,
    StageStatus,
    TrialRecord,
    TrialStatus,
)

if TYPE_CHECKING:
    from leaderboard import Store

__all__ = ["Driver", "log_path"]

_HEARTBEAT_S = 20.0
_POLL_S = 0.5


@dataclass
class _Open:
    """A trial under way."""

    trial: TrialRecord
    schedule: Schedule
    losses: int = 0
    """Workers that died in its stages; the first is forgiven, in case it was the machine's."""
    measuring: bool = False


@dataclass
class Driver:
    """Runs one campaign to its end, or until it is told to stop.

    Parameters
    ----------
    plan : Plan
    store : leaderboard.Store
        The campaign must be held by this process.
    campaign : CampaignRecord
    executor : Executor
    view : View
    log_dir : Path
    """

    plan: Plan
    store: Store
    campaign: CampaignRecord
    executor: Executor
    view: View
    log_dir: Path
    stop_asked: bool = False
    """Set from a signal handler; the driver stops at its next turn."""
    _open: dict[int, _Open] = field(default_factory=dict)
    _measuring: int = 0
    """Of the open trials those that wait for a GPU or are on one."""
    _retry: deque[TrialRecord] = field(default_factory=deque)
    _jobs: set[str] = field(default_factory=set)
    _modelled_job: str | None = None
    _finals_done: bool = False
    _beaten: float = 0.0

    def __post_init__(self) -> None:
        trials = self.store.load_trials(self.campaign.id)
        finished = [t for t in trials if t.status.finished]
        done = {t.schedule_key for t in finished}
        again = {t.schedule_key: t for t in trials if t.schedule_key not in done}
        self._retry.extend(again.values())  # the newest attempt of each, in order of proposal
        self._number = 1 + max((t.number for t in trials), default=-1)
        self._offered = {s.key: s for s in self.plan.offered}
        prior = earlier_outcomes(self.plan, self.store, before=self.campaign.created_at)
        self._prior = len(prior)
        self._search = Search(
            self.plan.family.parameters,
            self.plan.offered,
            sampler=self.plan.config.sampler,
            seed=self.plan.config.seed,
            first=self.plan.first(),
            prior=prior,
            history=[outcome_of(t, self._offered[t.schedule_key]) for t in finished],
        )
        self.tally = Tally(
            campaign_id=self.campaign.id,
            clock=self.plan.clock.value,
            target=self.plan.target,
            stages=self.plan.funnel.stages,
        )
        self.tally.restore(trials)

    def run(self) -> bool:
        """Work until the campaign is done; returns whether it is.

        Raises
        ------
        HarnessError
            The machine, the toolchain or the harness failed; open trials are
            abandoned.
        """
        self.view.begin(self.tally)
        if self.plan.config.warm_start:
            self.view.note(f"warm start: the sampler knows {self._prior} earlier trials")
        try:
            if self.plan.clock is Clock.MODELLED:
                self._open_modelled_job()
            self._loop()
        except BaseException:
            self._close(cancel=True)
            raise
        self._close(cancel=self.stop_asked)
        return not self.stop_asked

    # -- the loop ------------------------------------------------------------------

    def _loop(self) -> None:
        while not self.stop_asked:
            self._fill()
            if not self._open:
                self._say_why_early()
                if not self._wants_finals():
                    return
                self._start_finals()
                while not self._finals_done and not self.stop_asked:
                    self._turn()
                return
            self._turn()

    def _turn(self) -> None:
        for event in self.executor.poll(_POLL_S):
            self._handle(event)
        if time.monotonic() - self._beaten > _HEARTBEAT_S:
            self.store.heartbeat(self.campaign.id)
            self._beaten = time.monotonic()
        self.view.refresh()

    def _fill(self) -> None:
        """Keep the executor busy, within the budget."""
        while not self.stop_asked and self.tally.finished + len(self._open) < self.tally.target:
            if used_up(self.plan.config, self.tally) is not None:
                return
            if len(self._open) - self._measuring >= self.executor.cpu_slots:
                return
            if self.executor.gpu_slots and self._measuring >= self.executor.gpu_slots:
                return
            if self._retry:
                earlier = self._retry.popleft()
                schedule = self._offered[earlier.schedule_key]
                self._search.take(schedule)
                self._begin(schedule, earlier.number)
                continue
            proposed = self._search.ask()
            if proposed is None:
                return
            self._begin(proposed, self._number)
            self._number += 1

    def _say_why_early(self) -> None:
        why = used_up(self.plan.config, self.tally)
        if why is not None and self.tally.finished < self.tally.target:
            self.view.note(f"ends after {self.tally.finished} trials: {why}")

    def _begin(self, schedule: Schedule, number: int) -> None:
        start = time.perf_counter()
        result = validate(self.plan.family, schedule)
        seconds = time.perf_counter() - start
        passed = result.status is StageStatus.PASSED
        trial = self.store.begin_trial(
            self.campaign.id,
            number=number,
            schedule_key=schedule.key,
            schedule=schedule.as_dict(),
            source_hash=self.campaign.source_hash,
            gate_bound=self.plan.family.gate_bound(schedule),
            log_path=str(log_path(self.log_dir, number)),
            seen=_record("validate", result, seconds) if passed else None,
        )
        opened = _Open(trial, schedule)
        self._open[trial.id] = opened
        if passed:
            self._go_on(opened, "validate", seconds)
        else:
            self._advance(opened, "validate", result, seconds)

    # -- events --------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case StageFinished():
                opened = self._open.get(event.trial_id)
                if opened is not None:
                    self._advance(
                        opened, event.stage, event.result, event.seconds, job_id=event.job_id
                    )
            case TaskLost():
                self._lost(event)
            case HarnessFault() if self.stop_asked:
                pass  # what asked us to stop may have ended the workers first
            case HarnessFault():
                where = f"{event.stage}: " if event.stage else ""
                raise HarnessError(f"{where}{event.message}")
            case JobOpened():
                self.store.put_fingerprint(event.fingerprint)
                self.store.open_job(event.job.model_copy(update={"campaign_id": self.campaign.id}))
                self._jobs.add(event.job.id)
                self.view.note(f"job {event.job.id} opened on {event.job.gpu}")
            case JobClosed():
                self._job_closed(event)
            case FinalsFinished():
                self._finals_finished(event)

    def _advance(
        self,
        opened: _Open,
        stage: str,
        result: StageResult,
        seconds: float,
        *,
        job_id: str | None = None,
    ) -> None:
        """Record a stage and move the trial on, or end it."""
        trial_id = opened.trial.id
        following = self.plan.funnel.after(stage)
        details = dict(result.details)
        score_us, slow_us = result.score_us, result.slow_us
        passed = result.status is StageStatus.PASSED
        if passed and following is None and self.plan.clock is Clock.MODELLED:
            estimate = model(self.plan.operation, self.plan.family, opened.schedule)
            details.update(estimate.details)
            score_us, job_id = estimate.score_us, self._modelled_job
        record = _record(stage, replace(result, details=details), seconds)
        times = [m.model_copy(update={"trial_id": trial_id}) for m in result.measurements]
        if passed and following is not None:
            self.store.record_stage(trial_id, record, errors=result.errors, measurements=times)
            self._go_on(opened, stage, seconds)
            return
        self.tally.leave(trial_id, stage, result.status, max(0.0, seconds))
        # What ends a trial and its verdict are one write.
        write = {"last": record, "errors": result.errors, "measurements": times}
        if passed:
            self._finish(
                opened,
                TrialStatus.PASSED,
                score_us=score_us,
                slow_us=slow_us,
                job_id=job_id,
                write=write,
            )
            return
        self._finish(
            opened,
            verdict(result.status),
            reason=result.reason,
            job_id=job_id,
            estimate_us=result.details.get("estimate_us"),
            wrong_by=violation(result.errors),
            write=write,
        )

    def _go_on(self, opened: _Open, stage: str, seconds: float) -> None:
        """A stage was passed that is not the last."""
        following = self.plan.funnel.after(stage)
        assert following is not None
        self.tally.leave(opened.trial.id, stage, StageStatus.PASSED, max(0.0, seconds))
        self.tally.enter(opened.trial.id, following)
        if following in CPU_STAGES or following == DEVICE_STAGES[0]:
            self._submit(opened, following)

    def _submit(self, opened: _Open, stage: str) -> None:
        measuring = stage in DEVICE_STAGES
        self._measuring += measuring - opened.measuring
        opened.measuring = measuring
        self.executor.submit(
            Task(
                trial_id=opened.trial.id,
                stage="measure" if opened.measuring else stage,
                schedule=opened.schedule,
                log_path=opened.trial.log_path or "",
            )
        )

    def _lost(self, event: TaskLost) -> None:
        opened = self._open.get(event.trial_id)
        if opened is None:
            return
        if self.stop_asked:
            return  # it may have died of the signal that we got; a resume runs it again
        if event.kind == "crashed" and opened.losses == 0:
            opened.losses += 1
            self.view.note(f"trial {event.trial_id}: {event.reason}; once more in a new worker")
            self._submit(opened, event.stage)
            return
        status = StageStatus.CRASHED if event.kind == "crashed" else StageStatus.TIMEOUT
        reason = f"{event.reason}, twice" if opened.losses else event.reason
        self._advance(opened, event.stage, StageResult(status, reason), event.seconds)

    def _finish(
        self,
        opened: _Open,
        status: TrialStatus,
        *,
        reason: str = "",
        score_us: float | None = None,
        slow_us: float | None = None,
        job_id: str | None = None,
        estimate_us: float | None = None,
        wrong_by: float = 1.0,
        write: Mapping[str, Any],
    ) -> None:
        passed = status is TrialStatus.PASSED
        trial = self.store.finish_trial(
            opened.trial.id,
            status,
            reason=reason,
            clock=self.plan.clock if passed else None,
            score_us=score_us,
            slow_us=slow_us,
            job_id=job_id,
            **write,
        )
        del self._open[opened.trial.id]
        self._measuring -= opened.measuring
        known = score_us if passed else estimate_us
        self._search.tell(Outcome(opened.schedule, status, known, wrong_by))
        self.view.trial(trial, best=self.tally.count(trial))

    # -- jobs and finals -------------------------------------------------------------

    def _wants_finals(self) -> bool:
        return self.plan.clock is not Clock.MODELLED and self.tally.passed > 0

    def _start_finals(self) -> None:
        chosen = finalists(self.store, self.campaign.id, self.plan.config.finalists)
        self.view.note(f"finals: re-timing {len(chosen)} together, with the held-out shapes")
        self.executor.finals([Finalist(t.id, self._offered[t.schedule_key]) for t in chosen])

    def _finals_finished(self, event: FinalsFinished) -> None:
        each = event.seconds / max(1, len(event.results))  # they were timed in turns
        for trial_id, result in event.results.items():
            trial = self.store.record_finals(
                trial_id,
                StageRecord(
                    stage="finals",
                    status=result.status,
                    reason=result.reason,
                    seconds=max(0.0, each),
                    details=dict(result.details),
                ),
                errors=result.errors,
                measurements=result.measurements,
            )
            if result.status is not StageStatus.PASSED:
                self.view.note(f"finals: trial {trial_id} {result.status}: {result.reason}")
                self.tally.withdraw(trial)
        if event.order:
            first = event.order[0]
            self.view.note(
                f"finals: trial {first} is first, {event.results[first].score_us:.1f} us"
            )
        self._finals_done = True

    def _open_modelled_job(self) -> None:
        """A job without a GPU: it binds modelled rows to the toolchain that judged them."""
        made = fingerprint(self.campaign.source_hash)
        self._modelled_job = f"job-{uuid.uuid4().hex[:12]}"
        self.store.put_fingerprint(made)
        self.store.open_job(
            JobRecord(
                id=self._modelled_job,
                campaign_id=self.campaign.id,
                fingerprint_id=made.id,
                gpu="none",
                status=JobStatus.OPEN,
                started_at=datetime.now(UTC),
                note="cost model",
            )
        )

    def _job_closed(self, event: JobClosed) -> None:
        if event.job.id not in self._jobs:
            return
        self._jobs.discard(event.job.id)
        self.store.add_measurements(event.controls)
        status = event.job.status if event.job.status is not JobStatus.OPEN else JobStatus.VOID
        self.store.close_job(
            event.job.id,
            status,
            drift=event.job.drift,
            note=event.job.note,
            details=event.job.details,
        )
        drift = "" if event.job.drift is None else f", controls drifted {event.job.drift:.2%}"
        why = f": {event.job.note}" if event.job.note else ""
        self.view.note(f"job {event.job.id} closed {status}{drift}{why}")

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Beat from a thread: the last reading of controls can take longer than a lease holds."""
        from leaderboard import StoreError

        over = Flag()

        def beat() -> None:
            while not over.wait(_HEARTBEAT_S):
                with suppress(StoreError):  # the writes that follow say it
                    self.store.heartbeat(self.campaign.id)

        thread = Thread(target=beat, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _close(self, *, cancel: bool) -> None:
        """End the executor; keep its jobs' last words and abandon what is still open."""
        with self._signs_of_life():
            events = self.executor.close(cancel=cancel)
        for event in events:
            if isinstance(event, JobClosed | JobOpened):
                self._handle(event)
        if self._open:
            self.store.abandon_open_trials(self.campaign.id)
            self._open.clear()
        if self._modelled_job is not None:
            self.store.close_job(self._modelled_job, JobStatus.VALID, note="cost model")
            self._modelled_job = None
        if self._jobs:
            self.store.void_open_jobs(self.campaign.id, "cut short")
            self._jobs.clear()
        for event in events:
            if isinstance(event, HarnessFault) and not cancel:
                self._handle(event)


def _record(stage: str, result: StageResult, seconds: float) -> StageRecord:
    return StageRecord(
        stage=stage,
        status=result.status,
        reason=result.reason,
        seconds=max(0.0, seconds),
        details=dict(result.details),
    )


def log_path(log_dir: Path, number: int) -> Path:
    """Log file of a trial."""
    return log_dir / f"trial-{number}.log"
