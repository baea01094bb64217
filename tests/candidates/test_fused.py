"""The fused kernel: compiles within its budgets, and computes, in a PTX interpreter on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import operations
from candidates import BuildError, Schedule
from candidates._delta_rule.emulate import Plan, exact_segments
from candidates._delta_rule.kernel.pieces import MAPS, pieces_of
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.kda_prefill import FAMILY, emulate_fused
from candidates.kda_prefill.kernel.fused_plan import (
    ALIKE,
    BT,
    LEAST,
    LINE,
    NEVER,
    SECOND,
    SHORT,
    SHORTER,
    Cuts,
    FusedPlan,
    cuts_of,
)
from candidates.kda_prefill.kernel.steep_plan import STEEP_HALF
from candidates.kda_prefill.space import FusedSchedule
from operations.kda_prefill import KdaWorkload

OPERATION = operations.get("kda_prefill")
VARIANTS = [("middle", 3), ("middle", 2), ("boundary", 2)]


def inputs_of(lengths: tuple[int, ...], regime: str, heads: int = 1, **more: Any) -> Any:
    workload = KdaWorkload("case", heads=heads, lengths=lengths, **more)
    return workload, OPERATION.generate(workload, OPERATION.regimes[regime], seed=0, device="cpu")


def judged(got: dict[str, torch.Tensor], workload: KdaWorkload, inputs: Any, regime: str) -> None:
    want = OPERATION.fast_oracle(inputs)
    errors = OPERATION.compare(got, want, workload, OPERATION.regimes[regime])
    assert [e for e in errors if not e.within] == []


# ----------------------------------------------------------------------------- compilation


@pytest.mark.parametrize(("frame", "builders"), VARIANTS)
def test_fused_kernels_compile_without_spills_or_serialised_products(
    frame: str, builders: int
) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import compiled_fused

    from candidates._delta_rule.kernel.resources import budget_problems

    kept = compiled_fused(frame, builders, True)
    resources, fixup = kept.kernels
    plan = FusedPlan(frame, builders)
    assert resources.name.startswith("kda_fused_")
    assert resources.threads == plan.threads
    assert resources.dynamic_smem_bytes == plan.smem_bytes
    assert budget_problems(resources) == budget_problems(fixup) == ()
    assert fixup.name.startswith("kda_fixup")
    assert "Compiling entry function" in kept.remarks
    assert [c for c in ("C7511", "C7512", "C7514", "C7519") if c in kept.remarks] == []


def test_registers_of_all_warpgroups_fit_what_the_launch_gives() -> None:
    for frame, builders in VARIANTS:
        plan = FusedPlan(frame, builders)
        launched = 65536 // plan.threads // 8 * 8
        wanted = 2 * plan.scan_registers + builders * plan.build_registers
        assert wanted <= (2 + builders) * launched


def test_the_family_compiles_a_fused_schedule_as_one_kernel_and_its_fix_up() -> None:
    pytest.importorskip("cutlass")
    build = FAMILY.compile(FusedSchedule("boundary", 2, 4).schedule())
    assert [k.name[:9] for k in build.kernels] == ["kda_fused", "kda_fixup"]
    assert build.problems == ()


def test_a_fused_schedule_that_is_not_offered_does_not_build() -> None:
    pytest.importorskip("cutlass")
    items = (("form", "fused"), ("frame", "boundary"), ("builders", 3), ("waves", 1))
    with pytest.raises(BuildError, match="builders=3"):
        FAMILY.compile(Schedule(items))


def test_pieces_fill_the_machine_and_never_vanish() -> None:
    assert pieces_of(1, 1, 12, 132) == 11
    assert pieces_of(4, 4, 12, 132) == 11
    assert pieces_of(1, 100, 16, 132) == 1
    assert pieces_of(1, 0, 16, 132) == 132


# ------------------------------------------------------------------------------------ cuts


Run = list[tuple[int, int, int]]


def runs_of(lengths: tuple[int, ...], heads: int, runs: int, how: int) -> list[Run]:
    """Each run's pieces: chain, first chunk, and the one past the last."""
    counts = [-(-length // BT) for length in lengths] * heads
    out = []
    for (chain, begin), (last, stop) in itertools.pairwise(cuts_of(lengths, heads, runs, how)):
        ends = [*counts[chain:last], *[stop] * (stop > 0)]
        out.append([(chain + i, (i == 0) * begin, end) for i, end in enumerate(ends)])
    return out


def chunks_scanned(run: Run) -> int:
    """Chunks of a run with those of its early start, and what its other pieces are worth."""
    scanned = sum(end - begin + min(begin, SHORT) for _, begin, end in run)
    return scanned + SECOND * max(len(run) - 1, 0)


CUT_SHAPES = {
    "one": ((8192,), 16),
    "four": ((2048,) * 4, 12),
    "long": ((8192,), 24),
    "full": ((2048,) * 8, 16),
    "short": ((1024,), 4),
    "one among many": ((8192, 100, 0, 100, 2000), 16),
    "many": ((128,) * 100, 16),
    "ragged": (tuple(1 + 37 * n % 700 for n in range(70)), 3),
    "empty": ((0, 0, 37, 0, 1, 130, 0), 3),
    "nothing": ((0, 0), 2),
    "a token": ((1,), 1),
}


@pytest.mark.parametrize("how", [NEVER, ALIKE, SHORTER, LINE])
@pytest.mark.parametrize("runs", [2, 6, 132, 264])
@pytest.mark.parametrize("shape", CUT_SHAPES)
def test_every_chunk_is_in_one_run_and_every_chain_begins_in_one(
    shape: str, runs: int, how: int
) -> None:
    lengths, heads = CUT_SHAPES[shape]
    cut = cuts_of(lengths, heads, runs, how)
    assert len(cut) == runs + 1
    assert cut[0] == (0, 0)
    assert cut[-1] == (len(lengths) * heads, 0)
    assert cut == sorted(cut)
    inside = [x for x in cut if x[1] > 0]
    assert len(inside) == len(set(inside))  # only at the begin of a chain is a run empty
    assert how > NEVER or not inside
    pieces = [piece for run in runs_of(lengths, heads, runs, how) for piece in run]
    counts = [-(-length // BT) for length in lengths] * heads
    for chain, count in enumerate(counts):
        own = [(begin, end) for i, begin, end in pieces if i == chain]
        assert own[0][0] == 0
        assert own[-1][1] == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(own))
        assert all(begin < end for begin, end in own) or (count == 0 and len(own) == 1)


@pytest.mark.parametrize("shape", CUT_SHAPES)
def test_no_run_is_longer_than_if_all_are_cut_alike(shape: str) -> None:
    longest = {
        how: max(map(chunks_scanned, runs_of(*CUT_SHAPES[shape], 132, how)))
        for how in (ALIKE, SHORTER, LINE)
    }
    assert longest[SHORTER] <= longest[ALIKE]
    assert longest[SHORTER] in (longest[ALIKE], longest[LINE])


def test_runs_of_the_line_are_equally_long() -> None:
    for lengths, heads in CUT_SHAPES.values():
        places = heads * (sum(lengths) // BT + SECOND * len(lengths))
        runs = min(132, max(places // LEAST, 1))
        for run in runs_of(lengths, heads, 132, LINE):  # a chain's last chunk may have no place
            assert chunks_scanned(run) <= -(-places // runs) + SHORT + len(run)


@pytest.mark.parametrize(
    ("shape", "alike", "shorter"),
    [
        ("one", 65, 65),
        ("four", 65, 49),
        ("long", 104, 95),
        ("full", 128, 128),
        ("short", 3, 3),
        ("one among many", 512, 83),
    ],
)
def test_the_longest_run_of_known_shapes(shape: str, alike: int, shorter: int) -> None:
    found = [
        max(map(chunks_scanned, runs_of(*CUT_SHAPES[shape], 132, how))) for how in (ALIKE, SHORTER)
    ]
    assert found == [alike, shorter]


@pytest.mark.parametrize("equal", [True, False])
def test_the_host_foresees_what_the_kernel_would_decide(equal: bool) -> None:
    require_dsl()
    from foreseen import foreseen

    decide = foreseen(equal)
    shapes = [
        (lengths, heads)
        for lengths, heads in CUT_SHAPES.values()
        if len(set(lengths)) == 1 and lengths[0] > 0
    ]
    decided = set()
    for (lengths, heads), runs, how in itertools.product(
        shapes, (2, 132, 264), (NEVER, ALIKE, SHORTER, LINE)
    ):
        N, T = len(lengths), sum(lengths)
        found = decide(N, T, heads, runs, how)
        cuts = Cuts.of(N, heads, 0, T, -(-lengths[0] // BT), runs, how)
        if how == SHORTER and (equal or N == 1):
            how = LINE if cuts.line else ALIKE
            decided.add(how)
        assert found == (cuts.pieces, cuts.whole, how)
    assert decided == {ALIKE, LINE}


# ------------------------------------------------------------------------ in the interpreter


@pytest.mark.parametrize(("frame", "builders"), [("middle", 3), ("boundary", 2)])
@pytest.mark.parametrize(
    "regime",
    [
        "production",
        "slow",
        "constant",
        "mixed",
        "closed_ends",
        "beyond_6",
        "beyond_20",
        "beyond_inf",
        "beyond_single_inf",
        "beyond_scattered",
    ],
)
def test_the_compiled_kernel_computes_what_the_oracle_does(
    frame: str, builders: int, regime: str
) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    workload, inputs = inputs_of((15, 0, 49, 1), regime)
    judged(run_fused(frame, builders, inputs, 1), workload, inputs, regime)


@pytest.mark.parametrize(("frame", "builders"), [("middle", 3), ("boundary", 2)])
@pytest.mark.parametrize(
    "regime", ["production", "sweep_lb3", "sweep_lb2", "slow", "beyond_20", "beyond_scattered"]
)
def test_pieces_are_right_whether_they_warm_up_or_are_exact_segments(
    frame: str, builders: int, regime: str
) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    workload, inputs = inputs_of((270,), regime)
    judged(run_fused(frame, builders, inputs, 4), workload, inputs, regime)


STEEP_SPANS = {
    "the first chunk": ((0, BT),),
    "a cut last chunk": ((4 * BT, 4 * BT + 5),),
    "one among mild ones, then two": ((BT, 2 * BT), (3 * BT, 70)),
    "first and second halves": ((BT, BT + 8), (2 * BT + 8, 3 * BT), (3 * BT + 4, 3 * BT + 12)),
    "single tokens, twice in one half": ((19, 20), (40, 41), (43, 44)),
}


def steep_inputs(spans: tuple[tuple[int, int], ...], level: float) -> Any:
    """70 tokens of slow gates; half of the channels have ``level`` in the given runs of tokens."""
    workload, inputs = inputs_of((70,), "slow")
    for begin, end in spans:
        inputs["g"][begin:end, :, ::2] = level
    return workload, inputs


@pytest.mark.parametrize("where", STEEP_SPANS)
@pytest.mark.parametrize(
    ("frame", "builders", "level"),
    [("middle", 3, -7.0), ("middle", 3, float("-inf")), ("boundary", 2, -30.0)],
)
def test_steep_chunks_keep_the_state_of_the_channels_that_are_not(
    frame: str, builders: int, where: str, level: float
) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    workload, inputs = steep_inputs(STEEP_SPANS[where], level)
    got = run_fused(frame, builders, inputs, 1)
    judged(got, workload, inputs, "slow")
    want = FAMILY.emulate(FusedSchedule(frame, builders, 1).schedule(), inputs)
    for name, x in want.items():
        assert (got[name].float() - x.float()).norm() <= 1e-3 * x.float().norm(), name


@pytest.mark.parametrize("frame", ["middle", "boundary"])
def test_one_strong_gate_costs_the_slow_ones_behind_it_no_digits(frame: str) -> None:
    _, inputs = inputs_of((64,), "slow", initial_state=False)
    schedule = FusedSchedule(frame, 2, 1).schedule()

    def error() -> float:
        want = OPERATION.fast_oracle(inputs)["o"]
        got = FAMILY.emulate(schedule, inputs)["o"].double()
        return float((got - want).norm() / want.norm())

    without = error()
    for level in (-90.0, -1e4, -1e6, float("-inf")):
        inputs["g"][:2] = level
        assert error() <= 1.2 * without


def test_no_exponent_leaves_the_budget_whatever_the_gates() -> None:
    for frame in ("middle", "boundary"):
        schedule = FusedSchedule(frame, 2, 1).schedule()
        for regime in OPERATION.regimes:
            _, inputs = inputs_of((40, 0, 64), regime)
            assert emulate_fused.largest_exponent(schedule, inputs) <= -2 * STEEP_HALF, (
                frame,
                regime,
            )


def test_gates_of_production_are_never_steep() -> None:
    for regime in ("production", "production_spread", "constant", "closed_ends"):
        _, inputs = inputs_of((333,), regime)
        plan = Plan.of(emulate_fused._CHUNKS, inputs)
        assert not emulate_fused._Chunks.of(plan, inputs).steep.any()


@pytest.mark.parametrize(
    ("frame", "builders", "regime"), [("middle", 3, "slow"), ("boundary", 2, "mixed")]
)
def test_pairs_across_heads_and_sequences_are_right(frame: str, builders: int, regime: str) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    workload, inputs = inputs_of((230, 0, 77), regime, heads=2)
    judged(run_fused(frame, builders, inputs, 5), workload, inputs, regime)


def test_a_carry_of_more_segments_than_fit_is_right() -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    workload, inputs = inputs_of((544,), "slow")
    pieces = 2 * MAPS + 5  # two chunks each
    judged(run_fused("middle", 3, inputs, pieces), workload, inputs, "slow")


@pytest.mark.parametrize(("frame", "builders"), [("middle", 3), ("boundary", 2)])
def test_steep_chunks_in_pairs_are_right(frame: str, builders: int) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    workload, inputs = inputs_of((270,), "slow")
    for begin, end in ((100, 101), (150, 175), (180, 181), (240, 250)):
        inputs["g"][begin:end, :, ::2] = -30.0
    judged(run_fused(frame, builders, inputs, 4), workload, inputs, "slow")


@pytest.mark.parametrize("regime", ["production", "sweep_lb2"])
def test_what_builders_begin_before_it_is_decided_does_not_change_a_bit(regime: str) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    # Two chunks of warm-up where the gates decay slower, and not the one that builders begin with.
    _, inputs = inputs_of((170,), regime)
    needs = SHORT if regime == "production" else 2 * SHORT
    assert emulate_fused.warm_ups(inputs, 0, 0, 5) == needs
    first = run_fused("middle", 3, inputs, 2)
    again = run_fused("middle", 3, inputs, 2, order=1)
    for name, x in first.items():
        assert torch.equal(x, again[name])


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_warps_does_not_change_a_bit_in_pairs(seed: int) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    _, inputs = inputs_of((170,), "slow", initial_state=False)
    first = run_fused("middle", 3, inputs, 5)
    again = run_fused("middle", 3, inputs, 5, order=seed)
    for name, x in first.items():
        assert torch.equal(x, again[name])


@pytest.mark.parametrize(("frame", "builders"), [("middle", 3), ("boundary", 2)])
@pytest.mark.parametrize("level", [0.0, -7.0])
def test_the_order_of_warps_does_not_change_a_bit(frame: str, builders: int, level: float) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    _, inputs = steep_inputs(STEEP_SPANS["one among mild ones, then two"], level)
    first = run_fused(frame, builders, inputs, 1)
    for seed in (1, 2):
        again = run_fused(frame, builders, inputs, 1, order=seed)
        assert torch.equal(first["o"], again["o"])
        assert torch.equal(first["final_state"], again["final_state"])


LINES = {
    # lengths, heads, CTAs: the cuts that they give, as (chain, chunk)
    "two chains, then a straddling pair": (((300, 0, 90, 33), 1, 4), [(0, 6), (0, 15), (2, 0)]),
    "both cuts within a chain": (((20, 0, 190, 33, 150), 2, 4), [(2, 10), (5, 0), (7, 10)]),
    "parts of three chains": (((260, 20, 190), 1, 4), [(0, 6), (0, 15), (2, 3)]),
    "a pair that leaves a state of its second chain": (((70, 220), 1, 4), [(0, 3), (1, 3), (1, 8)]),
    "CTAs without a chunk": (((12, 90), 1, 6), [(1, 0), (2, 0), (2, 0), (2, 0), (2, 0)]),
    "many to a CTA": (((20, 5, 0, 47, 16, 0, 0, 33, 60), 2, 2), [(9, 0)]),
}


@pytest.mark.parametrize("where", LINES)
@pytest.mark.parametrize(
    ("frame", "builders", "regime"),
    [
        ("middle", 3, "production"),
        ("middle", 3, "slow"),
        ("middle", 2, "beyond_scattered"),
        ("boundary", 2, "mixed"),
    ],
)
def test_runs_across_chains_are_right(frame: str, builders: int, regime: str, where: str) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    (lengths, heads, runs), cuts = LINES[where]
    assert cuts_of(lengths, heads, runs, LINE)[1:-1] == cuts
    workload, inputs = inputs_of(lengths, regime, heads)
    got = run_fused(frame, builders, inputs, runs, how=LINE)
    judged(got, workload, inputs, regime)


@pytest.mark.parametrize("regime", ["production", "slow"])
def test_the_order_of_warps_does_not_change_a_bit_across_chains(regime: str) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    (lengths, heads, runs), _ = LINES["two chains, then a straddling pair"]
    _, inputs = inputs_of(lengths, regime, heads, initial_state=False)
    first = run_fused("middle", 3, inputs, runs, how=LINE)
    for seed in (1, 2):
        again = run_fused("middle", 3, inputs, runs, order=seed, how=LINE)
        for name, x in first.items():
            assert torch.equal(x, again[name])


@pytest.mark.parametrize("lengths", [(300,), (7, 130, 0, 64, 21)])
def test_where_no_gate_reaches_far_the_cuts_do_not_show(lengths: tuple[int, ...]) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    _, inputs = inputs_of(lengths, "production")
    inputs["g"][:] = -5.0  # what an early start drops is below any digit
    whole = run_fused("middle", 3, inputs, 2, how=NEVER)
    for how in (ALIKE, LINE):
        got = run_fused("middle", 3, inputs, 2 if how == ALIKE else 4, how=how)
        for name, x in whole.items():
            assert torch.equal(x, got[name]), (how, name)


def test_wrong_offsets_are_clamped_along_the_line() -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    _, inputs = inputs_of((340,), "slow", heads=2, initial_state=False)
    wrong, right = [3, 20, 7, 999], [3, 20, 20, 340]
    got = run_fused("middle", 2, inputs, 4, offsets=wrong, how=LINE)
    want = run_fused("middle", 2, inputs, 4, offsets=right, how=LINE)
    assert torch.equal(got["o"], want["o"])
    assert torch.equal(got["final_state"], want["final_state"])
    assert not got["o"][:3].any()
    assert got["o"].isfinite().all()


def test_wrong_offsets_are_clamped_and_rows_outside_cleared() -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    _, inputs = inputs_of((40,), "production", heads=2, initial_state=False)
    got = run_fused("middle", 2, inputs, 1, offsets=[3, 20, 7, 99])
    want = run_fused("middle", 2, inputs, 1, offsets=[3, 20, 20, 40])
    assert torch.equal(got["o"], want["o"])
    assert torch.equal(got["final_state"], want["final_state"])
    assert not got["o"][:3].any()
    assert got["o"].isfinite().all()


@pytest.mark.parametrize(
    ("instruction", "tokens", "pieces"),
    [
        ("mbarrier.arrive.shared::cta", 20, 1),
        ("mbarrier.arrive.shared::cluster", 300, 2),
        ("cp.async.bulk.shared::cluster.shared::cta", 300, 2),
        ("st.async.shared::cluster", 300, 2),
    ],
)
def test_missing_arrivals_are_reported_and_do_not_hang(
    instruction: str, tokens: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    import fused_compile
    from ptx_interpreter import Deadlock, Program

    _, inputs = inputs_of((tokens,), "slow", initial_state=False)
    kept = fused_compile.compiled_fused("middle", 2, False)
    broken = kept._replace(ptx=kept.ptx.replace(instruction, f"//{instruction}"))
    assert len(Program(broken.ptx).instructions) < len(Program(kept.ptx).instructions)
    monkeypatch.setattr(fused_compile, "compiled_fused", lambda *_: broken)
    with pytest.raises(Deadlock):
        fused_compile.run_fused("middle", 2, inputs, pieces)


# ------------------------------------------------------------------------------- emulation


@pytest.mark.parametrize("frame", ["middle", "boundary"])
@pytest.mark.parametrize("regime", list(OPERATION.regimes))
def test_emulated_pieces_stay_within_the_tolerances(frame: str, regime: str) -> None:
    workload, inputs = inputs_of((300, 0, 17), regime, heads=2)
    schedule = FusedSchedule(frame, 2, 1).schedule()
    judged(FAMILY.emulate(schedule, inputs), workload, inputs, regime)


def test_the_emulation_rounds_like_the_kernel() -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    _, inputs = inputs_of((64,), "production")
    for frame in ("middle", "boundary"):
        got = run_fused(frame, 2, inputs, 4)["o"].float()
        want = FAMILY.emulate(FusedSchedule(frame, 2, 1).schedule(), inputs)["o"].float()
        assert (got - want).norm() <= 1e-3 * want.norm()


@pytest.mark.parametrize("frame", ["middle", "boundary"])
def test_the_emulation_composes_segments_like_the_kernels(
    frame: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    _, inputs = inputs_of((270,), "slow")
    got = run_fused(frame, 2, inputs, 5)
    monkeypatch.setattr(emulate_fused, "SMS", 5)
    want = FAMILY.emulate(FusedSchedule(frame, 2, 1).schedule(), inputs)
    for name, x in want.items():
        error = (got[name].float() - x.float()).norm()
        assert error <= 1e-3 * x.float().norm()


@pytest.mark.parametrize("regime", ["production", "slow"])
def test_the_emulation_cuts_like_the_kernel(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    lengths, heads = (500, 0, 40, 30), 1
    cuts = cuts_of(lengths, heads, 4, SHORTER)
    assert cuts == cuts_of(lengths, heads, 4, LINE)
    assert cuts != cuts_of(lengths, heads, 4, ALIKE)
    _, inputs = inputs_of(lengths, regime, heads)
    got = run_fused("middle", 3, inputs, 4, how=SHORTER)
    monkeypatch.setattr(emulate_fused, "SMS", 4)
    want = FAMILY.emulate(FusedSchedule("middle", 3, 1).schedule(), inputs)
    for name, x in want.items():
        error = (got[name].float() - x.float()).norm()
        assert error <= 1e-3 * x.float().norm()


def test_a_pair_takes_its_pieces_as_one_where_the_guard_fails_between_them() -> None:
    segments = exact_segments
    assert segments([0, 2, 2, 2], [0, 1, 2, 3]) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert segments([0, -1, -1, -1, -1], [0, 1, 2, 3, 4]) == [(0, 2), (2, 4), (4, 5)]
    assert segments([0, -1, -1, -1, -1], [0, 6, 7, 8, 9]) == [(0, 1), (1, 3), (3, 5)]
    assert segments([0, -1, -1, 2, -1], [0, 1, 2, 3, 4]) == [(0, 2), (2, 3), (3, 4), (4, 5)]
