"""The fused kernel's guard: where a piece may start from zero, and that its bound is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from option_cases import call_of

import operations
from candidates._delta_rule.emulate import Plan
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.pieces import GUARD, JOB_WORDS
from candidates.kda_prefill import emulate_fused
from candidates.kda_prefill.kernel.fused_plan import (
    ALIKE,
    BT,
    GUARD_CUT,
    GUARD_DECAYS,
    RUN,
    SHORT,
    FusedPlan,
    cuts_of,
)
from operations.kda_prefill import KdaWorkload

OPERATION = operations.get("kda_prefill")


def inputs_of(lengths: tuple[int, ...], regime: str) -> dict[str, Any]:
    workload = KdaWorkload("case", heads=1, lengths=lengths)
    return OPERATION.generate(workload, OPERATION.regimes[regime], seed=0, device="cpu")


def test_a_warm_up_is_short_at_production_gates_and_none_will_do_at_slow_ones() -> None:
    inputs = inputs_of((400,), "production")
    assert emulate_fused.warm_ups(inputs, 0, 0, 12) == SHORT
    assert emulate_fused.warm_ups(inputs, 0, 0, 1) == 1  # from the sequence's start
    inputs = inputs_of((400,), "slow")
    assert emulate_fused.warm_ups(inputs, 0, 0, 12) == -1


def bounds_of(inputs: dict[str, Any], n: int = 0) -> torch.Tensor:
    """Logarithms of the bounds of a sequence's chunks, ``[chunks, H]``."""
    plan = Plan.of(emulate_fused._CHUNKS, inputs)
    chunks = emulate_fused._Chunks.of(plan, inputs)
    return emulate_fused.window_bounds(chunks, plan.base[n], -(-plan.lengths[n] // BT))


def map_norms(inputs: dict[str, Any]) -> torch.Tensor:
    """Logarithms of the spectral norms of the maps of whole chunks of one sequence and head."""
    k, g, beta = (inputs[name].double()[:, 0] for name in ("k", "g", "beta"))
    found = []
    for begin in range(0, len(k) - BT + 1, BT):
        state = torch.eye(128, dtype=torch.float64)
        for t in range(begin, begin + BT):
            state = g[t].exp()[:, None] * state
            state = state - beta[t] * torch.outer(k[t], k[t] @ state)
        found.append(torch.linalg.matrix_norm(state, 2).log())
    return torch.stack(found)


@pytest.mark.parametrize("how", ["long", "negative", "not a number"])
def test_one_token_that_is_not_tame_never_warms_up(how: str) -> None:
    for token in (160, 167, 175):
        inputs = inputs_of((400,), "production")
        inputs["g"][:] = -5.0
        assert emulate_fused.warm_ups(inputs, 0, 0, 11) == SHORT
        if how == "long":
            inputs["k"][token] *= 1.5 / inputs["beta"][token].sqrt()
        elif how == "negative":
            inputs["beta"][token] = -1e-6
        else:
            inputs["k"][token, 0, 77] = float("nan")
        assert emulate_fused.warm_ups(inputs, 0, 0, 11) == -1
        assert emulate_fused.warm_ups(inputs, 0, 0, 13) == SHORT


def test_keys_that_are_not_normalised_never_warm_up() -> None:
    inputs = inputs_of((400,), "production")
    inputs["k"] = inputs["k"] * 2
    assert emulate_fused.warm_ups(inputs, 0, 0, 12) == -1


@pytest.mark.parametrize(
    "regime",
    ["production", "sweep_lb3", "sweep_lb1", "slow", "mixed", "similar_keys", "beyond_scattered"],
)
def test_the_bound_holds_for_the_maps_that_it_bounds(regime: str) -> None:
    inputs = inputs_of((12 * BT,), regime)
    bounds = bounds_of(inputs)[:, 0]
    assert bounds.isfinite().all()
    assert (map_norms(inputs) <= bounds).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_for_random_gates_keys_and_strengths(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    inputs = inputs_of((24 * BT,), "slow")
    T = inputs["k"].shape[0]

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=rng)

    def each(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(BT, 0)

    # Every chunk has its own spread of gates, part of keys in common, and strength.
    level = each(10 ** (2.5 * rand(T // BT, 1, 1) - 1.5))
    inputs["g"] = -level * torch.randn(T, 1, 128, generator=rng).exp()
    inputs["g"][rand(T, 1, 128) < 0.01] = float("-inf")
    keys = torch.randn(T, 1, 128, generator=rng) + each(4 * rand(T // BT, 1, 1))
    keys = keys * (rand(T, 1, 128) < each(rand(T // BT, 1, 1).clamp(min=0.05)))
    inputs["k"] = torch.nn.functional.normalize(keys, dim=-1).bfloat16()
    inputs["beta"] = (1.98 * rand(T, 1)).clamp(max=2 * each(rand(T // BT, 1)))
    bounds, norms = bounds_of(inputs)[:, 0], map_norms(inputs)
    assert bounds.isfinite().all()
    assert (norms <= bounds).all()
    assert (bounds <= GUARD).any()
    assert (bounds > GUARD).any()


def test_the_bound_is_near_what_it_bounds_at_gates_of_production() -> None:
    inputs = inputs_of((40 * BT,), "production")
    beyond = bounds_of(inputs)[:, 0] - map_norms(inputs)
    assert beyond.median() < 4.5  # of about -23
    assert beyond.max() < 9


def test_a_chunk_is_enough_at_nearly_all_cuts_of_production_and_two_at_all() -> None:
    workload = KdaWorkload("1024/4/1", heads=4, lengths=(1024,))
    cuts = [c for c in cuts_of(workload.lengths, workload.heads, 132) if c[1] > 0]
    needed = []
    for seed in range(4):
        inputs = OPERATION.generate(
            workload, OPERATION.regimes["production"], seed=seed, device="cpu"
        )
        bounds = bounds_of(inputs)
        needed += [emulate_fused._warm_up(bounds[:, chain], chunk) for chain, chunk in cuts]
    assert len(needed) == 4 * 124
    assert needed.count(SHORT) >= 0.99 * len(needed)
    assert set(needed) <= {SHORT, 2 * SHORT}


# ----------------------------------------------------------- the guard in the interpreter


def test_decays_of_three_cuts_have_room_where_outputs_stand_later() -> None:
    for frame, builders in (("middle", 3), ("middle", 2), ("boundary", 2)):
        plan = FusedPlan(frame, builders)
        assert plan.off_group - plan.off_o >= 3 * (BT // 2) * GUARD_DECAYS


def guarded(
    inputs: Any, pieces: int, monkeypatch: pytest.MonkeyPatch, options: Options = PLAIN
) -> list[Any]:
    """Shared memory of each CTA after a run."""
    import fused_compile

    found: list[Any] = []
    run = fused_compile.run_cluster

    def kept(ctas: list[Any]) -> None:
        run(ctas)
        found.extend(cta.shared for cta in ctas)

    monkeypatch.setattr(fused_compile, "run_cluster", kept)
    fused_compile.run_fused("middle", 3, inputs, pieces, options=options)
    return found


def test_the_guard_finds_the_norms_that_it_is_made_of_whoever_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cutlass")
    inputs = inputs_of((270,), "production")
    cuts = [c for _, c in cuts_of((270,), 1, 4, ALIKE)]
    assert cuts == [0, 4, 8, 12, 0]
    shared = guarded(inputs, 4, monkeypatch)
    at = FusedPlan("middle", 3).off_guard
    k, g, beta = (inputs[name].double()[:, 0] for name in ("k", "g", "beta"))

    def decay(i: int, j: int) -> torch.Tensor:  # by tokens i to j
        return g[i:j].sum(0).exp()

    for asked, chunk in (
        ([(0, 1), (1, 1)], 4),
        ([(0, 2), (1, 2), (2, 0), (3, 0)], 8),
        ([(2, 1), (3, 1)], 12),
    ):
        seen = []
        for cta, place in asked:
            words = shared[cta][at + place * GUARD_CUT :][:GUARD_CUT].view("float32").copy()
            seen.append((torch.from_numpy(words[:128]).view(8, 16)[:, :15], float(words[128])))
        rows, top = seen[0]
        for other, other_top in seen[1:]:
            assert torch.equal(other, rows)
            assert other_top == top
        first, last = (chunk - 1) * BT, chunk * BT
        for p, row in enumerate(rows.double()):
            t = first + 2 * p
            want = [k[t] * decay(t + 1, t + 2) @ k[t + 1]]
            want += [k[i] @ k[i] for i in (t, t + 1)]
            for size in (4, 8, 16):  # of the part whose halves meet at this boundary
                m = first + 2 * p // size * size + size // 2
                for i in (t, t + 1):
                    by = decay(m, i + 1) if i >= m else decay(i + 1, m)
                    want.append((k[i] * by).norm())
            want += [(k[i] * decay(first, i + 1)).norm() for i in (t, t + 1)]
            want += [(k[i] * decay(i + 1, last)).norm() for i in (t, t + 1)]
            want += [beta[t], beta[t + 1]]
            torch.testing.assert_close(row, torch.stack(want), rtol=0.02, atol=1e-6)
        assert top == pytest.approx(float(decay(first, last).max() ** 2), rel=0.03)


def first_pieces(shared: list[Any]) -> list[tuple[int, int]]:
    """First chunk and chunks of the warm-up of each CTA's own first piece."""
    at = FusedPlan("middle", 3).off_jobs + 4 * JOB_WORDS * RUN + 16
    jobs = [x[at:][:12].view("int32").tolist() for x in shared]
    return [(start, warm) for start, _, warm in jobs]


def test_the_guard_sees_raw_keys_as_if_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    options = Options(gate="safe", gate_dtype="bfloat16", bias=True, l2norm=True)
    x, how = call_of(options, lengths=(170,))
    assert x["k"].float().norm(dim=-1).min() > 2  # as they come, none would be tame
    shared = guarded({**x, **how, "scale": 1.0}, 2, monkeypatch, options)
    assert first_pieces(shared) == [(0, 0), (4, 1)]


def test_the_guard_decides_like_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    # Gates that grow from slow ones to those of production, so that bounds lie on all sides.
    inputs = inputs_of((768,), "production")
    inputs["g"] *= torch.linspace(0.05, 1.1, 768)[:, None, None]
    pieces = 16
    cuts = [c for _, c in cuts_of((768,), 1, pieces, ALIKE)][:-1]
    bounds = bounds_of(inputs)[:, 0]
    needs = [emulate_fused._warm_up(bounds, c) for c in cuts[1:]]
    assert set(needs) == {-1, SHORT, 2 * SHORT}
    found = first_pieces(guarded(inputs, pieces, monkeypatch))
    for (start, warm), cut, need in zip(found[1:], cuts[1:], needs, strict=True):
        assert warm == max(need, 0)
        assert need <= 0 or start == cut - need
