"""Bytes that are costly to make, kept in the user's cache folder; losing them costs time only.

Knows nothing of what they are.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["kept"]


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
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    partial = Path(name)
    try:
        with os.fdopen(number, "wb") as stream:
            stream.write(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    for other in path.parent.iterdir():
        if other != path and not other.name.startswith(".partial-"):
            other.unlink(missing_ok=True)
