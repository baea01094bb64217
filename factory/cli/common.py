"""What commands share: options, opening the leaderboard, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from factory.cli.table import print_note, print_table
from factory.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from candidates import Family
    from leaderboard import Store
    from operations import Operation

__all__ = [
    "db_option",
    "db_to_write_option",
    "json_option",
    "known_operation",
    "log_folder",
    "open_reading",
    "print_json",
    "print_note",
    "print_table",
    "recording_url",
    "refuse_in_memory",
    "refuse_unknown",
    "us_text",
]

_F = TypeVar("_F", bound=Callable[..., Any])


def db_option(command: _F) -> _F:
    """``--db URL`` of a command that reads."""
    return click.option(
        "--db",
        metavar="URL",
        help="Leaderboard, for example sqlite:///FILE or postgresql://USER@HOST/NAME; shipped: "
        "the results that come with the package. Default: factory.db here, else the shipped ones.",
    )(command)


def db_to_write_option(command: _F) -> _F:
    """``--db URL`` of a command that writes."""
    return click.option(
        "--db",
        metavar="URL",
        help="Leaderboard to write, for example sqlite:///FILE or postgresql://USER@HOST/NAME. "
        "Default: factory.db here.",
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


def refuse_in_memory(db: str) -> None:
    """Refuse a database that keeps nothing.

    Raises
    ------
    UserError
    """
    from leaderboard._engine import in_memory, normalise

    if in_memory(normalise(db)):
        raise UserError(f"{db} keeps nothing beyond this command; name a file: sqlite:///FILE")


def recording_url(db: str | None, option: str) -> str:
    """URL of the leaderboard that ``option`` stores something in.

    Raises
    ------
    UserError
        It keeps nothing, or none is named and there is none here.
    """
    from pathlib import Path

    from leaderboard import DEFAULT_URL

    if db is None and not Path(DEFAULT_URL.removeprefix("sqlite:///")).exists():
        raise UserError(
            f"{option} needs a leaderboard and there is no {DEFAULT_URL}; name one with --db, or"
            " make it with factory leaderboard import"
        )
    url = db or DEFAULT_URL
    refuse_in_memory(url)
    return url


def log_folder(command: str, of: str) -> Path:
    """Make a folder of its own for the logs of one run of a command.

    Raises
    ------
    UserError
        It cannot be written.
    """
    from datetime import UTC, datetime

    from factory.campaign import LOG_ROOT

    made = LOG_ROOT / f"{command}-{of}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    try:
        made.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write logs to {made}: {error.strerror}") from error
    return made


def known_operation(name: str) -> tuple[Operation, Family]:
    """An operation and its candidates.

    Raises
    ------
    UserError
        If either is not here.
    """
    import candidates
    import operations

    try:
        return operations.get(name), candidates.get(name)
    except (operations.UnknownOperationError, candidates.UnknownFamilyError) as error:
        raise UserError(str(error)) from error


def refuse_unknown(kind: str, given: Sequence[str], known: Iterable[str], where: str = "") -> None:
    """Refuse a name that is none of the known ones, with the nearest that is.

    ``where`` follows the word "known", with a space before it.

    Raises
    ------
    UserError
    """
    import difflib

    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"known{where}: {', '.join(names) or 'none'}"
            )
            raise UserError(f"unknown {kind} {name!r}; {hint}")


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


def us_text(us: float | None) -> str:
    """Microseconds with four digits, or a dash."""
    return "-" if us is None else f"{us:.4g}" if us < 1000 else f"{us:.0f}"
