"""PREP compiles for sm_90a within its budgets, and its steps cover the scores; needs no GPU."""

from __future__ import annotations

import pytest
from prep_compile import PAIRS, WHOLE, Variant, compiled_prep

from candidates._delta_rule.kernel.resources import (
    budget_problems,
)
from candidates.kda_prefill.kernel.prep_plan import Plan

COMPILED = [WHOLE[1], WHOLE[3], WHOLE[4], WHOLE[5], PAIRS[5], PAIRS[7], PAIRS[9]]


@pytest.mark.parametrize("variant", COMPILED, ids=str)
def test_prep_compiles_without_spills_and_within_a_block(variant: Variant) -> None:
    pytest.importorskip("cutlass")
    prep, kept = compiled_prep(variant)
    (resources,) = kept.kernels
    assert resources.name.startswith(f"kda_prep_{variant[0]}_{variant[1]}")
    assert budget_problems(resources) == ()
    assert resources.threads == prep.threads
    assert resources.dynamic_smem_bytes == prep.smem_bytes


@pytest.mark.parametrize("variant", WHOLE + PAIRS, ids=str)
def test_steps_compute_every_score_of_the_lower_triangle(variant: Variant) -> None:
    """Each pair of tokens once: a level of halving is right only for pairs that it parts."""
    plan = Plan(*variant)
    seen = dict.fromkeys(
        ((q, i, j) for q in (0, 1) for i in range(plan.bt) for j in range(i + 1)), 0
    )
    for step in plan.steps:
        for job in step.jobs:
            for i in range(16 * job.row, 16 * job.row + 16):
                first = 16 * job.col + 8 * job.half
                for j in range(first, min(first + (16 if step.wide else 8), i + 1)):
                    parted = (i ^ j) // step.size == 1 if step.size else i == j
                    if not step.diagonal_level or parted:
                        seen[job.query, i, j] += 1
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("variant", WHOLE + PAIRS, ids=str)
def test_exponents_of_pairs_and_halving_point_away_from_their_anchor(variant: Variant) -> None:
    """Columns before the anchor, rows from it on: no factor above 1 between blocks."""
    plan = Plan(*variant)
    for step in plan.steps:
        if step.kind == "both":
            continue
        for job in step.jobs:
            if step.kind == "off":
                anchor = 16 * job.row // step.size * step.size
            elif step.size >= 16:
                anchor = (16 * job.row // (2 * step.size) * 2 + 1) * step.size
            else:
                continue
            assert 16 * job.col + 16 <= anchor <= 16 * job.row


@pytest.mark.parametrize("variant", WHOLE + PAIRS, ids=str)
def test_operands_stay_inside_their_buffers(variant: Variant) -> None:
    plan = Plan(*variant)
    for index, step in enumerate(plan.steps):
        in_image = step.kind == "both" and step.size == plan.bt
        for job in step.jobs:
            if not (in_image and step.rule == "start" and not job.query):
                assert 0 <= job.a < step.blocks
            if not (in_image and step.rule == "end"):
                assert 0 <= job.b < step.blocks
        end = plan.buffer(index) + step.blocks * 4096
        assert plan.layout.common <= plan.buffer(index) < end <= plan.off_l
        if index % 2 == 0 and index + 1 < len(plan.steps):  # written while the other is read
            assert end <= plan.buffer(index + 1)
    assert plan.off_x + 2 * plan.bt**2 <= plan.off_l
    assert plan.off_totals + 512 * plan.groups <= plan.off_beta
    assert plan.smem_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((48, "mid"), "bt=48"),
        ((32, "middle"), "anchor='middle'"),
        ((32, "pairs", 32, "mid"), "block=32"),
        ((64, "pairs", 16, "pairs"), "diagonal='pairs'"),
        ((64, "mid", 16, None), "do not apply"),
    ],
)
def test_plan_refuses_by_name(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(*arguments)
