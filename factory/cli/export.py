"""``factory export``: the winner as a folder to commit, and what became of one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from factory.cli.common import (
    db_option,
    json_option,
    known_operation,
    log_folder,
    open_reading,
    print_json,
    recording_url,
    refuse_in_memory,
    refuse_unknown,
)
from factory.errors import EXIT_DONE, EXIT_MACHINE, EXIT_NOTHING_PASSED, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from factory.device.hardware import Device
    from factory.export.folder import Checked
    from factory.export.gate import Gated
    from factory.export.select import Selection
    from leaderboard import ClaimRecord, ClaimView, Store

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
@click.option(
    "--format",
    "layout",
    type=click.Choice(["folder", "flashinfer-trace"]),
    default="folder",
    show_default=True,
    help="What to write: a folder to vendor, or a FlashInfer-Bench data set.",
)
@click.option(
    "--inputs",
    multiple=True,
    metavar="SHAPE",
    help="With --format flashinfer-trace: write the inputs of this shape; may be repeated.",
)
@click.option("--aot", is_flag=True, help="Add the kernels compiled ahead of time, and a loader.")
@click.option(
    "--gate",
    "gated",
    is_flag=True,
    help="Put the folder through the export gate on a GPU, and store the claim.",
)
@click.option(
    "--control",
    "controls",
    multiple=True,
    metavar="NAME",
    help="With --gate: time this baseline beside it, not all; may be repeated.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 50),
    default=3,
    show_default=True,
    help="With --gate: turns that folder and candidate take.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="With --gate: of all inputs.")
@db_option
@json_option
def export(
    what: str,
    to: Path | None,
    checked: Path | None,
    layout: str,
    inputs: tuple[str, ...],
    aot: bool,
    gated: bool,
    controls: tuple[str, ...],
    rounds: int,
    seed: int | None,
    db: str | None,
    as_json: bool,
) -> int:
    """Write the winner of an operation, or one trial by its number, as a folder to commit.

    WHAT is an operation (its winner is exported, with other trials where they are told faster on
    a shape) or a trial.  It works from the shipped results, without a GPU.  No folder is called a
    winner before it has passed the export gate itself (--gate): without that no claim is made.

    Exit code 0: written, or fine; 1: there is no winner, the gate refused the folder, or it was
    altered or superseded; 2: wrong usage, or a folder that holds something else; 3: --gate
    without an sm90 GPU, or a job that does not count.

    With --json: one object with id (the export's hash), folder, files, winner, claim, refused,
    campaign, rows and source; with --check one with id, folder, status, altered, missing, added,
    changed, differs, current and unknown.
    """
    if (to is None) == (checked is None):
        raise UserError("name a folder with --to to write it, or with --check to look at one")
    if (gated or aot) and (to is None or layout != "folder"):
        name = "--gate" if gated else "--aot"
        with_what = "with --to" if to is None else f"with a folder, not with --format {layout}"
        raise UserError(f"{name} goes {with_what}: it is about the folder that is written")
    for option in ("controls", "rounds", "seed"):
        source = click.get_current_context().get_parameter_source(option)
        if not gated and source is ParameterSource.COMMANDLINE:
            name = option.removesuffix("s") if option == "controls" else option
            raise UserError(f"--{name} goes with --gate: only that times anything")
    if gated and db is not None:
        refuse_in_memory(db)
    if inputs and layout == "folder":
        raise UserError("--inputs goes with --format flashinfer-trace: a folder holds no inputs")
    with ExitStack() as opened:
        stores = _Stores(opened, db)
        if checked is not None:
            return _check(what, checked, stores, as_json)
        assert to is not None
        if layout != "folder":
            return _write_traces(what, to, stores, inputs, as_json)
        asked = None
        if gated:
            asked = _Gate(_gpu(), _recording(opened, db), controls, rounds, seed)
        return _write(what, to, stores, as_json, asked, aot=aot)


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
        return select(*known_operation(what), stores)
    campaign = stores.first.get_campaign(stores.first.get_trial(what).campaign_id)
    return select(*known_operation(campaign.operation), stores, trial=what)


def _claim(stores: _Stores, export_hash: str) -> ClaimView | None:
    from leaderboard import claim_of

    found = (claim_of(store, export_hash) for store in stores.opened)
    return next((claim for claim in found if claim is not None), None)


def _rendered(
    selection: Selection, stores: _Stores, compiled: dict[str, bytes]
) -> tuple[dict[str, bytes], str]:
    """The files and the export's hash, with the claim on it if one is stored."""
    from factory.export.render import export_hash, render

    found = render(selection, compiled=compiled)
    bound = export_hash(found)
    claim = _claim(stores, bound)
    return (found if claim is None else render(selection, claim, compiled)), bound


def _compiled(selection: Selection) -> dict[str, bytes]:
    """The ahead-of-time form of a table."""
    from factory.export.aot import compile_library
    from factory.export.exporter import exporter_of

    exporter = exporter_of(selection.operation.name)
    return compile_library(
        exporter,
        exporter.forms([row.schedule for row in selection.rows]),
        lambda kind, line: click.echo(f"{kind}: {line}", err=True),
    )


# -- the gate ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gate:
    """What the command line asks of the gate."""

    device: Device
    store: Store
    controls: tuple[str, ...]
    rounds: int
    seed: int | None


def _gpu() -> Device:
    from factory.device.cuda import CudaDevice

    return CudaDevice.find()


def _recording(opened: ExitStack, db: str | None) -> Store:
    """Where the claim goes."""
    from leaderboard import open_store

    return opened.enter_context(open_store(recording_url(db, "--gate")))


def _put_through(
    asked: _Gate, selection: Selection, to: Path, bound: str
) -> tuple[Gated, ClaimRecord | None]:
    """Run the gate on the written folder and store what it claims."""
    import candidates
    from factory.export.contest import Contest
    from factory.export.gate import claim_from, gate, store_claim
    from factory.export.render import table, vendored
    from leaderboard import UnknownError, claims

    s, uid = selection, selection.default.trial.uid
    try:
        trial_id = asked.store.get_trial(uid).id
    except UnknownError as error:
        raise UserError(
            f"{asked.store.name} does not hold the campaign of {s.default.schedule.key}; add it"
            " with factory leaderboard import, the claim stands beside it"
        ) from error
    there = {b.name: b for b in candidates.baselines(s.operation.name)}
    refuse_unknown("control", asked.controls, there)
    contest = Contest(vendored(s, to.resolve(), bound), s.family, s.default.schedule, s.gate_bound)
    found = gate(
        s.operation,
        contest,
        device=asked.device,
        baselines=[b for n, b in there.items() if not asked.controls or n in asked.controls],
        log_dir=log_folder("export", s.operation.name).resolve(),
        seed=asked.seed,
        rounds=asked.rounds,
        on_event=lambda kind, line: click.echo(f"{kind}: {line}", err=True),
        many_rows=len({row.schedule.key for row in s.rows}) > 1,
    )
    if found.refused or found.void:
        return found, None
    record = claim_from(
        found,
        s.operation,
        contest,
        table=table(s),
        campaign_id=s.campaign.id,
        trial_uid=uid,
        standing=claims(asked.store, operation=s.operation.name),
    )
    store_claim(asked.store, found, record, trial_id)
    return found, record


# -- writing -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Written:
    """What was written, and what may be said of it."""

    selection: Selection
    to: Path
    files: dict[str, bytes]
    export_hash: str
    claim: ClaimRecord | None
    refused: str


def _write(
    what: str,
    to: Path,
    stores: _Stores,
    as_json: bool,
    asked: _Gate | None = None,
    *,
    aot: bool = False,
) -> int:
    from factory.export.folder import refuse_unwritable, write
    from factory.export.render import render

    selection = _select(what, stores)
    refuse_unwritable(to)
    compiled = _compiled(selection) if aot else {}
    found, bound = _rendered(selection, stores, compiled)
    write(found, to)
    claim: ClaimRecord | None = _claim(stores, bound)
    refused, code = "", EXIT_DONE
    if asked is not None:
        gated, made = _put_through(asked, selection, to, bound)
        refused = gated.refused or (gated.void and f"the job does not count: {gated.void}")
        if made is None:
            code = EXIT_NOTHING_PASSED if gated.refused else EXIT_MACHINE
        else:
            claim = made
            # The same export, with its claim in the manifest.
            found = render(selection, made, compiled)
            write(found, to)
    written = _Written(selection, to, found, bound, claim, refused)
    if as_json:
        print_json(_object(written))
    else:
        _say(written)
    return code


def _write_traces(
    what: str, to: Path, stores: _Stores, inputs: tuple[str, ...], as_json: bool
) -> int:
    from factory.export.folder import write
    from factory.export.trace import input_blobs, render_traces

    selection = _select(what, stores)
    folder, bound = _rendered(selection, stores, {})
    found = render_traces(selection, folder)
    write(found, to, beside=("blob",))
    blobs = input_blobs(selection, inputs, to)
    if as_json:
        files = sorted([*found, *(p.relative_to(to).as_posix() for p in blobs)])
        print_json({"id": bound, "folder": str(to), "files": files})
    else:
        click.echo(
            f"wrote {to}: a flashinfer-trace data set of export {bound[:12]}, from"
            f" {selection.store}; inputs in {len(blobs)} files"
        )
        _say_of(selection, _claim(stores, bound), "")
    return EXIT_DONE


def _object(written: _Written) -> dict[str, Any]:
    """What ``--json`` prints."""
    selection, claim = written.selection, written.claim
    return {
        "id": written.export_hash,
        "folder": str(written.to),
        "files": sorted(written.files),
        "winner": claim is not None and _superseded(claim) is None,
        "claim": claim,
        "refused": written.refused,
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


def _say(written: _Written) -> None:
    s = written.selection
    click.echo(
        f"wrote {written.to}: {len(written.files)} files, export {written.export_hash[:12]}, from"
        f" {s.store}"
    )
    for row in s.rows:
        over = ", ".join(f"{name} {ratio:.3f}" for name, ratio in row.over_default.items())
        told = f" ({over} of the time of the schedule for the rest)" if over else ""
        rest = "all other shapes" if len(s.rows) > 1 else "all shapes"
        click.echo(f"  {row.workload or rest}: {row.schedule.key}{told}")
    _say_of(s, written.claim, written.refused)


def _say_of(selection: Selection, claim: ClaimRecord | None, refused: str) -> None:
    """What is to be known of an export, whatever it was written as."""
    if not selection.is_winner:
        click.echo("this trial did not win its campaign")
    if not selection.same_source:
        click.echo(
            "the kernels have changed since these trials were measured: the table rests on times"
            " of older source"
        )
    if refused:
        click.echo(f"no claim was made: {refused}")
    elif claim is None:
        click.echo("no claim was made: this folder itself has not passed the export gate")
    else:
        newer = _superseded(claim)
        state = "stands" if newer is None else f"superseded by {newer}"
        told = f", {claim.control_ratio:.3f} of {claim.control}" if claim.control_ratio else ""
        click.echo(
            f"claim {claim.id} {state}: {claim.score_us:.1f} us on {claim.gpu},"
            f" {claim.ratio:.3f} of its candidate{told}"
        )


def _superseded(claim: ClaimRecord) -> str | None:
    """The better claim, as the leaderboard has it; one just made has none."""
    return getattr(claim, "superseded_by", None)


# -- checking ----------------------------------------------------------------------------


def _check(what: str, folder: Path, stores: _Stores, as_json: bool) -> int:
    from factory.export.exporter import ExportError
    from factory.export.folder import check, read_manifest
    from factory.export.render import render

    told = read_manifest(folder)
    operation = told.get("operation")
    theirs = operation.get("name") if isinstance(operation, dict) else None
    currents: list[dict[str, bytes]] = []
    unknown = ""
    try:
        selection = _select(what, stores)
        if isinstance(theirs, str) and theirs != selection.operation.name:
            raise UserError(
                f"{folder} is an export of {theirs}, not of {selection.operation.name};"
                f" factory export {theirs} --check {folder}"
            )
        currents = [_rendered(selection, stores, {})[0], render(selection)]
    except ExportError as error:
        unknown = str(error)
    claim = _claim(stores, told["export_hash"])
    found = check(folder, currents, None if claim is None else claim.superseded_by)
    if as_json:
        print_json(
            {
                "id": found.export_hash,
                "folder": str(folder),
                **{k: v for k, v in asdict(found).items() if k not in _NAMED_OTHERWISE},
                "current": found.current_hash,
                "unknown": unknown,
            }
        )
    else:
        _say_checked(folder, found, unknown)
    return EXIT_DONE if found.status == "fine" else EXIT_NOTHING_PASSED


_NAMED_OTHERWISE = ("export_hash", "current_hash")


def _say_checked(folder: Path, found: Checked, unknown: str) -> None:
    head = f"{folder}: {found.status}"
    if found.status == "unaltered":
        head += ", but not compared with what would be exported now"
    click.echo(f"{head}, export {found.export_hash[:12]}")
    for word in ("altered", "missing", "added"):
        for name in getattr(found, word):
            click.echo(f"  {word}: {name}")
    for name in found.differs:
        click.echo(f"  not what is exported now beside the same sources and table: {name}")
    if found.changed:
        now = "" if found.current_hash is None else f" (now {found.current_hash[:12]})"
        click.echo(f"  superseded: changed {' and '.join(found.changed)}{now}")
    if unknown:
        click.echo(f"  what would be exported now is not known: {unknown}")
