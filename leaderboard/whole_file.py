"""Files that appear whole or not at all."""

from __future__ import annotations

import io
import lzma
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

__all__ = ["COMPRESSED", "open_text", "whole_file"]

COMPRESSED = ".xz"
"""How the name of a file ends that is compressed (LZMA)."""


def open_text(raw: BinaryIO, name: str) -> TextIO:
    """The text of an open file called ``name``: UTF-8, decompressed if its name says so.

    Read errors are OSError, UnicodeDecodeError and, of a compressed file, LZMAError and EOFError.
    """
    if name.endswith(COMPRESSED):
        return cast("TextIO", lzma.open(raw, "rt", encoding="utf-8"))
    return io.TextIOWrapper(raw, encoding="utf-8")


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Text for ``path``, which takes the place of what was there once all of it is written.

    One whose name ends in ``.xz`` is compressed.  A device, a pipe or a socket is written to as it
    is, never replaced; of a link the file that it leads to is.

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
        if path.name.endswith(COMPRESSED):
            with lzma.open(partial, "wt", preset=9, encoding="utf-8", newline="") as packed:
                yield cast("TextIO", packed)
        else:
            with partial.open("w", encoding="utf-8", newline="") as stream:
                yield stream
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
