"""Bytes that are costly to make, kept in the user's cache folder; losing them costs time only.

Knows nothing of what they are.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["kept"]

_KEY = re.compile("[0-9a-f]{64}")
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
        A SHA-256 in hexadecimal; another key is another content.
    make : callable
    """
    path = None
    with suppress(OSError, RuntimeError):  # it cannot be read; or nobody's home is known
        path = _folder(what) / key
        content = path.read_bytes() if path.is_file() else b""
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
        with suppress(OSError):
            if other != path and _may_go(other):
                other.unlink()


def _may_go(path: Path) -> bool:
    """Whether it is an entry, or what a process that was killed had written of one."""
    if path.name.startswith(_PARTIAL):
        return time.time() - path.stat().st_mtime > _WRITTEN_S
    return _KEY.fullmatch(path.name) is not None
