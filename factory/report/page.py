"""One HTML page from gathered data: style, drawings, table and script inside it.

The page asks nothing of the network, and its content policy forbids it to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from factory import __version__
from factory.report.charts import (
    best_chart,
    error_chart,
    funnel_chart,
    shape_chart,
    sweep_chart,
    sweep_styles,
)
from factory.report.data import Report, Run
from factory.report.space_charts import importance_chart, parallel_chart
from factory.report.svg import number
from factory.report.trials import TableRow
from leaderboard import Clock, Verdict

__all__ = ["render"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

_COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    # name in filters, attribute of a row, kind, digits
    ("rank", "rank", "num", 0),
    ("trial", "id", "num", 0),
    ("schedule", "schedule", "key", 0),
    ("us", "us", "num", 4),
    ("slow", "slow_us", "num", 4),
    ("ratio", "ratio", "num", 4),
    ("losses", "losses", "num", 0),
    ("error", "share", "num", 2),
    ("status", "status", "", 0),
    ("note", "note", "why", 0),
)

_WITHOUT_SCRIPT = 100
"""Rows of the table that are there before the script runs."""


def render(report: Report) -> str:
    """The page as text."""
    c = report.campaign
    parts = [
        _head(report),
        *_notes(report),
        *(_run_section(report, run) for run in report.runs),
        _sweep_section(report),
        _funnel_section(report),
        _table_section(report),
        _fingerprint_section(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(c.name)}: {escape(c.operation)}</title>\n"
        f"<style>\n{_part('page.css')}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f"\n{_data(report.trials)}\n<script>\n{_part('page.js')}</script>\n</body>\n</html>\n"
    )


def _part(name: str) -> str:
    return (files("factory.report") / name).read_text("utf-8")


def _data(trials: Sequence[TableRow]) -> str:
    """Rows of the table as JSON that cannot end its own element."""
    value = {
        "columns": [{"name": n, "kind": kind, "digits": d} for n, _, kind, d in _COLUMNS],
        "rows": [[getattr(t, attribute) for _, attribute, _, _ in _COLUMNS] for t in trials],
    }
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return (
        '<script type="application/json" id="trials">'
        + text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
        + "</script>"
    )


# ------------------------------------------------------------------------------------ head


def _head(report: Report) -> str:
    c, f = report.campaign, report.funnel
    facts = [("status", c.status.value, f"{f.finished} of {f.budget} trials")]
    if report.runs:
        run = report.runs[0]
        row = run.leader
        there = "" if run.won is None else f", {number(run.won.score_us or 0)} us there"
        facts.append(
            (
                f"trial {row.id}, {row.clock.value}",
                f"{number(row.score_us)} us",
                f"{run.leader_is}{there}",
            )
        )
        if run.verdict is Verdict.NOT_TOLD_APART:
            facts.append((f"against {row.control}", "=", "not told apart, same job"))
        elif row.ratio is not None:
            facts.append(
                (f"against {row.control}", f"{1 / row.ratio:.2f}\u00d7", "speed, same job")
            )
        if row.slow_us is not None:
            facts.append(("on slow gates", f"{number(row.slow_us)} us", "the same trial"))
    passed = sum(n for s, n in f.statuses.items() if s.value == "passed")
    failed = f.finished - passed
    facts.append(("passed", str(passed), f"{failed} did not"))
    cards = "".join(
        f'<div class="fact"><span class="soft">{escape(a)}</span><b>{escape(b)}</b>'
        f'<span class="soft">{escape(note)}</span></div>'
        for a, b, note in facts
    )
    best = ""
    if report.runs:
        best = f"<p><code>{escape(report.runs[0].leader.schedule_key)}</code></p>"
    title = c.name if c.name == c.operation else f"{c.name}: {c.operation}"
    gpu = report.runs[0].leader.gpu if report.runs else None
    return (
        f"<header><h1>{escape(title)}{escape(f' on {gpu}' if gpu else '')}</h1>"
        f'<p class="soft">version {escape(c.operation_version)} of {escape(c.operation)}, '
        f"campaign {escape(c.id)}, from {escape(report.source)}, "
        f"{report.made_at:%Y-%m-%d %H:%M} UTC</p>"
        f'<div class="facts">{cards}</div>{best}</header>'
    )


def _notes(report: Report) -> Iterable[str]:
    status = report.campaign.status.value
    if status != "finished":
        said = {
            "running": "The campaign is running: this is how it stands now.",
            "interrupted": "The campaign was interrupted; factory launch --resume goes on.",
        }.get(status, f"The campaign is {status}.")
        yield _note(said)
    if not report.runs:
        left = [t for t in report.trials if t.status == "passed"]
        many = f"{len(left)} trial{'' if len(left) == 1 else 's'} passed"
        yield _note(
            f"{many}, but none has a place: {left[0].note}"
            if left
            else "No trial has passed, so there is no time to show."
        )
    if any(run.leader.clock is Clock.MODELLED for run in report.runs):
        yield _note(
            "Modelled times are a cost model's: they order schedules, and say little of what a "
            "GPU would take."
        )
    if any(run.open_jobs for run in report.runs):
        yield _note("Times of a job that is still open are shown: they may yet be void.")
    if report.gate_note:
        yield _note(report.gate_note)


def _note(text: str) -> str:
    return f'<p class="note-box">{escape(text)}</p>'


# ---------------------------------------------------------------------------------- charts


def _figure(
    title: str,
    drawing: str,
    caption: str,
    extra: str = "",
    *,
    tall: bool = False,
    wide: bool = False,
) -> str:
    if wide:
        drawing = f'<div class="wide">{drawing}</div>'
    return (
        f"<figure{' class=tall' if tall else ''}><h3>{escape(title)}</h3>{drawing}{extra}"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _run_section(report: Report, run: Run) -> str:
    done = float(report.funnel.finished)
    order = (
        f"Ordered across jobs by time over {run.leader.control}: provisional."
        if run.leader.provisional
        else "Best time so far; lower is better."
    )
    figures = [
        _figure(
            "Best so far, over trials",
            best_chart(run, lambda s: float(s.finished), "trials finished", done),
            order,
        ),
        _figure(
            f"Best so far, over {report.minutes_are}",
            best_chart(run, lambda s: s.minutes, report.minutes_are, report.minutes),
            "Gate, screen and time of all trials until then; neither controls nor finals."
            if report.minutes_are.startswith("GPU")
            else "Pauses included.",
        ),
        _figure(
            "Error against time",
            error_chart(run, gate=report.has_gate),
            "Each trial's worst error over all gating regimes and outputs, as a share of its "
            "bound: above 1 is rejected. A click on a point finds its row.",
        ),
    ]
    if run.shapes:
        legend = f'<ul class="legend"><li><span class="key mine"></span>trial {run.leader.id}</li>'
        if any(b.kind == "control" for s in run.shapes for b in s.bars):
            legend += '<li><span class="key other"></span>controls of its job</li>'
        if any(b.name.endswith(" *") for s in run.shapes for b in s.bars):
            legend += "<li>* beyond the tolerances that candidates have to meet</li>"
        if run.floor_note:
            legend += f'<li><span class="key floor"></span>floor: {escape(run.floor_note)}</li>'
        figures.append(
            _figure(
                f"Each shape: trial {run.leader.id}, {run.leader_is}",
                shape_chart(run.shapes),
                _shape_caption(run),
                legend + "</ul>",
                tall=len(run.shapes) > 5,
            )
        )
    return (
        f"<section><h2>{escape(run.title[0].upper() + run.title[1:])}</h2>"
        f'<p class="soft">{len(run.rows)} ranked</p>'
        f'<div class="charts">{"".join(figures)}</div></section>' + _space_section(run)
    )


def _space_section(run: Run) -> str:
    space = run.space
    if space is None:
        return ""
    few = "" if len(run.rows) >= 30 else f" With {len(run.rows)} trials these are rough."
    left_out = f" {space.left_out} lines are left out." if space.left_out else ""
    return (
        '<section><h2>The space</h2><div class="charts">'
        + _figure(
            "What mattered",
            importance_chart(space, run.unit),
            "Share of the variance of log time that each parameter explains alone among the trials "
            "that have it, adjusted for the number of its choices; what only two together explain "
            "is in none of them." + few,
        )
        + _choices_table(run)
        + "</div>"
        + _figure(
            "Schedules through their parameters",
            parallel_chart(space, run.unit),
            "Each line is a schedule, up to its time at the right, the fastest on top; the "
            "fastest are strong, broken lines failed, - is a parameter that the schedule "
            "does not have. A click on a line finds its row." + left_out,
            wide=True,
        )
        + "</section>"
    )


def _choices_table(run: Run) -> str:
    """Each parameter's choices, the fastest first."""
    assert run.space is not None
    rows = "".join(
        f'<tr><td>{escape(i.name)}</td><td class="mono">{escape(choice)}</td>'
        f'<td class="num">{number(mean)}</td><td class="num">{count}</td></tr>'
        for i in run.space.importances
        for choice, mean, count in i.means
    )
    return (
        '<figure><h3>By choice</h3><div class="scroll short"><table><thead><tr>'
        f'<th>parameter</th><th>choice</th><th class="num">geomean, {escape(run.unit)}</th>'
        f'<th class="num">trials</th></tr></thead><tbody>{rows}</tbody></table></div></figure>'
    )


def _shape_caption(run: Run) -> str:
    if all(len(s.bars) == 1 for s in run.shapes):
        return "Microseconds on the ranking regime."
    return (
        "Microseconds on the ranking regime, as the search timed them; each shape has a scale of "
        "its own. Whiskers are the interval of the samples; \u203a\u203a is a bar cut short. In "
        "bold the fastest, and what is not told apart from it."
    )


def _sweep_section(report: Report) -> str:
    if not report.sweep:
        return ""
    return (
        '<section><h2>Severity</h2><div class="charts">'
        + _figure(
            "Error against the lower bound of the gates",
            sweep_chart(report.sweep_regimes, report.sweep, report.sweep_gate),
            "The largest error of any output, on the GPU where the gate ran, else as emulated. "
            "Where a rejected trial was not walked through the sweep, milder points are missing.",
        )
        + _sweep_table(report)
        + "</div></section>"
    )


def _sweep_table(report: Report) -> str:
    """Legend of the drawing, and its numbers."""
    colours, dashes = sweep_styles(report.sweep)
    rows = []
    for sweep in report.sweep:
        kind = f"c{colours[sweep.first]} d{dashes[sweep.second]}"
        lost = [report.sweep_regimes[n][0] for n, v in sweep.points if v is None]
        mark = (
            f'<path d="M11,1l8,8m0,-8l-8,8" class="lost {kind}"/>'
            if lost
            else f'<line x1="0" y1="5" x2="30" y2="5" class="sweep {kind}"/>'
        )
        worst = max((v for _, v in sweep.points if v is not None), default=0.0)
        said = f"not finite on {lost[0]}" if lost else f"{worst:.1e}"
        bad = lost or (report.sweep_gate is not None and worst > report.sweep_gate)
        rows.append(
            f'<tr><td><svg class="mark" viewBox="0 0 30 10" aria-hidden="true">{mark}</svg>'
            f'{escape(sweep.label)}</td><td class="num">{sweep.trials}</td>'
            f'<td class="num"><span class="status {"rejected" if bad else ""}">{escape(said)}'
            "</span></td></tr>"
        )
    return (
        '<figure><h3>By kind of schedule</h3><div class="scroll">'
        '<table class="lines"><thead><tr>'
        '<th>schedules</th><th class="num">trials</th><th class="num">largest error</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div></figure>"
    )


def _funnel_section(report: Report) -> str:
    if not report.funnel.stages:
        return ""
    rows = "".join(
        f'<tr><td class="num">{count}</td><td><span class="status {escape(status)}">'
        f"{escape(status)}</span></td><td>{escape(stage)}</td>"
        f'<td class="why">{escape(reason)}</td></tr>'
        for stage, status, reason, count in report.reasons
    )
    if report.other_reasons:
        rows += f"<tr><td></td><td></td><td></td><td>{report.other_reasons} other kinds</td></tr>"
    reasons = (
        '<figure><h3>Why trials failed</h3><div class="scroll"><table><thead><tr>'
        '<th class="num">trials</th><th>verdict</th><th>stage</th><th>reason (of the first)</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div></figure>"
        if rows
        else "<figure><h3>Why trials failed</h3><p>None did.</p></figure>"
    )
    return (
        '<section><h2>Funnel</h2><div class="charts">'
        + _figure(
            "Trials by stage",
            funnel_chart(report.funnel),
            "How many entered and passed each stage, and the time spent there by all of them.",
        )
        + reasons
        + "</div></section>"
    )


# ----------------------------------------------------------------------------------- table


def _table_section(report: Report) -> str:
    control = next((run.leader.control for run in report.runs if run.leader.control), None)
    titles = {"losses": f"loses to {control or 'control'} on"}
    heads = "".join(
        f'<th class="{"num" * (kind == "num")}{" long" * (name in titles)}">'
        f'<button type="button">{escape(titles.get(name, name))}</button></th>'
        for name, _, kind, _ in _COLUMNS
    )
    rows = "".join(map(_table_row, report.trials[:_WITHOUT_SCRIPT]))
    statuses = "".join(
        f'<option value="{escape(s)}">{escape(s)}</option>'
        for s in sorted({t.status for t in report.trials})
    )
    error = "error is the share of the gate's bound" if report.has_gate else "error is the largest"
    return (
        "<section><h2>Trials</h2>"
        f'<p class="soft">us on the ranking regime, as timed in the search; slow on slow gates; '
        f"ratio over the control of the same job; losses of {len(report.campaign.workloads)} "
        f"shapes; {error}. Filter by words that must all hold, for example "
        "<code>bt=32 and anchor=mid us&lt;120</code> or <code>losses=0</code>; click a head to "
        "sort.</p>"
        '<div class="controls"><input id="search" type="search" placeholder="filter" '
        'aria-label="filter trials"><select id="verdict" aria-label="verdict">'
        f'<option value="">all verdicts</option>{statuses}</select>'
        f'<span id="count" class="soft">{len(report.trials)} trials</span></div>'
        f'<div class="scroll"><table id="table"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        '<button type="button" id="more" class="more" hidden>more</button></section>'
    )


def _table_row(trial: TableRow) -> str:
    cells = []
    for name, attribute, kind, digits in _COLUMNS:
        value = getattr(trial, attribute)
        said = "" if value is None else f"{value:.{digits}g}" if digits else str(value)
        if name == "status":
            cells.append(f'<td><span class="status {escape(said)}">{escape(said)}</span></td>')
        else:
            cells.append(f'<td class="{kind}">{escape(said)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


# ----------------------------------------------------------------------------- fingerprint


def _fingerprint_section(report: Report) -> str:
    c = report.campaign
    about = {
        "campaign": c.id,
        "operation": f"{c.operation} {c.operation_version}",
        "family": c.family,
        "source": c.source_hash,
        "space": c.space_hash,
        "seed": c.seed,
        "budget": c.budget,
        "clock": c.clock.value,
        "ranking regime": c.ranking_regime,
        "began": f"{c.created_at:%Y-%m-%d %H:%M:%S} UTC",
        "last change": f"{c.updated_at:%Y-%m-%d %H:%M:%S} UTC",
        "configuration": c.config,
        "report by": f"kernel-factory {__version__}",
    }
    parts = [f"<section><h2>Fingerprint</h2>{_list(about)}"]
    for id_, values in report.fingerprints.items():
        mine = [j for j in report.jobs if j.fingerprint_id == id_]
        title = f"{mine[0].gpu}, {len(mine)} job{'' if len(mine) == 1 else 's'}"
        parts.append(
            f"<details open><summary>{escape(title)}</summary>{_list(values)}"
            f"{_list({j.id: _job(j) for j in mine[:50]})}</details>"
        )
    if not report.fingerprints:
        parts.append("<p>Nothing was measured, so there is no machine to name.</p>")
    return "".join(parts) + "</section>"


def _job(job: Any) -> str:
    drift = "" if job.drift is None else f", controls drifted by {job.drift:.1%}"
    note = f": {job.note}" if job.note else ""
    return f"{job.status.value}{drift}{note}"


def _list(values: Mapping[str, Any]) -> str:
    return (
        "<dl>"
        + "".join(
            f'<dt>{escape(str(k))}</dt><dd class="mono">{escape(_plain(v))}</dd>'
            for k, v in values.items()
            if v is not None
        )
        + "</dl>"
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
