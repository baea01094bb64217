"""What commands print: run in an empty folder, so that there are only the shipped results."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from docs.data.pages import ROOT

__all__ = ["PAGES", "SEARCHES", "blocks", "searches"]

SEARCHES = "searches.svg"
_SAMPLERS = "--sampler tpe --sampler random --sampler grid"
_REPLAY = f"factory replay kda_prefill --db shipped {_SAMPLERS} --plot {SEARCHES}"
_WIDTH = 108
"""Columns of a page's code block; what is longer is cut."""

PAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "docs/campaigns.md": {
        "dry run": ("factory launch quickstart --clock modelled --dry-run",),
    },
    "docs/search.md": {"replay": (_REPLAY,)},
    "docs/leaderboard.md": {
        "ranking": ("factory leaderboard --db shipped --limit 4",),
        "report": ("factory report kda_prefill --db shipped",),
    },
    "docs/database.md": {
        "transfer": (
            "factory leaderboard export --db shipped -o results.jsonl",
            "factory leaderboard import results.jsonl --db sqlite:///other.db",
            "factory leaderboard import results.jsonl --db sqlite:///other.db",
        ),
    },
}
"""Page to its blocks, and the commands of each, which run one after the other."""
_OF_THE_MACHINE = "estimate: "
"""Begins a line that another machine prints otherwise."""


def blocks(page: str) -> dict[str, str]:
    """Blocks of a page that show commands and what they print."""
    return {name: _shown(lines) for name, lines in PAGES[page].items()}


def searches() -> str:
    """The drawing that the replay of the shipped campaign makes."""
    return _run((_REPLAY,))[1][SEARCHES]


def _shown(lines: tuple[str, ...]) -> str:
    shown = ["```console"]
    for line, printed in zip(lines, _run(lines)[0], strict=True):
        shown.append(f"$ {line}")
        kept = (x for x in printed.rstrip().splitlines() if not x.startswith(_OF_THE_MACHINE))
        shown += map(_cut, kept)
    return "\n".join([*shown, "```"])


def _cut(line: str) -> str:
    if len(line) <= _WIDTH:
        return line
    return line[:_WIDTH] if set(line) == {"\u2500"} else line[: _WIDTH - 3].rstrip() + "..."


@cache
def _run(lines: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """What each command prints, and the drawings that they write.

    Raises
    ------
    RuntimeError
        If one fails.
    """
    said = []
    with tempfile.TemporaryDirectory() as folder:
        for line in lines:
            done = subprocess.run(
                [sys.executable, "-m", "factory", *shlex.split(line)[1:]],
                cwd=folder,
                env={
                    "PYTHONPATH": str(ROOT),
                    "PATH": "/usr/bin:/bin",
                    "OMP_NUM_THREADS": "1",
                    "HOME": folder,
                    "NO_COLOR": "1",
                    "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", ""),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(f"{line}: {done.stdout}")
            said.append(done.stdout)
        drawn = {p.name: p.read_text("utf-8") for p in Path(folder).glob("*.svg")}
    return said, drawn
