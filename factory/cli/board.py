"""``factory leaderboard``: ranked trials, and moving them between databases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from factory.cli.common import (
    db_option,
    json_option,
    open_reading,
    print_json,
    print_table,
    us_text,
)

__all__ = ["leaderboard"]

_LOSSES_NAMED = 2
"""Workloads that a table names."""


@click.group(invoke_without_command=True)
@click.option("--campaign", help="Only this one, by id or name.")
@click.option("--operation", help="Only this operation.")
@click.option("--clock", type=click.Choice(["gpu", "modelled"]), help="Only this clock.")
@click.option("--gpu", help="Only this GPU, for example 'NVIDIA H200'.")
@click.option("--control", help="Baseline for the ratios.")
@click.option("--limit", type=click.IntRange(min=1), help="Rows of each ranking.")
@click.option("--rejected", "show_rejected", is_flag=True, help="The rejected, with reasons.")
@db_option
@json_option
@click.pass_context
def leaderboard(
    ctx: click.Context,
    campaign: str | None,
    operation: str | None,
    clock: str | None,
    gpu: str | None,
    control: str | None,
    limit: int | None,
    show_rejected: bool,
    db: str | None,
    as_json: bool,
) -> None:
    """Ranked trials, best first; or with --rejected those that failed and why.

    Clocks, GPUs and versions are never ranked together: each has its own
    ranking from 1.  With --json: a list of objects, each with its trial's id
    (leaderboard.LeaderboardRow; with --rejected leaderboard.RejectedRow).
    """
    ctx.obj = db
    if ctx.invoked_subcommand is not None:
        return
    from leaderboard import Clock, ranked, rejected

    with open_reading(db) as store:
        campaign_id = store.get_campaign(campaign).id if campaign else None
        if show_rejected:
            failed = rejected(store, campaign_id=campaign_id, operation=operation)
            failed = failed[:limit] if limit else failed
            if as_json:
                print_json(failed)
            else:
                _print_rejected(failed, store.name)
            return
        rows = ranked(
            store,
            operation=operation,
            campaign_id=campaign_id,
            clock=Clock(clock) if clock else None,
            gpu=gpu,
            control=control,
            limit=limit,
        )
        if as_json:
            print_json(rows)
        else:
            _print_ranked(rows, store.name)


@leaderboard.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@db_option
@json_option
@click.pass_obj
def import_(parent_db: str | None, file: str, db: str | None, as_json: bool) -> None:
    """Add the campaigns of an exported FILE; what is there already is skipped.

    With --json: one object with added and skipped counts by kind.
    """
    from leaderboard import DEFAULT_URL, import_file, open_store

    with open_store(db or parent_db or DEFAULT_URL) as store:
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


def _print_ranked(rows: list[Any], name: str) -> None:
    if not rows:
        click.echo(f"no ranked trials in {name} (--rejected shows the others)")
        return
    runs: list[list[Any]] = []
    for row in rows:
        if row.rank == 1 or not runs:
            runs.append([])
        runs[-1].append(row)
    for number, run in enumerate(runs):
        if number:
            click.echo()
        _print_run(run)


def _print_run(run: list[Any]) -> None:
    first = run[0]
    where = f" on {first.gpu}" if first.gpu else ""
    marks = [
        *(["across jobs: provisional"] if first.provisional else []),
        *(["superseded source"] if first.superseded else []),
    ]
    title = f"{first.operation} {first.operation_version}, clock {first.clock.value}{where}"
    columns = ["rank", "trial", "us"]
    slow = any(r.slow_us is not None for r in run)
    over = any(r.ratio is not None for r in run)
    columns += ["slow us"] if slow else []
    columns += [f"/ {first.control}", "loses on"] if over else []
    print_table(
        [*columns, "campaign", "schedule"],
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
                r.campaign,
                r.schedule_key,
            ]
            for r in run
        ),
        title=f"{title} ({'; '.join(marks)})" if marks else title,
        right=",".join(["rank", "trial", "us", "slow us", f"/ {first.control}"]),
    )


def _losses(workloads: tuple[str, ...]) -> str:
    """Where the control is faster: by name while a few, else how many (--json has them all)."""
    if len(workloads) > _LOSSES_NAMED:
        return f"{len(workloads)} shapes"
    return " ".join(workloads) or "-"


def _print_rejected(rows: list[Any], name: str) -> None:
    if not rows:
        click.echo(f"nothing was rejected in {name}")
        return
    print_table(
        ["trial", "verdict", "stage", "schedule", "reason"],
        ([str(r.id), r.status.value, r.stage, r.schedule_key, r.reason] for r in rows),
        right="trial",
    )
