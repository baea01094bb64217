"""Faster, slower, or not told apart."""

from __future__ import annotations

import random
import statistics

import pytest

from leaderboard import Verdict, compare_samples, contrast, in_groups
from leaderboard._verdicts import _resampled_median


def noisy(us: float, seed: int, n: int = 30, spread: float = 0.01) -> list[float]:
    draw = random.Random(seed)
    return [us * (1.0 + abs(draw.gauss(0.0, spread))) for _ in range(n)]


def test_ten_names_for_one_kernel_are_a_ten_way_tie() -> None:
    entries = {f"name {i}": {w: noisy(20.0, 31 * i + ord(w)) for w in "abc"} for i in range(10)}
    assert [len(group) for group in in_groups(entries)] == [10]


def test_a_few_percent_are_told_apart() -> None:
    entries = {us: {"a": noisy(us, 1), "b": noisy(2 * us, 2)} for us in (12.0, 10.0, 10.5)}
    assert in_groups(entries) == ((10.0,), (10.5,), (12.0,))
    assert compare_samples(entries[10.0], entries[10.5]) is Verdict.FASTER
    assert compare_samples(entries[10.5], entries[10.0]) is Verdict.SLOWER


def test_what_is_certain_but_too_small_is_not_named() -> None:
    found = contrast([10.0] * 30, [10.05] * 30)
    assert found.high < 1.0
    assert found.verdict is Verdict.NOT_TOLD_APART


def test_what_is_large_but_uncertain_is_not_named() -> None:
    found = contrast(noisy(10.0, 1, n=5, spread=0.5), noisy(10.3, 2, n=5, spread=0.5))
    assert found.low < 1.0 < found.high
    assert found.verdict is Verdict.NOT_TOLD_APART


def test_the_interval_covers_the_true_ratio_19_times_in_20() -> None:
    covered = 0
    for seed in range(200):
        found = contrast(
            noisy(10.0, 2 * seed, spread=0.2), noisy(10.0, 2 * seed + 1, spread=0.2), threshold=0
        )
        covered += found.low <= 1.0 <= found.high
    assert covered >= 180


def test_equal_samples_give_equal_answers_in_any_order() -> None:
    a, b = noisy(10.0, 1), noisy(10.2, 2)
    assert contrast(a, b) == contrast(a[::-1], b[::-1])
    assert contrast({"x": a, "y": b}, {"x": b, "y": a}).ratio == pytest.approx(1.0)


@pytest.mark.parametrize("n", [1, 2, 7, 10])
def test_a_replicate_is_distributed_as_the_median_of_a_resample(n: int) -> None:
    ordered = [float(i * i) for i in range(n)]
    draw = random.Random(3)
    quick = [_resampled_median(ordered, draw) for _ in range(4000)]
    slow = [statistics.median(draw.choices(ordered, k=n)) for _ in range(4000)]
    assert statistics.fmean(quick) == pytest.approx(statistics.fmean(slow), abs=0.05 * n * n)
    for x in ordered:
        shares = [sum(v <= x for v in values) / 4000 for values in (quick, slow)]
        assert shares[0] == pytest.approx(shares[1], abs=0.05)


def test_other_workloads_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="only one of the two was timed on 'b'"):
        contrast({"a": [1.0], "b": [1.0]}, {"a": [1.0]})
    with pytest.raises(ValueError, match="no samples of workload 'a'"):
        contrast({"a": []}, {"a": [1.0]})
