"""Three-valued comparison of two sets of samples: faster, slower, or not told apart.

Pure arithmetic on samples; knows nothing of the database.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

__all__ = [
    "CONFIDENCE",
    "THRESHOLD",
    "Contrast",
    "Samples",
    "Verdict",
    "compare_samples",
    "contrast",
    "in_groups",
]

THRESHOLD = 0.01
"""Relative difference that is too small to name: what one kernel differs by between
processes (placement of code and tensors) is not told from a better schedule."""

CONFIDENCE = 0.95
"""Of the interval of the ratio."""

_REPLICATES = 999
_SEED = 20261130
"""Of the resampling: equal samples give equal verdicts."""

Samples = Sequence[float] | Mapping[str, Sequence[float]]
"""Times of one workload, or by workload."""

_Key = TypeVar("_Key", bound=Hashable)


class Verdict(StrEnum):
    """How the first stands to the second."""

    FASTER = "faster"
    SLOWER = "slower"
    NOT_TOLD_APART = "not told apart"


@dataclass(frozen=True)
class Contrast:
    """Two sets of samples against each other.

    Parameters
    ----------
    ratio : float
        Geomean over the workloads of the ratios of medians, first over second.
    low, high : float
        Its interval at :data:`CONFIDENCE`.
    verdict : Verdict
    """

    ratio: float
    low: float
    high: float
    verdict: Verdict


def contrast(first: Samples, second: Samples, *, threshold: float = THRESHOLD) -> Contrast:
    """Compare two sets of samples of the same workloads, taken in one job.

    The statistic is the geomean over the workloads of the ratios of medians.
    Its interval is the percentile interval of 999 bootstrap replicates (seeded,
    so that equal samples give equal answers), each workload resampled by
    itself; no distribution of times is assumed.  ``faster`` and ``slower`` are
    said only where the whole interval lies beyond ``1 / (1 + threshold)`` or
    ``1 + threshold``.

    Raises
    ------
    ValueError
        If the workloads differ, or one has no samples.
    """
    a, b = _by_workload(first), _by_workload(second)
    if set(a) != set(b):
        odd = sorted(set(a) ^ set(b))
        raise ValueError(f"only one of the two was timed on {', '.join(map(repr, odd))}")
    return _contrast(_replicates(a), _replicates(b), threshold)


def compare_samples(first: Samples, second: Samples, *, threshold: float = THRESHOLD) -> Verdict:
    """Verdict of :func:`contrast`."""
    return contrast(first, second, threshold=threshold).verdict


def in_groups(
    entries: Mapping[_Key, Samples], *, threshold: float = THRESHOLD
) -> tuple[tuple[_Key, ...], ...]:
    """Order by geomean of medians and put together what is not told apart.

    A group is led by its fastest member; the next one joins it unless it is
    slower than that leader, and leads a new group otherwise.  Within a group
    the order says nothing.
    """
    resampled = {key: _replicates(_by_workload(samples)) for key, samples in entries.items()}
    groups: list[list[_Key]] = []
    for key in sorted(resampled, key=lambda k: resampled[k][0]):
        if groups:
            against = _contrast(resampled[key], resampled[groups[-1][0]], threshold)
            if against.verdict is not Verdict.SLOWER:
                groups[-1].append(key)
                continue
        groups.append([key])
    return tuple(tuple(group) for group in groups)


def _by_workload(samples: Samples) -> Mapping[str, Sequence[float]]:
    named = samples if isinstance(samples, Mapping) else {"": samples}
    for workload, values in named.items():
        if not values:
            raise ValueError(f"no samples of workload {workload!r}")
    if not named:
        raise ValueError("no samples")
    return named


def _replicates(samples: Mapping[str, Sequence[float]]) -> list[float]:
    """Log geomean of medians: of the samples themselves first, then of each replicate."""
    # Sorted, and seeded by what is resampled: neither order nor company changes a replicate.
    values = [sorted(samples[name]) for name in sorted(samples)]
    draw = random.Random(f"{_SEED}{values}")
    found = [statistics.fmean(math.log(statistics.median(v)) for v in values)]
    found += [
        statistics.fmean(math.log(_resampled_median(v, draw)) for v in values)
        for _ in range(_REPLICATES)
    ]
    return found


def _resampled_median(ordered: Sequence[float], draw: random.Random) -> float:
    """Median of as many draws with replacement as there are samples.

    The m-th smallest of n uniform numbers is Beta(m, n - m + 1), and says which
    sample is drawn: the same distribution as drawing all n, at the cost of one.
    """
    n = len(ordered)
    middle = (n + 1) // 2
    lower = draw.betavariate(middle, n - middle + 1)
    first = ordered[min(n - 1, int(n * lower))]
    if n % 2:
        return first
    # The next smallest of n - middle numbers above it.
    upper = lower + (1.0 - lower) * draw.betavariate(1, n - middle)
    return (first + ordered[min(n - 1, int(n * upper))]) / 2


def _contrast(first: Sequence[float], second: Sequence[float], threshold: float) -> Contrast:
    differences = sorted(x - y for x, y in zip(first[1:], second[1:], strict=True))
    tail = (1.0 - CONFIDENCE) / 2
    low = differences[int(tail * len(differences))]
    high = differences[-1 - int(tail * len(differences))]
    beyond = math.log1p(threshold)
    verdict = Verdict.NOT_TOLD_APART
    if high < -beyond:
        verdict = Verdict.FASTER
    elif low > beyond:
        verdict = Verdict.SLOWER
    return Contrast(math.exp(first[0] - second[0]), math.exp(low), math.exp(high), verdict)
