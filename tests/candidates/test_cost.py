"""The cost model: near what was measured, and moved by what moves a kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import operations
from candidates.kda_prefill import FAMILY
from candidates.kda_prefill.cost import H200, kernel_us, modelled_us
from candidates.kda_prefill.space import KdaSchedule
from operations.kda_prefill import KdaWorkload

OPERATION = operations.get("kda_prefill")


def workload(tokens: int, heads: int, sequences: int = 1) -> KdaWorkload:
    lengths = (tokens // sequences,) * sequences
    return KdaWorkload(f"{tokens}/{heads}/{sequences}", heads=heads, lengths=lengths)


def times(view: KdaSchedule, shape: KdaWorkload) -> dict[str, float]:
    return kernel_us(view.schedule(), shape)


@pytest.mark.parametrize(
    ("bt", "rows", "measured"),
    [
        (16, 64, (207, 105, 54.8, 116)),
        (32, 64, (148, 75.8, 39.9, 101)),
        (64, 64, (138, 68.6, 36.8, 105)),
        (16, 128, (300, 153, 79.4, 97.6)),
        (32, 128, (237, 122, 64.1, 98.6)),
    ],
)
def test_the_scan_is_within_a_tenth_of_the_plain_scan_measured_on_an_h200(
    bt: int, rows: int, measured: tuple[float, ...]
) -> None:
    # Total us, 20 launches back to back, SM clock 1980 MHz; the last shape is bound by memory.
    shapes = (workload(8192, 16), workload(4096, 8), workload(2048, 12), workload(2048, 128))
    for shape, us in zip(shapes, measured, strict=True):
        modelled = times(KdaSchedule(bt, "mid", None, None, 1, rows), shape)["kda_scan"]
        assert modelled == pytest.approx(us, rel=0.12), shape.name


def test_every_schedule_has_a_positive_time_on_every_workload() -> None:
    empty = (KdaWorkload("no-sequence"), KdaWorkload("no-token", heads=2, lengths=(0, 0)))
    shapes = (*OPERATION.workloads.values(), *OPERATION.reduced(), *empty)
    for schedule in FAMILY.offered("quickstart"):
        for shape in shapes:
            us = FAMILY.modelled_us(schedule, shape)
            assert math.isfinite(us), (schedule.key, shape.name)
            assert us >= 2 * H200.launch_us, (schedule.key, shape.name)


def test_segments_pay_on_an_idle_chip_and_cost_on_a_full_one() -> None:
    one, four = (KdaSchedule(32, "mid", None, None, n, 64).schedule() for n in (1, 4))
    assert modelled_us(four, workload(4096, 8)) < modelled_us(one, workload(4096, 8))
    full = workload(16384, 16, 8)
    assert modelled_us(four, full) > 1.2 * modelled_us(one, full)


def test_a_segmented_scan_has_its_passes_and_two_segments_need_no_carry() -> None:
    def names(n: int) -> list[str]:
        return list(times(KdaSchedule(32, "mid", None, None, n, 64), workload(4096, 8)))

    assert names(1) == ["kda_prep", "kda_scan"]
    assert names(2) == ["kda_prep", "kda_pass1", "kda_scan"]
    assert names(8) == ["kda_prep", "kda_pass1", "kda_carry", "kda_scan"]


def test_a_second_wave_of_ctas_takes_its_time() -> None:
    view = KdaSchedule(32, "mid", None, None, 1, 64)
    once, twice = workload(2048, 66), workload(2048, 67)  # 132 and 134 CTAs
    # Not twice: one full wave is already near the limit of memory.
    assert times(view, twice)["kda_scan"] > 1.3 * times(view, once)["kda_scan"]


def test_prep_costs_more_the_more_factors_an_anchor_needs() -> None:
    shape = workload(8192, 16)
    prep = [
        times(KdaSchedule(32, anchor, block, diagonal, 1, 64), shape)["kda_prep"]
        for anchor, block, diagonal in (
            ("mid", None, None),
            ("pairs", 16, "mid"),
            ("pairs", 16, "halving"),
        )
    ]
    assert prep == sorted(prep)
    assert prep[0] < prep[-1]


def test_a_longer_sequence_is_never_cheaper() -> None:
    for schedule in FAMILY.offered("quickstart"):
        us = [modelled_us(schedule, workload(n, 4)) for n in (64, 512, 4096, 32768)]
        assert us == sorted(us), schedule.key
        assert us[0] < us[-1]


def test_constants_can_be_replaced_by_measured_ones() -> None:
    schedule, shape = FAMILY.offered("quickstart")[0], workload(2048, 12)
    slower = replace(H200, step_us={k: 2 * v for k, v in H200.step_us.items()})
    assert modelled_us(schedule, shape, slower) > 1.5 * modelled_us(schedule, shape)
