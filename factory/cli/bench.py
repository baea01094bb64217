"""``factory bench``: the current winner and all controls side by side, shape by shape."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from factory.cli.common import (
    db_option,
    json_option,
    known_operation,
    log_folder,
    open_reading,
    print_json,
    print_table,
    recording_url,
    refuse_unknown,
    us_text,
)
from factory.errors import EXIT_DONE, EXIT_MACHINE, EXIT_NOTHING_PASSED

if TYPE_CHECKING:
    from candidates import Baseline
    from factory.bench import Benched, Contestant
    from factory.bench_rows import Geomean, Row
    from factory.device.hardware import Device
    from leaderboard import Contrast, Store
    from leaderboard.records import MeasurementRecord
    from operations import Operation

__all__ = ["bench"]

_FASTER = "*"
_TIED = "="
_INEXACT = "!"


@click.command()
@click.argument("operation")
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    metavar="KEY",
    help="Time this schedule, or 'winner' (the default); may be repeated.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="Meet this tuned workload only; may be repeated.",
)
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="NAME",
    help="Time this baseline only; may be repeated.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 50),
    default=3,
    show_default=True,
    help="Turns that each one takes.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), help="Replay the inputs of an earlier bench."
)
@click.option("--record", is_flag=True, help="Store the job and its times in the leaderboard.")
@db_option
@json_option
def bench(
    operation: str,
    schedules: tuple[str, ...],
    workloads: tuple[str, ...],
    controls: tuple[str, ...],
    rounds: int,
    seed: int | None,
    record: bool,
    db: str | None,
    as_json: bool,
) -> int:
    """Time OPERATION's current winner and all baselines in turns, in one job.

    The winner is timed on activated inputs, and on raw ones where it takes
    them.  All tuned shapes, the three clocks, warm and cold, production and
    slow gates, with the floor of each shape.  What cannot run here is named
    with the reason.  Exit code 0: done; 1: a schedule of ours was refused; 2: wrong
    usage; 3: no sm90 GPU, or the machine did not hold still.

    With --json: one object with id (the job's), operation, void, floor,
    contestants, missing, rows (one for each time), geomeans, job and
    fingerprint; docs/bench.md has their shapes.
    """
    import candidates
    from factory.bench import bench as run
    from factory.bench_entries import WINNER, choose, named

    known, family = known_operation(operation)
    baselines = _baselines(known, controls)
    refuse_unknown("workload", workloads, [w.name for w in known.tuned()])
    for key in schedules:
        if key != WINNER:
            named(family, key)
    with ExitStack() as opened:
        store = opened.enter_context(_asked(db, record)) if record or db else None
        device = _gpu()
        stores = _stores(opened) if store is None else [store]
        gpu = str(device.describe()["gpu"])
        entries, missing = choose(known, family, schedules or (WINNER,), stores, gpu)
        found = run(
            known,
            family,
            entries,
            device=device,
            baselines=baselines,
            log_dir=log_folder("bench", known.name),
            seed=seed,
            rounds=rounds,
            workloads=workloads or None,
            missing=missing,
            fed_raw=candidates.fed_raw(known.name),
            on_event=lambda kind, line: click.echo(f"{kind}: {line}", err=True),
        )
        if as_json:
            print_json(_object(found))
        else:
            _print(found)
        if record and store is not None:
            click.echo(_record(store, found), err=True)
    if found.void:
        return EXIT_MACHINE
    return EXIT_NOTHING_PASSED if found.refused else EXIT_DONE


def _baselines(operation: Operation, chosen: Sequence[str]) -> list[Baseline]:
    import candidates

    there = {b.name: b for b in candidates.baselines(operation.name)}
    refuse_unknown("control", chosen, there)
    return [b for name, b in there.items() if not chosen or name in chosen]


def _stores(opened: ExitStack) -> list[Store]:
    """Where a winner is looked for: in what is here, then in what was shipped."""
    from leaderboard import shipped_store

    first = opened.enter_context(open_reading(None))
    shipped = opened.enter_context(shipped_store())
    return [first] if first.name == shipped.name else [first, shipped]


def _asked(db: str | None, record: bool) -> Store:
    """The leaderboard that the command line asks for, to be written if it says so."""
    from leaderboard import open_store

    return open_store(recording_url(db, "--record")) if record else open_reading(db)


def _gpu() -> Device:
    from factory.device.cuda import CudaDevice

    return CudaDevice.find()


def _record(store: Store, found: Benched) -> str:
    """Store the job; says in a line what was stored."""
    from leaderboard import JobStatus

    times: list[MeasurementRecord] = []
    left = []
    for c in found.contestants:
        entry = found.entries.get(c.id)
        if entry is None:
            times += found.measurements[c.id]
        elif c.input_form == "raw":
            # Neither a trial's, whose times are those of activated inputs, nor a control's.
            left.append(f"{c.id}, whose inputs are no trial's")
        elif entry.trial_id is None:
            left.append(f"{c.id}, which has no trial there")
        else:
            times += [
                m.model_copy(update={"trial_id": entry.trial_id}) for m in found.measurements[c.id]
            ]
    job = found.job
    store.put_fingerprint(found.fingerprint)
    store.open_job(job.model_copy(update={"status": JobStatus.OPEN, "ended_at": None}))
    store.add_measurements(times)
    store.close_job(job.id, job.status, drift=job.drift, note=job.note)
    without = f"; without {'; '.join(left)}" if left else ""
    return f"stored: job {job.id}, {len(times)} times, in {store.name}{without}"


# -- JSON --------------------------------------------------------------------------------


def _object(found: Benched) -> dict[str, Any]:
    from factory.bench_rows import geomeans, rows

    times = rows(found)
    return {
        "id": found.job.id,
        "operation": found.operation.name,
        "operation_version": found.operation.version,
        "source_sha256": found.fingerprint.values["source"],
        "seed": found.job.seed,
        "rounds": found.rounds,
        "void": found.void,
        "reference": found.reference,
        "floor": {
            "bytes_per_s": found.floor.bytes_per_s,
            "source": found.floor.source,
            "shapes": [
                {"id": w, "us": us, "raw_us": found.floor.raw_us[w]}
                for w, us in found.floor.us.items()
            ],
        },
        "contestants": [asdict(c) for c in found.contestants],
        "missing": [asdict(m) for m in found.missing],
        "rows": [
            {
                "id": " ".join((r.contestant, r.workload, r.regime, r.clock, r.cache)),
                **asdict(r),
                "beats_ours": r.beats_ours,
            }
            for r in times
        ],
        "geomeans": [
            {"id": " ".join((g.contestant, g.regime, g.clock, g.cache)), **asdict(g)}
            for g in geomeans(found, times)
        ],
        "job": found.job,
        "fingerprint": found.fingerprint.values,
    }


# -- tables ------------------------------------------------------------------------------


def _print(found: Benched) -> None:
    from factory.bench_rows import geomeans, rows

    operation, job = found.operation, found.job
    click.echo(
        f"{operation.name} version {operation.version} on {job.gpu}\n"
        f"job {job.id}, {found.rounds} rounds, seed {job.seed},"
        f" source {found.fingerprint.values['source'][:12]}\n"
        f"floor: bytes that must move at {found.floor.bytes_per_s / 1e12:.2f} TB/s\n"
        f"({found.floor.source})"
    )
    if any(c.input_form == "raw" for c in found.contestants):
        click.echo(
            f"geomean us: {_floor(found)} on activated inputs, as in the tables,"
            f" {_floor(found, 'raw')} on raw ones"
        )
    click.echo()
    _print_contestants(found)
    if found.missing:
        click.echo("\nmissing")
        for m in found.missing:
            click.echo(f"  {m.id}: {m.reason}")
    times = rows(found)
    means = geomeans(found, times)
    if found.reference is not None:
        click.echo(f"\n{_FASTER} faster than ours, {_TIED} not told apart from ours")
        if found.raw_reference is not None:
            click.echo(f"columns fed raw inputs are held to {found.raw_reference}")
    for regime in dict.fromkeys(r.regime for r in times):
        click.echo()
        _print_means(found, regime, [g for g in means if g.regime == regime])
    for cell in dict.fromkeys((r.regime, r.clock, r.cache) for r in times):
        click.echo()
        _print_cell(
            found,
            [r for r in times if (r.regime, r.clock, r.cache) == cell],
            {g.contestant: g for g in means if (g.regime, g.clock, g.cache) == cell},
        )
    if found.void:
        click.echo(f"\nthese times do not count: {found.void}; bench again")


def _print_contestants(found: Benched) -> None:
    regimes = list(dict.fromkeys(r for c in found.contestants for r in c.largest_error))
    heads = [f"max error\n{r}" for r in regimes]
    print_table(
        ["column", "inputs", *heads, "what"],
        (
            [
                c.id,
                c.input_form,
                *(_error(c, r) for r in regimes),
                c.what,
            ]
            for c in found.contestants
        ),
        right=",".join(heads),
    )
    if any(c.inexact for c in found.contestants):
        click.echo(f"{_INEXACT} beyond the tolerance that ours meets")
    for c in found.contestants:
        if c.origin and c.input_form != "raw":  # of one schedule once
            click.echo(f"{c.id}: {c.origin}")


def _error(contestant: Contestant, regime: str) -> str:
    value = contestant.largest_error.get(regime)
    mark = _INEXACT if regime in contestant.inexact else ""
    return "-" if value is None else f"{mark}{value:.1e}"


def _head(contestant: Contestant) -> str:
    """A column's name, folded where a table of all baselines would not fit 80 columns."""
    return contestant.id.replace("_", "\n")


def _label(clock: str, cache: str) -> str:
    return clock if cache == "warm" else f"{clock} {cache}"


def _marked(us: float | None, against: Contrast | None) -> str:
    from leaderboard import Verdict

    if against is None or us is None:
        return us_text(us)
    mark = {Verdict.SLOWER: _FASTER, Verdict.NOT_TOLD_APART: _TIED, Verdict.FASTER: ""}
    return f"{mark[against.verdict]}{us_text(us)}"


def _floor(found: Benched, input_form: str = "activated") -> str:
    from factory.device.verdicts import geomean

    return us_text(geomean(found.floor.of(input_form).values()))


def _print_means(found: Benched, regime: str, means: Sequence[Geomean]) -> None:
    heads = [_head(c) for c in found.contestants]
    by_cell: dict[tuple[str, str], dict[str, Geomean]] = {}
    for g in means:
        by_cell.setdefault((g.clock, g.cache), {})[g.contestant] = g
    print_table(
        ["clock", "floor", *heads],
        (
            [
                _label(*cell),
                _floor(found),
                *(
                    _marked(mine[c.id].us, mine[c.id].against) if c.id in mine else "-"
                    for c in found.contestants
                ),
            ]
            for cell, mine in by_cell.items()
        ),
        title=f"{regime}: geomean us over {len(found.workloads)} shapes",
        right=",".join(["floor", *heads]),
        drop=_dispensable(found, {g.contestant: g for g in means if g.clock == "gpu"}),
    )


def _dispensable(found: Benched, means: dict[str, Geomean]) -> str:
    """Heads of controls, slowest last: those that a narrow terminal does without first."""
    controls = [c for c in found.contestants if c.id in means and c.id not in found.entries]
    return ",".join(_head(c) for c in sorted(controls, key=lambda c: means[c.id].us or 0.0))


def _print_cell(found: Benched, times: Sequence[Row], means: dict[str, Geomean]) -> None:
    by_shape: dict[str, dict[str, Row]] = {}
    for r in times:
        by_shape.setdefault(r.workload, {})[r.contestant] = r
    columns = [c for c in found.contestants if c.id in means]
    heads = [_head(c) for c in columns]
    ratio = "to\nbest"
    lines = [
        [
            workload,
            us_text(found.floor.us[workload]),
            *(_marked(mine[c.id].us, mine[c.id].against) if c.id in mine else "-" for c in columns),
            _over_best(found, mine),
        ]
        for workload, mine in by_shape.items()
    ]
    lines.append(
        [
            "geomean",
            _floor(found),
            *(_marked(means[c.id].us, means[c.id].against) for c in columns),
            "",
        ]
    )
    if found.reference is not None:
        lines.append(["ratio", "", *(_ratio(means[c.id].against) for c in columns), ""])
        lines.append(["faster on", "", *(_faster_on(means[c.id]) for c in columns), ""])
    first = times[0]
    print_table(
        ["workload", "floor", *heads, ratio],
        lines,
        title=f"{first.regime}, {_label(first.clock, first.cache)}: median us",
        right=",".join(["floor", *heads, ratio]),
        drop=_dispensable(found, means),
    )


def _over_best(found: Benched, mine: dict[str, Row]) -> str:
    """Ours over the fastest control of a shape."""
    ours = mine.get(found.reference or "")
    controls = [r.us for name, r in mine.items() if name not in found.entries]
    return "-" if ours is None or not controls else f"{ours.us / min(controls):.2f}"


def _ratio(against: Contrast | None) -> str:
    return "-" if against is None else f"{against.ratio:.3f}"


def _faster_on(mean: Geomean) -> str:
    return "-" if mean.against is None else f"{len(mean.losses)}/{mean.shapes}"
