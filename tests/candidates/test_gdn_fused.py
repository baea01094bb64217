"""The fused GDN kernel: compiles within its budgets, and computes, in a PTX interpreter."""

from __future__ import annotations

import itertools
import math
import random
import re
from functools import partial
from typing import Any

import pytest
import torch

import operations
from candidates._delta_rule.kernel.options import Options
from candidates._delta_rule.kernel.pieces import MAPS
from candidates.gdn_prefill import FAMILY, emulate_fused
from candidates.gdn_prefill.kernel.fused_plan import (
    FusedPlan,
    parts_of,
    pieces_of,
    span_of,
    windows_of,
)
from candidates.gdn_prefill.space import FusedSchedule
from operations.gdn_prefill import GdnWorkload

OPERATION = operations.get("gdn_prefill")
LONG, HALF = FusedPlan(64, 128, 1), FusedPlan(64, 64, 2)
SHORT, SHORT_2 = FusedPlan(32, 128, 3), FusedPlan(32, 128, 2)
PLANS = [LONG, HALF, SHORT, SHORT_2]
LONGER = pytest.mark.soak


def inputs_of(
    lengths: tuple[int, ...], regime: str, heads: tuple[int, int] = (1, 1), **more: Any
) -> Any:
    workload = GdnWorkload("case", heads=heads[0], value_heads=heads[1], lengths=lengths, **more)
    return workload, OPERATION.generate(workload, OPERATION.regimes[regime], seed=0, device="cpu")


def judged(got: dict[str, torch.Tensor], workload: GdnWorkload, inputs: Any, regime: str) -> None:
    want = OPERATION.fast_oracle(inputs)
    errors = OPERATION.compare(got, want, workload, OPERATION.regimes[regime])
    assert [e for e in errors if not e.within] == []


# ----------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gdn_fused_kernels_compile_without_spills_or_serialised_products(
    plan: FusedPlan,
) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import compiled_fused

    from candidates._delta_rule.kernel.resources import budget_problems

    kept = compiled_fused(plan, True)
    resources, *fixup = kept.kernels
    assert resources.name.startswith("gdn_fused_")
    assert resources.threads == plan.threads
    assert resources.dynamic_smem_bytes == plan.smem_bytes
    assert budget_problems(resources) == ()
    assert [k.name[:9] for k in fixup] == ["gdn_fixup"] * plan.cuts
    assert [budget_problems(k) for k in fixup] == [()] * plan.cuts
    assert "Compiling entry function" in kept.remarks
    assert [c for c in ("C7511", "C7512", "C7514", "C7517", "C7519") if c in kept.remarks] == []


def test_the_gdn_family_compiles_and_names_what_a_fused_schedule_launches() -> None:
    pytest.importorskip("cutlass")
    from candidates.gdn_prefill.kernel.launch import LoadedSchedule, config_of

    build = FAMILY.compile(FusedSchedule(64).schedule())
    assert [k.name[:9] for k in build.kernels] == ["gdn_fused"]
    assert build.problems == ()
    cut = ["gdn_fused", "gdn_fixup"]
    for rows, bt, names in ((64, 64, ["gdn_fused"]), (128, 64, cut), (128, 32, cut)):
        schedule = FusedSchedule(rows, 1, bt).schedule()
        loaded = LoadedSchedule(config_of(schedule))
        assert [name[:9] for name in loaded.kernel_names] == names
        assert loaded.chunk_tokens == bt


def test_gdn_pieces_fill_the_machine_and_are_never_short() -> None:
    assert pieces_of(64, 128, 1, 8192, 1, 32, 132) == 4
    assert pieces_of(64, 128, 4, 8192, 1, 32, 132) == 16
    assert pieces_of(64, 128, 1, 1024, 1, 4, 132) == 4
    assert pieces_of(32, 128, 1, 1024, 1, 4, 132) == 8
    assert pieces_of(32, 128, 1, 8192, 24, 32, 132) == 24
    assert pieces_of(32, 128, 1, 8192, 101, 32, 132) == 51  # two sequences to a CTA
    assert pieces_of(64, 64, 1, 8192, 1, 32, 132) == 1
    assert pieces_of(64, 128, 1, 0, 0, 32, 132) == 0


def test_a_gdn_sequence_is_cut_into_as_many_pieces_as_its_share_of_the_tokens() -> None:
    lengths = OPERATION.workloads["halves-8192/4/8"].lengths
    rows = [0, *itertools.accumulate(lengths)]
    pieces = pieces_of(32, 128, 1, rows[-1], len(lengths), 8, 132)
    span = span_of(pieces, rows[-1], len(lengths))
    assert [parts_of(*x, span) for x in itertools.pairwise(rows)] == [8, 5, 3, 2, 2, 1, 1, 1, 1]
    rng = random.Random(0)
    for _ in range(200):
        T, N = rng.randrange(1, 3000), rng.randrange(1, 9)
        pieces = rng.randrange(N, 3 * N + 9)
        rows = sorted(rng.randrange(T + 1) for _ in range(N + 1))
        span = span_of(pieces, T, N)
        owned = [
            row // span + n + p
            for n, (row, end) in enumerate(itertools.pairwise(rows))
            for p in range(parts_of(row, end, span))
        ]
        assert owned == sorted(set(owned))
        assert owned[-1] < pieces
        assert all(
            end - row <= span * parts_of(row, end, span) for row, end in itertools.pairwise(rows)
        )


def test_registers_of_gdn_warpgroups_fit_what_the_launch_gives() -> None:
    for plan in PLANS:
        launched = 65536 // plan.threads // 8 * 8
        wanted = plan.scanners * plan.scan_registers + plan.builders * plan.build_registers
        assert wanted <= (plan.scanners + plan.builders) * launched


def test_a_gdn_builder_that_may_fetch_may_also_write_its_matrices() -> None:
    for plan in PLANS:
        # It waits for chunk c + builders - stages: the last one that had the slot of chunk c.
        assert plan.stages - plan.builders == plan.slots


# ------------------------------------------------------------------------ in the interpreter


@pytest.mark.parametrize(
    ("plan", "regime"),
    [
        (SHORT, "production"),
        (LONG, "constant_inf"),
        (HALF, "single_inf"),
        pytest.param(SHORT_2, "production", marks=LONGER),
        pytest.param(SHORT, "constant_inf", marks=LONGER),
        pytest.param(LONG, "production", marks=LONGER),
        pytest.param(LONG, "slow", marks=LONGER),
        pytest.param(HALF, "production", marks=LONGER),
        pytest.param(HALF, "slow", marks=LONGER),
    ],
    ids=str,
)
def test_the_compiled_gdn_kernel_computes_what_the_oracle_does(
    plan: FusedPlan, regime: str
) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    workload, inputs = inputs_of((1, 0, 17), regime, heads=(1, 2))
    judged(run_fused(plan, inputs), workload, inputs, regime)


@pytest.mark.parametrize(
    "regime",
    ["mixed_heads", *(pytest.param(x, marks=LONGER) for x in ("beta_near_1", "scattered"))],
)
def test_several_gdn_chunks_and_a_cut_last_one_are_right(regime: str) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    lengths = (63, 65) if regime == "mixed_heads" else (15, 130)
    workload, inputs = inputs_of(lengths, regime)
    for plan in (LONG, SHORT):
        judged(run_fused(plan, inputs), workload, inputs, regime)


def test_similar_keys_of_gdn_without_a_state_are_right() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    workload, inputs = inputs_of((130,), "similar_keys", initial_state=False)
    judged(run_fused(SHORT, inputs), workload, inputs, "similar_keys")


@pytest.mark.parametrize(
    "plan", [SHORT, *(pytest.param(x, marks=LONGER) for x in (LONG, HALF))], ids=str
)
def test_the_order_of_warps_does_not_change_a_bit_of_gdn(plan: FusedPlan) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((200,), "slow")
    first = run_fused(plan, inputs)
    for seed in (1, 2):
        again = run_fused(plan, inputs, order=seed)
        assert torch.equal(first["o"], again["o"])
        assert torch.equal(first["final_state"], again["final_state"])


@pytest.mark.parametrize("plan", [SHORT, pytest.param(LONG, marks=LONGER)], ids=str)
def test_a_cta_of_two_gdn_sequences_computes_what_two_ctas_do(plan: FusedPlan) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((70, 130, 0, 40, 33), "slow", heads=(1, 2))
    want, got = run_fused(plan, inputs), run_fused(plan, inputs, 3)
    for name, x in want.items():
        assert torch.equal(got[name], x)


def test_what_lies_behind_a_sequence_in_memory_is_not_read() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((40, 30), "production")
    want = run_fused(SHORT, inputs)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name].clone()
        inputs[name][40:] = torch.nan
    got = run_fused(SHORT, inputs)
    assert torch.equal(got["o"][:40], want["o"][:40])
    assert torch.equal(got["final_state"][0], want["final_state"][0])


def test_wrong_gdn_offsets_are_clamped_and_rows_outside_cleared() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((40,), "production", initial_state=False)
    for pieces in (0, 6):
        got = run_fused(SHORT, inputs, pieces, offsets=[3, 20, 7, 99])
        want = run_fused(SHORT, inputs, pieces, offsets=[3, 20, 20, 40])
        assert torch.equal(got["o"], want["o"])
        assert torch.equal(got["final_state"], want["final_state"])
        assert not got["o"][:3].any()
        assert got["o"].isfinite().all()


@pytest.mark.parametrize("whose", ["a scanning warp's", "a building warp's"])
def test_missing_arrivals_of_gdn_are_reported(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    import gdn_fused_compile
    from ptx_interpreter import Deadlock, Program

    _, inputs = inputs_of((200,), "slow", initial_state=False)
    kept = gdn_fused_compile.compiled_fused(SHORT, False)
    arrive = "mbarrier.arrive.shared::cta"
    found = [x.start() for x in re.finditer(arrive, kept.ptx)]
    passing_on, scanning, building = found
    at = scanning if "scan" in whose else building
    assert passing_on < at
    broken = kept._replace(ptx=kept.ptx[:at] + "//" + kept.ptx[at:])
    assert len(Program(broken.ptx).instructions) < len(Program(kept.ptx).instructions)
    monkeypatch.setattr(gdn_fused_compile, "compiled_fused", lambda *_: broken)
    with pytest.raises(Deadlock):
        gdn_fused_compile.run_fused(SHORT, inputs)


RAW = {
    "as Qwen3-Next calls it": Options(l2norm=True, beta_dtype="bfloat16", offsets="int64"),
    "a gate to activate": Options("softplus", "bfloat16", True, beta_logits=True),
    "everything, as views": Options(
        "softplus", "bfloat16", True, "bfloat16", True, True, compact=False
    ),
}


@pytest.mark.parametrize(
    "what",
    [
        "everything, as views",
        *(pytest.param(name, marks=LONGER) for name in RAW if "everything" not in name),
    ],
)
def test_raw_gdn_inputs_mean_what_they_are_activated_to(what: str) -> None:
    pytest.importorskip("cutlass")
    from gdn_compile import raw_call
    from gdn_fused_compile import compiled_fused, run_fused

    options = RAW[what]
    raw, plain = raw_call(options, (17, 0, 140))
    want = OPERATION.fast_oracle(plain)
    for pieces in (0, 7):
        got = run_fused(SHORT, raw, pieces, options=options)
        for name, x in want.items():
            error = (got[name].double() - x).norm() / x.norm()
            assert error <= 6e-3, (name, float(error))
    remarks = compiled_fused(SHORT, True, options).remarks
    assert "Compiling entry function" in remarks
    assert "spills" not in remarks
    assert "C75" not in remarks


def test_gdn_gates_and_strengths_are_read_by_their_own_steps() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    workload, inputs = inputs_of((100,), "mixed_heads", heads=(1, 2))
    views = {name: inputs[name].T.contiguous().T for name in ("g", "beta")}
    got = run_fused(SHORT, {**inputs, **views}, 2, options=Options(compact=False))
    judged(got, workload, inputs, "mixed_heads")


# ------------------------------------------------------------------------ pieces


PIECES = {
    "early starts": ((300,), "constant_2", 3),
    "whole starts": ((300,), "slow", 4),
    "both, and resets": ((290,), "single_inf", 5),
    "an odd number of pieces": ((230,), "no_gate", 3),
}


@pytest.mark.parametrize("what", PIECES)
def test_gdn_pieces_are_right_whether_they_start_early_or_are_exact(what: str) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    lengths, regime, pieces = PIECES[what]
    workload, inputs = inputs_of(lengths, regime)
    plan = LONG if what == "whole starts" else SHORT
    judged(run_fused(plan, inputs, pieces), workload, inputs, regime)


@pytest.mark.parametrize("plan", [LONG, SHORT], ids=str)
def test_exact_gdn_segments_are_right(plan: FusedPlan) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    workload, inputs = inputs_of((30, 400, 20), "slow")
    inputs["g"][:] = -0.25
    inputs["g"][130:330] = -0.02
    flags: list[int] = []
    judged(run_fused(plan, inputs, 8, flags=flags), workload, inputs, "slow")
    assert sum(flag > 0 for flag in flags) >= 3
    assert flags[-1] == 0  # the last sequence's, beside an exact segment: two jobs


@LONGER
@pytest.mark.parametrize("plan", [LONG, SHORT], ids=str)
def test_slow_gates_of_gdn_make_exact_segments(plan: FusedPlan) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    workload, inputs = inputs_of((40, 1100, 60, 0), "no_gate")
    flags: list[int] = []
    judged(run_fused(plan, inputs, 9, flags=flags), workload, inputs, "no_gate")
    assert any(flags)


def test_gdn_pairs_across_heads_and_sequences_are_right() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    workload, inputs = inputs_of((150, 0, 77, 0), "mixed_heads", heads=(1, 2))
    judged(run_fused(SHORT, inputs, 11), workload, inputs, "mixed_heads")


def test_the_order_of_warps_does_not_change_a_bit_of_gdn_pieces() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((170,), "slow", initial_state=False)
    first = run_fused(SHORT, inputs, 5)
    again = run_fused(SHORT, inputs, 5, order=1)
    for name, x in first.items():
        assert torch.equal(x, again[name])


@LONGER
def test_a_gdn_carry_of_more_segments_than_fit_is_right() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    workload, inputs = inputs_of((32 * (2 * MAPS + 4),), "slow")
    judged(run_fused(SHORT, inputs, 2 * MAPS + 4), workload, inputs, "slow")


def test_the_compiled_gdn_guard_sums_gates() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    from candidates._delta_rule.kernel.exact import ENDS

    _, inputs = inputs_of((400,), "slow")
    inputs["g"][:] = -14.5 / 64
    inputs["g"][:151] = -0.01  # of the 64 before token 192, where the third of four pieces begins
    begins = [400 // 16 * p // 4 for p in range(4)]
    ask = [emulate_fused.warm_up(inputs, 0, 0, b, windows_of(101)) for b in begins]
    assert ask == [0, 6, -1, 4]
    flags: list[int] = []
    run_fused(SHORT, inputs, 4, flags=flags)
    # 1: an exact segment begins with the pair's first piece; 2: its second belongs to the first.
    assert [flag % ENDS for flag in flags] == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("what", "plan"),
    [
        ("nothing", SHORT),
        ("a long key", SHORT),
        *(
            pytest.param(what, plan, marks=LONGER)
            for what, plan in (
                ("a long key", LONG),
                ("a long key", SHORT_2),
                ("a negative strength", SHORT),
                ("no number", SHORT),
            )
        ),
    ],
    ids=str,
)
def test_what_early_starts_may_not_drop_is_scanned_from_the_start(
    what: str, plan: FusedPlan
) -> None:
    """Bit for bit as where nothing is cut: the same chunks from the same state."""
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((500,), "slow")
    inputs["g"][:] = -14.5 / 64
    bounds = [16 * (32 * p // 5) for p in range(5)] + [500]
    # Tokens that are early ones of one piece each: of the second, the last and, at the end of what
    # both parts of a pair start early with, of the third.
    rows = {1: 40, 2: 130, 4: 350}
    for row in rows.values() if what != "nothing" else ():
        if what == "a long key":
            inputs["k"][row] = inputs["k"][row] * 2
            inputs["beta"][row] = 0.9
        elif what == "a negative strength":
            inputs["beta"][row] = -0.1
        else:
            inputs["k"][row, 0, 5] = math.nan
    flags: list[int] = []
    cut, whole = run_fused(plan, inputs, 5, flags=flags), run_fused(plan, inputs)
    assert set(flags) == {0}
    same = [
        torch.equal(*(x["o"][a:b].view(torch.int16) for x in (cut, whole)))
        for a, b in itertools.pairwise(bounds)
    ]
    states = [x["final_state"].view(torch.int32) for x in (cut, whole)]
    redone = what != "nothing"
    assert torch.equal(*states) == redone
    assert all(same[p] for p in rows) == redone


def test_an_early_start_is_as_long_as_the_gates_ask_for() -> None:
    _, inputs = inputs_of((1200,), "slow")
    ask = partial(emulate_fused.warm_up, inputs, 0, 0, 70)  # 1120 tokens
    assert ask() == -1
    inputs["g"][:] = -14.5 / 64
    assert ask() == 4
    inputs["g"][:] = -14.5 / 256
    assert ask() == 14
    assert ask(windows=6) == -1  # as long as a short piece
    inputs["g"][:] = -14.5 / 160
    assert ask() == 10
    inputs["g"][1000] = -20.0
    assert ask() == 8
    inputs["g"][:] = -11.0 / 512
    assert ask() == -1
    assert emulate_fused.warm_up(inputs, 0, 0, 20) == 20  # from the sequence's start


def test_gdn_keys_that_are_not_normalised_are_scanned_from_the_start() -> None:
    _, inputs = inputs_of((1200,), "slow")
    inputs["g"][:] = -1.0
    assert emulate_fused.warm_up(inputs, 0, 0, 70) == 2
    inputs["k"] = inputs["k"] * 2
    inputs["beta"][:] = 0.9
    assert emulate_fused.warm_up(inputs, 0, 0, 70) == 70


# ------------------------------------------------------------------------------- emulation


@pytest.mark.parametrize("regime", list(OPERATION.regimes))
def test_emulated_gdn_stays_within_the_tolerances(regime: str) -> None:
    workload, inputs = inputs_of((600, 0, 17), regime, heads=(1, 2))
    for bt in (32, 64):
        got = FAMILY.emulate(FusedSchedule(128, 1, bt).schedule(), inputs)
        judged(got, workload, inputs, regime)


def test_the_gdn_emulation_rounds_like_the_kernel() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    cases = ("production", (1, 2), SHORT), ("similar_keys", (1, 1), LONG)
    for regime, heads, plan in cases:
        _, inputs = inputs_of((100,), regime, heads)
        got = run_fused(plan, inputs)
        want = FAMILY.emulate(FusedSchedule(128, 1, plan.bt).schedule(), inputs)
        for name, x in want.items():
            error = (got[name].float() - x.float()).norm()
            assert error <= 1e-3 * x.float().norm(), (regime, name)


@pytest.mark.parametrize("regime", ["slow", pytest.param("constant_2", marks=LONGER)])
def test_the_gdn_emulation_cuts_like_the_kernels(
    regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((270,), regime)
    got = run_fused(SHORT, inputs, 5)
    monkeypatch.setattr(emulate_fused, "pieces_of", lambda *_: 5)
    want = FAMILY.emulate(FusedSchedule(128, 1, 32).schedule(), inputs)
    for name, x in want.items():
        assert (got[name].float() - x.float()).norm() <= 1e-3 * x.float().norm(), name
