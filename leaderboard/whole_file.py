"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Text for ``path``, which takes the place of what was there once all of it is written.

    A device, a pipe or a socket is written to as it is, never replaced; of a link the file that
    it leads to is.

    Yields
    ------
    TextIO
        UTF-8, line feeds as they come.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="") as stream:
            yield stream
        return
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as stream:
            yield stream
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
