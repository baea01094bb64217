"""``factory export``: the winner as a folder to commit, and what became of one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from factory.cli.common import db_option, json_option, open_reading, print_json
from factory.errors import EXIT_DONE, EXIT_NOTHING_PASSED, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candidates import Family
    from factory.export.folder import Checked
    from factory.export.select import Selection
    from leaderboard import ClaimView, Store
    from operations import Operation

__all__ = ["export"]


@click.command()
@click.argument("what")
@click.option("--to", type=click.Path(path_type=Path), help="Folder to write.")
@click.option(
    "--check",
    "checked",
    type=click.Path(path_type=Path),
    help="Instead of writing: was this folder altered, or superseded?",
)
@db_option
@json_option
def export(what: str, to: Path | None, checked: Path | None, db: str | None, as_json: bool) -> int:
    """Write the winner of an operation, or one trial by its number, as a folder to commit.

    WHAT is an operation (its winner is exported, with other trials where they are told faster on
    a shape) or a trial.  It works from the shipped results, without a GPU.  The folder is no
    winner before it has passed the export gate itself: without one no claim is made.

    Exit code 0: written, or fine; 1: there is no winner, or the folder was altered or superseded;
    2: wrong usage, or a folder that holds something else.

    With --json: one object with id (the export's hash), folder, files, winner, claim, campaign,
    rows and source; with --check one with id, folder, status, altered, missing, added, changed
    and current.
    """
    if (to is None) == (checked is None):
        raise UserError("name a folder with --to to write it, or with --check to look at one")
    with ExitStack() as opened:
        stores = _Stores(opened, db)
        if checked is not None:
            return _check(what, checked, stores, as_json)
        assert to is not None
        return _write(what, to, stores, as_json)


class _Stores:
    """Where a winner is looked for: the one named; else what is here, then what was shipped.

    Loaded as they are asked for: the shipped results take a second.
    """

    def __init__(self, opened: ExitStack, db: str | None) -> None:
        self._opened, self._db = opened, db
        self._found: list[Store] = []

    def __iter__(self) -> Iterator[Store]:
        yield self.first
        if self._db is None:
            if len(self._found) == 1:
                from leaderboard import shipped_store

                self._found.append(self._opened.enter_context(shipped_store()))
            if self._found[1].name != self.first.name:
                yield self._found[1]

    @property
    def first(self) -> Store:
        if not self._found:
            self._found.append(self._opened.enter_context(open_reading(self._db)))
        return self._found[0]

    @property
    def opened(self) -> list[Store]:
        """Those that were asked so far."""
        return self._found


def _select(what: str, stores: _Stores) -> Selection:
    from factory.export.select import select

    if not what.isdecimal():
        return select(*_known(what), stores)
    campaign = stores.first.get_campaign(stores.first.get_trial(what).campaign_id)
    return select(*_known(campaign.operation), stores, trial=what)


def _known(name: str) -> tuple[Operation, Family]:
    import candidates
    import operations

    try:
        return operations.get(name), candidates.get(name)
    except (operations.UnknownOperationError, candidates.UnknownFamilyError) as error:
        raise UserError(str(error)) from error


def _claim(stores: _Stores, export_hash: str) -> ClaimView | None:
    from leaderboard import claim_of

    found = (claim_of(store, export_hash) for store in stores.opened)
    return next((claim for claim in found if claim is not None), None)


def _rendered(selection: Selection, stores: _Stores) -> tuple[dict[str, bytes], str]:
    """The files and the export's hash, with the claim on it if one is stored."""
    from factory.export.render import export_hash, render

    found = render(selection)
    bound = export_hash(found)
    claim = _claim(stores, bound)
    return (found if claim is None else render(selection, claim)), bound


# -- writing -----------------------------------------------------------------------------


def _write(what: str, to: Path, stores: _Stores, as_json: bool) -> int:
    from factory.export.folder import write

    selection = _select(what, stores)
    found, bound = _rendered(selection, stores)
    write(found, to)
    claim = _claim(stores, bound)
    if as_json:
        print_json(_written(selection, to, found, bound, claim))
    else:
        _say(selection, to, found, bound, claim)
    return EXIT_DONE


def _written(
    selection: Selection,
    to: Path,
    found: dict[str, bytes],
    bound: str,
    claim: ClaimView | None,
) -> dict[str, Any]:
    return {
        "id": bound,
        "folder": str(to),
        "files": sorted(found),
        "winner": claim is not None and claim.superseded_by is None,
        "claim": claim,
        "campaign": selection.campaign.id,
        "rows": [
            {
                "id": row.workload or "all other shapes",
                "schedule": row.schedule.key,
                "trial": row.trial.uid,
                "over_default": dict(row.over_default),
            }
            for row in selection.rows
        ],
        "source": {
            "sha256": selection.family.source_hash(),
            "measured_sha256": selection.default.trial.source_hash,
            "same_as_measured": selection.same_source,
        },
    }


def _say(
    selection: Selection,
    to: Path,
    found: dict[str, bytes],
    bound: str,
    claim: ClaimView | None,
) -> None:
    s = selection
    click.echo(f"wrote {to}: {len(found)} files, export {bound[:12]}, from {s.store}")
    for row in s.rows:
        over = ", ".join(f"{name} {ratio:.3f}" for name, ratio in row.over_default.items())
        told = f" ({over} of the time of the schedule for the rest)" if over else ""
        click.echo(f"  {row.workload or 'all other shapes'}: {row.schedule.key}{told}")
    if not s.is_winner:
        click.echo("this trial did not win its campaign")
    if not s.same_source:
        click.echo(
            "the kernels have changed since these trials were measured: the table rests on times"
            " of older source"
        )
    if claim is None:
        click.echo("no claim was made: this folder itself has not passed the export gate")
    else:
        state = f"superseded by {claim.superseded_by}" if claim.superseded_by else "stands"
        click.echo(f"claim {claim.id} {state}: {claim.score_us:.1f} us on {claim.gpu}")


# -- checking ----------------------------------------------------------------------------


def _check(what: str, folder: Path, stores: _Stores, as_json: bool) -> int:
    from factory.export.folder import check, read_manifest
    from factory.export.select import ExportError

    told = read_manifest(folder)
    try:
        current: dict[str, bytes] | None = _rendered(_select(what, stores), stores)[0]
        reason = ""
    except ExportError as error:
        current, reason = None, str(error)
    claim = _claim(stores, told["export_hash"])
    found = check(folder, current, None if claim is None else claim.superseded_by)
    if as_json:
        print_json(
            {
                "id": found.export_hash,
                "folder": str(folder),
                **{k: v for k, v in asdict(found).items() if k not in ("export_hash",)},
                "current": found.current_hash,
                "unknown": reason,
            }
        )
    else:
        _say_checked(folder, found, reason)
    return EXIT_DONE if found.status == "fine" else EXIT_NOTHING_PASSED


def _say_checked(folder: Path, found: Checked, reason: str) -> None:
    click.echo(f"{folder}: {found.status}, export {found.export_hash[:12]}")
    for word in ("altered", "missing", "added"):
        for name in getattr(found, word):
            click.echo(f"  {word}: {name}")
    if found.changed:
        now = "" if found.current_hash is None else f" (now {found.current_hash[:12]})"
        click.echo(f"  superseded: changed {' and '.join(found.changed)}{now}")
    if reason:
        click.echo(f"  what would be exported now is not known: {reason}")
