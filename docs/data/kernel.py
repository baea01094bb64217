"""Blocks of docs/kernel.md, which is about the kernels of KDA prefill."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import candidates
from candidates.kda_prefill.cost import run_chunks
from candidates.kda_prefill.space import FusedSchedule, is_fused
from docs.data.pages import table
from docs.data.results import PRODUCTION, SLOW, us_text
from docs.data.shown import Shown

__all__ = ["kernel_blocks"]


def kernel_blocks(shown: Shown) -> dict[str, str]:
    """The winner by shape: how it is cut at production gates, and its times over the floor."""
    times = shown.times(shown.winner)
    warm, slow = (times.of(None, c, shown.tuned) for c in (PRODUCTION, SLOW))
    schedule = candidates.get(shown.campaign.family).schedule(shown.winner.schedule)
    view = FusedSchedule.of(schedule) if is_fused(schedule) else None
    sms = int(str(shown.fingerprint["multiprocessors"]))
    floors = shown.floors
    lines: list[list[str]] = []
    points: list[tuple[int, float]] = []
    for n, name in enumerate(shown.tuned):
        w = shown.operation.workloads[name]
        us, floor = warm[n], floors[n]
        cut = ["-", "-"]
        if view is not None:
            heads: int = w.heads  # type: ignore[attr-defined]
            # The kernels of the shipped campaign begin two chunks early.
            runs = run_chunks(view, heads, w.lengths, sms)  # type: ignore[attr-defined]
            longest = max(map(sum, runs))
            cut = [str(len(runs)), str(longest)]
            if us is not None:
                points.append((longest, us))
        over = "-" if us is None else f"{us / floor:.1f}"
        lines.append([f"`{name}`", *cut, us_text(floor), us_text(us), over, us_text(slow[n])])
    head = "shape | CTAs | chunks | floor | production | over floor | slow gates"
    return {
        "fused": table(head, lines),
        "fused line": _line(points),
        "fused schedules": _schedules(shown),
    }


def _line(points: Sequence[tuple[int, float]]) -> str:
    """Times as a line over the chunks of the longest run, by least squares."""
    if len(points) < 3:
        return "The winner is not of the fused form."
    slope, fixed = statistics.linear_regression(*zip(*points, strict=True))
    most = max(abs(us - fixed - slope * n) for n, us in points)
    return (
        f"By least squares the production times are `{fixed:.1f} + {slope:.2f} n` us, n being the "
        f"chunks of the longest run; none is further off than {most:.1f} us."
    )


def _schedules(shown: Shown) -> str:
    """The fused schedules, and where one is faster than the winner."""
    best = shown.times(shown.winner).of(None, PRODUCTION, shown.tuned, mean=False)
    lines = []
    for row in shown.rows:
        if row.schedule.get("form") != "fused":
            continue
        own = shown.times(row).of(None, PRODUCTION, shown.tuned, mean=False)
        pairs = zip(shown.tuned, own, best, strict=True)
        ahead = [f"`{n}`" for n, us, other in pairs if us is not None and other and us < other]
        times = map(us_text, (row.score_us, row.slow_us))
        lines.append([f"`{row.schedule_key}`", *times, ", ".join(ahead) or "-"])
    return table("schedule | production | slow gates | faster than the winner on", lines)
