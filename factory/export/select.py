"""What an export is made of: the leaderboard's winner, and shapes on which another trial beats it.

Reads the leaderboard and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from candidates import Family, Schedule
from factory.errors import UserError
from factory.export.exporter import ExportError
from factory.leader import leaders
from leaderboard import (
    CampaignRecord,
    Clock,
    FingerprintRecord,
    JobRecord,
    NamedTime,
    Store,
    TrialRecord,
    TrialStatus,
    Verdict,
    contrast,
    named_times,
    winner,
)

if TYPE_CHECKING:
    from operations import Operation

__all__ = ["ExportError", "Row", "Selection", "select"]


@dataclass(frozen=True)
class Row:
    """One line of the dispatch table.

    Parameters
    ----------
    workload : str or None
        Tuned workload whose shape it serves; None serves every other shape.
    schedule : Schedule
    trial : TrialRecord
    times : tuple of NamedTime
        The measurements it rests on: its ``gpu`` times, warm, on the workload, or on all tuned
        workloads for the row that serves the rest.
    over_default : Mapping[str, float]
        Regime to time over that of the row for the rest, on the workload; empty for that row.
    """

    workload: str | None
    schedule: Schedule
    trial: TrialRecord
    times: tuple[NamedTime, ...]
    over_default: Mapping[str, float]


@dataclass(frozen=True)
class Selection:
    """What is exported, and where it comes from.

    Parameters
    ----------
    operation : Operation
    family : Family
    store : str
        Name of the leaderboard.
    campaign : CampaignRecord
    job : JobRecord
        The one job that all times of the table were read in.
    fingerprint : FingerprintRecord
        Of that job.
    rows : tuple of Row
        Rows of single workloads first; the last one serves every other shape.
    is_winner : bool
        Whether the last row's trial won the finals of its campaign.
    """

    operation: Operation
    family: Family
    store: str
    campaign: CampaignRecord
    job: JobRecord
    fingerprint: FingerprintRecord
    rows: tuple[Row, ...]
    is_winner: bool

    @property
    def default(self) -> Row:
        return self.rows[-1]

    @property
    def gate_bound(self) -> float | None:
        """Most negative log gate per token that every row is right for; None means any."""
        bounds = [self.family.gate_bound(row.schedule) for row in self.rows]
        known = [b for b in bounds if b is not None]
        return max(known) if known else None

    @property
    def same_source(self) -> bool:
        """Whether the kernels are those that the trial was measured with."""
        return self.default.trial.source_hash == self.family.source_hash()


def select(
    operation: Operation, family: Family, stores: Iterable[Store], trial: str | None = None
) -> Selection:
    """Choose the winner, or a named trial, and what beats it on single shapes.

    Parameters
    ----------
    operation : Operation
    family : Family
    stores : iterable of Store
        Asked in turn, until one names a winner.
    trial : str, optional
        Number or uid of a trial that is exported alone, winner or not.

    Raises
    ------
    ExportError
        If no winner is named, or the trial has no measured time or cannot be built.
    UserError
        If the trial is of another operation, or winners are of several GPUs.
    """
    if trial is not None:
        return _named(operation, family, next(iter(stores)), trial)
    reasons = []
    for store in stores:
        found = _winner(operation, family, store)
        if isinstance(found, Selection):
            return found
        reasons.append(f"{store.name}: {found}")
    raise ExportError(
        f"no winner of {operation.name} to export ({'; '.join(reasons)}); run factory launch on an"
        " sm90 GPU, or export one trial by its number"
    )


def _winner(operation: Operation, family: Family, store: Store) -> Selection | str:
    """The winner of the campaign that leads the ranking, or why there is none.

    Raises
    ------
    UserError
        If there are winners on several GPUs.
    """
    firsts = leaders(store, operation, family)
    if not firsts:
        return (
            f"no measured trial of version {operation.version} has a place:"
            " factory leaderboard --status all shows what there is"
        )
    finals = {gpu: winner(store, row.campaign_id) for gpu, row in firsts.items()}
    named = {gpu: final for gpu, final in finals.items() if final is not None}
    if not named:
        ids = " and ".join(row.campaign_id for row in firsts.values())
        return f"campaign {ids} has no finals, and only these name a winner"
    if len(named) > 1:
        each = ", ".join(f"trial {final.id} on {gpu}" for gpu, final in named.items())
        raise UserError(
            f"{store.name} has a winner of {operation.name} for each of {len(named)} GPUs, whose"
            f" times are not compared: {each}; export one by its number"
        )
    ((gpu, final),) = named.items()
    campaign = store.get_campaign(firsts[gpu].campaign_id)
    trial = store.get_trial(final.id)
    default = _row(family, trial, named_times(store, trial.id), None, campaign, final.job_id)
    overrides = _faster(family, store, campaign, default, final.job_id)
    return _selection(operation, family, store, campaign, (*overrides, default), is_winner=True)


def _named(operation: Operation, family: Family, store: Store, ref: str) -> Selection:
    trial = store.get_trial(ref)
    campaign = store.get_campaign(trial.campaign_id)
    if campaign.operation != operation.name:
        raise UserError(
            f"trial {ref} is one of {campaign.operation}, not of {operation.name}; name one of"
            f" factory leaderboard --operation {operation.name}"
        )
    if trial.status is not TrialStatus.PASSED or trial.clock is Clock.MODELLED:
        said = "its time is modelled" if trial.clock is Clock.MODELLED else str(trial.status)
        raise ExportError(f"trial {ref} has no measured time ({said}); it cannot be exported")
    if campaign.operation_version != operation.version:
        raise ExportError(
            f"trial {ref} was measured under version {campaign.operation_version} of"
            f" {operation.name}, and this is version {operation.version}: its errors and times do"
            " not count here; measure it again"
        )
    final = winner(store, campaign.id)
    is_winner = final is not None and final.id == trial.id
    job_id = final.job_id if final is not None and is_winner else trial.job_id
    return _selection(
        operation,
        family,
        store,
        campaign,
        (_row(family, trial, named_times(store, trial.id), None, campaign, job_id),),
        is_winner=is_winner,
    )


def _selection(
    operation: Operation,
    family: Family,
    store: Store,
    campaign: CampaignRecord,
    rows: tuple[Row, ...],
    *,
    is_winner: bool,
) -> Selection:
    job_id = rows[-1].times[0].record.job_id
    job = store.get_job(job_id)
    return Selection(
        operation=operation,
        family=family,
        store=store.name,
        campaign=campaign,
        job=job,
        fingerprint=store.get_fingerprint(job.fingerprint_id),
        rows=rows,
        is_winner=is_winner,
    )


def _row(
    family: Family,
    trial: TrialRecord,
    known: Sequence[NamedTime],
    workload: str | None,
    campaign: CampaignRecord,
    job_id: str | None,
) -> Row:
    """A row of one trial, with its times of one job: of the finals if it has these there."""
    try:
        schedule = family.schedule(trial.schedule)
        problems = family.problems(schedule)
    except ValueError as error:
        problems = (str(error),)
    if problems:
        raise ExportError(
            f"trial {trial.id} ({trial.schedule_key}) cannot be built any more: {problems[0]}"
        )
    wanted = campaign.workloads if workload is None else (workload,)
    regimes = (campaign.ranking_regime, campaign.slow_regime)
    times = [
        t
        for t in _warm(known)
        if t.record.job_id == job_id
        and t.record.workload in wanted
        and t.record.regime in regimes
        and t.record.phase in ("search", "final")
    ]
    finals = [t for t in times if t.record.phase == "final"]
    if not times:
        raise ExportError(f"trial {trial.id} has no warm gpu time")
    return Row(workload, schedule, trial, tuple(finals or times), {})


def _warm(known: Sequence[NamedTime]) -> list[NamedTime]:
    """Those by the ranking clock, on tuned workloads."""
    return [
        t
        for t in known
        if t.record.clock is Clock.GPU and t.record.cache == "warm" and not t.record.held_out
    ]


def _faster(
    family: Family, store: Store, campaign: CampaignRecord, default: Row, job_id: str
) -> list[Row]:
    """For each workload the trial that beats the winner there, where one does.

    It has to be told apart on the ranking regime from times of the same job, must bear the same
    gates, and must not lose more at slow gates than it gains.
    """
    bound = family.gate_bound(default.schedule)
    against: dict[tuple[str, str, str], tuple[float, ...]] = {
        (t.record.workload, t.record.regime, t.record.phase): t.record.samples_us
        for t in _warm(named_times(store, default.trial.id))
        if t.record.job_id == job_id
    }
    best: dict[str, tuple[float, Row]] = {}
    for listed in store.list_trials(campaign.id, (TrialStatus.PASSED,)):
        if listed.id == default.trial.id:
            continue
        known = named_times(store, listed.id)
        for workload in campaign.workloads:
            try:
                row = _row(family, listed, known, workload, campaign, job_id)
            except ExportError:  # not built any more, or not timed there: the winner serves
                continue
            own = family.gate_bound(row.schedule)
            if own is not None and (bound is None or own > bound):
                continue
            over = _over(row, against, campaign.ranking_regime)
            gain = math.prod(over.values())
            if over and gain < best.get(workload, (1.0,))[0]:
                full = store.get_trial(listed.id)
                best[workload] = (gain, Row(workload, row.schedule, full, row.times, over))
    return [best[w][1] for w in campaign.workloads if w in best]


def _over(
    row: Row, against: Mapping[tuple[str, str, str], Sequence[float]], regime: str
) -> dict[str, float]:
    """Ratios over the default on one workload by regime; empty unless it is told faster."""
    over: dict[str, float] = {}
    # The ranking regime first: most trials end there, before anything is resampled.
    for time in sorted(row.times, key=lambda t: t.record.regime != regime):
        record = time.record
        theirs = against.get((record.workload, record.regime, record.phase), ())
        if not theirs or not record.samples_us:
            return {}
        if record.regime == regime and median(record.samples_us) >= median(theirs):
            return {}
        found = contrast(record.samples_us, theirs)
        if record.regime == regime and found.verdict is not Verdict.FASTER:
            return {}
        over[record.regime] = round(found.ratio, 4)
    return over if regime in over else {}
