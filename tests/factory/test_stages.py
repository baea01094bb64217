"""Stages: each verdict and the numbers in its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import candidates
import operations
from factory.funnel import Funnel, run_cpu_stage
from factory.stages.base import HarnessError
from factory.stages.compile import compile_schedule
from factory.stages.emulate import References, emulate, gating_order
from factory.stages.model import model
from factory.stages.validate import validate
from leaderboard.records import Clock, StageStatus
from operations import Tolerance

OPERATION = operations.get("toy_scale")
FAMILY = candidates.get("toy_scale")


def toy(kind: str, **values):
    return FAMILY.schedule({"kind": kind, **values})


@pytest.fixture
def references() -> References:
    return References(OPERATION, seed=0)


def test_validate_names_the_broken_budget():
    result = validate(FAMILY, toy("greedy"))
    assert (result.status, result.reason) == (StageStatus.INFEASIBLE, "wants 300 KiB of 227")
    assert validate(FAMILY, toy("offset")).status is StageStatus.PASSED


def test_emulate_passes_a_right_candidate_in_all_regimes_of_its_contract(references):
    result = emulate(FAMILY, toy("exact", block=2), references)
    assert result.status is StageStatus.PASSED
    met = {(e.regime, e.workload) for e in result.errors if not e.out_of_contract}
    assert met == {(r, w) for r in ("production", "constant", "slow") for w in ("r3", "r5")}
    assert all(e.within and e.max_rel < 1e-6 for e in result.errors if not e.out_of_contract)


def test_regimes_past_the_bound_are_recorded_as_out_of_contract(references):
    result = emulate(FAMILY, toy("exact", block=2), references)
    outside = [e for e in result.errors if e.out_of_contract]
    assert [e.regime for e in outside] == ["beyond"]
    assert not outside[0].within
    assert outside[0].max_rel is None


def test_the_mild_regime_decides_nothing(references):
    result = emulate(FAMILY, toy("exact", block=2), references)
    assert "mild" not in {e.regime for e in result.errors}


def test_a_wrong_candidate_is_rejected_with_its_error(references):
    result = emulate(FAMILY, toy("offset"), references)
    assert result.status is StageStatus.REJECTED
    assert result.reason == "regime production, workload r3: y max error 1.00e-01 > 1.0e-02"


def test_a_regimes_own_tolerance_decides_there(monkeypatch, references):
    own = replace(
        OPERATION.regimes["production"], tolerances={"y": Tolerance(0.05, 0.05, "made up")}
    )
    monkeypatch.setitem(OPERATION.regimes, "production", own)
    result = emulate(FAMILY, toy("offset"), references)
    assert result.reason == "regime production, workload r3: y max error 1.00e-01 > 5.0e-02"
    wide = replace(own, tolerances={"y": Tolerance(0.2, 0.2, "made up")})
    monkeypatch.setitem(OPERATION.regimes, "production", wide)
    result = emulate(FAMILY, toy("offset"), references)
    assert result.reason == "regime constant, workload r3: y max error 1.00e-01 > 1.0e-02"


def test_a_non_finite_candidate_is_rejected_with_counts_and_exponent(references):
    result = emulate(FAMILY, toy("overflow"), references)
    assert result.status is StageStatus.REJECTED
    assert result.reason == (
        "regime production, workload r3: y has 24 non-finite of 24 (largest exponent 103 > 88)"
    )
    assert result.errors[-1].max_rel is None


def test_what_is_rejected_is_walked_through_the_sweep():
    """The verdict is production's; the sweep shows from which severity on it is wrong."""
    operation, family = operations.get("kda_prefill"), candidates.get("kda_prefill")
    schedule = family.schedule(
        {"form": "split", "bt": 64, "anchor": "mid", "segments": 1, "rows": 64}
    )
    result = emulate(family, schedule, References(operation, seed=0))
    assert result.status is StageStatus.REJECTED
    assert result.reason.startswith("regime production")
    first = next(e for e in result.errors if not e.within)
    assert first.regime == "production"
    sweep = {r.name: r.severity for r in operation.regimes.values() if r.severity is not None}
    finite = {}
    for e in result.errors:
        if e.regime in sweep:
            finite[e.regime] = finite.get(e.regime, True) and e.finite
    assert set(finite) == set(sweep)
    mildest, steepest = max(sweep, key=sweep.get), min(sweep, key=sweep.get)
    assert finite[mildest]
    assert not finite[steepest]


def test_production_is_met_first(references):
    assert gating_order(OPERATION)[0].name == "production"


def test_a_raising_emulation_is_the_candidates_crash(references):
    result = emulate(FAMILY, toy("raises"), references)
    assert result.status is StageStatus.CRASHED
    assert "RuntimeError: made to raise" in result.reason


def test_a_failing_oracle_is_the_harness_fault(monkeypatch, references):
    def broken(inputs):
        raise MemoryError("no room")

    monkeypatch.setattr(OPERATION, "fast_oracle", broken)
    with pytest.raises(HarnessError, match=r"regime production.*MemoryError: no room"):
        emulate(FAMILY, toy("exact", block=2), references)


def test_out_of_memory_in_an_emulation_is_no_verdict(monkeypatch, references):
    def broken(schedule, inputs):
        raise MemoryError

    monkeypatch.setattr(FAMILY, "emulate", broken)
    with pytest.raises(HarnessError, match="out of memory"):
        emulate(FAMILY, toy("exact", block=2), references)


def test_an_emulation_that_writes_its_inputs_is_rejected_and_harms_nobody_else(
    monkeypatch, references
):
    right = FAMILY.emulate

    def spoiling(schedule, inputs):
        outputs = right(schedule, inputs)
        inputs["x"].zero_()
        return outputs

    monkeypatch.setattr(FAMILY, "emulate", spoiling)
    result = emulate(FAMILY, toy("exact", block=2), references)
    assert (result.status, result.reason) == (
        StageStatus.REJECTED,
        "regime production, workload r3: input x changed",
    )
    monkeypatch.setattr(FAMILY, "emulate", right)
    assert emulate(FAMILY, toy("exact", block=2), references).status is StageStatus.PASSED


def test_a_missing_output_is_rejected(monkeypatch, references):
    monkeypatch.setattr(FAMILY, "emulate", lambda schedule, inputs: {})
    result = emulate(FAMILY, toy("exact", block=2), references)
    assert (result.status, result.reason) == (
        StageStatus.REJECTED,
        "regime production, workload r3: output y is missing",
    )


def test_references_are_computed_once_and_bounded(monkeypatch):
    calls = []
    real = OPERATION.fast_oracle
    monkeypatch.setattr(OPERATION, "fast_oracle", lambda i: calls.append(1) or real(i))
    kept = References(OPERATION, seed=0)
    for _ in range(3):
        emulate(FAMILY, toy("exact", block=2), kept)
    assert len(calls) == 6
    small = References(OPERATION, seed=0, limit_bytes=1)
    emulate(FAMILY, toy("exact", block=2), small)
    assert len(small._entries) == 1


def test_seed_changes_inputs():
    regime, workload = OPERATION.regimes["production"], OPERATION.reduced()[0]
    a = References(OPERATION, seed=0).get(regime, workload)[0]["x"]
    b = References(OPERATION, seed=1).get(regime, workload)[0]["x"]
    assert not torch.equal(a, b)


def test_compile_keeps_resources():
    result = compile_schedule(FAMILY, toy("exact", block=1))
    assert result.status is StageStatus.PASSED
    assert result.details["kernels"][0]["registers"] == 32


def test_a_build_error_is_one_line_and_infeasible():
    result = compile_schedule(FAMILY, toy("no_build"))
    assert (result.status, result.reason) == (StageStatus.INFEASIBLE, "does not compile")


def test_a_missing_toolchain_is_no_verdict():
    with pytest.raises(HarnessError, match="nvidia-cutlass-dsl is not installed"):
        compile_schedule(FAMILY, toy("no_dsl"))


def test_model_scores_all_tuned_workloads_and_only_those():
    result = model(OPERATION, FAMILY, toy("exact", block=8))
    assert result.details["modelled_us"] == {"64": 7.4, "256": 26.6}
    assert result.score_us == pytest.approx((7.4 * 26.6) ** 0.5)
    assert result.measurements == ()


def test_a_model_without_a_number_is_the_harness_fault(monkeypatch):
    monkeypatch.setattr(FAMILY, "modelled_us", lambda s, w: 0.0)
    with pytest.raises(HarnessError, match=r"gave 0\.0 us"):
        model(OPERATION, FAMILY, toy("exact", block=8))


def test_funnel_depends_on_the_clock():
    assert Funnel.of(Clock.MODELLED, "emulate").stages == ("validate", "emulate")
    assert Funnel.of(Clock.MODELLED, "compile").stages == ("validate", "emulate", "compile")
    measured = Funnel.of(Clock.GPU, "emulate")
    assert measured.stages == ("validate", "emulate", "compile", "gate", "screen", "time")
    assert measured.after("compile") == "gate"
    assert measured.after("time") is None


def test_there_is_no_other_cpu_stage(references):
    with pytest.raises(ValueError, match="no CPU stage 'gate'"):
        run_cpu_stage("gate", FAMILY, toy("offset"), references)
