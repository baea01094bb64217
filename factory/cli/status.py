"""``factory status``: how campaigns stand."""

from __future__ import annotations

from typing import Any

import click

from factory.cli.common import (
    db_option,
    json_option,
    open_reading,
    print_json,
    print_note,
    print_table,
    us_text,
)

__all__ = ["status"]


@click.command()
@click.argument("campaign", required=False)
@db_option
@json_option
def status(campaign: str | None, db: str | None, as_json: bool) -> None:
    """How campaigns stand: all of them, or CAMPAIGN (an id or a name) stage by stage.

    With --json: a list of objects with id, name, operation, status, clock,
    budget, finished, statuses, stages, spared, best, winner, driver, heartbeat_at, created_at
    and updated_at; one such object if CAMPAIGN is given.
    """
    with open_reading(db) as store:
        if campaign is not None:
            found = _described(store, store.get_campaign(campaign))
            if as_json:
                print_json(found)
            else:
                _print_one(found)
            return
        rows = [_described(store, c) for c in store.list_campaigns()]
        if as_json:
            print_json(rows)
            return
        if not rows:
            click.echo(f"no campaigns in {store.name}")
            return
        print_table(
            ["campaign", "operation", "status", "trials", "passed", "clock", "best us", "driver"],
            (
                [
                    r["id"],
                    r["operation"],
                    r["status"],
                    f"{r['finished']}/{r['budget']}",
                    str(r["statuses"].get("passed", 0)),
                    r["clock"],
                    us_text(r["best"]["score_us"] if r["best"] else None),
                    r["driver"] or "-",
                ]
                for r in rows
            ),
            right="trials,passed,best us",
            drop="clock,driver,operation",
            keep={"campaign": 40},
        )


def _described(store: Any, campaign: Any) -> dict[str, Any]:
    from leaderboard import CampaignStatus, best_so_far, funnel, is_held, winner

    status = campaign.status
    if status is CampaignStatus.RUNNING and not is_held(campaign):
        status = CampaignStatus.INTERRUPTED  # its driver had no time to say so
    counts = funnel(store, campaign.id)
    points = best_so_far(store, campaign.id)
    first = winner(store, campaign.id)
    return {
        "id": campaign.id,
        "name": campaign.name,
        "operation": campaign.operation,
        "status": status.value,
        "clock": campaign.clock.value,
        "budget": campaign.budget,
        "finished": counts.finished,
        "statuses": {s.value: n for s, n in counts.statuses.items()},
        "stages": [stage.model_dump(mode="json") for stage in counts.stages],
        "spared": _spared(counts),
        "best": points[-1].model_dump(mode="json") if points else None,
        "winner": first.model_dump(mode="json") if first else None,
        "driver": campaign.driver,
        "heartbeat_at": campaign.heartbeat_at.isoformat() if campaign.heartbeat_at else None,
        "created_at": campaign.created_at.isoformat(),
        "updated_at": campaign.updated_at.isoformat(),
    }


def _spared(counts: Any) -> dict[str, int] | None:
    """Finished trials that never met the GPU, by the stage that stopped them; None without one."""
    from factory.executors.base import DEVICE_STAGES

    if not any(stage.stage in DEVICE_STAGES for stage in counts.stages):
        return None
    stopped = {
        stage.stage: sum(stage.failed.values())
        for stage in counts.stages
        if stage.stage not in (*DEVICE_STAGES, "finals")
    }
    return {stage: n for stage, n in stopped.items() if n}


def _print_one(found: dict[str, Any]) -> None:
    click.echo(f"campaign {found['id']}  {found['status']}  operation {found['operation']}")
    # What a killed driver had under way stays "running" until a resume finds it.
    cut = found["status"] == "interrupted"
    said = {"running": "cut off"} if cut else {}
    statuses = ", ".join(f"{n} {said.get(s, s)}" for s, n in found["statuses"].items()) or "none"
    click.echo(f"trials {found['finished']} of {found['budget']}: {statuses}")
    best = found["best"]
    if best:
        print_note(
            best["schedule_key"],
            first=f"best {us_text(best['score_us'])} us {found['clock']}: ",
            indent="  ",
        )
    first = found["winner"]
    if first:
        print_note(
            first["schedule_key"],
            first=f"winner trial {first['id']}, {us_text(first['score_us'])} us in the finals: ",
            indent="  ",
        )
    if found["spared"] is not None:
        by = ", ".join(f"{n} by {stage}" for stage, n in found["spared"].items())
        click.echo(f"GPU trials spared: {sum(found['spared'].values())}{f' ({by})' * bool(by)}")
    if found["driver"]:
        held = "was held by" if cut else "held by"
        click.echo(f"{held} {found['driver']}, last sign {found['heartbeat_at']}")
    print_table(
        ["stage", "entered", "passed", "failed", "seconds"],
        (
            [
                s["stage"],
                str(s["entered"]),
                str(s["passed"]),
                ", ".join(f"{n} {k}" for k, n in s["failed"].items()) or "-",
                f"{s['seconds']:.1f}" if s["seconds"] else "-",
            ]
            for s in found["stages"]
        ),
        right="entered,passed,seconds",
    )
