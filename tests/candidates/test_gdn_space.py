"""GDN's family as others meet it: space, presets, budgets, cost model, source hash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import candidates
import operations
from candidates import Schedule
from candidates.gdn_prefill import FAMILY
from candidates.gdn_prefill.cost import kernel_us, modelled_us
from candidates.gdn_prefill.kernel.config import Config, FusedConfig, schedule_of, workspace
from candidates.gdn_prefill.kernel.prep_plan import Plan
from candidates.gdn_prefill.space import FusedSchedule, GdnSchedule, is_fused
from operations.gdn_prefill import GdnWorkload

ROOT = Path(__file__).resolve().parents[2]
OPERATION = operations.get("gdn_prefill")
FULL, QUICK = FAMILY.offered("gdn_prefill"), FAMILY.offered("quickstart")


def workload(tokens: int, heads: int, value_heads: int, sequences: int = 1) -> GdnWorkload:
    lengths = (tokens // sequences,) * sequences
    return GdnWorkload("case", heads=heads, value_heads=value_heads, lengths=lengths)


def test_the_operation_finds_its_family() -> None:
    assert candidates.get("gdn_prefill") is FAMILY
    assert FAMILY.name == FAMILY.operation == OPERATION.name


def test_presets_hold_what_can_be_built_in_the_same_order_every_time() -> None:
    assert FAMILY.presets() == ("gdn_prefill", "quickstart")
    assert (len(FULL), len(QUICK)) == (30, 11)
    assert len(set(FULL)) == 30
    assert set(QUICK) <= set(FULL)
    assert [s for s in FULL if FAMILY.problems(s)] == []
    assert FAMILY.offered("gdn_prefill") == FULL
    assert FULL[0].key == "form=split bt=16 segments=1 rows=64"
    with pytest.raises(ValueError, match=r"'quick'.*gdn_prefill, quickstart"):
        FAMILY.offered("quick")


def test_every_chunk_length_is_offered_and_none_declares_a_gate_bound() -> None:
    assert {s["bt"] for s in QUICK if not is_fused(s)} == {16, 32, 64}
    assert {FAMILY.gate_bound(s) for s in FULL} == {None}


def test_the_state_of_128_rows_does_not_fit_the_registers_at_bt_64() -> None:
    (problem,) = FAMILY.problems(GdnSchedule(64, 1, 128).schedule())
    assert "rows=128" in problem
    assert "232" in problem


def test_a_schedule_is_its_typed_view_and_its_configuration() -> None:
    for schedule in (s for s in FULL if is_fused(s)):
        fused = FusedSchedule.of(schedule)
        assert fused.schedule() == schedule
        assert schedule_of(schedule.as_dict()) == FusedConfig(
            fused.rows, fused.waves, fused.bt, fused.builders
        )
    for schedule in (s for s in FULL if not is_fused(s)):
        view = GdnSchedule.of(schedule)
        assert view.schedule() == schedule
        config = schedule_of(schedule.as_dict())
        assert config == Config(view.bt, view.rows, view.segments)
        assert config.unroll == view.unroll


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bt": 48}, "bt=48"),
        ({"bt": 32, "anchor": "mid"}, "no 'anchor'"),
        ({"rows": 64}, "needs 'bt'"),
        ({"bt": 32, "segments": 3}, "segments=3"),
        ({"bt": True}, "bt=True"),
        ({"form": "fuzed", "bt": 32}, "form='fuzed'"),
        ({"form": "fused", "rows": 32}, "rows=32"),
        ({"form": "fused", "rows": 64, "waves": 2}, "does not cut"),
        ({"form": "fused", "rows": 128, "waves": 0}, "waves=0"),
        ({"form": "fused", "bt": 64}, "needs 'rows'"),
        ({"form": "fused", "rows": 64, "bt": 32}, "bt=32 rows=64"),
        ({"form": "fused", "rows": 128, "bt": 32, "builders": 4}, "builders=4"),
    ],
)
def test_configurations_that_do_not_exist_are_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_of(values)


def test_score_tiles_cover_the_lower_triangle_once() -> None:
    for bt in (16, 32, 64):
        plan = Plan(bt)
        seen = dict.fromkeys(
            ((q, i, j) for q in (0, 1) for i in range(bt) for j in range(i + 1)), 0
        )
        for job in (job for jobs in plan.rounds for job in jobs):
            for i in range(16 * job.row, 16 * job.row + 16):
                first = 16 * job.col + 8 * job.half
                for j in range(first, min(first + (16 if plan.wide else 8), i + 1)):
                    seen[job.query, i, j] += 1
        assert set(seen.values()) == {1}
        assert max(map(len, plan.rounds)) <= plan.warps
        # What the copy engine and vectors of 16 bytes need, and nothing overlaps.
        ends = [plan.layout.image, plan.off_x, plan.off_l, plan.off_beta, plan.off_place]
        assert ends == sorted(ends)
        assert all(x % 16 == 0 for x in (plan.off_x, plan.off_l, plan.off_beta, plan.off_place))


def test_scratch_is_bounded_by_the_arguments() -> None:
    (shape, dtype), (inner, _) = workspace(Config(32, segments=4), 8192, 3, 32)
    assert dtype == "bfloat16"
    assert shape[0] <= 8192 // 32 + 3 * 4
    assert shape[1:] == (32, 35 * 512)
    assert inner[:2] == (9, 32)


# -------------------------------------------------------------------------------- the model


def test_every_schedule_has_a_positive_time_on_every_workload() -> None:
    empty = GdnWorkload("no-token", heads=1, value_heads=2, lengths=(0, 0))
    for schedule in FULL:
        for shape in (*OPERATION.workloads.values(), *OPERATION.reduced(), empty):
            assert 0 < FAMILY.modelled_us(schedule, shape) < 1e5, (schedule.key, shape.name)


def test_a_call_has_the_kernels_that_the_schedule_launches() -> None:
    from candidates.gdn_prefill.kernel.launch import kernel_names

    for segments in (1, 2, 4):
        times = kernel_us(GdnSchedule(32, segments).schedule(), workload(4096, 4, 8))
        assert [f"{name}_" for name in times] == list(kernel_names(segments))
    assert list(kernel_us(FusedSchedule(64).schedule(), workload(4096, 4, 8))) == ["gdn_fused"]
    cut = kernel_us(FusedSchedule(128).schedule(), workload(4096, 4, 8))
    assert list(cut) == ["gdn_fused", "gdn_fixup"]


def test_segments_pay_on_an_idle_chip_and_cost_on_a_full_one() -> None:
    one, four = GdnSchedule(32).schedule(), GdnSchedule(32, 4).schedule()
    assert modelled_us(four, workload(8192, 2, 4)) < modelled_us(one, workload(8192, 2, 4))
    full = workload(16384, 16, 32, 8)
    assert modelled_us(four, full) > 1.2 * modelled_us(one, full)


@pytest.mark.parametrize(
    ("view", "measured"),
    [
        (FusedSchedule(128, 1, 32, 3), (198, 120, 68, 103, 33)),
        (FusedSchedule(128, 1, 32, 2), (202, 124, 70, 92, 33)),
        (FusedSchedule(128, 1, 64), (259, 152, 84, 106, 58)),
        (FusedSchedule(64), (335, 305, 154, 153, 79)),
    ],
    ids=str,
)
def test_the_fused_kernel_is_near_what_it_took_on_an_h200(
    view: FusedSchedule, measured: tuple[float, ...]
) -> None:
    # Of the shipped campaign, production gates: many chunks a CTA, cut, short ones, a small call.
    names = ("16384/16/32/8", "8192/8/16/1", "4096/8/16/1", "8192/8/16/64", "2048/4/8/1")
    for name, us in zip(names, measured, strict=True):
        modelled = modelled_us(view.schedule(), OPERATION.workloads[name])
        assert modelled == pytest.approx(us, rel=0.15), name


def test_value_heads_that_share_keys_read_them_once() -> None:
    schedule = GdnSchedule(32).schedule()
    shared, own = (kernel_us(schedule, workload(8192, h, 32))["gdn_prep"] for h in (8, 32))
    assert shared < own


# ------------------------------------------------------------------------------ the sources


def test_listing_and_costing_the_space_loads_neither_torch_nor_the_dsl() -> None:
    code = (
        "import sys, candidates, operations\n"
        "f = candidates.get('gdn_prefill')\n"
        "w = operations.get('gdn_prefill').tuned()[0]\n"
        "assert all(f.modelled_us(s, w) > 0 for s in f.offered('quickstart'))\n"
        "print(sorted({'torch', 'cutlass', 'tvm_ffi'} & set(sys.modules)))\n"
        "import candidates.gdn_prefill.emulate\n"
        "print(sorted({'cutlass', 'tvm_ffi'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == ["[]", "[]"]


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown parameter 'anchor'"):
        FAMILY.schedule({**FULL[0].as_dict(), "anchor": "mid"})
    assert isinstance(FAMILY.schedule(FULL[0].as_dict()), Schedule)
