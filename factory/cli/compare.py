"""``factory compare``: two trials against each other."""

from __future__ import annotations

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

__all__ = ["compare"]


@click.command()
@click.argument("first")
@click.argument("second")
@db_option
@json_option
def compare(first: str, second: str, db: str | None, as_json: bool) -> None:
    """Is trial FIRST faster than SECOND, slower, or not told apart, on each shape?

    Only within one job: times of different jobs are no comparison, and the
    refusal says what to do instead.  With --json: one object with first_id,
    second_id, job_id, clock, first_us, second_us, ratio, low, high, verdict and
    shapes (leaderboard.Comparison); verdicts are null for modelled times.
    """
    import leaderboard

    with open_reading(db) as store:
        a, b = store.get_trial(first), store.get_trial(second)
        found = leaderboard.compare(store, a.id, b.id)
    if as_json:
        print_json(found)
        return
    where = f"job {found.job_id}, " if found.job_id else ""
    click.echo(f"{where}clock {found.clock.value}, ranking regime")
    for trial, us in ((a, found.first_us), (b, found.second_us)):
        click.echo(f"trial {trial.id}  {us_text(us)} us  {trial.schedule_key}")
    click.echo(_conclusion(found))
    if found.shapes:
        click.echo()
        heads = [f"trial {a.id}", f"trial {b.id}"]
        print_table(
            ["workload", *heads, "ratio", "95% interval", f"trial {a.id} is"],
            (
                [
                    s.workload,
                    us_text(s.first_us),
                    us_text(s.second_us),
                    f"{s.ratio:.3f}",
                    f"{s.low:.3f} to {s.high:.3f}",
                    str(s.verdict),
                ]
                for s in found.shapes
            ),
            right=",".join([*heads, "ratio"]),
        )


def _conclusion(found: Any) -> str:
    a, b = found.first_id, found.second_id
    if found.verdict is None:
        return (
            f"{found.ratio:.3f} of the modelled time; a model has no samples, so neither is called "
            "faster"
        )
    interval = f"ratio {found.ratio:.3f}, 95% interval {found.low:.3f} to {found.high:.3f}"
    if found.verdict == "not told apart":
        return f"trials {a} and {b} are not told apart: {interval}"
    return f"trial {a} is {found.verdict} than trial {b}: {interval}"
