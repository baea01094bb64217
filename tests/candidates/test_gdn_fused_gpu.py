"""The fused GDN form on an sm90 GPU: pieces, exact segments, and the same in every run.

``test_gdn_gpu.py`` runs the fused schedules that are offered through all regimes as well.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gdn_compile import asked, raw_call, shape
from on_a_gpu import assert_replays_in_a_graph, assert_streams_share_nothing, made_safe, moved

import operations
from candidates._delta_rule.kernel.options import Options
from candidates.gdn_prefill.kernel import launch
from candidates.gdn_prefill.kernel.config import FusedConfig
from candidates.gdn_prefill.kernel.entry import check, gdn_prefill
from operations.gdn_prefill import GdnWorkload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

OPERATION = operations.get("gdn_prefill")
REGIMES = (
    "slow", "mixed_heads", "one_hot_state", "similar_keys", "sweep_A2", "constant_2", "scattered",
)  # fmt: skip
CONFIGS = (
    FusedConfig(64),
    FusedConfig(128),
    FusedConfig(128, 4),
    FusedConfig(128, 1, 32),
    FusedConfig(128, 4, 32, 2),
)


WORKLOADS = (
    shape("ragged", 1, 3, (2047, 1, 3000)),
    shape("empty", 1, 3, (0, 0, 37, 0, 1, 130, 0)),
    shape("odd-pieces", 5, 5, (5000,)),
    shape("halves", 2, 4, (4096, 2048, 1024, 512, 256, 128, 64, 63, 1)),
    shape("across-sequences", 1, 7, (3000, 77, 1500)),
    shape("many-segments", 1, 1, (16384,)),
    shape("no-state", 1, 2, (100, 0, 900), initial_state=False),
    shape("full", 12, 24, (2000,)),
)


def inputs_of(workload: GdnWorkload, regime: str, seed: int = 1) -> Any:
    return OPERATION.generate(workload, OPERATION.regimes[regime], seed=seed, device="cuda")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_gdn_pieces_on_a_gpu_are_right_and_the_same_in_every_run(
    config: FusedConfig, workload: GdnWorkload
) -> None:
    schedule = launch.LoadedSchedule(config)
    for regime in REGIMES:
        inputs = inputs_of(workload, regime)
        call = schedule.bind(inputs, OPERATION.outputs(inputs))
        first = {name: x.clone() for name, x in call().items()}
        again = call()
        assert all(torch.equal(x, again[name]) for name, x in first.items()), regime
        want = OPERATION.fast_oracle(inputs)
        errors = OPERATION.compare(first, want, workload, OPERATION.regimes[regime])
        assert [e for e in errors if not e.within] == [], regime


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.plan.cuts], ids=str)
def test_gdn_pieces_whose_early_keys_are_long_are_scanned_from_their_sequences_start(
    config: FusedConfig,
) -> None:
    workload = shape("long-keys", 1, 3, (2047, 1, 3000))
    inputs = inputs_of(workload, "slow")
    inputs["g"][:] = -0.5
    inputs["k"][::50] = inputs["k"][::50] * 2
    inputs["beta"][::50] = 0.9
    schedule = launch.LoadedSchedule(config)
    call = schedule.bind(inputs, OPERATION.outputs(inputs))
    first = {name: x.clone() for name, x in call().items()}
    again = call()
    assert all(torch.equal(x, again[name]) for name, x in first.items())
    want = OPERATION.fast_oracle(inputs)
    errors = OPERATION.compare(first, want, workload, OPERATION.regimes["slow"])
    assert [e for e in errors if not e.within] == []


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "offsets", [[0, 900], [1, 1000], [0, 600, 100, 1000], [-5, 1200], [1000, 0], [1100, 1200]]
)
def test_malformed_gdn_offsets_are_made_safe_in_the_fused_form(
    config: FusedConfig, offsets: list[int]
) -> None:
    inputs = inputs_of(shape("one", 1, 2, (1000,), initial_state=False), "slow")
    results = []
    for cu in (offsets, made_safe(offsets, 1000)):
        x = {**inputs, "cu_seqlens": torch.tensor(cu, dtype=torch.int32, device="cuda")}
        out = torch.full_like(inputs["v"], math.nan)
        results.append(gdn_prefill(**x, schedule=config, out=out))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gdn_states_of_either_type_and_long_offsets(dtype: torch.dtype) -> None:
    inputs = inputs_of(shape("two", 2, 4, (1100, 300)), "slow")
    inputs["initial_state"] = inputs["initial_state"].to(dtype)
    want = OPERATION.fast_oracle({**inputs, "initial_state": inputs["initial_state"].float()})
    inputs["cu_seqlens"] = inputs["cu_seqlens"].long()
    for config in CONFIGS:
        final = torch.empty_like(inputs["initial_state"])
        o, got = gdn_prefill(**inputs, schedule=config, final_state=final)
        for x, name in ((o, "o"), (got, "final_state")):
            error = (x.double() - want[name]).norm() / want[name].norm()
            assert error <= 1e-2, (name, float(error))
        assert gdn_prefill(**inputs, schedule=config, final_state=False)[1] is None


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        Options(l2norm=True, beta_dtype="bfloat16"),
        Options("softplus", "bfloat16", True, beta_logits=True),
        Options("softplus", "bfloat16", True, "bfloat16", True, True, compact=False),
    ],
    ids=str,
)
def test_raw_gdn_inputs_are_right_in_the_fused_form(config: FusedConfig, options: Options) -> None:
    raw, plain = map(moved, raw_call(options, (1500, 0, 65)))
    tensors = {n: raw[n] for n in ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")}
    how = asked(options, raw)
    assert check(**tensors, **how).compact == options.compact
    results = gdn_prefill(**tensors, scale=raw["scale"], schedule=config, **how)
    want = OPERATION.fast_oracle(plain)
    for got, name in zip(results, ("o", "final_state"), strict=True):
        error = (got.double() - want[name]).norm() / want[name].norm()
        assert error <= 1e-2, (name, float(error))


def test_a_gdn_state_is_updated_in_place_by_ctas_of_64_rows() -> None:
    inputs = inputs_of(shape("three", 1, 2, (100, 0, 33)), "slow")
    _, want = gdn_prefill(**inputs, schedule=FusedConfig(64))
    state = inputs["initial_state"].clone()
    call = {**inputs, "initial_state": state, "final_state": state}
    gdn_prefill(**call, schedule=FusedConfig(64))
    assert torch.equal(state, want)
    with pytest.raises(ValueError, match="final_state shares memory"):
        gdn_prefill(**call, schedule=FusedConfig(128))


def test_two_streams_do_not_share_the_fused_scratch_of_gdn() -> None:
    workload = shape("long", 1, 2, (3000,))
    cases = [inputs_of(workload, regime) for regime in ("slow", "mixed_heads")]
    assert_streams_share_nothing(lambda x: gdn_prefill(**x, schedule=CONFIGS[3]), cases, times=100)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_fused_gdn_form_replays_in_a_cuda_graph(config: FusedConfig) -> None:
    workload = shape("graph", 1, 2, (1500, 33))
    first, second = (inputs_of(workload, regime) for regime in ("slow", "production"))
    assert_replays_in_a_graph(lambda x: gdn_prefill(**x, schedule=config), first, second)
