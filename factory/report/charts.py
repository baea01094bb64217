"""The drawings of a report, each from gathered data to one SVG element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from factory.report.data import ErrorPoint, Run, ShapeBars, Step
from factory.report.svg import (
    HEIGHT,
    WIDTH,
    Linear,
    Log,
    circle,
    cross,
    drawing,
    line,
    number,
    polyline,
    rect,
    text,
    x_axis,
    y_axis,
)
from factory.report.sweep import SweepLine
from leaderboard import Funnel, StageCount

__all__ = ["best_chart", "error_chart", "funnel_chart", "shape_chart", "sweep_chart"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, WIDTH - 12.0, 26.0, HEIGHT - 42.0
_CUT = 2.6
"""A control's bar ends at this many times the slowest of the leader and the controls near it."""


def best_chart(run: Run, x_of: Callable[[Step], float], title: str, end: float) -> str:
    """Best so far as stairs; each step is a trial.

    Parameters
    ----------
    x_of : callable
        Place of a step on the x axis.
    title : str
        Of that axis.
    end : float
        Where the axis ends, at the right of the last step.
    """
    steps = run.steps
    values = [s.value for s in steps]
    control = _control_line(run)
    seen = [*values, *([control] if control else [])]
    y = Linear(0, max(seen, default=1.0) * 1.05, _BOTTOM, _TOP)
    x = Linear(0, max([end, *map(x_of, steps)], default=1.0) or 1.0, _LEFT, _RIGHT)
    parts = [*y_axis(y, _LEFT, _RIGHT, run.unit), *x_axis(x, _TOP, _BOTTOM, title, _RIGHT)]
    if control:
        parts += [
            line(_LEFT, y(control), _RIGHT, y(control), "control"),
            text(_LEFT + 4, y(control) - 5, _control_name(run), kind="note"),
        ]
    path: list[tuple[float, float]] = []
    for step in steps:
        if path:
            path.append((x(x_of(step)), path[-1][1]))
        path.append((x(x_of(step)), y(step.value)))
    if path:
        path.append((_RIGHT, path[-1][1]))
        parts.append(polyline(path, "stairs"))
    for step in steps:
        tip = f"trial {step.id}: {number(step.value)} {run.unit}, {step.label}"
        parts.append(circle(x(x_of(step)), y(step.value), "step", tip=tip, trial=step.id))
    if steps:
        parts.append(
            text(_RIGHT, y(steps[-1].value) + 17, number(steps[-1].value), kind="big", anchor="end")
        )
    return drawing(parts, f"best so far over {title}")


def _control_line(run: Run) -> float | None:
    if run.leader.control is None:
        return None
    return 1.0 if run.leader.provisional else run.leader.control_us


def _control_name(run: Run) -> str:
    return f"{run.leader.control} {number(_control_line(run) or 0)}"


def error_chart(run: Run, *, gate: bool) -> str:
    """Worst error over time, the gate drawn in; beside them those that have no time."""
    timed = [p for p in run.points if p.value is not None]
    rest = [p for p in run.points if p.value is None]
    strip = 64.0 if rest else 0.0
    right = _RIGHT - strip
    shares = [p.share for p in run.points if p.share]
    low = min([*shares, 0.3 if gate else 1.0]) * 0.8
    high = max([*shares, 1.0 if gate else 0.0], default=1.0) * 1.6
    lost = any(p.share is None for p in run.points)
    top = _TOP + (24.0 if lost else 0.0)
    y = Log(low, max(high, low * 2), _BOTTOM, top)
    values = [p.value for p in timed if p.value is not None]
    least, most = min(values, default=1.0) * 0.93, max(values, default=1.0) * 1.07
    wide = most > 3 * least
    x = Log(least, most, _LEFT, right) if wide else Linear(least, most, _LEFT, right)
    name = "worst error / what the gate allows" if gate else "worst error"
    parts = [*y_axis(y, _LEFT, _RIGHT, name), *x_axis(x, _TOP, _BOTTOM, run.unit, right)]
    if lost:
        parts.append(text(_LEFT - 6, _TOP + 10, "\u221e", kind="tick", anchor="end"))
        parts.append(line(_LEFT, top - 6, _RIGHT, top - 6, "grid"))
    if gate:
        parts.append(rect(_LEFT, _TOP, _RIGHT - _LEFT, max(y(1.0) - _TOP, 0), "beyond"))
        parts.append(line(_LEFT, y(1.0), _RIGHT, y(1.0), "gate"))
        parts.append(text(_LEFT + 4, y(1.0) - 5, "the gate", kind="note bad"))
    if rest:
        parts.append(line(right + 8, _TOP, right + 8, _BOTTOM, "axisline"))
        for n, words in enumerate(("no time", f"({len(rest)})")):
            at = _BOTTOM + 16 + 14 * n
            parts.append(text(right + 36, at, words, kind="tick", anchor="middle"))

    def place(p: ErrorPoint) -> tuple[float, float]:
        at = right + 16 + (p.id * 7 % 40) if p.value is None else x(p.value)
        return round(at, 1), round(_TOP + 6 if p.share is None else y(p.share), 1)

    drawn = set()
    # Ten thousand points do not fit into a picture: of those in one place the best is drawn.
    for p in run.points:
        spot = place(p)
        where = (round(spot[0] / 1.5), round(spot[1] / 1.5), p.within)
        if where in drawn:
            continue
        drawn.add(where)
        tip = f"trial {p.id}, {'no time' if p.value is None else number(p.value)}: {p.label}"
        mark = circle if p.within else cross
        parts.append(mark(*spot, "dot good" if p.within else "dot bad", tip=tip, trial=p.id))
    return drawing(parts, "error against time")


def shape_chart(shapes: Sequence[ShapeBars]) -> str:
    """Bars with intervals, the floor as a mark; each workload on a scale of its own.

    Bars that stand alone share one scale: there is nothing else to see them by.
    """
    alone = all(len(s.bars) == 1 for s in shapes)
    common = max((s.bars[0].us for s in shapes), default=0.0) if alone else 0.0
    row, gap, head = 15.0, 12.0, 16.0
    left, right = 96.0, WIDTH - 62.0
    parts: list[str] = []
    y = 4.0
    for shape in shapes:
        mine = max(b.us for b in shape.bars if b.kind == "trial")
        near = [b.high_us or b.us for b in shape.bars if b.us <= mine * _CUT]
        x = Linear(0, max([*near, shape.floor_us or 0.0, common]) * 1.08, left, right)
        parts.append(text(0, y + 12, shape.workload, kind="axis"))
        top = y + head
        for n, bar in enumerate(shape.bars):
            at = top + n * row
            cut = bar.us > mine * _CUT
            end = right if cut else x(bar.us)
            kind = "mine" if bar.kind == "trial" else "other"
            span = "" if bar.low_us is None else f" ({bar.low_us:.4g} to {bar.high_us:.4g})"
            tip = f"{bar.name} on {shape.workload}: {bar.us:.4g} us{span}"
            parts.append(text(left - 6, at + 10, bar.name, kind="tick", anchor="end"))
            parts.append(rect(left, at + 1, end - left, row - 4, kind, tip=tip))
            if cut:
                parts.append(text(right - 4, at + 10, "\u203a\u203a", kind="cut", anchor="end"))
            elif bar.low_us is not None and bar.high_us is not None:
                low, high, mid = x(bar.low_us), min(x(bar.high_us), right), at + row / 2 - 1
                parts.append(line(low, mid, high, mid, "span"))
                parts += [line(v, mid - 3, v, mid + 3, "span") for v in (low, high)]
            best = " fastest" if bar.fastest and len(shape.bars) > 1 else ""
            parts.append(text(right + 6, at + 10, number(bar.us), kind=f"value{best}"))
        bottom = top + len(shape.bars) * row
        if shape.floor_us is not None:
            f = x(shape.floor_us)
            parts.append(line(f, top - 3, f, bottom, "floor"))
            said = f"floor {number(shape.floor_us)} at {shape.floor_at}"
            parts.append(text(f + 3, top - 4, said, kind="note floortext"))
        y = bottom + gap
    return drawing(parts, "times on each workload", height=max(y, 20.0))


def sweep_chart(
    regimes: Sequence[tuple[str, str]], lines: Sequence[SweepLine], gate: float | None
) -> str:
    """Error against the steepness of the gates, logarithmic, a line for each kind of schedule."""
    values = [v for sweep in lines for _, v in sweep.points if v]
    lost = any(v is None for sweep in lines for _, v in sweep.points)
    low = min([*values, gate or 1.0]) * 0.8
    high = max([*values, gate or 0.0], default=1.0) * 1.6
    top = _TOP + (30.0 if lost else 0.0)
    y = Log(low, max(high, low * 2), _BOTTOM, top)
    x = Linear(-0.3, len(regimes) - 0.6, _LEFT, _RIGHT)
    parts = y_axis(y, _LEFT, _RIGHT, "largest error")
    for n, (name, words) in enumerate(regimes):
        parts.append(line(x(n), _TOP, x(n), _BOTTOM, "grid"))
        parts.append(text(x(n), _BOTTOM + 16, words, kind="tick", anchor="middle", tip=name))
    title = "lower bound of the gates, milder to steeper"
    parts.append(text(_RIGHT, _BOTTOM + 33, title, kind="axis", anchor="end"))
    if lost:
        parts.append(rect(_LEFT, _TOP, _RIGHT - _LEFT, 22, "beyond"))
        parts.append(text(_LEFT + 4, _TOP + 15, "not finite", kind="note bad"))
    if gate is not None:
        parts.append(rect(_LEFT, top, _RIGHT - _LEFT, max(y(gate) - top, 0), "beyond"))
        parts.append(line(_LEFT, y(gate), _RIGHT, y(gate), "gate"))
        parts.append(text(_LEFT + 4, y(gate) - 5, f"the gate, {gate:g}", kind="note bad"))
    colours, dashes = sweep_styles(lines)
    broken = [sweep.label for sweep in lines if any(v is None for _, v in sweep.points)]
    for sweep in lines:
        kind = f"c{colours[sweep.first]} d{dashes[sweep.second]}"
        finite = [(x(n), y(v)) for n, v in sweep.points if v is not None]
        tip = f"{sweep.label}, {sweep.trials} trial{'' if sweep.trials == 1 else 's'}"
        if len(finite) > 1:
            parts.append(polyline(finite, f"sweep {kind}", tip=tip))
        aside = 0.0
        if sweep.label in broken:
            aside = (broken.index(sweep.label) - (len(broken) - 1) / 2) * min(13, 66 / len(broken))
        for (n, v), (after, w) in pairwise(sweep.points):
            if v is not None and w is None:  # where it breaks
                parts.append(line(x(n), y(v), x(after) + aside, _TOP + 16, f"sweep fall {kind}"))
        for n, v in sweep.points:
            said = f"{tip}, {regimes[n][0]}: {'not finite' if v is None else format(v, '.2e')}"
            if v is None:
                parts.append(cross(x(n) + aside, _TOP + 11, f"lost {kind}", tip=said))
            else:
                parts.append(circle(x(n), y(v), f"point {kind}", radius=3, tip=said))
    return drawing(parts, "error against the lower bound of the gates")


def sweep_styles(lines: Sequence[SweepLine]) -> tuple[dict[str, int], dict[str, int]]:
    """Colour of each first word and dash of each second one, numbered."""
    first = {word: n % 8 for n, word in enumerate(dict.fromkeys(s.first for s in lines))}
    second = {word: n % 4 for n, word in enumerate(dict.fromkeys(s.second for s in lines))}
    return first, second


def funnel_chart(funnel: Funnel) -> str:
    """A bar for each stage: who passed it, and who did not by verdict."""
    row, left, right = 34.0, 84.0, WIDTH - 8.0
    most = max((s.entered for s in funnel.stages), default=1)
    x = Linear(0, most, left, right)
    parts: list[str] = []
    for n, stage in enumerate(funnel.stages):
        y = 4 + n * row
        parts.append(text(left - 8, y + 16, stage.stage, kind="axis", anchor="end"))
        at = 0
        for status, count in _verdicts(stage):
            tip = f"{stage.stage}: {count} {status}"
            parts.append(rect(x(at), y, x(at + count) - x(at), 22, f"s-{status}", tip=tip))
            at += count
        lost = ", ".join(f"{count} {s}" for s, count in _verdicts(stage) if s != "passed")
        words = f"{stage.passed} of {stage.entered}" + (f"; {lost}" if lost else "")
        words += f"; {_seconds(stage.seconds)}"
        inside = x(at) - left > 200
        parts.append(
            text(
                left + 8 if inside else x(at) + 6,
                y + 15.5,
                words,
                kind="onbar" if inside else "tick",
            )
        )
    return drawing(parts, "trials by stage", height=max(len(funnel.stages) * row + 4, 20))


def _verdicts(stage: StageCount) -> list[tuple[str, int]]:
    failed = sorted((s.value, n) for s, n in stage.failed.items() if n)
    return [("passed", stage.passed), *failed]


def _seconds(seconds: float) -> str:
    if not seconds:
        return "time not noted"
    if seconds < 1:
        return "under 1 s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
