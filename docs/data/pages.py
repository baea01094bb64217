"""Blocks of a page that are a copy of data, between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["ROOT", "marks", "spliced", "table"]

ROOT = Path(__file__).resolve().parents[2]

_BLOCK = r"<!-- {0} -->\n.*?<!-- /{0} -->"


def table(head: str, lines: Iterable[Iterable[str]]) -> str:
    """A table in Markdown; columns of ``head`` are parted by `` | ``."""
    columns = head.split(" | ")
    return "\n".join(
        [f"| {head} |", "|" + "---|" * len(columns), *(f"| {' | '.join(r)} |" for r in lines)]
    )


def marks(page: str) -> list[str]:
    """Names of the blocks of a page."""
    return re.findall(r"^<!-- /([\w -]+) -->$", page, re.M)


def spliced(page: str, blocks: Mapping[str, str]) -> str:
    """The page with each of its blocks that ``blocks`` names put in place.

    Raises
    ------
    KeyError
        If the page has a block that ``blocks`` lacks.
    """
    for name in marks(page):
        old = re.findall(_BLOCK.format(re.escape(name)), page, re.S)
        if len(old) != 1:
            raise KeyError(f"{len(old)} blocks are called {name!r}")
        page = page.replace(
            old[0], f"<!-- {name} -->\n\n{blocks[name].strip()}\n\n<!-- /{name} -->"
        )
    return page
