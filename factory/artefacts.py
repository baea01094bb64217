"""The artefact store: what was compiled once, kept on disk and shared by processes.

An entry is a folder of files under a key; the key is a digest of everything that decides what
they contain (see :func:`key_of`).  It is written aside and renamed, so that no reader ever sees
half of one, and checked against its own digests when it is read: what does not match is removed
and compiled again.  A store that cannot be read or written costs time, never a campaign.

It knows files and digests; what they mean is their writer's affair.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from candidates import Family, Schedule
from factory.machine import installed
from factory.provenance import digest

__all__ = [
    "ARTEFACTS",
    "ARTEFACT_BYTES",
    "Collected",
    "Store",
    "default_store",
    "key_of",
]

ARTEFACTS = "FACTORY_ARTEFACTS"
"""Environment variable that names the store's folder; empty keeps nothing."""

ARTEFACT_BYTES = 2 << 30
"""Size that a store is kept under by whoever writes to it."""

_MANIFEST = "manifest.json"
_ASIDE = ".factory-aside-"
_KEY = re.compile(r"[0-9a-f]{64}")
"""Nothing in a store's folder that is called otherwise is ours, to read or to remove."""
_STALE_S = 3600.0
"""After which what somebody wrote aside and never renamed is left behind by a dead process."""

_log = logging.getLogger(__name__)


def key_of(family: Family, schedule: Schedule) -> str:
    """Key of what a schedule compiles to: family, source, schedule and toolchain.

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    return digest(
        {
            "format": 1,
            "operation": family.operation,
            "family": family.name,
            "source": family.source_hash(),
            "schedule": schedule.key,
            "toolchain": _toolchain(),
        }
    )


def _toolchain() -> dict[str, str | None]:
    dsl = installed("nvidia-cutlass-dsl") or installed("nvidia-cutlass-dsl-libs-base")
    return {
        "dsl": dsl,
        "tvm_ffi": installed("apache-tvm-ffi"),
        # Machine code for the GPU and the code that launches it; nothing of Python is in it.
        "machine": platform.machine(),
    }


@dataclass(frozen=True)
class Collected:
    """What :meth:`Store.collect` removed, or would remove.

    Parameters
    ----------
    kept, freed : int
        Entries.
    kept_bytes, freed_bytes : int
    """

    kept: int
    kept_bytes: int
    freed: int
    freed_bytes: int


@dataclass(frozen=True)
class _Entry:
    path: Path
    used: float
    size: int


class Store:
    """Entries under one folder, kept below a size by removing the least recently used.

    Parameters
    ----------
    root : Path
        Made when something is first kept.
    max_bytes : int
        0 keeps nothing.
    """

    def __init__(self, root: Path, max_bytes: int = ARTEFACT_BYTES) -> None:
        self.root = root
        self.max_bytes = max_bytes

    @property
    def keeps(self) -> bool:
        """Whether anything is kept, so that it is worth making for the store's sake alone."""
        return self.max_bytes > 0

    def get(self, key: str) -> Mapping[str, bytes] | None:
        """Files of an entry by name; None if there is none, or none that is whole."""
        folder = self.root / _checked(key)
        if not self.keeps:
            return None
        try:
            stored = json.loads((folder / _MANIFEST).read_bytes())["sha256"]
            files = {name: (folder / name).read_bytes() for name in stored}
        except FileNotFoundError:
            if folder.exists():
                self._discard(folder, "a file is missing")
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._discard(folder, str(error))
            return None
        for name, data in files.items():
            if hashlib.sha256(data).hexdigest() != stored[name]:
                self._discard(folder, f"{name} was changed")
                return None
        try:
            os.utime(folder)  # used now: what is not goes first
        except OSError as error:
            _log.info("artefact store: %s", error)
        return files

    def folder(self, key: str) -> Path | None:
        """Where the files of a whole entry lie; None without one."""
        return None if self.get(key) is None else self.root / key

    def put(self, key: str, files: Mapping[str, bytes]) -> bool:
        """Keep an entry in place of any earlier one; returns whether it could be."""
        home = self.root / _checked(key)
        size = sum(map(len, files.values()))
        if size > self.max_bytes or not self.keeps:
            return False
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=self.root))
            try:
                for name, data in files.items():
                    (aside / name).write_bytes(data)
                stored = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
                (aside / _MANIFEST).write_text(json.dumps({"sha256": stored}), encoding="utf-8")
                aside.chmod(0o755)
                self._rename(aside, home)
            finally:
                shutil.rmtree(aside, ignore_errors=True)  # is gone if it was renamed
            self.collect(self.max_bytes)
        except OSError as error:
            _log.warning("artefact store: %s is not kept: %s", key[:12], error)
            return False
        return True

    def collect(self, max_bytes: int, *, dry_run: bool = False) -> Collected:
        """Remove entries, the least recently used first, until the rest fits.

        Parameters
        ----------
        max_bytes : int
        dry_run : bool
            Only say what would go.
        """
        entries = sorted(self._entries(), key=lambda e: e.used, reverse=True)
        kept = kept_bytes = freed = freed_bytes = 0
        for entry in entries:
            if kept_bytes + entry.size <= max_bytes:
                kept, kept_bytes = kept + 1, kept_bytes + entry.size
                continue
            freed, freed_bytes = freed + 1, freed_bytes + entry.size
            if not dry_run:
                self._remove(entry.path)
        return Collected(kept, kept_bytes, freed, freed_bytes)

    def _entries(self) -> Iterator[_Entry]:
        try:
            found = list(os.scandir(self.root)) if self.keeps else []
        except FileNotFoundError:
            return
        for item in found:
            try:
                aside = item.name.startswith(_ASIDE)
                if not item.is_dir(follow_symlinks=False):
                    continue
                if not aside and _KEY.fullmatch(item.name) is None:
                    continue
                used = item.stat(follow_symlinks=False).st_mtime
                if aside:
                    if time.time() - used > _STALE_S:
                        shutil.rmtree(item.path, ignore_errors=True)
                    continue
                size = sum(f.stat(follow_symlinks=False).st_size for f in os.scandir(item.path))
            except FileNotFoundError:  # somebody else removed it
                continue
            yield _Entry(Path(item.path), used, size)

    def _rename(self, aside: Path, home: Path) -> None:
        try:
            aside.rename(home)
        except OSError:
            if not home.exists():
                raise
            # A folder that is not empty is not replaced: the earlier entry has to go first.
            self._remove(home)
            try:
                aside.rename(home)
            except OSError:
                if not home.exists():
                    raise
                # Another process kept the same meanwhile.

    def _discard(self, folder: Path, why: str) -> None:
        _log.warning("artefact store: %s is damaged (%s) and is dropped", folder.name[:12], why)
        self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """Out of sight at once, and then gone: nobody reads an entry of which files are missing."""
        gone = self.root / f"{_ASIDE}{os.getpid()}-{time.monotonic_ns()}"
        try:
            folder.rename(gone)
        except OSError as error:
            if folder.exists():
                _log.warning("artefact store: cannot remove %s: %s", folder, error)
            return
        shutil.rmtree(gone, ignore_errors=True)


def _checked(key: str) -> str:
    if _KEY.fullmatch(key) is None:
        raise ValueError(f"{key!r} is no key of an artefact")
    return key


def default_store() -> Store:
    """The store of this user on this machine.

    ``$FACTORY_ARTEFACTS``, else ``kernel-factory/artefacts`` in the user's cache folder.
    """
    named = os.environ.get(ARTEFACTS)
    if named is not None:
        return Store(Path(named or "."), ARTEFACT_BYTES if named else 0)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Store(Path(cache).expanduser() / "kernel-factory" / "artefacts")
