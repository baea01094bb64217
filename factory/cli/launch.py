"""``factory launch``: run a campaign."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from factory.cli.common import (
    db_to_write_option,
    json_option,
    print_json,
    print_note,
    print_table,
    refuse_in_memory,
    us_text,
)
from factory.cli.table import print_failures
from factory.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NOTHING_PASSED, MachineError, UserError

if TYPE_CHECKING:
    from factory.campaign import Launched
    from factory.config import CampaignConfig
    from factory.executors.base import Executor, WorkerContext
    from factory.plan import Plan
    from factory.progress import View
    from leaderboard import CampaignRecord, Store

__all__ = ["launch"]

_SHOWN = 20
"""Ranked trials printed at the end."""


@click.command()
@click.argument("campaign")
@click.option("--budget", type=int, help="Finished trials in all, resumed ones included.")
@click.option("--gpu-minutes", type=float, help="Begin nothing after so many; 0 is no limit.")
@click.option("--patience", type=int, help="End after so many trials without a new best.")
@click.option(
    "--clock",
    type=click.Choice(["gpu", "modelled"]),
    help="Clock that ranks; default: gpu where there is an sm90 GPU, else modelled.",
)
@click.option("--seed", type=int, help="Seed of inputs and sampler.")
@click.option(
    "--sampler",
    type=click.Choice(["tpe", "gp", "random", "grid"]),
    help="Who proposes schedules; grid tries all of them in order.",
)
@click.option("--resume", is_flag=True, help="Continue the newest campaign of this name.")
@click.option("--name", help="Another name for the campaign; resuming looks for it.")
@click.option("--executor", type=click.Choice(["inline", "ray"]), help="Where stages run.")
@click.option("--workers", type=int, help="CPU worker processes; 0 is one for each CPU.")
@click.option("--ray-address", help="Ray cluster to join; implies --executor ray.")
@click.option("--dry-run", is_flag=True, help="Show space, counts and an estimate; run nothing.")
@click.option("--print-config", is_flag=True, help="Print the configuration as TOML.")
@db_to_write_option
@json_option
def launch(
    campaign: str,
    budget: int | None,
    gpu_minutes: float | None,
    patience: int | None,
    clock: str | None,
    seed: int | None,
    sampler: str | None,
    resume: bool,
    name: str | None,
    executor: str | None,
    workers: int | None,
    ray_address: str | None,
    dry_run: bool,
    print_config: bool,
    db: str | None,
    as_json: bool,
) -> int:
    """Run CAMPAIGN: a preset's name, a TOML file or an operation's name.

    Schedules are proposed, validated, emulated against the fp64 oracle and
    compiled; with an sm90 GPU they are then gated and timed on it.  A campaign
    that was stopped, or killed, goes on with --resume.
    """
    from factory.config import load_campaign, to_toml

    config = load_campaign(
        campaign,
        {
            "budget": budget,
            "gpu_minutes": gpu_minutes,
            "patience": patience,
            "clock": clock,
            "seed": seed,
            "sampler": sampler,
            "name": name,
            "executor.kind": "ray" if ray_address else executor,
            "executor.workers": workers,
            "executor.ray_address": ray_address,
        },
    )
    if print_config:
        click.echo(to_toml(config), nl=False)
        return EXIT_DONE
    if dry_run:
        return _dry_run(config, db, as_json)
    given = {"budget": budget, "gpu_minutes": gpu_minutes, "patience": patience}
    return _launch(campaign, config, db, resume=resume, given=given, as_json=as_json)


def _launch(
    campaign: str,
    config: CampaignConfig,
    db: str | None,
    *,
    resume: bool,
    given: Mapping[str, float | None],
    as_json: bool,
) -> int:
    from factory.campaign import find_resumable, unfinished
    from factory.campaign import launch as run
    from factory.plan import make_plan
    from factory.progress import make_view
    from leaderboard import (
        DEFAULT_URL,
        AbsentError,
        OlderError,
        StoreError,
        UnreachableError,
        open_store,
    )

    # All that can be refused is, before a database is made or touched.
    url = db or DEFAULT_URL
    refuse_in_memory(url)
    stored = None
    if resume:
        try:
            reading = open_store(url, read_only=True)
        except UnreachableError:
            raise
        except OlderError:
            reading = open_store(url)  # which brings it up to date
        except StoreError as error:
            raise UserError(f"nothing to resume: {error}") from error
        with reading as store:
            stored = find_resumable(store, config.name)
        config = _as_launched(config, stored, given)
    plan = make_plan(config, need_gpu_here=config.executor.ray_address is None)
    if isinstance(config.warm_start, list) and config.warm_start:
        try:
            with suppress(OlderError):
                open_store(url, read_only=True).close()
        except AbsentError as error:
            named = config.warm_start[0]
            raise UserError(f"warm_start: no campaign {named!r}: {error}") from None
    if config.executor.kind == "ray":
        _need_ray()
    with open_store(url) as store:
        if stored is None:
            _refuse_unfinished(store, unfinished(store, config.name))
        launched = run(plan, store, stored=stored, make_executor=_make_executor, view=make_view())
        return _report(store, launched, plan, campaign, as_json=as_json)


def _as_launched(
    config: CampaignConfig, stored: CampaignRecord, given: Mapping[str, float | None]
) -> CampaignConfig:
    """What a resume takes from the stored campaign where the command line is silent."""
    from factory.config import with_defaults

    before = {**with_defaults(stored.config), "budget": stored.budget}
    update: dict[str, Any] = {
        key: before[key] if value is None else value for key, value in given.items()
    }
    if config.clock is None:
        update["clock"] = stored.clock.value
    return config.model_copy(update=update)


def _refuse_unfinished(store: Store, open_one: CampaignRecord | None) -> None:
    if open_one is None:
        return
    from leaderboard import funnel

    counts = funnel(store, open_one.id)
    raise UserError(
        f"campaign {open_one.id} is unfinished ({counts.finished} of {counts.budget} trials); "
        "add --resume to continue it, or --name NAME to start another"
    )


def _need_ray() -> None:
    from factory.machine import installed

    if installed("ray") is None:
        raise MachineError("--executor ray needs ray; install it with pip install 'ray>=2.50'")


def _make_executor(context: WorkerContext, plan: Plan, view: View) -> Executor:
    from leaderboard import Clock

    config = plan.config.executor
    measured = plan.clock is not Clock.MODELLED
    if config.kind == "ray":
        from factory.executors.ray import RayExecutor

        ray_executor: Executor = RayExecutor(
            context,
            workers=config.workers,
            address=config.ray_address,
            measured=measured,
            note=view.note,
        )
        return ray_executor
    from factory.executors.inline import InlineExecutor
    from factory.executors.lane import opener

    return InlineExecutor(
        context,
        workers=config.workers,
        open_job=opener(context, lambda word, line: view.note(f"{word}: {line}"))
        if measured
        else None,
    )


def _report(store: Store, launched: Launched, plan: Plan, campaign: str, *, as_json: bool) -> int:
    from leaderboard import ranked, rejected, winner

    record = launched.campaign
    rows = ranked(store, campaign_id=record.id, clock=plan.clock)
    failed = rejected(store, campaign_id=record.id)
    first = winner(store, record.id)
    code = EXIT_DONE if launched.passed else EXIT_NOTHING_PASSED
    if launched.interrupted:
        code = EXIT_INTERRUPTED
    if as_json:
        print_json(
            {
                "id": record.id,
                "name": record.name,
                "status": record.status,
                "clock": plan.clock.value,
                "budget": record.budget,
                "offered": len(plan.offered),
                "finished": launched.finished,
                "passed": launched.passed,
                "winner": first,
                "ranked": rows,
                "rejected": failed,
            }
        )
    else:
        _print_tables(rows, failed, plan)
        _print_end(store, launched, first)
    if launched.interrupted:
        click.echo(f"resume with: {_resume_command(campaign)}", err=True)
    return code


def _print_tables(rows: Any, failed: Any, plan: Plan) -> None:
    if rows:
        slow = any(r.slow_us is not None for r in rows)
        print_table(
            ["rank", "trial", "us", *(["slow us"] if slow else []), "schedule"],
            (
                [
                    str(r.rank),
                    str(r.id),
                    us_text(r.score_us),
                    *([us_text(r.slow_us)] if slow else []),
                    r.schedule_key,
                ]
                for r in rows[:_SHOWN]
            ),
            title=f"{plan.operation.name}: ranked by clock {plan.clock.value}",
            right="rank,trial,us,slow us",
            drop="slow us",
            keep={"schedule": 70},
            fold="schedule",
        )
        if len(rows) > _SHOWN:
            click.echo(f"and {len(rows) - _SHOWN} more: factory leaderboard")
        click.echo()
    if failed:
        print_failures(failed, title="not ranked")
        click.echo()


def _print_end(store: Store, launched: Launched, first: Any) -> None:
    from factory.campaign import LOG_ROOT

    record = launched.campaign
    click.echo(
        f"campaign {record.id} {record.status.value}: {launched.finished} trials, "
        f"{launched.passed} passed; leaderboard {store.name}, logs {LOG_ROOT / record.id}"
    )
    if first is not None:
        click.echo(f"winner: trial {first.id}, {us_text(first.score_us)} us, {first.schedule_key}")


def _resume_command(campaign: str) -> str:
    """The command line that was given, with ``--resume``."""
    import sys

    given = [a for a in sys.argv[1:] if a != "--resume"]
    words = given if campaign in given else ["launch", campaign]
    return shlex.join(["factory", *words, "--resume"])


def _dry_run(config: CampaignConfig, db: str | None, as_json: bool) -> int:
    from factory.dryrun import describe
    from factory.plan import make_plan
    from leaderboard import DEFAULT_URL, AbsentError, open_store

    refuse_in_memory(db or DEFAULT_URL)
    plan = make_plan(config, need_gpu_here=config.executor.ray_address is None)
    store = None
    with suppress(AbsentError):  # a launch makes it; nothing was timed before
        store = open_store(db or DEFAULT_URL, read_only=True)
    try:
        found = describe(plan, store)
    finally:
        if store is not None:
            store.close()
    if as_json:
        print_json(found)
        return EXIT_DONE
    print_note(
        f"campaign {found['name']}: {found['target']} of {found['offered']} offered schedules, "
        f"{found['combinations']} combinations in all, clock {found['clock']}",
        indent="  ",
    )
    click.echo(f"stages: {' > '.join(found['stages'])}")
    click.echo(
        f"infeasible by budgets: {found['infeasible']}; "
        f"emulated cases per schedule: up to {found['cases']}"
    )
    print_table(
        ["parameter", "choices", "offered", "meaning"],
        (
            [
                p["id"],
                " ".join(str(c) for c in p["choices"]),
                " ".join(f"{c}:{n}" for c, n in p["offered"].items()),
                p["doc"],
            ]
            for p in found["parameters"]
        ),
        spill="meaning",
    )
    estimate = found["estimate_s"]
    if estimate is None:
        click.echo("estimate: none, no campaign of this operation ran here yet")
    else:
        from factory.progress import seconds_text

        click.echo(f"estimate: {seconds_text(estimate)}, from stages timed here before")
    return EXIT_DONE
