"""Every form of inputs, on the CPU: the compiled kernel in an interpreter, against the oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from option_cases import OPERATION, call_of, errors, expected

from candidates._delta_rule.kernel.options import L2NORM_EPS, PLAIN, Options
from operations.kda_prefill import KdaWorkload, raw

RAW = Options(
    gate="safe", gate_dtype="bfloat16", bias=True, beta_dtype="bfloat16", beta_logits=True,
    l2norm=True,
)  # fmt: skip
"""What production hands over."""

EVERYTHING = dataclasses.replace(
    RAW, gate="softplus", initial_state="bfloat16", final_state="bfloat16", offsets="int64",
    compact=False,
)  # fmt: skip


def judged(frame: str, builders: int, options: Options, pieces: int = 1, **case: object) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    x, how = call_of(options, **case)  # type: ignore[arg-type]
    got = run_fused(frame, builders, {**x, **how, "scale": 128**-0.5}, pieces, options=options)
    assert ("final_state" in got) is (options.final_state is not None)
    for name, (largest, rms) in errors(got, expected(x, how)).items():
        assert largest <= 8e-3, name
        assert rms <= 6e-3, name


# ------------------------------------------------------------------------ in the interpreter


@pytest.mark.parametrize(
    ("frame", "builders", "options"),
    [
        ("middle", 3, RAW),
        ("boundary", 2, dataclasses.replace(RAW, gate_dtype="float32", final_state=None)),
    ],
)
def test_raw_inputs_are_activated_and_normalised(
    frame: str, builders: int, options: Options
) -> None:
    judged(frame, builders, options, lengths=(15, 0, 20))


def test_slices_of_a_projection_with_two_value_heads_to_a_key() -> None:
    judged("middle", 3, EVERYTHING, lengths=(17, 3), group=2)


def test_equal_sequences_without_offsets() -> None:
    options = Options(offsets="equal", compact=False, gate_dtype="bfloat16")
    judged("middle", 3, options, lengths=(18, 18), group=2)


@pytest.mark.parametrize("regime", ["production", "slow"])
def test_the_guard_reads_raw_inputs_as_the_builders_do(regime: str) -> None:
    judged("middle", 3, RAW, pieces=3, lengths=(130,), regime=regime)


def test_raw_gates_of_any_strength_are_activated_where_a_chunk_is_steep() -> None:
    pytest.importorskip("cutlass")
    from fused_compile import run_fused

    x, how = call_of(EVERYTHING, lengths=(15, 34), regime="slow")
    x["g"][3], x["g"][24:30, :, ::2], x["g"][40, :, 1::4] = 1e4, 40.0, math.inf
    got = run_fused("middle", 3, {**x, **how, "scale": 128**-0.5}, 1, options=EVERYTHING)
    for name, (largest, rms) in errors(got, expected(x, how)).items():
        assert largest <= 8e-3, name
        assert rms <= 6e-3, name


# ------------------------------------------------------------------------------- compilation


@pytest.mark.parametrize(
    ("frame", "builders", "options"),
    [("middle", 3, RAW), ("middle", 3, EVERYTHING), ("boundary", 2, EVERYTHING)],
    ids=["raw", "everything", "boundary"],
)
def test_variants_compile_without_spills_or_serialised_products(
    frame: str, builders: int, options: Options
) -> None:
    pytest.importorskip("cutlass")
    from fused_compile import compiled_fused

    from candidates._delta_rule.kernel.resources import budget_problems

    kept = compiled_fused(frame, builders, True, options)
    resources, _ = kept.kernels
    assert resources.name.startswith(f"kda_fused_{frame}_b{builders}_{options.gate}_")
    assert budget_problems(resources) == ()
    assert "Compiling entry function" in kept.remarks
    assert [c for c in ("C7511", "C7512", "C7514", "C7519") if c in kept.remarks] == []


def test_unknown_options_do_not_exist() -> None:
    with pytest.raises(ValueError, match="gate='tanh'"):
        Options(gate="tanh")
    with pytest.raises(ValueError, match="offsets='int16'"):
        Options(offsets="int16")
    with pytest.raises(ValueError, match="bias goes with"):
        Options(bias=True)
    assert PLAIN.suffix == ""
    assert EVERYTHING.suffix == "_softplus_g16_b16_logits_l2_strided"


# ------------------------------------------------------------------------------- what is meant


def test_the_operations_raw_form_means_its_plain_form() -> None:
    workload = KdaWorkload("raw", heads=2, lengths=(9, 4))
    x = OPERATION.raw_form(workload, OPERATION.regimes["production"], seed=1, device="cpu")
    assert x is not None
    got = raw.plain(
        x["q_raw"], x["k_raw"], x["v"], x["g_raw"], x["beta_logits"], x["cu_seqlens"],
        gate="safe", lower_bound=x["lower_bound"], A_log=x["A_log"], dt_bias=x["dt_bias"],
        beta_logits=True, l2norm=True,
    )  # fmt: skip
    assert torch.allclose(got["g"], x["g"].double(), rtol=1e-5, atol=1e-6)
    assert torch.allclose(got["beta"], x["beta"].double(), rtol=1e-6)
    assert torch.allclose(got["q"], x["q"].double(), atol=2e-3)  # that is rounded to bf16
    assert torch.allclose(got["k"].norm(dim=-1), torch.ones(13, 2).double(), atol=1e-5)
    assert got["scale"] == pytest.approx(1 / math.sqrt(128))


def test_gates_at_both_ends() -> None:
    x = torch.tensor([-1e4, -50.0, -0.0, 50.0, 1e4]).double().view(5, 1, 1)
    slope, bias = torch.full((1,), math.log(2.0)), torch.zeros(1, 1)
    safe = raw.activated_gate("safe", x, -5.0, slope, bias).flatten()
    assert safe.tolist() == pytest.approx([0.0, -5 * math.exp(-100), -2.5, -5.0, -5.0])
    soft = raw.activated_gate("softplus", x, None, slope, bias).flatten()
    assert soft.tolist() == pytest.approx([0.0, -2 * math.exp(-50), -2 * math.log(2), -100, -2e4])
    assert safe[1] < 0
    assert soft[1] < 0
    for gate, lower, A_log in (("safe", None, slope), ("softplus", None, None), ("safe", -5, None)):
        with pytest.raises(ValueError, match="needs"):
            raw.activated_gate(gate, x, lower, A_log)
    with pytest.raises(ValueError, match="'tanh'"):
        raw.activated_gate("tanh", x, None, slope)


def test_batches_and_value_heads_are_packed_and_repeated() -> None:
    q = torch.randn(2, 3, 1, 128)
    v, g, beta = torch.randn(2, 3, 2, 128), -torch.rand(2, 3, 2, 128), torch.rand(2, 3, 2)
    got = raw.plain(q, q, v, g, beta, scale=0.0)
    assert got["cu_seqlens"].tolist() == [0, 3, 6]
    assert torch.equal(got["q"][:, 1], q.double().flatten(0, 1)[:, 0])
    assert got["beta"].shape == (6, 2)
    assert got["scale"] == 0.0
    zero = raw.plain(torch.zeros(2, 3, 1, 128), q, v, g, beta, l2norm=True)
    assert not zero["q"].any()
    assert raw.L2NORM_EPS == L2NORM_EPS
