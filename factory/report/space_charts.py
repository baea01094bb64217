"""Drawings of the space: what mattered, and every schedule as a line through its parameters."""

from __future__ import annotations

from html import escape

from factory.report.space import Importance, Space
from factory.report.svg import HEIGHT, WIDTH, Linear, Log, drawing, line, number, rect, text

__all__ = ["importance_chart", "parallel_chart"]

_WIDE = 2.0 * WIDTH
"""A parameter needs room."""

_LABELS = 12
"""Choices that are named on an axis."""


def importance_chart(space: Space, unit: str) -> str:
    """A bar for each parameter: the share of the spread of times that it explains alone."""
    row, left, right = 26.0, 100.0, WIDTH - 104.0
    x = Linear(0, 1, left, right)
    parts = []
    for n, found in enumerate(space.importances):
        y = 6 + n * row
        parts.append(text(left - 8, y + 13, found.name, kind="axis", anchor="end"))
        parts.append(rect(left, y, right - left, 17, "track"))
        parts.append(rect(left, y, x(found.share) - left, 17, "share", tip=_choices(found, unit)))
        said = f"{found.share:.0%} of {found.trials}"
        parts.append(text(right + 8, y + 13, said if found.trials else "not met", kind="value"))
    return drawing(
        parts, "how much each parameter explains", height=len(space.importances) * row + 10
    )


def _choices(found: Importance, unit: str) -> str:
    said = ", ".join(f"{c} {number(mean)} ({n})" for c, mean, n in found.means)
    return f"{found.name}, geomean {unit} by choice (trials): {said}"


def parallel_chart(space: Space, unit: str) -> str:
    """Axes side by side, the last one time; the strongest lines are the fastest."""
    top, bottom, left, right = 30.0, HEIGHT + 30.0, 20.0, _WIDE - 52.0
    count = len(space.axes)
    at = [left + (right - left) * n / count for n in range(count + 1)]
    values = [p.value for p in space.paths if p.value is not None]
    low, high = min(values), max(values)
    lost = any(p.value is None for p in space.paths)
    # Up is fast: what has no time lies under the slowest.
    y = Log(low, max(high, low * 1.0001), top, bottom - (26.0 if lost else 0.0))
    places = [
        {c: _place(i, len(axis.choices), top, bottom) for i, c in enumerate(axis.choices)}
        for axis in space.axes
    ]
    parts: list[str] = []
    for path in space.paths:
        end = bottom if path.value is None else y(path.value)
        points = [(x, by[c]) for x, by, c in zip(at, places, path.choices, strict=False)]
        kind = "lost" if path.value is None else "fast" if path.fast else "any"
        said = path.status if path.value is None else f"{number(path.value)} {unit}"
        where = " ".join(f"{x:.1f},{v:.1f}" for x, v in [*points, (at[-1], end)])
        parts.append(
            f'<polyline points="{where}" class="path {kind}" data-trial="{path.id}">'
            f"<title>{escape(f'trial {path.id}, {said}: {path.label}')}</title></polyline>"
        )
    for n, (axis, x) in enumerate(zip(space.axes, at, strict=False)):
        parts.append(line(x, top, x, bottom, "axisline"))
        anchor = "middle" if n else "start"
        parts.append(text(x if n else 2.0, 16.0, axis.name, kind="axis", anchor=anchor))
        every = -(-len(places[n]) // _LABELS)
        for choice, v in list(places[n].items())[::every]:
            parts.append(text(x + 3, v + 4, choice, kind="tick halo"))
    parts.append(line(at[-1], top, at[-1], bottom, "axisline"))
    parts.append(text(at[-1] + 5, 16.0, unit, kind="axis", anchor="middle"))
    for value in _ends(low, high):
        parts.append(text(at[-1] + 5, y(value) + 4, number(value), kind="tick"))
    if lost:
        parts.append(text(at[-1] + 5, bottom + 3, "no time", kind="note bad"))
    label = "schedules as lines through their parameters"
    return drawing(parts, label, height=bottom + 14, width=_WIDE)


def _place(index: int, count: int, top: float, bottom: float) -> float:
    if count == 1:
        return (top + bottom) / 2
    return bottom - 8 - index * (bottom - top - 16) / (count - 1)


def _ends(low: float, high: float) -> list[float]:
    return [low] if high < low * 1.02 else [low, high]
