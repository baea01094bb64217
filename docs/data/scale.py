"""Blocks of docs/scale.md: what the stages of the shipped campaign took."""

from __future__ import annotations

import statistics
from collections import defaultdict

import leaderboard
from docs.data.pages import table
from docs.data.shown import Shown

__all__ = ["blocks"]

_ON_A_CPU = ("emulate", "compile")
_ON_THE_GPU = ("gate", "screen", "time")


def blocks(shown: Shown) -> dict[str, str]:
    """Seconds of a schedule in each stage, over those that were timed."""
    of: dict[str, list[float]] = defaultdict(list)
    timed = {row.id for row in shown.rows}
    for trial, seconds in leaderboard.trial_seconds(shown.store, shown.campaign.id).items():
        if trial in timed:
            for stage in (*_ON_A_CPU, *_ON_THE_GPU):
                of[stage].append(seconds[stage])
            of["GPU in all"].append(sum(seconds[s] for s in _ON_THE_GPU))
    lines = [
        [stage, *(f"{x:.1f}" for x in (min(values), statistics.median(values), max(values)))]
        for stage, values in of.items()
    ]
    return {"stages": table("stage, s a schedule | least | median | most", lines)}
