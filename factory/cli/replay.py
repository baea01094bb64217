"""``factory replay``: what each sampler would have needed on a recorded campaign."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from factory.cli.common import (
    db_option,
    json_option,
    known_operation,
    open_reading,
    print_json,
    print_table,
    us_text,
)

if TYPE_CHECKING:
    from factory.replay import Recording, Replay

__all__ = ["replay"]


@click.command()
@click.argument("campaigns", metavar="CAMPAIGN...", nargs=-1, required=True)
@click.option(
    "--sampler",
    "samplers",
    multiple=True,
    type=click.Choice(["tpe", "gp", "random", "grid"]),
    help="Only this one; may be given again. Default: all.",
)
@click.option("--seeds", default=20, show_default=True, type=click.IntRange(1), help="Runs each.")
@click.option(
    "--within",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Percent above the recorded best that is near enough.",
)
@click.option(
    "--first",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Proposals by the cost model before the sampler's own.",
)
@click.option(
    "--batch",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Trials under way at once.",
)
@click.option("--plot", metavar="FILE", help="Draw all samplers into FILE (.svg or .html).")
@db_option
@json_option
def replay(
    campaigns: tuple[str, ...],
    samplers: tuple[str, ...],
    seeds: int,
    within: float,
    first: int,
    batch: int,
    plot: str | None,
    db: str | None,
    as_json: bool,
) -> None:
    """Run searches against recorded CAMPAIGNs (ids or names) and count the trials they need.

    No GPU is used: proposals are answered with what was recorded. With --json:
    one object with recording, within, seeds and samplers.
    """
    from factory.errors import UserError
    from factory.machine import installed
    from factory.replay import load_recording
    from factory.replay import replay as run
    from factory.search import SAMPLERS

    if not math.isfinite(within):
        raise UserError(f"--within {within}: say how many percent are near enough")
    if plot is not None and Path(plot).suffix not in (".svg", ".html"):
        raise UserError(f"--plot {plot}: the file is an .svg or an .html")
    chosen = [s for s in SAMPLERS if not samplers or s in samplers]
    if "gp" in chosen and installed("scipy") is None:
        if samplers:
            raise UserError("sampler 'gp' needs scipy; pip install scipy, or leave it out")
        chosen.remove("gp")
    with open_reading(db) as store:
        records = [store.get_campaign(ref) for ref in dict.fromkeys(campaigns)]
        _, family = known_operation(records[0].operation)
        recording = load_recording(store, family, records)
    done = [
        run(
            recording,
            sampler=sampler,
            seeds=range(seeds),
            first=first,
            batch=batch,
            within=within / 100,
        )
        for sampler in chosen
    ]
    if plot is not None:
        _plot(Path(plot), recording, done, within / 100)
    if as_json:
        print_json(
            {
                "recording": _recording(recording),
                "within": within / 100,
                "seeds": seeds,
                "samplers": [_replay(r) for r in done],
            }
        )
        return
    _print(recording, done, within=within, seeds=seeds)


def _plot(path: Path, recording: Recording, done: list[Replay], within: float) -> None:
    from factory.errors import UserError
    from factory.report.searches import searches_page, searches_svg

    draw = searches_svg if path.suffix == ".svg" else searches_page
    try:
        path.write_text(draw(recording, done, within=within), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"wrote {path}", err=True)


def _recording(recording: Recording) -> dict[str, Any]:
    return {
        "campaigns": list(recording.campaigns),
        "clock": recording.clock.value,
        "recorded": len(recording.outcomes),
        "passed": len(recording.ranked),
        "offered": recording.whole,
        "missing": recording.missing,
        "exhaustive": recording.exhaustive,
        "measured": len(recording.measured),
        "best_us": recording.best_us,
        "best": recording.ranked[0].schedule.key,
        "top_by_model": list(recording.top_by_model),
    }


def _replay(result: Replay) -> dict[str, Any]:
    return {
        "sampler": result.sampler,
        "first": result.first,
        "batch": result.batch,
        "needed": _finite(result.needed),
        "measured": result.measured,
        "share": _finite(result.share),
        "runs": [
            {
                "seed": r.seed,
                "needed": r.needed,
                "measured": r.measured,
                "best_us": [_finite(us) for us in r.best_us],
            }
            for r in result.runs
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print(recording: Recording, done: list[Replay], *, within: float, seeds: int) -> None:
    known = len(recording.outcomes)
    click.echo(
        f"recorded: {known} schedules, {len(recording.ranked)} passed, clock "
        f"{recording.clock.value}; best {us_text(recording.best_us)} us, "
        f"{recording.ranked[0].schedule.key}"
    )
    if recording.exhaustive:
        click.echo(f"exhaustive: all {recording.whole} schedules that the family offers")
    else:
        click.echo(
            f"not exhaustive: {recording.missing} of the {recording.whole} schedules that the "
            "family offers were not recorded; the best may be among them"
        )
    if recording.measured:
        click.echo(
            f"met the GPU: {len(recording.measured)}; emulation and compilation spared it "
            f"{known - len(recording.measured)}"
        )
    places = ", ".join(map(str, recording.top_by_model))
    click.echo(f"places of the {len(recording.ranked[:5])} fastest by the cost model: {places}")
    click.echo()
    print_table(
        ["sampler", "first", "batch", "trials", "of space", "fewest", "most", "on the GPU"],
        (
            [
                r.sampler,
                str(r.first),
                str(r.batch),
                f"{r.needed:g}",
                f"{r.share:.0%}" if math.isfinite(r.share) else "-",
                f"{r.spread[0]:g}",
                f"{r.spread[1]:g}",
                f"{r.measured:g}",
            ]
            for r in done
        ),
        title=f"trials to within {within:g}% of the recorded best, median of {seeds} seeds",
        right="first,batch,trials,of space,fewest,most,on the GPU",
    )
