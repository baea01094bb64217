"""The fused GDN kernel: compiles within its budgets, and computes, in a PTX interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import operations
from candidates.gdn_prefill import emulate_fused
from candidates.gdn_prefill.kernel.fused_plan import FusedPlan
from operations.gdn_prefill import GdnWorkload

OPERATION = operations.get("gdn_prefill")
ROWS = [128, 64]


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


@pytest.mark.parametrize("rows", ROWS)
def test_gdn_fused_kernels_compile_without_spills_or_serialised_products(
    rows: int, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import compiled_fused

    from candidates.kda_prefill.kernel.resources import (
        Cubin,
        budget_problems,
        dynamic_smem,
        kernel_resources,
    )

    function, cubin, _ = compiled_fused(rows, True, remarks=True)
    (resources,), _ = kernel_resources(Cubin(cubin), dynamic_smem(str(function.ir_module)))
    plan = FusedPlan(rows)
    assert resources.name.startswith("gdn_fused_")
    assert resources.threads == plan.threads
    assert resources.dynamic_smem_bytes == plan.smem_bytes
    assert budget_problems(resources) == ()
    output = "".join(capfd.readouterr())
    assert "Compiling entry function" in output  # the remarks were printed
    assert [c for c in ("C7511", "C7512", "C7514", "C7517", "C7519") if c in output] == []


def test_registers_of_gdn_warpgroups_fit_what_the_launch_gives() -> None:
    for rows in ROWS:
        plan = FusedPlan(rows)
        launched = 65536 // plan.threads // 8 * 8
        wanted = plan.scanners * plan.scan_registers + plan.builders * plan.build_registers
        assert wanted <= (plan.scanners + plan.builders) * launched


def test_a_gdn_builder_that_may_fetch_may_also_write_its_matrices() -> None:
    for rows in ROWS:
        plan = FusedPlan(rows)
        # It waits for chunk c + builders - stages: the last one that had the slot of chunk c.
        assert plan.stages - plan.builders == plan.slots


# ------------------------------------------------------------------------ in the interpreter


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("regime", ["production", "slow", "constant_inf", "single_inf"])
def test_the_compiled_gdn_kernel_computes_what_the_oracle_does(rows: int, regime: str) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    workload, inputs = inputs_of((1, 0, 17), regime, heads=(1, 2))
    judged(run_fused(rows, inputs), workload, inputs, regime)


@pytest.mark.parametrize("regime", ["similar_keys", "beta_near_1", "mixed_heads", "scattered"])
def test_several_gdn_chunks_and_a_cut_last_one_are_right(regime: str) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    lengths = (63, 65) if regime == "mixed_heads" else (15, 130)
    workload, inputs = inputs_of(lengths, regime, initial_state=regime != "similar_keys")
    judged(run_fused(128, inputs), workload, inputs, regime)


@pytest.mark.parametrize("rows", ROWS)
def test_the_order_of_warps_does_not_change_a_bit_of_gdn(rows: int) -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((200,), "slow")
    first = run_fused(rows, inputs)
    for seed in (1, 2):
        again = run_fused(rows, inputs, order=seed)
        assert torch.equal(first["o"], again["o"])
        assert torch.equal(first["final_state"], again["final_state"])


def test_what_lies_behind_a_sequence_in_memory_is_not_read() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((40, 30), "production")
    want = run_fused(128, inputs)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name].clone()
        inputs[name][40:] = torch.nan
    got = run_fused(128, inputs)
    assert torch.equal(got["o"][:40], want["o"][:40])
    assert torch.equal(got["final_state"][0], want["final_state"][0])


def test_wrong_gdn_offsets_are_clamped_and_rows_outside_cleared() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    _, inputs = inputs_of((40,), "production", initial_state=False)
    got = run_fused(64, inputs, offsets=[3, 20, 7, 99])
    want = run_fused(64, inputs, offsets=[3, 20, 20, 40])
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
    function, cubin, ptx = gdn_fused_compile.compiled_fused(128, False)
    arrive = "mbarrier.arrive.shared::cta"
    at = ptx.index(arrive) if "scan" in whose else ptx.rindex(arrive)
    broken = ptx[:at] + "//" + ptx[at:]
    assert len(Program(broken).instructions) < len(Program(ptx).instructions)
    monkeypatch.setattr(
        gdn_fused_compile, "compiled_fused", lambda *_, **__: (function, cubin, broken)
    )
    with pytest.raises(Deadlock):
        gdn_fused_compile.run_fused(128, inputs)


# ------------------------------------------------------------------------------- emulation


@pytest.mark.parametrize("regime", list(OPERATION.regimes))
def test_emulated_gdn_stays_within_the_tolerances(regime: str) -> None:
    workload, inputs = inputs_of((300, 0, 17), regime, heads=(1, 2))
    judged(emulate_fused.emulate(None, inputs), workload, inputs, regime)


def test_the_gdn_emulation_rounds_like_the_kernel() -> None:
    pytest.importorskip("cutlass")
    from gdn_fused_compile import run_fused

    for regime, heads in (("production", (1, 2)), ("similar_keys", (1, 1))):
        _, inputs = inputs_of((100,), regime, heads)
        got = run_fused(128, inputs)
        want = emulate_fused.emulate(None, inputs)
        for name, x in want.items():
            error = (got[name].float() - x.float()).norm()
            assert error <= 1e-3 * x.float().norm(), (regime, name)
