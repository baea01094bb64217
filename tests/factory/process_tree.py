"""Processes below another one, by /proc."""

from __future__ import annotations

import os
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """All processes below ``pid``."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            found += [int(entry), *children_of(int(entry))]
    return found


def workers_of(pid: int) -> list[int]:
    """Processes below ``pid`` that run stages: each leads a session of its own."""
    return [p for p in children_of(pid) if _leads(p) and "forkserver" in words_of(p)]


def _leads(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def words_of(pid: int) -> str:
    """Its command line; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
