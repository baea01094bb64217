"""Writing and reading trials: begun, told stage by stage, finished once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from leaderboard import _rows
from leaderboard._base import (
    BaseStore,
    insert_measurements,
    now_utc,
    rows_changed,
    trial_by_id,
)
from leaderboard._errors import StoreError, UnknownError
from leaderboard._scores import Basis, score_basis
from leaderboard._statements import (
    ADD_ERRORS,
    ADD_STAGE,
    ADD_TRIAL,
    ATTEMPTS,
    JOB,
    RUNNING,
    SCORED,
    SET_STAGE,
    SET_VERDICT,
    STAGES,
    TIMES,
    TRIAL,
)
from leaderboard.models import ErrorRow, MeasurementRow, StageRow, TrialRow
from leaderboard.records import (
    Clock,
    ErrorRecord,
    MeasurementRecord,
    StageRecord,
    StageStatus,
    TrialRecord,
    TrialStatus,
)

__all__ = ["TrialStore"]

_Child = TypeVar("_Child", StageRow, ErrorRow, MeasurementRow)


class TrialStore(BaseStore):
    """The part of the store that knows trials."""

    def begin_trial(
        self,
        campaign_id: str,
        *,
        number: int,
        schedule_key: str,
        schedule: Mapping[str, int | str],
        source_hash: str,
        gate_bound: float | None = None,
        log_path: str | None = None,
        attempt: int | None = None,
        stage: str = "",
        seen: StageRecord | None = None,
    ) -> TrialRecord:
        """Open a trial (``running``).

        Parameters
        ----------
        number : int
            0-based order of proposal; a second attempt may keep its number.
        attempt : int, optional
            1 for the first; by default one more than the schedule has had.
        seen : StageRecord, optional
            A stage that it has passed already.

        Raises
        ------
        StoreError
            If the schedule finished already or is running, or the number or
            the attempt is taken.
        HeldError
            If another driver holds the campaign.
        """
        with self.writing() as session:
            self._hold(session, campaign_id)
            earlier = session.execute(
                ATTEMPTS, {"of_campaign": campaign_id, "of_schedule": schedule_key}
            ).all()
            for trial_id, taken, status, _ in earlier:
                if status != TrialStatus.ABANDONED.value:
                    raise StoreError(
                        f"schedule '{schedule_key}' is already {status} as trial {trial_id} "
                        f"(number {taken}) of campaign {campaign_id}"
                    )
            values: dict[str, Any] = {
                "uid": _rows.new_uid(),
                "campaign_id": campaign_id,
                "number": number,
                "schedule_key": schedule_key,
                "schedule": dict(schedule),
                "status": TrialStatus.RUNNING.value,
                "stage": stage,
                "reason": "",
                "attempt": attempt or 1 + max((a for *_, a in earlier), default=0),
                "source_hash": source_hash,
                "gate_bound": gate_bound,
                "started_at": now_utc(),
                "log_path": log_path,
            }
            made: int = session.execute(ADD_TRIAL, values).scalar_one()
            if seen is not None:
                values["stage"] = seen.stage
                _insert_stage(session, made, 0, seen, ())
                session.execute(SET_STAGE, {"of_trial": made, "reached": seen.stage})
            return TrialRecord(id=made, **values)

    def record_stage(
        self,
        trial_id: int,
        stage: StageRecord,
        errors: Sequence[ErrorRecord] = (),
        measurements: Sequence[MeasurementRecord] = (),
    ) -> None:
        """Add what one stage saw, whole or not at all.

        Raises
        ------
        StoreError
            If the trial is not running, the stage is recorded already, an
            earlier stage failed, or times come with a failure (only a ``slow``
            verdict may show the times it rests on).
        """
        _refuse_times(trial_id, stage, measurements)
        with self.writing() as session:
            self._running(session, trial_id)
            self._add(session, trial_id, stage, errors, measurements)
            session.execute(SET_STAGE, {"of_trial": trial_id, "reached": stage.stage})

    def _add(
        self,
        session: Session,
        trial_id: int,
        stage: StageRecord,
        errors: Sequence[ErrorRecord],
        measurements: Sequence[MeasurementRecord],
    ) -> None:
        before = session.execute(STAGES, {"of_trial": trial_id}).all()
        for name, status in before:
            if name == stage.stage:
                raise StoreError(f"trial {trial_id} has its stage {name} recorded already")
            if status != StageStatus.PASSED.value:
                raise StoreError(f"trial {trial_id} ended at stage {name}: {status}")
        for job_id in sorted({m.job_id for m in measurements}):
            self._open(session, job_id)
        _insert_stage(session, trial_id, len(before), stage, errors)
        insert_measurements(session, measurements)

    def finish_trial(
        self,
        trial_id: int,
        status: TrialStatus,
        *,
        stage: str | None = None,
        reason: str = "",
        clock: Clock | None = None,
        score_us: float | None = None,
        slow_us: float | None = None,
        job_id: str | None = None,
        last: StageRecord | None = None,
        errors: Sequence[ErrorRecord] = (),
        measurements: Sequence[MeasurementRecord] = (),
    ) -> TrialRecord:
        """Close a trial.

        A measured pass is checked: the score must be the geomean over all of
        the campaign's tuned workloads of times stored for this trial in this job.

        Parameters
        ----------
        stage : str, optional
            Last stage reached; by default the last recorded one.
        score_us, slow_us : float, optional
            Geomeans on the ranking and the slow regime, microseconds.
        last, errors, measurements : optional
            The stage that ended it, as :meth:`record_stage` takes them.

        Raises
        ------
        StoreError
            If the trial is not running, a failure carries a time, or a pass
            misses a stage, a time, its clock or its job.
        """
        if status is TrialStatus.RUNNING:
            raise StoreError(f"trial {trial_id} cannot finish as running")
        if last is not None:
            _refuse_times(trial_id, last, measurements)
        with self.writing() as session:
            trial = self._running(session, trial_id)
            reached = trial.stage
            if last is not None:
                self._add(session, trial_id, last, errors, measurements)
                reached = last.stage
            basis: Basis | None = None
            if status is TrialStatus.PASSED:
                basis = _passes(session, trial, clock, score_us, slow_us, job_id)
            elif score_us is not None or slow_us is not None:
                raise StoreError(f"a {status} trial cannot carry a time")
            values = {
                "status": status.value,
                "finished": True if status.finished else None,
                "stage": reached if stage is None else stage,
                "reason": reason,
                "ended_at": now_utc(),
                "job_id": job_id,
                "clock": None if clock is None else clock.value,
                "score_us": score_us,
                "slow_us": slow_us,
                "method": None if basis is None else basis.method,
                "cache": None if basis is None else basis.cache,
            }
            this = {"of_trial": trial_id}
            session.execute(SET_VERDICT, {**this, **{f"new_{k}": v for k, v in values.items()}})
            return _rows.trial_record(session.execute(TRIAL, this).one())

    def record_finals(
        self,
        trial_id: int,
        stage: StageRecord,
        *,
        errors: Sequence[ErrorRecord] = (),
        measurements: Sequence[MeasurementRecord] = (),
    ) -> TrialRecord:
        """Record how a passed trial fared as a finalist.

        One that was wrong on a held-out workload, crashed or ran out of time
        there is passed no more: it takes that verdict and loses its score.
        Finals that are run again replace what was recorded of the earlier ones.

        Raises
        ------
        StoreError
            If the trial has not passed, or a failed stage carries times.
        """
        if measurements and stage.status is not StageStatus.PASSED:
            raise StoreError(f"stage {stage.stage} is {stage.status}: it carries no time")
        with self.writing() as session:
            row = trial_by_id(session, trial_id)
            self._renew(session, row.campaign_id)
            if row.status != TrialStatus.PASSED.value:
                raise StoreError(f"trial {trial_id} is {row.status}: it cannot be a finalist")
            for model in (StageRow, ErrorRow):
                session.execute(
                    sa.delete(model).where(model.trial_id == trial_id, model.stage == stage.stage)
                )
            earlier = sa.select(sa.func.count()).where(StageRow.trial_id == trial_id)
            _insert_stage(
                session,
                trial_id,
                session.scalar(earlier) or 0,
                stage,
                [e.model_copy(update={"stage": stage.stage}) for e in errors],
            )
            for job_id in sorted({m.job_id for m in measurements}):
                self._open(session, job_id)
            insert_measurements(
                session, [m.model_copy(update={"trial_id": trial_id}) for m in measurements]
            )
            if stage.status is not StageStatus.PASSED:
                row.status = TrialStatus(stage.status.value).value
                row.stage, row.reason = stage.stage, stage.reason
                row.clock = row.score_us = row.slow_us = None
            session.flush()
            return _rows.trial_record(row)

    def abandon_open_trials(self, campaign_id: str, reason: str = "interrupted") -> int:
        """Close every running trial of the campaign as abandoned; returns how many.

        Called on resume, before the first new trial: no running row is then
        older than the resume.
        """
        with self.writing() as session:
            self._renew(session, campaign_id)
            return rows_changed(
                session,
                sa.update(TrialRow)
                .where(
                    TrialRow.campaign_id == campaign_id,
                    TrialRow.status == TrialStatus.RUNNING.value,
                )
                .values(status=TrialStatus.ABANDONED.value, reason=reason, ended_at=now_utc()),
            )

    def get_trial(self, ref: int | str) -> TrialRecord:
        """Trial by id or uid, with all that was seen of it.

        Raises
        ------
        UnknownError
            If there is none.
        """
        with self.reading() as session:
            column = TrialRow.id
            value: int | str = ref
            if isinstance(ref, str):
                if ref.isdecimal() and len(ref) < 19:
                    value = int(ref)
                else:
                    row = session.scalars(sa.select(TrialRow).where(TrialRow.uid == ref)).first()
                    value = -1 if row is None else row.id
            found = _with_rows(session, sa.select(TrialRow).where(column == value))
            if not found:
                raise UnknownError(
                    f"no trial {ref} in {self.name}; factory leaderboard shows their numbers"
                )
            return found[0]

    def list_trials(
        self, campaign_id: str, statuses: Collection[TrialStatus] = ()
    ) -> list[TrialRecord]:
        """Trials in order of proposal, without stages, errors and measurements.

        Parameters
        ----------
        statuses : collection of TrialStatus
            Only these; empty means all.
        """
        with self.reading() as session:
            query = _trials_of(campaign_id, statuses)
            return [_rows.trial_record(row) for row in session.scalars(query)]

    def load_trials(
        self, campaign_id: str, statuses: Collection[TrialStatus] = ()
    ) -> list[TrialRecord]:
        """As :meth:`list_trials`, with all that was seen of each; four queries in all."""
        with self.reading() as session:
            return _with_rows(session, _trials_of(campaign_id, statuses))

    def _running(self, session: Session, trial_id: int) -> Any:
        """Id, campaign and stage of a running trial; it and its campaign are locked and held."""
        row = session.execute(RUNNING, {"of_trial": trial_id}).one_or_none()
        if row is None:
            raise UnknownError(f"no trial {trial_id}")
        self._check_held(session, row)
        if row.status != TrialStatus.RUNNING.value:
            raise StoreError(f"trial {trial_id} is {row.status} already")
        return row


def _insert_stage(
    session: Session,
    trial_id: int,
    position: int,
    stage: StageRecord,
    errors: Sequence[ErrorRecord],
) -> None:
    """Add what a stage said of a trial, and the errors it saw."""
    values = {**stage.model_dump(), "status": stage.status.value}
    session.execute(ADD_STAGE, {"trial_id": trial_id, "position": position, **values})
    if errors:
        session.execute(ADD_ERRORS, [_rows.error_values(trial_id, e) for e in errors])


def _refuse_times(
    trial_id: int, stage: StageRecord, measurements: Sequence[MeasurementRecord]
) -> None:
    if measurements and stage.status not in (StageStatus.PASSED, StageStatus.SLOW):
        raise StoreError(f"stage {stage.stage} is {stage.status}: it carries no time")
    if any(m.trial_id not in (None, trial_id) for m in measurements):
        raise StoreError(f"stage {stage.stage} of trial {trial_id} holds another trial's times")


def _passes(
    session: Session,
    trial: Any,
    clock: Clock | None,
    score_us: float | None,
    slow_us: float | None,
    job_id: str | None,
) -> Basis:
    """Check that a trial may pass; returns how its times were read."""
    label = f"trial {trial.trial_id}"
    stages = session.execute(STAGES, {"of_trial": trial.trial_id}).all()
    failed = [name for name, status in stages if status != StageStatus.PASSED.value]
    if not stages or failed:
        what = f"stage {failed[0]} failed" if failed else "no stage is recorded"
        raise StoreError(f"{label} cannot pass: {what}")
    if clock is None or score_us is None:
        raise StoreError(f"{label} cannot pass without a score and its clock")
    if clock is Clock.MODELLED:
        if slow_us is not None:
            raise StoreError(f"{label}: a modelled trial has no slow time")
        return Basis("cost model", "none")
    if job_id is None:
        raise StoreError(f"{label} cannot pass: a measured time belongs to a job")
    job = session.execute(JOB, {"of_job": job_id}).one_or_none()
    if job is None:
        raise UnknownError(f"no job {job_id!r}")
    if job.campaign_id not in (None, trial.id):
        raise StoreError(f"{label} cannot pass: job {job_id} is another campaign's")
    campaign = session.execute(SCORED, {"of_campaign": trial.id}).one()
    times = session.execute(TIMES, {"of_trial": trial.trial_id, "of_job": job_id}).all()
    return score_basis(
        campaign,
        label=label,
        clock=clock,
        job_id=job_id,
        score_us=score_us,
        slow_us=slow_us,
        measurements=times,
    )


def _trials_of(campaign_id: str, statuses: Collection[TrialStatus]) -> sa.Select[TrialRow]:
    query = sa.select(TrialRow).where(TrialRow.campaign_id == campaign_id)
    if statuses:
        query = query.where(TrialRow.status.in_([s.value for s in statuses]))
    return query.order_by(TrialRow.number, TrialRow.attempt)


def _with_rows(session: Session, query: sa.Select[TrialRow]) -> list[TrialRecord]:
    trials = list(session.scalars(query))
    ids = query.with_only_columns(TrialRow.id).order_by(None)

    def children(model: type[_Child]) -> dict[Any, list[_Child]]:
        found: dict[Any, list[_Child]] = defaultdict(list)
        rows = sa.select(model).where(model.trial_id.in_(ids)).order_by(model.id)
        for child in session.scalars(rows):
            found[child.trial_id].append(child)
        return found

    stages, errors = children(StageRow), children(ErrorRow)
    times = children(MeasurementRow)
    return [
        _rows.trial_record(row, stages[row.id], errors[row.id], times[row.id]) for row in trials
    ]
