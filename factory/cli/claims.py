"""``factory leaderboard claims``: exported folders that passed the export gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from factory.cli.common import (
    db_option,
    json_option,
    open_reading,
    print_json,
    print_table,
    refuse_unknown,
    us_text,
)

if TYPE_CHECKING:
    from leaderboard import ClaimView

__all__ = ["claims"]


@click.command()
@click.option("--operation", help="Only this operation.")
@db_option
@json_option
@click.pass_obj
def claims(parent_db: str | None, operation: str | None, db: str | None, as_json: bool) -> None:
    """Exported folders that passed the export gate, newest first.

    With --json: a list of objects, each with its id (leaderboard.ClaimView).
    """
    import operations
    from leaderboard import claims as asked

    with open_reading(db or parent_db) as store:
        found = asked(store)
        if operation is not None:
            there = {c.operation for c in found}
            refuse_unknown("operation", [operation], sorted({*operations.names(), *there}))
            found = [c for c in found if c.operation == operation]
        if as_json:
            print_json(found)
        else:
            _print(found, store.name)


def _print(rows: list[ClaimView], name: str) -> None:
    if not rows:
        click.echo(f"no claims in {name}: no exported folder has passed the export gate")
        return
    columns = ["claim", "operation", "export", "us", "/ candidate", "held out", "/ control"]
    print_table(
        [*columns, "control", "gpu", "job", "state"],
        (
            [
                c.id,
                f"{c.operation} {c.operation_version}",
                c.export_hash[:12],
                us_text(c.score_us),
                f"{c.ratio:.3f}",
                "-" if c.held_out_ratio is None else f"{c.held_out_ratio:.3f}",
                "-" if c.control_ratio is None else f"{c.control_ratio:.3f}",
                c.control or "-",
                c.gpu,
                c.job_id,
                _state(c),
            ]
            for c in rows
        ),
        right="us,/ candidate,held out,/ control",
    )


def _state(claim: ClaimView) -> str:
    if claim.superseded_by is not None:
        return f"superseded by {claim.superseded_by}"
    return f"stands, seen in {claim.jobs} jobs" if claim.replicated else "stands, unreplicated"
