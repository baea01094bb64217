"""Small inline SVG: text, scales and axes.  Knows nothing of campaigns.

Drawings carry classes, never colours: the page's style sheet decides those for
light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

__all__ = [
    "HEIGHT",
    "WIDTH",
    "Linear",
    "Log",
    "Scale",
    "circle",
    "cross",
    "drawing",
    "line",
    "number",
    "polyline",
    "rect",
    "text",
    "x_axis",
    "y_axis",
]

WIDTH = 480
HEIGHT = 300
"""Of a drawing, in its own units: at this width its text is legible on a phone."""


class Scale(Protocol):
    """Maps a number to a place."""

    def __call__(self, value: float) -> float: ...

    def ticks(self) -> list[float]: ...


@dataclass(frozen=True)
class Linear:
    """Linear scale from ``low`` at ``start`` to ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Four to six round values inside the range."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        raw = span / 5
        power: float = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


@dataclass(frozen=True)
class Log:
    """Logarithmic scale; ``low`` is positive."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = math.log(self.high / self.low) or 1.0
        return self.start + math.log(max(value, self.low) / self.low) / span * (
            self.end - self.start
        )

    def ticks(self) -> list[float]:
        """Powers of ten, with their doubles and halves where those are few."""
        low, high = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        marks = (1, 2, 5) if high - low <= 3 else (1,)
        values = [m * 10.0**n for n in range(low, high + 1) for m in marks]
        return [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]


def number(value: float) -> str:
    """At most four digits, without an exponent where it can be helped."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u2009")
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _tip(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""


def drawing(
    parts: Iterable[str], label: str, *, height: float = HEIGHT, width: float = WIDTH
) -> str:
    """An SVG element that scales with its container."""
    return (
        f'<svg viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def text(
    x: float, y: float, words: str, *, kind: str = "", anchor: str = "start", tip: str = ""
) -> str:
    """Text with its baseline at ``y``."""
    css = f' class="{kind}"' if kind else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{_n(x)}" y="{_n(y)}"{css}{at}>{escape(words)}{_tip(tip)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{kind}"/>'


def polyline(points: Sequence[tuple[float, float]], kind: str, *, tip: str = "") -> str:
    """A line through ``points``."""
    path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}">{_tip(tip)}</polyline>'


def rect(x: float, y: float, width: float, height: float, kind: str, *, tip: str = "") -> str:
    """A filled rectangle."""
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.0))}" height="{_n(height)}"'
        f' class="{kind}">{_tip(tip)}</rect>'
    )


def circle(
    x: float, y: float, kind: str, *, radius: float = 3.5, tip: str = "", trial: int | None = None
) -> str:
    """A point; ``trial`` is what a click on it looks up in the table."""
    mark = "" if trial is None else f' data-trial="{trial}"'
    return (
        f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{kind}"{mark}>'
        f"{_tip(tip)}</circle>"
    )


def cross(x: float, y: float, kind: str, *, tip: str = "", trial: int | None = None) -> str:
    """A point that stands for a failure."""
    mark = "" if trial is None else f' data-trial="{trial}"'
    path = f"M{_n(x - 4)},{_n(y - 4)}l8,8m0,-8l-8,8"
    return f'<path d="{path}" class="{kind}"{mark}>{_tip(tip)}</path>'


def x_axis(scale: Scale, top: float, bottom: float, title: str, right: float) -> list[str]:
    """Grid lines, numbers below them and the title at the right end."""
    parts = []
    for value in scale.ticks():
        x = scale(value)
        parts += [
            line(x, top, x, bottom, "grid"),
            text(
                min(x, WIDTH - 2),
                bottom + 16,
                number(value),
                kind="tick",
                anchor="end" if x > WIDTH - 18 else "middle",
            ),
        ]
    parts.append(text(right, bottom + 33, title, kind="axis", anchor="end"))
    return parts


def y_axis(scale: Scale, left: float, right: float, title: str) -> list[str]:
    """Grid lines, numbers beside them and the title above."""
    parts = [text(2, 14, title, kind="axis")]
    for value in scale.ticks():
        y = scale(value)
        parts += [
            line(left, y, right, y, "grid"),
            text(left - 6, y + 4, number(value), kind="tick", anchor="end"),
        ]
    return parts
