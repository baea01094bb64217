"""What makes a score: all tuned workloads, one method, one cache state.

Pure arithmetic on records, or on rows with their fields; knows nothing of the database.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from leaderboard._errors import StoreError
from leaderboard.records import Clock

__all__ = ["SAME", "Basis", "geomean", "interval", "score_basis"]

SAME = 1e-6
"""Relative difference up to which a stated number equals the recomputed one."""


def geomean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, and a 95% confidence interval of it.

    The interval is between two order statistics and assumes no distribution:
    the ``k``-th smallest and largest with ``2 P(Binomial(n, 1/2) < k) <= 0.05``;
    all samples where there are fewer than six.
    """
    ordered = sorted(samples)
    rank = _rank(len(ordered))
    return statistics.median(ordered), ordered[rank], ordered[-1 - rank]


@functools.lru_cache(maxsize=256)
def _rank(n: int) -> int:
    below, tail = 0, 0.0
    while tail + math.comb(n, below) / 2**n <= 0.025:
        tail += math.comb(n, below) / 2**n
        below += 1
    return max(0, below - 1)


@dataclass(frozen=True)
class Basis:
    """How the times behind a score were read."""

    method: str
    cache: str


def score_basis(
    campaign: Any,
    *,
    label: str,
    clock: Clock,
    job_id: str,
    score_us: float,
    slow_us: float | None,
    measurements: Iterable[Any],
) -> Basis:
    """Find the complete set of times that ``score_us`` is the geomean of.

    ``campaign`` and ``measurements`` are records, or rows with those of their fields that are
    looked at.  Considered are the trial's ``search`` times of this job and clock on the
    tuned workloads; of several of one workload, regime, method and cache the
    last one counts.

    Raises
    ------
    StoreError
        If a (workload, regime) has no time, or the score is not their geomean.
    """
    if not campaign.workloads:
        raise StoreError(
            f"{label} cannot pass with a measured time: campaign {campaign.id} names no tuned "
            "workloads (CampaignRecord.workloads)"
        )
    regimes = [campaign.ranking_regime]
    if campaign.slow_regime is not None:
        regimes.append(campaign.slow_regime)
    cells: dict[Basis, dict[tuple[str, str], float]] = defaultdict(dict)
    for m in measurements:
        if m.clock == clock and m.job_id == job_id and m.phase == "search" and not m.held_out:
            cells[Basis(m.method, m.cache)][m.workload, m.regime] = m.median_us
    wanted = [(w, r) for r in regimes for w in campaign.workloads]
    complete = {b: c for b, c in cells.items() if all(cell in c for cell in wanted)}
    if not complete:
        best = max(cells.values(), key=lambda c: sum(cell in c for cell in wanted), default={})
        missing = [cell for cell in wanted if cell not in best]
        raise StoreError(
            f"{label} cannot pass: {len(wanted) - len(missing)} of {len(wanted)} {clock} times "
            f"are there; the first missing is {missing[0][0]} on {missing[0][1]}"
        )
    seen = []
    for basis, found in complete.items():
        production = geomean([found[w, campaign.ranking_regime] for w in campaign.workloads])
        slow = None
        if campaign.slow_regime is not None:
            slow = geomean([found[w, campaign.slow_regime] for w in campaign.workloads])
        seen.append((production, slow))
        if _same(score_us, production) and _same(slow_us, slow):
            return basis
    production, slow = seen[0]
    raise StoreError(
        f"{label} cannot pass: its score {score_us:.6g} us (slow {_text(slow_us)}) is not the "
        f"geomean of its times, {production:.6g} us (slow {_text(slow)})"
    )


def _same(stated: float | None, computed: float | None) -> bool:
    if stated is None or computed is None:
        return stated is computed
    return math.isclose(stated, computed, rel_tol=SAME)


def _text(us: float | None) -> str:
    return "none" if us is None else f"{us:.6g} us"
