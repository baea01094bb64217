"""The folder on disk: written whole or not at all, never over files of others, and checked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from factory.errors import UserError
from factory.export.render import FORMAT, MANIFEST, VERSION, export_hash, sha256

__all__ = ["Checked", "check", "read_manifest", "refuse_unwritable", "write"]

_LEAVINGS = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")
"""Folders that tools leave behind; neither exported nor anybody's work."""


@dataclass(frozen=True)
class Checked:
    """What became of an exported folder.

    Parameters
    ----------
    status : str
        ``fine``: to the byte what would be exported now.  ``altered``: not what its manifest says.
        ``superseded``: other sources or another table would be exported, or a better claim was
        made.  ``differs``: sources and table are those that would be exported, other files are
        not.  ``unaltered``: what its manifest says, and there is nothing to compare it with.
    altered, missing, added : tuple of str
        Files that differ from the manifest, are gone, or are not in it.
    differs : tuple of str
        Files that are not what would be exported now, beside the same sources and table.
    export_hash : str
        Of the folder as its manifest has it.
    current_hash : str or None
        What would be exported now; None if nothing can be.
    changed : tuple of str
        Why it is superseded: ``source``, ``table``, or ``claim`` and its name.
    """

    status: Literal["fine", "altered", "superseded", "differs", "unaltered"]
    altered: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    differs: tuple[str, ...]
    export_hash: str
    current_hash: str | None
    changed: tuple[str, ...] = ()


def write(found: Mapping[str, bytes], folder: Path, *, beside: Sequence[str] = ()) -> None:
    """Write an export, replacing an earlier one that nobody has touched.

    Parameters
    ----------
    found : Mapping
        From :func:`.render.render`.
    folder : Path
        Made if it is not there; its parent has to be.
    beside : sequence of str
        Folders in it that are no part of an export and are kept.

    Raises
    ------
    UserError
        If the folder holds anything but an unaltered export, or cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    refuse_unwritable(folder, beside=beside)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    older = folder.with_name(f".{folder.name}.{os.getpid()}.older")
    try:
        partial.mkdir()
        for name, data in found.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if folder.exists():
            folder.rename(older)
        partial.rename(folder)
        for name in beside:
            if (older / name).is_dir():
                (older / name).rename(folder / name)
    except OSError as error:
        if older.exists() and not folder.exists():
            older.rename(folder)
        raise UserError(f"cannot write {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(older, ignore_errors=True)


def refuse_unwritable(folder: Path, *, beside: Sequence[str] = ()) -> None:
    """Refuse what :func:`write` would, before its files are made: compiling takes minutes.

    Raises
    ------
    UserError
        As :func:`write` does; a disk may still be full then.
    """
    folder = Path(os.path.abspath(folder))
    try:
        _refuse_foreign(folder, beside)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from error
    if not os.access(folder.parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder}: {folder.parent} is not writable")


def _refuse_foreign(folder: Path, beside: Sequence[str]) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} is there and is no folder; name another with --to")
    if not folder.parent.is_dir():
        raise UserError(f"the folder {folder.parent} does not exist; make it, or name another")
    if not folder.exists():
        return
    if not (folder / MANIFEST).is_file():  # one look; below it may be a whole disk
        if all(path.name in _LEAVINGS for path in folder.iterdir()):
            return
        raise UserError(
            f"{folder} holds files that no export wrote; name an empty folder, or a new one"
        )
    told = read_manifest(folder)
    altered, _, added = _differences(folder, told)
    added = tuple(name for name in added if name.partition("/")[0] not in beside)
    if altered or added:
        what = f"{altered[0]} was altered" if altered else f"{added[0]} was not exported"
        raise UserError(f"{folder}: {what}; nothing was overwritten: move it away, or name another")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an exported folder.

    Raises
    ------
    UserError
        If it is no exported folder, or of a newer version.
    """
    path = folder / MANIFEST
    try:
        told = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{folder} is no exported folder: {MANIFEST}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: move the folder away, and export again") from error
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise UserError(f"{path} is not the manifest of an export: name another folder")
    if not isinstance(told.get("version"), int) or told["version"] > VERSION:
        raise UserError(f"{path} was written by a newer version; upgrade kernel-factory")
    if not isinstance(told.get("files"), dict) or not isinstance(told.get("export_hash"), str):
        raise UserError(f"{path} names no files or no hash; export again")
    outside = [name for name in told["files"] if not _within(name)]
    if outside:
        raise UserError(f"{path} was altered: it names {outside[0]!r}, which is no file of it")
    return told


def _within(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def check(
    folder: Path, currents: Sequence[Mapping[str, bytes]] = (), newer_claim: str | None = None
) -> Checked:
    """Compare a vendored folder with its manifest, and with what would be exported now.

    A manifest is no seal: whoever alters a file can alter its digest too.  But an export is
    deterministic, so beside the same sources and table every other file has one right content.

    Parameters
    ----------
    folder : Path
    currents : sequence of Mapping
        Fresh exports (:func:`.render.render`), with and without the claim that is stored; empty if
        nothing can be exported.
    newer_claim : str or None
        The claim that superseded the one on this folder.

    Raises
    ------
    UserError
        If it is no exported folder.
    """
    told = read_manifest(folder)
    if "layout" in told:
        raise UserError(
            f"{folder} is a {told['layout']} data set; write it again, it is not vendored"
        )
    files = told["files"]
    altered, missing, added = _differences(folder, told)
    stated = told["export_hash"]
    now = export_hash(currents[0]) if currents else None
    changed: list[str] = []
    differs: tuple[str, ...] = ()
    if now == stated:
        differs = min((_unlike(folder, told, current) for current in currents), key=len)
    elif now is not None:
        unlike = {
            name
            for name in {*files, *currents[0]}
            if name.endswith(".py")
            and not name.startswith("tests/")
            and (name not in currents[0] or files.get(name) != sha256(currents[0][name]))
        }
        changed += ["table"] if "dispatch.py" in unlike else []
        changed += ["source"] if unlike - {"dispatch.py"} else []
    if newer_claim is not None:
        changed.append(f"claim {newer_claim}")
    status: Literal["fine", "altered", "superseded", "differs", "unaltered"] = "fine"
    if altered or missing or added:
        status = "altered"
    elif changed:
        status = "superseded"
    elif differs:
        status = "differs"
    elif now is None:
        status = "unaltered"
    return Checked(status, altered, missing, added, differs, stated, now, tuple(changed))


_AOT = "aot/"
"""Compiled ahead of time: not made again to compare it, and no part of the export's hash."""


def _unlike(folder: Path, told: Mapping[str, Any], current: Mapping[str, bytes]) -> tuple[str, ...]:
    """Files of a folder that are not those of a fresh export of the same sources and table."""
    kept = {name: digest for name, digest in told["files"].items() if not name.startswith(_AOT)}
    fresh = {name: sha256(data) for name, data in current.items() if name != MANIFEST}
    unlike = [n for n in sorted({*kept, *fresh}) if kept.get(n) != fresh.get(n)]
    if {**told, "files": kept} != json.loads(current[MANIFEST]):
        unlike.append(MANIFEST)
    return tuple(unlike)


def _differences(
    folder: Path, told: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Files altered, missing and added, by name; a manifest whose hash is not theirs is altered."""
    files: Mapping[str, str] = told["files"]
    there = _present(folder)
    altered = tuple(n for n in sorted(there & set(files)) if _hash(folder / n) != files[n])
    missing = tuple(sorted(set(files) - there))
    added = tuple(sorted(there - set(files) - {MANIFEST}))
    if "layout" not in told and not altered and not missing:  # a data set states its folder's hash
        own = export_hash({name: (folder / name).read_bytes() for name in files})
        altered = () if own == told["export_hash"] else (MANIFEST,)
    return altered, missing, added


def _hash(path: Path) -> str:
    return sha256(path.read_bytes())


def _present(folder: Path) -> set[str]:
    """Files below a folder, without what tools leave behind."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink())
        and not any(part in _LEAVINGS for part in path.relative_to(folder).parts)
        and path.suffix != ".pyc"
    }
