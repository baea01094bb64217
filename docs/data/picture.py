"""A picture of a report for the first page: its own drawings on one sheet of SVG."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files

from docs.data.shown import CLOCKS, Shown
from factory.report.charts import best_chart, shape_chart
from factory.report.data import Report
from factory.report.svg import number

__all__ = ["picture"]

_WIDTH, _GAP, _COLUMN = 1000.0, 16.0, 468.0
_PAD = 12.0
_SHAPES = 3
"""So many fit beside the other drawing."""


def picture(report: Report, shown: Shown) -> str:
    """The report's facts and two of its drawings; light or dark as the reader's page is.

    Raises
    ------
    ValueError
        If the campaign has nothing ranked.
    """
    if not report.runs:
        raise ValueError(f"campaign {report.campaign.id} has nothing ranked to draw")
    run = report.runs[0]
    done = float(report.funnel.finished)
    figures = (
        (
            "Best so far, over trials",
            best_chart(run, lambda s: float(s.finished), "trials finished", done),
        ),
        (
            f"The first {_SHAPES} of {len(run.shapes)} shapes, us; ours is trial {run.leader.id}",
            shape_chart(run.shapes[:_SHAPES]),
        ),
    )
    parts, top = _head(report, shown)
    bottom = top
    for column, (title, drawing) in enumerate(figures):
        panel, height = _panel(title, drawing, 8.0 + column * (_COLUMN + _GAP + 16), top)
        parts.append(panel)
        bottom = max(bottom, top + height + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {bottom:.0f}" '
        f'role="img" aria-label="report of campaign {escape(report.campaign.id)}">\n'
        f"<style>{_style()}</style>\n"
        f'<rect class="sheet" width="{_WIDTH:g}" height="{bottom:.0f}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _style() -> str:
    """What of the page's style concerns drawings, and the sheet they lie on."""
    css = (files("factory.report") / "page.css").read_text("utf-8")
    css = css[: css.index("@media screen and (max-width")]
    return (
        css
        + ".sheet { fill: var(--paper); } .panel { fill: var(--panel); stroke: var(--rule); }"
        + " svg .h1 { font-size: 20px; font-weight: 600; } svg .h3 { font-size: 14px;"
        + " font-weight: 600; } svg .fact { font-size: 22px; font-weight: 600; }"
        + " svg .small { font-size: 12.5px; fill: var(--soft); }"
    )


def _head(report: Report, shown: Shown) -> tuple[list[str], float]:
    c, f, row = report.campaign, report.funnel, report.runs[0].leader
    times = shown.times(shown.winner)
    facts = []
    for column, where in ((CLOCKS[0], "production"), (CLOCKS[4], "slow gates")):
        for who in (None, *shown.controls[:1]):
            us = times.of(who, column, shown.tuned)[-1]
            if us is not None:
                facts.append((f"{who or 'ours'}, {where}", f"{number(us)} us"))
    facts.append(
        (
            "trials passed",
            f"{sum(s.value == 'passed' and n for s, n in f.statuses.items())} of {f.finished}",
        )
    )
    where = f" on {row.gpu}" if row.gpu else ""
    parts = [
        f'<text x="8" y="30" class="h1">{escape(f"{c.name}: {c.operation}{where}")}</text>',
        f'<text x="8" y="50" class="small">{escape(f"campaign {c.id}; {row.schedule_key}")}</text>',
    ]
    for n, (words, value) in enumerate(facts):
        x = 8 + n * (_WIDTH / len(facts))
        parts.append(f'<text x="{x:g}" y="82" class="small">{escape(words)}</text>')
        parts.append(f'<text x="{x:g}" y="106" class="fact">{escape(value)}</text>')
    return parts, 122.0


def _panel(title: str, drawing: str, x: float, y: float) -> tuple[str, float]:
    """A titled drawing on a panel, and the panel's height."""
    found = re.match(r'<svg viewBox="0 0 (\d+) ([\d.]+)"', drawing)
    assert found is not None, drawing[:60]
    wide = _COLUMN
    tall = float(found[2]) * wide / float(found[1])
    height = tall + 30 + 2 * _PAD - 6
    inner = drawing.replace(
        "<svg ",
        f'<svg x="{x + _PAD:g}" y="{y + _PAD + 22:g}" width="{wide:g}" height="{tall:.1f}" ',
        1,
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{wide + 2 * _PAD:g}" height="{height:.1f}" rx="8" '
        f'class="panel"/><text x="{x + _PAD:g}" y="{y + _PAD + 12:g}" class="h3">'
        f"{escape(title)}</text>{inner}",
        height,
    )
