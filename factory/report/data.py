"""What a report shows, gathered from the leaderboard and from the operation's own words.

Reads through :mod:`leaderboard`'s public queries only, and draws nothing.  What
the leaderboard cannot know (tolerances, the severity of a regime, bytes that
must move) comes from the operation, where it is installed in the version that
the campaign ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from factory.report.space import Space, describe_space
from factory.report.sweep import SweepLine, sweep_axis, sweep_lines
from factory.report.trials import TableRow, reasons_of, table_rows
from leaderboard import (
    CampaignRecord,
    Clock,
    FinalRow,
    Funnel,
    JobRecord,
    LeaderboardRow,
    QueryError,
    Ratio,
    Store,
    TrialError,
    TrialRecord,
    Verdict,
    best_so_far,
    control_spans,
    funnel,
    ranked,
    ratio,
    shapes,
    trial_errors,
    trial_seconds,
    winner,
)

if TYPE_CHECKING:
    from operations import Operation, Tolerance

__all__ = [
    "Bar",
    "ErrorPoint",
    "Report",
    "Run",
    "ShapeBars",
    "Step",
    "gather",
]

_MODELLED_GPU = "NVIDIA H200"
"""What cost models estimate; see :meth:`candidates.Family.modelled_us`."""


@dataclass(frozen=True)
class Step:
    """A trial that was the best of its run when it finished."""

    id: int
    finished: int
    """Trials of the campaign that had finished then, itself included."""
    minutes: float
    """As :attr:`Report.minutes_are` says."""
    value: float
    """Microseconds; in a provisional run, time over the control's."""
    label: str


@dataclass(frozen=True)
class ErrorPoint:
    """One trial's worst error, as a share of what the gate allows."""

    id: int
    value: float | None
    """Microseconds, or the ratio in a provisional run; None without a time."""
    share: float | None
    """None where an output was not finite."""
    within: bool
    label: str


@dataclass(frozen=True)
class Bar:
    """One time on one workload; without an interval where nobody gave one."""

    name: str
    kind: str
    """``trial`` or ``control``."""
    us: float
    low_us: float | None = None
    high_us: float | None = None
    fastest: bool = False
    """Or not told apart from the one that is."""


@dataclass(frozen=True)
class ShapeBars:
    """The leader of a run and the controls of its job on one workload."""

    workload: str
    bars: tuple[Bar, ...]
    floor_us: float | None
    floor_at: str
    """The bandwidth of the floor; empty without one."""


@dataclass(frozen=True)
class Run:
    """Trials that may be ordered among each other, best first."""

    title: str
    unit: str
    """``us``, or ``x CONTROL`` where the order is by ratio."""
    rows: tuple[LeaderboardRow, ...]
    steps: tuple[Step, ...]
    points: tuple[ErrorPoint, ...]
    leader: LeaderboardRow
    leader_is: str
    won: FinalRow | None
    """The leader among the finalists, if it is their first: its time there is another one."""
    verdict: Verdict | None
    """How the leader stands to its control; None without one, and while its job is open."""
    shapes: tuple[ShapeBars, ...]
    floor_note: str
    open_jobs: bool
    space: Space | None


@dataclass(frozen=True)
class Report:
    """All that the page shows."""

    campaign: CampaignRecord
    source: str
    """Name of the database."""
    made_at: datetime
    funnel: Funnel
    minutes: float
    minutes_are: str
    """What a minute is: of GPU stages, or since the launch where nothing met a GPU."""
    runs: tuple[Run, ...]
    sweep_regimes: tuple[tuple[str, str], ...]
    """Name and what is written under it."""
    sweep: tuple[SweepLine, ...]
    sweep_gate: float | None
    has_gate: bool
    gate_note: str
    reasons: tuple[tuple[str, str, str, int], ...]
    """Stage, verdict, an example of the reason, and how many trials."""
    other_reasons: int
    trials: tuple[TableRow, ...]
    jobs: tuple[JobRecord, ...]
    fingerprints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def gather(store: Store, campaign: CampaignRecord, *, now: datetime) -> Report:
    """Read everything the report of one campaign shows; a dozen queries."""
    operation = _operation(campaign)
    trials = store.list_trials(campaign.id)
    jobs = store.list_jobs(campaign.id)
    errors = _by_trial(trial_errors(store, campaign.id))
    shares = {t: _share(found, operation) for t, found in errors.items()}
    rows = ranked(store, campaign_id=campaign.id, live=True)
    open_jobs = {j.id for j in jobs if j.status.value == "open"}
    reasons, other = reasons_of(trials)
    minutes, minutes_are = _minutes(store, campaign, trials)
    axis = sweep_axis(campaign, operation, errors)
    return Report(
        campaign=campaign,
        source=store.name,
        made_at=now,
        funnel=funnel(store, campaign.id),
        minutes=max(minutes.values(), default=0.0),
        minutes_are=minutes_are,
        runs=tuple(
            _run(store, campaign, operation, run, trials, shares, open_jobs, minutes)
            for run in _runs_of(rows)
        ),
        sweep_regimes=tuple((name, text) for name, text, _ in axis),
        sweep=sweep_lines(trials, errors, [name for name, *_ in axis]),
        sweep_gate=None
        if operation is None
        else min((t.max_rel for t in operation.tolerances.values()), default=None),
        has_gate=operation is not None,
        gate_note=""
        if operation is not None
        else f"{campaign.operation} {campaign.operation_version} is not installed here: "
        "without its tolerances the gate cannot be drawn, nor the sweep's order be known",
        reasons=reasons,
        other_reasons=other,
        trials=table_rows(store, campaign, trials, rows, shares, open_jobs),
        jobs=tuple(jobs),
        fingerprints={
            f: store.get_fingerprint(f).values
            for f in dict.fromkeys(j.fingerprint_id for j in jobs)
        },
    )


def _operation(campaign: CampaignRecord) -> Operation | None:
    """The operation, if it is the one that the campaign met."""
    import operations

    try:
        found = operations.get(campaign.operation)
    except operations.UnknownOperationError:
        return None
    return found if found.version == campaign.operation_version else None


def _by_trial(errors: Iterable[TrialError]) -> dict[int, list[TrialError]]:
    found: dict[int, list[TrialError]] = defaultdict(list)
    for error in errors:
        found[error.id].append(error)
    return found


# ------------------------------------------------------------------------------- the gate


def _share(errors: Sequence[TrialError], operation: Operation | None) -> tuple[float | None, str]:
    """Worst error over its bound, and where; without an operation the largest error itself."""
    worst: tuple[float, str] = (0.0, "")
    for e in errors:
        if not e.finite or e.max_rel is None:
            return None, f"{e.tensor} not finite on {e.regime} ({e.stage})"
        if operation is None:
            share = e.max_rel
        else:
            bound = _tolerance(operation, e)
            if bound is None:
                continue
            share = max(e.max_rel / bound.max_rel, (e.rms_rel or 0.0) / bound.rms_rel)
        if share >= worst[0]:
            worst = (share, f"{e.tensor} {e.max_rel:.1e} on {e.regime} ({e.stage})")
    return worst


def _tolerance(operation: Operation, error: TrialError) -> Tolerance | None:
    regime = operation.regimes.get(error.regime)
    if regime is None or not regime.gates:
        return None
    own = (regime.tolerances or {}).get(error.tensor)
    return own or operation.tolerances.get(error.tensor)


# ------------------------------------------------------------------------------------ runs


def _runs_of(rows: Sequence[LeaderboardRow]) -> list[list[LeaderboardRow]]:
    runs: list[list[LeaderboardRow]] = []
    for row in rows:
        if row.rank == 1:
            runs.append([])
        runs[-1].append(row)
    return runs


def _value(row: LeaderboardRow) -> float:
    return row.ratio if row.provisional and row.ratio is not None else row.score_us


def _run(
    store: Store,
    campaign: CampaignRecord,
    operation: Operation | None,
    rows: Sequence[LeaderboardRow],
    trials: Sequence[TrialRecord],
    shares: Mapping[int, tuple[float | None, str]],
    open_jobs: set[str],
    minutes: Mapping[int, float],
) -> Run:
    first = rows[0]
    ids = {row.id: row for row in rows}
    won = winner(store, campaign.id)
    if won is not None and won.id not in ids:
        won = None
    leader = first if won is None else ids[won.id]
    over = _Over(store, leader)
    how = [first.method or "", f"{first.cache} cache" if first.cache not in (None, "none") else ""]
    words = [f"clock {first.clock.value}", *([f"on {first.gpu}"] if first.gpu else []), *how]
    gpu = first.gpu or _MODELLED_GPU
    peak, note = _peak(gpu, operation)
    no_time = [t for t in trials if t.id in shares and t.status.finished and t.score_us is None]
    return Run(
        title=", ".join(w for w in words if w),
        unit=f"x {first.control}" if first.provisional else "us",
        rows=tuple(rows),
        steps=_steps(store, campaign, ids, trials, minutes),
        points=(
            *(_point(r.id, _value(r), r.schedule_key, shares) for r in rows if r.id in shares),
            *(_point(t.id, None, t.schedule_key, shares) for t in no_time),
        ),
        leader=leader,
        leader_is="first" if won is None else "winner of the finals",
        won=won,
        verdict=None if leader.control is None else over.verdict(leader.control),
        shapes=_shapes(store, campaign, operation, leader, over, peak),
        floor_note=note,
        open_jobs=any(r.job_id in open_jobs for r in rows),
        space=describe_space(rows, {r.id: _value(r) for r in rows}, trials, campaign.space),
    )


def _steps(
    store: Store,
    campaign: CampaignRecord,
    ids: Mapping[int, LeaderboardRow],
    trials: Sequence[TrialRecord],
    minutes: Mapping[int, float],
) -> tuple[Step, ...]:
    place = {t.id: n for n, t in enumerate(_in_turn(trials), 1)}
    return tuple(
        Step(
            id=p.id,
            finished=place[p.id],
            minutes=minutes[p.id],
            value=_value(ids[p.id]),
            label=p.schedule_key,
        )
        for p in best_so_far(store, campaign.id)
        if p.id in ids and p.id in place and p.ended_at is not None
    )


def _in_turn(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Finished trials in the order in which they finished."""
    done = [t for t in trials if t.status.finished and t.ended_at is not None]
    return sorted(done, key=lambda t: (t.ended_at, t.id))


def _minutes(
    store: Store, campaign: CampaignRecord, trials: Sequence[TrialRecord]
) -> tuple[dict[int, float], str]:
    """Minutes that were spent when each trial finished, and what they are of."""
    from factory.executors.base import DEVICE_STAGES

    done = _in_turn(trials)
    seconds = trial_seconds(store, campaign.id)
    spent = 0.0
    found: dict[int, float] = {}
    for t in done:
        spent += sum(s for stage, s in seconds.get(t.id, {}).items() if stage in DEVICE_STAGES)
        found[t.id] = spent / 60
    if spent:
        return found, "GPU minutes"
    since = {
        t.id: (t.ended_at - campaign.created_at).total_seconds() / 60
        for t in done
        if t.ended_at is not None
    }
    return since, "minutes since the launch"


def _point(
    id_: int, value: float | None, key: str, shares: Mapping[int, tuple[float | None, str]]
) -> ErrorPoint:
    share, where = shares[id_]
    return ErrorPoint(
        id=id_, value=value, share=share, within=value is not None, label=f"{key}: {where}"
    )


def _peak(gpu: str, operation: Operation | None) -> tuple[float | None, str]:
    from factory.device.cuda import peak_bytes_per_s

    peak = peak_bytes_per_s(gpu)
    if operation is None or peak is None:
        return None, ""
    return peak, (
        f"bytes that any implementation must move, at {gpu}'s {_bandwidth(peak)} by its data sheet"
    )


def _bandwidth(peak: float) -> str:
    return f"{peak / 1e12:.3g} TB/s"


class _Over:
    """How a leader stands to controls of its job; each is asked once, and only if need be."""

    def __init__(self, store: Store, leader: LeaderboardRow) -> None:
        self._store, self._leader = store, leader
        self._known: dict[str, Ratio | None] = {}

    def _ratio(self, control: str) -> Ratio | None:
        if control not in self._known:
            try:
                self._known[control] = ratio(self._store, self._leader.id, control)
            except QueryError:  # an open job, or a control that was not timed on all workloads
                self._known[control] = None
        return self._known[control]

    def verdict(self, control: str, workload: str | None = None) -> Verdict | None:
        """Over all workloads, or on one; None where that is not known."""
        found = self._ratio(control)
        if found is None:
            return None
        if workload is None:
            return found.verdict
        return next((s.verdict for s in found.shapes if s.workload == workload), None)


_NEAR = 1.1
"""Whatever is further off than that is told apart without asking the samples."""


def _marked(workload: str, bars: Sequence[tuple[str | None, Bar]], over: _Over) -> list[Bar]:
    """Bars of one workload, the fastest said to be so, and the leader or a control beside it
    that is not told apart from it.

    Parameters
    ----------
    bars : sequence of (control, Bar)
        None in the place of a control is the leader.
    """
    first, least = min(bars, key=lambda b: b[1].us)

    def fast(control: str | None, bar: Bar) -> bool:
        if bar is least:
            return True
        other = control if first is None else first
        if (control is None) == (first is None) or bar.us > _NEAR * least.us or other is None:
            return False
        return over.verdict(other, workload) is Verdict.NOT_TOLD_APART

    return [replace(bar, fastest=fast(control, bar)) for control, bar in bars]


def _shapes(
    store: Store,
    campaign: CampaignRecord,
    operation: Operation | None,
    leader: LeaderboardRow,
    over: _Over,
    peak: float | None,
) -> tuple[ShapeBars, ...]:
    """Times behind the leader's score, beside the controls of its own job."""
    bars: dict[str, list[tuple[str | None, Bar]]] = defaultdict(list)
    name = f"trial {leader.id}"
    if leader.clock is Clock.MODELLED:
        for stage in store.get_trial(leader.id).stages:
            for workload, us in (stage.details.get("modelled_us") or {}).items():
                bars[workload].append((None, Bar(name, "trial", us)))
    else:
        basis = (campaign.ranking_regime, leader.clock, leader.cache, leader.method)
        for row in shapes(store, leader.id, clock=leader.clock):
            seen = (row.regime, row.clock, row.cache, row.method)
            if seen == basis and row.phase == "search" and row.job_id == leader.job_id:
                bar = Bar(name, "trial", row.median_us, row.low_us, row.high_us)
                bars[row.workload].append((None, bar))
        inexact = _inexact(store, leader, campaign.ranking_regime)
        for c in control_spans(store, leader.job_id or ""):
            if (c.regime, c.clock, c.cache, c.method) == basis:
                form = "" if c.input_form == "activated" else f" ({c.input_form})"
                mark = " *" if c.control in inexact else ""
                bar = Bar(c.control + form + mark, "control", c.median_us, c.low_us, c.high_us)
                bars[c.workload].append((c.control, bar))
    return tuple(
        ShapeBars(
            workload=w,
            bars=tuple(sorted(_marked(w, bars[w], over), key=lambda b: (b.kind != "trial", b.us))),
            floor_us=_floor_us(operation, w, peak),
            floor_at="" if peak is None else _bandwidth(peak),
        )
        for w in campaign.workloads
        if any(control is None for control, _ in bars[w])
    )


def _inexact(store: Store, leader: LeaderboardRow, regime: str) -> set[str]:
    """Controls of the leader's job whose outputs are beyond what candidates have to meet."""
    details = {} if leader.job_id is None else store.get_job(leader.job_id).details
    found: Mapping[str, Sequence[Mapping[str, Any]]] = details.get("control_errors") or {}
    return {
        name
        for name, errors in found.items()
        if any(e.get("regime") == regime and not e.get("within", True) for e in errors)
    }


def _floor_us(operation: Operation | None, workload: str, peak: float | None) -> float | None:
    if operation is None or peak is None or workload not in operation.workloads:
        return None
    return operation.floor_bytes(operation.workloads[workload]) / peak * 1e6 or None
