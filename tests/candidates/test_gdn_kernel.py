"""GDN's split kernels: compile within their budgets, and compute, in a PTX interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import operations
from candidates import BuildError, Schedule, ToolchainError
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates.gdn_prefill import FAMILY
from candidates.gdn_prefill.kernel.config import Config
from candidates.gdn_prefill.kernel.prep_plan import Plan
from candidates.gdn_prefill.space import GdnSchedule
from operations.gdn_prefill import GdnWorkload

pytest.importorskip("cutlass")

OPERATION = operations.get("gdn_prefill")


def inputs_of(
    lengths: tuple[int, ...], regime: str, heads: int = 1, group: int = 2, **more: Any
) -> tuple[GdnWorkload, dict[str, Any]]:
    workload = GdnWorkload("case", heads=heads, value_heads=heads * group, lengths=lengths, **more)
    return workload, OPERATION.generate(workload, OPERATION.regimes[regime], seed=0)


def wrong(got: dict[str, torch.Tensor], workload: GdnWorkload, inputs: Any, regime: str) -> Any:
    want = OPERATION.fast_oracle(inputs)
    errors = OPERATION.compare(got, want, workload, OPERATION.regimes[regime])
    return [e for e in errors if not e.within]


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return max(
        float((got[n].double() - x.double()).norm() / x.double().norm()) for n, x in want.items()
    )


# ----------------------------------------------------------------------------- compilation


@pytest.mark.parametrize("bt", [16, 32, 64])
def test_prep_compiles_without_spills_for_as_many_ctas_as_it_plans(bt: int) -> None:
    build = FAMILY.compile(GdnSchedule(bt).schedule())
    assert build.problems == ()
    prep, scan = build.kernels
    plan = Plan(bt)
    assert prep.name.startswith("gdn_prep_")
    assert scan.name.startswith("kda_scan_")
    assert (prep.threads, prep.dynamic_smem_bytes) == (plan.threads, plan.smem_bytes)
    assert prep.registers * plan.threads * plan.blocks_per_sm <= 65536
    assert (plan.smem_bytes + 1024) * plan.blocks_per_sm <= 228 * 1024


@pytest.mark.soak
def test_every_offered_schedule_compiles_within_its_budgets() -> None:
    builds = [FAMILY.compile(s) for s in FAMILY.offered("gdn_prefill") if s["form"] == "split"]
    assert [p for build in builds for p in build.problems] == []
    # Two schedules with equal machine code would be one schedule under two names.
    assert len({build.cubin_sha256 for build in builds}) == len(builds)


def test_every_form_of_the_inputs_compiles_without_spills() -> None:
    from candidates._delta_rule.kernel.resources import (
        Cubin,
        budget_problems,
        dynamic_smem,
        kernel_resources,
    )
    from candidates.gdn_prefill.kernel import host

    every = Options(
        "softplus", "bfloat16", True, "bfloat16", True, True, offsets="int64", compact=False
    )
    compiled, cubin = host.compile_function(*host.prep_job(Config(64), every), keep=True)
    (kernel,), _ = kernel_resources(Cubin(cubin), dynamic_smem(str(compiled.ir_module)))
    assert kernel.name.startswith("gdn_prep_64_softplus_g16_b16_logits_l2_strided")
    assert budget_problems(kernel) == ()


def test_the_scan_is_that_of_every_family_bit_for_bit() -> None:
    from candidates._delta_rule.kernel import launch
    from candidates._delta_rule.kernel.resources import Cubin, dynamic_smem, kernel_resources
    from candidates.gdn_prefill.kernel import host

    compiled, cubin = host.compile_function(*host.scan_job(Config(16), True), keep=True)
    kernels, code = kernel_resources(Cubin(cubin), dynamic_smem(str(compiled.ir_module)))
    shared = launch.scan_part(16, 64, 1)
    assert (kernels, code) == (shared.kernels, shared.code_sha256)


def test_segments_bring_their_kernels_in_launch_order() -> None:
    from candidates.gdn_prefill.kernel.launch import kernel_names

    build = FAMILY.compile(GdnSchedule(16, 4).schedule())
    assert build.problems == ()
    for kernel, prefix in zip(build.kernels, kernel_names(4), strict=True):
        assert kernel.name.startswith(prefix)


def test_what_does_not_exist_is_the_candidates_fault() -> None:
    with pytest.raises(BuildError, match="'anchor'"):
        FAMILY.compile(Schedule((("form", "split"), ("bt", 32), ("anchor", "mid"))))


def test_loading_without_a_gpu_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="no CUDA GPU"):
        FAMILY.load(GdnSchedule(32).schedule())


# ------------------------------------------------------------------------ in the interpreter


@pytest.mark.parametrize(
    ("bt", "regime"),
    [
        (16, "production"),
        (32, "similar_keys"),
        (64, "scattered"),
        *(
            pytest.param(bt, regime, marks=pytest.mark.soak)
            for bt in (16, 32, 64)
            for regime in ("production_steep", "constant_inf", "mixed_heads", "single_1e6")
        ),
    ],
)
def test_the_compiled_kernels_compute_what_oracle_and_emulation_do(bt: int, regime: str) -> None:
    from gdn_compile import run_call

    workload, inputs = inputs_of((15, 0, bt + 3), regime)
    got = run_call(Config(bt), inputs)
    assert wrong(got, workload, inputs, regime) == []
    assert distance(got, FAMILY.emulate(GdnSchedule(bt).schedule(), inputs)) <= 1e-3


def test_a_group_of_value_heads_reads_its_own_key_head() -> None:
    from gdn_compile import run_call

    workload, inputs = inputs_of((20, 13), "slow", heads=2, group=3, initial_state=False)
    assert wrong(run_call(Config(16), inputs), workload, inputs, "slow") == []


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (Config(16, 64, 4), 130),
        pytest.param(Config(16, 128, 2), 64, marks=pytest.mark.soak),
        pytest.param(Config(32, 128, 1), 33, marks=pytest.mark.soak),
        pytest.param(Config(32, 64, 4), 900, marks=pytest.mark.soak),
        pytest.param(Config(64, 64, 2), 512, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_segments_and_wide_scans_are_right(config: Config, tokens: int) -> None:
    from gdn_compile import run_call

    workload, inputs = inputs_of((tokens,), "slow", group=1)
    got = run_call(config, inputs)
    assert wrong(got, workload, inputs, "slow") == []
    schedule = GdnSchedule(config.bt, config.segments, config.rows).schedule()
    # Roundings that fall the other way add up along a chain.
    assert distance(got, FAMILY.emulate(schedule, inputs)) <= 2e-3


def test_images_are_what_the_definition_says() -> None:
    from gdn_compile import run_prep
    from prep_reference import FIELDS, batch_of, reference, unpack

    config = Config(64)
    _, inputs = inputs_of((70, 17), "slow", group=1)
    inputs["g"][3], inputs["g"][5:7], inputs["g"][40:48] = float("-inf"), -1e4, -30.0
    images, _ = run_prep(config, inputs)
    batch = batch_of(inputs["cu_seqlens"].tolist(), 87, 64, config.unroll)
    got = unpack(images[batch.owned], 64)
    wide = {**inputs, "g": inputs["g"].unsqueeze(-1).expand(-1, -1, 128)}
    want = reference(wide, batch, inputs["scale"])
    for name in FIELDS:
        error = (got[name] - want[name]).abs().max() / want[name].abs().max()
        assert error <= 8e-3, name
    assert got["pad"].eq(0).all()
    assert got["aqk"].triu(1).eq(0).all()  # by selection, not by a factor


@pytest.mark.soak
def test_the_order_of_warps_does_not_change_a_bit() -> None:
    from gdn_compile import run_call

    _, inputs = inputs_of((40,), "slow", group=1)
    first = run_call(Config(32), inputs)
    again = run_call(Config(32), inputs, order=1)
    assert all(torch.equal(x, again[name]) for name, x in first.items())


def test_wrong_offsets_are_clamped_and_rows_outside_cleared() -> None:
    from gdn_compile import run_call

    _, inputs = inputs_of((40,), "production", group=1, initial_state=False)
    got = run_call(Config(16), inputs, offsets=[3, 20, 7, 99])
    want = run_call(Config(16), inputs, offsets=[3, 20, 20, 40])
    assert torch.equal(got["o"], want["o"])
    assert torch.equal(got["final_state"], want["final_state"])
    assert not got["o"][:3].any()
    assert got["o"].isfinite().all()


def test_what_lies_beyond_a_sequence_is_set_to_zero_whatever_it_holds() -> None:
    from gdn_compile import run_call

    _, inputs = inputs_of((40,), "slow", group=1)
    want = run_call(Config(32), inputs, offsets=[0, 21])
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][21:] = float("nan")
    got = run_call(Config(32), inputs, offsets=[0, 21])
    assert all(torch.equal(x, got[name]) for name, x in want.items())
    assert not got["o"][21:].any()


@pytest.mark.parametrize(
    "options",
    [
        Options(l2norm=True, beta_dtype="bfloat16", offsets="int64"),
        pytest.param(
            Options("softplus", "bfloat16", True, final_state=None, compact=False),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            Options("softplus", initial_state="bfloat16", final_state="bfloat16"),
            marks=pytest.mark.soak,
        ),
    ],
    ids=str,
)
def test_inputs_are_activated_and_normalised_where_they_are_used(options: Options) -> None:
    from gdn_compile import raw_call, run_call

    raw, plain = raw_call(options, (9, 26))
    got = run_call(Config(32), raw, options=options)
    want = OPERATION.fast_oracle(plain)
    limit = 1e-2 if options.final_state == "bfloat16" else 7e-3
    for name, x in got.items():
        error = (x.double() - want[name]).norm() / want[name].norm()
        assert error <= limit, (name, error)
    assert ("final_state" in got) == (options.final_state is not None)
    assert PLAIN.suffix == ""


# -------------------------------------------------------------- from the entry point to the end


@pytest.fixture
def prefill(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The entry point on CPU tensors, with the interpreter in place of compiled functions."""
    from gdn_compile import interpreted

    from candidates._delta_rule.kernel import known
    from candidates.gdn_prefill.kernel import arguments, entry

    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
    monkeypatch.setattr(known, "_KNOWN", {})
    monkeypatch.setattr(known, "_PREPARED", {})
    monkeypatch.setattr(known, "current_device", lambda: -1)
    monkeypatch.setattr(entry, "compiled", interpreted)
    monkeypatch.setattr(entry, "on_stream", lambda stream, device: None)
    return entry.gdn_prefill


def test_a_batch_without_offsets_is_computed_as_its_packed_form(prefill: Any) -> None:
    workload, inputs = inputs_of((18, 18), "slow")
    scale = inputs.pop("scale")
    o, final = prefill(**inputs, schedule={"bt": 16}, scale=scale)
    assert wrong({"o": o, "final_state": final}, workload, {**inputs, "scale": scale}, "slow") == []
    names = ("q", "k", "v", "g", "beta")
    batch = {name: inputs[name].unflatten(0, (2, 18)) for name in names}
    o2, final2 = prefill(
        **batch, initial_state=inputs["initial_state"], schedule={"bt": 16}, scale=scale
    )
    assert torch.equal(o2.flatten(0, 1), o)
    assert torch.equal(final2, final)


def test_states_are_updated_in_place(prefill: Any) -> None:
    _, inputs = inputs_of((9, 0, 17), "slow", group=1)
    _, want = prefill(**inputs, schedule=Config(16))
    state = inputs["initial_state"].clone()
    _, final = prefill(**{**inputs, "initial_state": state}, final_state=state, schedule=Config(16))
    assert final is state
    assert torch.equal(final, want)


def test_views_of_one_projection_and_what_a_model_leaves_to_the_kernel(prefill: Any) -> None:
    from gdn_compile import raw_call

    options = Options("softplus", "bfloat16", True, "bfloat16", True, True, compact=False)
    raw, plain = raw_call(options, (5, 14))
    names = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "A_log", "dt_bias")
    how = {"gate": "softplus", "beta_logits": True, "l2norm": True, "schedule": Config(16)}
    want = OPERATION.fast_oracle(plain)
    for _ in range(2):  # checked, and as a call like one before
        o, final = prefill(**{n: raw[n] for n in names}, **how)
        for got, name in ((o, "o"), (final, "final_state")):
            assert (got.double() - want[name]).norm() <= 7e-3 * want[name].norm(), name
