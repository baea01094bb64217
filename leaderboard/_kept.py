"""Bytes that are costly to make, kept in the user's cache folder; losing them costs time only.

Knows nothing of what they are.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["kept"]

_PARTIAL = ".partial-"
_WRITTEN_S = 3600.0
"""Longer than writing one takes."""


def kept(what: str, key: str, make: Callable[[], bytes]) -> bytes:
    """What ``make`` made for this key, now or in an earlier process.

    One entry of each kind is kept, the newest.  Where the folder cannot be read or
    written, or the entry is damaged, it is made again.

    Parameters
    ----------
    what : str
        The kind: a folder of this name under ``kernel-factory`` in the cache folder,
        which is ``$XDG_CACHE_HOME`` or ``~/.cache``.
    key : str
        Letters and digits; another key is another content.
    make : callable
    """
    path = None
    with suppress(OSError, RuntimeError):  # it cannot be read; or nobody's home is known
        path = _folder(what) / key
        content = path.read_bytes()
        digest, content = content[:32], content[32:]
        if hashlib.sha256(content).digest() == digest:
            return content
    content = make()
    if path is not None:
        with suppress(OSError):
            _write(path, hashlib.sha256(content).digest() + content)
    return content


def _folder(what: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "kernel-factory" / what


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=_PARTIAL)
    partial = Path(name)
    try:
        with os.fdopen(number, "wb") as stream:
            stream.write(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    for other in path.parent.iterdir():
        if other != path and not _being_written(other):
            other.unlink(missing_ok=True)


def _being_written(path: Path) -> bool:
    """Whether another process may still be at it; one that was killed leaves it behind."""
    return path.name.startswith(_PARTIAL) and time.time() - path.stat().st_mtime < _WRITTEN_S
