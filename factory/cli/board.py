"""``factory leaderboard``: what is fastest, what was rejected and why, import and export."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from factory.cli.claims import claims
from factory.cli.common import (
    db_option,
    db_to_write_option,
    json_option,
    open_reading,
    print_json,
    print_note,
    print_table,
    refuse_in_memory,
    us_text,
)
from factory.cli.table import line_width, print_failures
from factory.errors import UserError

if TYPE_CHECKING:
    from leaderboard import FinalRow, ResultRow, Results, ShapeResult, Store

__all__ = ["leaderboard"]

_LOSSES_NAMED = 2
"""Workloads that a table names."""

_SIDE_BY_SIDE = 4
"""Trials of a table of shapes."""

_MARKS: dict[str | None, str] = {"slower": "*", "not told apart": "="}
"""Beside a time, by how it stands to the control."""

_ON_A_TERMINAL = 20
"""Rows of a ranking there, where nobody asked for a number of them."""


@click.group(invoke_without_command=True)
@click.option("--operation", help="Only this operation.")
@click.option("--campaign", help="Only this one, by id or name.")
@click.option("--gpu", help="Only this GPU; a part of its name will do, for example H200.")
@click.option(
    "--clock",
    type=click.Choice(["gpu", "per_call", "pipelined", "modelled"]),
    help="Order by this clock.",
)
@click.option("--regime", help="Order by the times on this regime, for example slow.")
@click.option(
    "--status",
    default="ranked",
    show_default=True,
    help="ranked, passed (without a place too), failed, all, or one verdict.",
)
@click.option("--where", metavar="CONDITION", help='For example "bt=32 and anchor=mid".')
@click.option("--sort", metavar="COLUMN", help="Order within each ranking; -COLUMN downwards.")
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=1_000_000_000),
    help="Rows of each ranking; default: all, on a terminal 20.",
)
@click.option("--columns", metavar="A,B,...", help="These columns, in this order.")
@click.option("--control", help="Baseline for the ratios.")
@click.option("--shapes", is_flag=True, help="Each shape beside the control: * slower, = as fast.")
@click.option("--rejected", is_flag=True, help="Those that failed, with the first breach.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@db_option
@json_option
@click.pass_context
def leaderboard(
    ctx: click.Context,
    /,
    *,
    columns: str | None,
    shapes: bool,
    rejected: bool,
    as_csv: bool,
    db: str | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Ranked trials, best first, and any other question to the results.

    \b
    factory leaderboard --operation kda_prefill --gpu H200 --limit 5
    factory leaderboard --where "bt=32 and anchor=mid" --sort -slow_us
    factory leaderboard --status rejected --columns id,stage,reason
    factory leaderboard --shapes --limit 3

    Clocks, GPUs and versions are never ranked together: each has its own
    ranking from 1, and a filter changes no rank, but for --campaign, which
    ranks that campaign alone.  What was measured with other source than the
    installed one comes apart, marked superseded.  With --json: a list of
    objects, each with its trial's id (leaderboard.ResultRow; with --shapes
    leaderboard.ShapeResult, with --rejected leaderboard.RejectedRow).
    """
    ctx.obj = db
    if ctx.invoked_subcommand is not None:
        return
    if as_csv and as_json:
        raise click.UsageError("--csv and --json are two formats; name one")
    if columns and (shapes or rejected):
        raise click.UsageError("--columns goes with neither --shapes nor --rejected")
    if shapes and rejected:
        raise click.UsageError("--shapes and --rejected are two tables; name one")
    if rejected and ctx.get_parameter_source("status") is not ParameterSource.DEFAULT:
        raise click.UsageError("--rejected is --status failed, as a table of reasons; name one")
    from leaderboard import query, query_shapes
    from leaderboard import rejected as failures

    with open_reading(db) as store:
        if rejected:
            asked["status"] = "failed"
        found = query(store, source_hash=_sources(store), **asked)
        chosen = None if columns is None else _chosen(found, columns)
        if rejected:
            order = {row.id: n for n, row in enumerate(found)}
            rows = [r for r in failures(store) if r.id in order]
            rows.sort(key=lambda r: order[r.id])
            _print_rejected(rows, store.name, as_json=as_json, as_csv=as_csv)
        elif shapes:
            _print_shapes(query_shapes(store, found), store.name, as_json=as_json, as_csv=as_csv)
        elif as_csv:
            heads, lines = found.flat()
            keep = [heads.index(name) for name in chosen] if chosen else range(len(heads))
            _print_csv([heads[n] for n in keep], ([line[n] for n in keep] for line in lines))
        elif as_json:
            print_json(found.rows if chosen is None else _objects(found, chosen))
        else:
            most = None if asked["limit"] or line_width() is None else _ON_A_TERMINAL
            if chosen is not None:
                _print_chosen(found, chosen, store.name, most)
            else:
                _print_found(found, store, most)


def _sources(store: Store) -> Mapping[str, str]:
    """Source of each family as it is installed here; those that are not are not judged."""
    import candidates

    found = {}
    for operation in {c.operation for c in store.list_campaigns()}:
        try:
            family = candidates.get(operation)
        except candidates.UnknownFamilyError:
            continue
        found[family.name] = family.source_hash()
    return found


def _chosen(found: Results, columns: str) -> list[str]:
    import difflib

    known = found.flat()[0]
    short = {"us": "score_us", "slow": "slow_us", "trial": "id", "schedule": "schedule_key"}
    names = [short.get(c.strip(), c.strip()) for c in columns.split(",") if c.strip()]
    if not names:
        raise UserError(f"--columns names none; there: {', '.join([*short, *known])}")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *short], n=1)
            there = ", ".join([*short, *known])
            hint = f"did you mean {near[0]!r}?" if near else f"there: {there}"
            raise UserError(f"no column {name!r}; {hint}")
    return names


def _objects(found: Results, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with these columns, and always with the id."""
    heads, lines = found.flat()
    names = list(dict.fromkeys(["id", *chosen]))
    return [{name: line[heads.index(name)] for name in names} for line in lines]


@leaderboard.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@db_to_write_option
@json_option
@click.pass_obj
def import_(parent_db: str | None, file: str, db: str | None, as_json: bool) -> None:
    """Add the campaigns of an exported FILE; what is there already is skipped.

    With --json: one object with added and skipped counts by kind.
    """
    from leaderboard import DEFAULT_URL, StoreError, import_file, open_store

    url = db or parent_db or DEFAULT_URL
    refuse_in_memory(url)
    try:
        open_store(url, read_only=True).close()
    except StoreError:  # there is none yet: a file that is refused must not leave an empty one
        with open_store("sqlite:///:memory:") as trial:
            import_file(trial, Path(file))
    with open_store(url) as store:
        result = import_file(store, Path(file))
        if as_json:
            print_json(result)
            return
        added = ", ".join(f"{n} {kind}" for kind, n in result.added.items() if n) or "nothing new"
        skipped = sum(result.skipped.values())
        click.echo(f"added {added}; {skipped} were there already; leaderboard {store.name}")


@leaderboard.command("export")
@click.argument("campaigns", nargs=-1)
@click.option("-o", "--output", help="File to write; default: standard output.")
@db_option
@click.pass_obj
def export_(
    parent_db: str | None, campaigns: tuple[str, ...], output: str | None, db: str | None
) -> None:
    """Write CAMPAIGNS (ids or names; all by default) as JSON lines."""
    from leaderboard import export_file, export_lines

    with open_reading(db or parent_db) as store:
        ids = [store.get_campaign(c).id for c in campaigns] or None
        if output is None:
            for line in export_lines(store, ids):
                click.echo(line)
            return
        export_file(store, Path(output), ids)
        click.echo(f"wrote {output}", err=True)


leaderboard.add_command(claims)


# ---------------------------------------------------------------------------------- tables


def _print_csv(heads: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    click.echo(stream.getvalue(), nl=False)


def _print_found(found: Results, store: Store, most: int | None) -> None:
    if not found:
        click.echo(f"no ranked trials in {store.name} fit (--status all shows the others)")
        return
    for number, run in enumerate(found.runs()):
        if number:
            click.echo()
        if run[0].run is None:
            print_failures(run, title="without a place")
        else:
            _print_run(run, most, _winner(store, run))


def _winner(store: Store, run: Sequence[ResultRow]) -> FinalRow | None:
    """Of the finals, where the run is of one campaign and by what it ranks by."""
    from leaderboard import winner

    first, ids = run[0], {r.campaign_id for r in run}
    if len(ids) > 1 or first.regime not in (None, "production"):
        return None
    found = winner(store, first.campaign_id)
    return found if found is not None and found.clock is first.clock else None


def _print_run(run: Sequence[ResultRow], most: int | None, first_of_finals: Any) -> None:
    """A ranking; under it its campaign's winner, whose time of the finals is another one."""
    first = run[0]
    ids = {r.campaign_id: r.campaign for r in run}
    many = len(ids) > 1
    names = Counter(ids.values())
    slow = any(r.slow_us is not None for r in run)
    over = any(r.ratio is not None for r in run)
    ratio = f"/ {first.control}"
    columns = ["rank", "trial", "us"]
    columns += ["slow us"] if slow else []
    columns += [ratio, "loses on"] if over else []
    columns += ["campaign"] if many else []
    print_table(
        [*columns, "schedule"],
        (
            [
                str(r.rank),
                str(r.id),
                us_text(r.score_us),
                *([us_text(r.slow_us)] if slow else []),
                *(
                    ["-" if r.ratio is None else f"{r.ratio:.3f}", _losses(r.losses)]
                    if over
                    else []
                ),
                *([r.campaign if names[r.campaign] == 1 else r.campaign_id] if many else []),
                r.schedule_key,
            ]
            for r in run[:most]
        ),
        title=_title(run),
        right=f"rank,trial,us,slow us,{ratio}",
        drop="slow us,loses on,campaign",
        keep={"schedule": 44},
        fold="schedule",
    )
    _print_rest(run, most)
    if first_of_finals is not None:
        us = us_text(first_of_finals.score_us)
        print_note(f"trial {first_of_finals.id} is the winner of the finals, {us} us there")


def _print_rest(run: Sequence[ResultRow], most: int | None) -> None:
    if most is not None and len(run) > most:
        print_note(f"and {len(run) - most} more; --limit {len(run)} shows all")


def _title(run: Sequence[ResultRow | ShapeResult], *, operation: str = "") -> str:
    first: Any = run[0]
    where = f" on {first.gpu}" if first.gpu else ""
    names = {r.campaign_id for r in run}
    clock = "-" if first.clock is None else first.clock.value
    head = operation or f"{first.operation} {first.operation_version}"
    regime = f", regime {first.regime}" if first.regime not in (None, "production") else ""
    title = f"{head}, clock {clock}{regime}{where}"
    if len(names) == 1:
        title += f", campaign {names.pop()}"
    marks = [
        *(["across jobs: provisional"] if getattr(first, "provisional", False) else []),
        *(["superseded source"] if getattr(first, "superseded", False) else []),
    ]
    return f"{title} ({'; '.join(marks)})" if marks else title


def _losses(workloads: tuple[str, ...]) -> str:
    """Where the control is faster: by name while a few, else how many (--json has them all)."""
    if len(workloads) > _LOSSES_NAMED:
        return f"{len(workloads)} shapes"
    return " ".join(workloads) or "-"


def _print_chosen(found: Results, chosen: Sequence[str], name: str, most: int | None) -> None:
    if not found:
        click.echo(f"no trials in {name} fit")
        return
    heads, lines = found.flat()
    numbers = {h for n, h in enumerate(heads) if any(isinstance(x[n], int | float) for x in lines)}
    at = [heads.index(c) for c in chosen]
    by_id = {line[0]: line for line in lines}
    for number, run in enumerate(found.runs()):
        if number:
            click.echo()
        print_table(
            chosen,
            ([_cell(by_id[row.id][n]) for n in at] for row in run[:most]),
            title="without a place" if run[0].run is None else _title(run),
            right=",".join(numbers),
            fold="schedule_key",
        )
        _print_rest(run, most)


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_rejected(rows: list[Any], name: str, *, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json(rows)
    elif as_csv:
        heads = ["id", "uid", "campaign_id", "number", "schedule_key", "status", "stage", "reason"]
        _print_csv(heads, ([r.model_dump(mode="json")[h] for h in heads] for r in rows))
    elif not rows:
        click.echo(f"nothing was rejected in {name}")
    else:
        print_failures(rows)


def _print_shapes(rows: Sequence[ShapeResult], name: str, *, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json(rows)
        return
    if as_csv:
        values = [r.model_dump(mode="json") for r in rows]
        heads = list(type(rows[0]).model_fields) if rows else ["id"]
        _print_csv(heads, ([v[h] for h in heads] for v in values))
        return
    if not rows:
        click.echo(f"no times in {name} fit")
        return
    runs: dict[int | None, list[ShapeResult]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    for number, run in enumerate(runs.values()):
        if number:
            click.echo()
        _print_shape_run(run)


def _print_shape_run(run: Sequence[ShapeResult]) -> None:
    """The first trials of a run side by side, with the control of the first one's job."""
    trials = list(dict.fromkeys(r.id for r in run))
    shown = trials[:_SIDE_BY_SIDE]
    cells = {(r.id, r.workload): r for r in run}
    first = run[0]
    jobs = {r.job_id for r in run if r.id in shown}
    # The controls of several jobs are several numbers, and each belongs to its own trial.
    beside = [first.control] if first.control and len(jobs) == 1 else []

    def line(workload: str) -> list[str]:
        found = [cells.get((trial, workload)) for trial in shown]
        known = next((r for r in found if r is not None), None)
        return [
            workload,
            *("-" if r is None else f"{us_text(r.us)} {_MARKS.get(r.verdict, ' ')}" for r in found),
            *(us_text(known.control_us if known else None) for _ in beside),
        ]

    heads = [f"trial {trial}" for trial in shown]
    print_table(
        ["workload", *heads, *map(str, beside)],
        (line(w) for w in dict.fromkeys(r.workload for r in run)),
        title=_title(run, operation="each shape, us"),
        right=",".join([*heads, *map(str, beside)]),
    )
    seen = {r.verdict for r in run if r.id in shown}
    for verdict, words in (
        ("slower", "the control of its own job is faster"),
        ("not told apart", "not told apart from the control of its own job"),
    ):
        if verdict in seen:
            print_note(f"{_MARKS[verdict]} {words}", indent="  ")
    for trial in shown:
        key = next(r.schedule_key for r in run if r.id == trial)
        print_note(key, first=f"trial {trial}: ", indent="  ")
    if len(trials) > len(shown):
        print_note(f"and {len(trials) - len(shown)} more trials; --json and --csv have all")
