"""What commands share: options, opening the leaderboard, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from leaderboard import Store

__all__ = ["db_option", "json_option", "open_reading", "print_json", "print_table", "us_text"]

_F = TypeVar("_F", bound=Callable[..., Any])


def db_option(command: _F) -> _F:
    """``--db URL``."""
    return click.option(
        "--db",
        metavar="URL",
        help="Leaderboard, for example sqlite:///FILE or postgresql://USER@HOST/NAME. "
        "Default: factory.db here, else (for reading) the shipped results.",
    )(command)


def json_option(command: _F) -> _F:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def open_reading(db: str | None) -> Store:
    """The leaderboard a reading command looks at, read-only.

    Raises
    ------
    leaderboard.StoreError
        One line naming the database.
    """
    from leaderboard import open_for_reading

    return open_for_reading(db)


def print_json(value: object) -> None:
    """Print records, or containers of them, as JSON."""
    click.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False))


def _plain(value: object) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", right: str = ""
) -> None:
    """Print a table; ``right`` names columns that are aligned to the right, comma-separated.

    In a pipe lines are as long as their contents: nothing is folded or cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    aligned = set(right.split(","))
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, justify="right" if column in aligned else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_escaped(cell) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(table, soft_wrap=not console.is_terminal)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def us_text(us: float | None) -> str:
    """Microseconds with four digits, or a dash."""
    return "-" if us is None else f"{us:.4g}" if us < 1000 else f"{us:.0f}"
