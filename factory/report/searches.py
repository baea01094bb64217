"""One drawing of what samplers needed on a recording: the best so far over trials, side by side.

It knows replays and drawings; it reads no leaderboard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from factory.replay import Recording, Replay
from factory.report.svg import (
    HEIGHT,
    WIDTH,
    Linear,
    circle,
    drawing,
    line,
    polyline,
    text,
    x_axis,
    y_axis,
)

__all__ = ["course", "searches_page", "searches_svg"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, WIDTH - 12.0, 26.0, HEIGHT - 60.0
_WORST = 2.0
"""Times the best at which the drawing ends: beyond, nobody cares by how much."""
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #5b6570; --rule: #d8dde3;
  --tpe: #1f6feb; --gp: #0a7d55; --random: #d9480f; --grid: #9333ea; --near: #b45309; }
@media (prefers-color-scheme: dark) { :root { --paper: #0f1318; --ink: #e8ecf1; --soft: #9aa7b4;
  --rule: #2c343e; --tpe: #5aa2ff; --gp: #3ddc97; --random: #ff9a52; --grid: #c792ff;
  --near: #f0a94b; } }
body { margin: 1rem auto; max-width: 46rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
svg { background: var(--paper); }
text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.tick, .note { fill: var(--soft); font-size: 11px; }
.axis { font-weight: 600; }
.gridline, .grid { stroke: var(--rule); stroke-width: 1; }
.near { stroke: var(--near); stroke-width: 1.4; stroke-dasharray: 5 4; }
polyline { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
polyline.tpe { stroke: var(--tpe); } circle.tpe, text.tpe { fill: var(--tpe); }
polyline.gp { stroke: var(--gp); } circle.gp, text.gp { fill: var(--gp); }
polyline.random { stroke: var(--random); } circle.random, text.random { fill: var(--random); }
polyline.by-grid { stroke: var(--grid); } circle.by-grid, text.by-grid { fill: var(--grid); }
text.tpe, text.gp, text.random, text.by-grid { font-weight: 600; }
"""


def course(result: Replay, best_us: float) -> list[float]:
    """Median over the seeds of the best so far after each trial, over the recorded best.

    A search that came near enough keeps its last; before the first that passed it is infinite.
    """
    longest = max(len(r.best_us) for r in result.runs)
    rows = [(*r.best_us, *[r.best_us[-1]] * (longest - len(r.best_us))) for r in result.runs]
    return [_median(column) / best_us for column in zip(*rows, strict=True)]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def searches_svg(recording: Recording, results: Sequence[Replay], *, within: float) -> str:
    """All samplers in one drawing that stands alone.

    Parameters
    ----------
    recording : Recording
    results : sequence of Replay
        On that recording.
    within : float
        What is near enough, relative.
    """
    svg = _drawing(recording, results, within)
    start = svg.index(">") + 1
    head = svg[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{head}<style>{_STYLE}</style>{svg[start:]}\n"


def searches_page(recording: Recording, results: Sequence[Replay], *, within: float) -> str:
    """The drawing as a page of its own, with what it shows in words."""
    first = results[0]
    rows = "".join(
        f"<li>{r.sampler}: {_count(r.needed)} trials, {_share(r)} of the space "
        f"(fewest {_count(r.spread[0])}, most {_count(r.spread[1])})</li>"
        for r in results
    )
    whole = "exhaustive" if recording.exhaustive else f"{recording.missing} offered ones missing"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Searches on {escape(', '.join(recording.campaigns))}</title>"
        f"<style>{_STYLE}</style><body><h1>What a search would have needed</h1>"
        f"<p>{len(recording.outcomes)} recorded schedules ({whole}), clock "
        f"{recording.clock.value}; {len(first.runs)} seeds each. Trials to within {within:.0%} of "
        f"the recorded best, medians:</p><ul>{rows}</ul>"
        f"{_drawing(recording, results, within)}</body></html>\n"
    )


def _drawing(recording: Recording, results: Sequence[Replay], within: float) -> str:
    space = len(recording.outcomes)
    x = Linear(0, space, _LEFT, _RIGHT)
    y = Linear(1.0, _WORST, _BOTTOM, _TOP)
    parts = [
        *y_axis(y, _LEFT, _RIGHT, "best so far / recorded best"),
        *x_axis(x, _TOP, _BOTTOM, f"trials, of {space} recorded schedules", _RIGHT),
        line(_LEFT, y(1 + within), _RIGHT, y(1 + within), "near"),
        text(_RIGHT, y(1 + within) - 5, f"within {within:.0%}", kind="note", anchor="end"),
        line(x(0.3 * space), _TOP, x(0.3 * space), _BOTTOM, "near"),
        text(x(0.3 * space) + 4, _TOP + 10, "30% of the space", kind="note"),
    ]
    for number, result in enumerate(results):
        kind = "by-grid" if result.sampler == "grid" else result.sampler
        path: list[tuple[float, float]] = []
        for trial, value in enumerate(course(result, recording.best_us), 1):
            if math.isfinite(value):
                level = y(min(value, _WORST))
                if path:
                    path.append((x(trial), path[-1][1]))
                path.append((x(trial), level))
        tip = f"{result.sampler}: {_count(result.needed)} trials, {_share(result)}"
        parts.append(polyline(path, kind, tip=tip))
        if math.isfinite(result.needed):
            parts.append(circle(x(result.needed), y(1 + within), kind, tip=tip))
        name = f"{result.sampler}: {_count(result.needed)}"
        parts.append(text(_LEFT + 104 * number, HEIGHT - 8, name, kind=kind))
    label = f"best so far over trials of {', '.join(r.sampler for r in results)}"
    return drawing(parts, label)


def _count(trials: float) -> str:
    return f"{trials:g}" if math.isfinite(trials) else "never"


def _share(result: Replay) -> str:
    return f"{result.share:.0%}" if math.isfinite(result.share) else "-"
