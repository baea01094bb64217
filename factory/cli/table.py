"""Tables as text: aligned, one line a row, never wider than the terminal.

In a pipe lines are as long as their contents: nothing is folded, cut or coloured.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any

import click

__all__ = ["coloured", "line_width", "print_failures", "print_note", "print_table"]

_GAP = "   "
_NARROW_GAP = "  "
_LEAST = 10
"""Width to which a column may be shortened."""

_STYLES = {
    "passed": "green",
    "faster": "green",
    "ok": "green",
    "valid": "green",
    "within": "green",
    "finished": "green",
    "rejected": "red",
    "crashed": "red",
    "timeout": "red",
    "fault": "red",
    "slower": "red",
    "beyond": "red",
    "not finite": "red",
    "void": "red",
    "failed": "red",
    "slow": "yellow",
    "infeasible": "yellow",
    "note": "yellow",
    "interrupted": "yellow",
    "running": "cyan",
}
"""Colour of a cell that is one of these words, in a column of words like that."""

_WORDS = ("verdict", "status", "is", "")


def line_width() -> int | None:
    """Columns of the terminal that standard output is; None for a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured() -> bool:
    """Whether escapes may be written: on a terminal, unless ``NO_COLOR`` or ``TERM=dumb``."""
    return (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "") != "dumb"
    )


def print_note(text: str, *, indent: str = "", first: str = "") -> None:
    """A line of words, broken between words at the terminal's width.

    Parameters
    ----------
    indent : str
        Before every line but the first.
    first : str
        Before the first one.
    """
    width = line_width()
    if width is None:
        click.echo(first + text)
        return
    lines = wrap(
        text,
        max(width, 20),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo("\n".join(lines) or first)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    right: str = "",
    drop: str = "",
    keep: Mapping[str, int] | None = None,
    spill: str = "",
    fold: str = "",
) -> None:
    """Print a table.

    Where a terminal is too narrow, columns named in ``drop`` are left out, then the longest texts
    are cut, or folded.  A line under the table says what is not shown.

    Parameters
    ----------
    columns : sequence of str
        Heads; one may have several lines.
    right : str
        Columns that are aligned to the right, comma-separated; they are never cut.
    drop : str
        Columns that can be done without, comma-separated; the last named goes first.
    keep : mapping, optional
        Columns that are not cut below this width while there is something to leave out.
    spill : str
        A column of long texts: where it does not fit, its texts stand under the table.
    fold : str
        The last column, if its texts go on in a line of their own instead of being cut: those
        that differ in their middle only would look alike.
    """
    lines = [[_clean(cell) for cell in row] for row in rows]
    heads = list(columns)
    numeric = set(right.split(","))
    width = line_width()
    gap = _GAP if width is None else _NARROW_GAP
    dropped: list[str] = []
    spilt: list[tuple[str, str]] = []
    if width is not None:
        if spill in heads and sum(_natural(heads, lines)) + len(gap) * len(heads) > width:
            at, by = heads.index(spill), next(n for n, h in enumerate(heads) if h)
            spilt = [(line[by], line[at]) for line in lines if line[at] not in ("", "-")]
            heads.pop(at)
            lines = [line[:at] + line[at + 1 :] for line in lines]
        spare = [name for name in drop.split(",") if name in heads]
        while spare and _least(heads, lines, numeric, keep or {}, gap) > width:
            name = spare.pop()
            at = heads.index(name)
            heads.pop(at)
            lines = [line[:at] + line[at + 1 :] for line in lines]
            dropped.insert(0, name)
    widths = _natural(heads, lines)
    fitted = widths if width is None else _fitted(widths, heads, numeric, width, gap)
    cut = any(
        now != natural
        for head, now, natural in zip(heads, fitted, widths, strict=True)
        if head != fold
    )
    if title:
        click.echo(_bold(_cut(title, width)))
    for level in _levels(heads):
        click.echo(_line(level, fitted, numeric, heads, gap))
    click.echo("\u2500" * (sum(fitted) + len(gap) * (len(fitted) - 1)))
    for line in lines:
        for part in _folded(line, fitted[-1]) if heads[-1] == fold else [line]:
            click.echo(_line(part, fitted, numeric, heads, gap, colours=coloured()))
    if dropped or cut:
        left_out = f"{', '.join(dropped)} left out" if dropped else ""
        words = "; ".join(w for w in (left_out, "long texts cut" if cut else "") if w)
        print_note(f"({words}: a wider terminal or a pipe shows all)")
    for name, text in spilt:
        print_note(text, first=f"{name}: ", indent="  ")


def _folded(cells: Sequence[str], width: int) -> list[list[str]]:
    """The line, and as many more as its last cell needs; these begin two columns further in."""
    if _length(cells[-1]) <= width:
        return [[*cells]]
    parts = wrap(cells[-1], width, subsequent_indent="  ", break_on_hyphens=False)
    empty = [""] * (len(cells) - 1)
    return [[*cells[:-1], parts[0]], *([*empty, part] for part in parts[1:])]


def _bold(text: str) -> str:
    return click.style(text, bold=True) if coloured() else text


def _clean(text: str) -> str:
    """One line, and no control characters that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def _length(text: str) -> int:
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _head_length(head: str) -> int:
    return max(map(_length, head.split("\n")))


def _levels(heads: Sequence[str]) -> list[list[str]]:
    """Lines of the heads, which may have several, standing on the rule."""
    parts = [head.split("\n") for head in heads]
    deep = max(map(len, parts), default=1)
    return [[*_column(parts, deep, n)] for n in range(deep)]


def _column(parts: Iterable[Sequence[str]], deep: int, level: int) -> Iterable[str]:
    for part in parts:
        at = level - (deep - len(part))
        yield part[at] if at >= 0 else ""


def _natural(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[int]:
    widths = [_head_length(h) for h in heads]
    for line in lines:
        widths = [max(w, _length(c)) for w, c in zip(widths, line, strict=True)]
    return widths


def _least(
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    numeric: set[str],
    keep: Mapping[str, int],
    gap: str,
) -> int:
    widths = _natural(heads, lines)
    bare = [
        w if h in numeric else min(w, max(keep.get(h, _LEAST), _head_length(h)))
        for h, w in zip(heads, widths, strict=True)
    ]
    return sum(bare) + len(gap) * (len(bare) - 1)


def _fitted(
    widths: list[int], heads: Sequence[str], numeric: set[str], width: int, gap: str
) -> list[int]:
    """Take from the widest text column, one by one, until the line fits."""
    found = list(widths)
    room = width - len(gap) * (len(found) - 1)
    while sum(found) > room:
        able = [
            n
            for n, h in enumerate(heads)
            if h not in numeric and found[n] > max(_LEAST, _head_length(h))
        ]
        if not able:
            break
        found[max(able, key=lambda n: (found[n], n))] -= 1
    return found


def _line(
    cells: Sequence[str],
    widths: Sequence[int],
    numeric: set[str],
    heads: Sequence[str],
    gap: str,
    *,
    colours: bool = False,
) -> str:
    parts = []
    for n, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        text = _cut(cell, width)
        room = " " * (width - _length(text))
        if colours and heads[n].split(" ")[-1] in _WORDS and cell in _STYLES:
            text = click.style(text, fg=_STYLES[cell])
        last = n == len(cells) - 1
        parts.append(room + text if heads[n] in numeric else text + ("" if last else room))
    return gap.join(parts).rstrip()


def _cut(text: str, width: int | None) -> str:
    if width is None or _length(text) <= width:
        return text
    kept = ""
    for c in text:
        if _length(kept + c) > width - 1:
            break
        kept += c
    return kept + "\u2026"


def print_failures(rows: Iterable[Any], *, title: str = "") -> None:
    """Failed trials with their reasons: a table where it fits, else an entry each.

    Parameters
    ----------
    rows : iterable
        With ``id``, ``status``, ``stage``, ``schedule_key`` and ``reason``.
    """
    rows = list(rows)
    heads = ["trial", "verdict", "stage", "schedule", "reason"]
    cells = [[str(r.id), r.status.value, r.stage, r.schedule_key, r.reason] for r in rows]
    width = line_width()
    if width is None or sum(_natural(heads, cells)) + len(_NARROW_GAP) * (len(heads) - 1) <= width:
        print_table(heads, cells, title=title, right="trial")
        return

    if title:
        click.echo(_bold(title))
    for row in rows:
        said = row.status.value
        if coloured() and said in _STYLES:
            said = click.style(said, fg=_STYLES[said])
        click.echo(f"trial {row.id}  {said}{f' at {row.stage}' if row.stage else ''}")
        for text in (row.schedule_key, row.reason):
            if text:
                print_note(_clean(text), first="  ", indent="  ")
