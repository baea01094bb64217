"""Baselines: the plain torch one is right everywhere; the others say what they lack."""

from __future__ import annotations

import pytest
import torch

import candidates
import operations
from candidates.kda_prefill.baselines._flashkda import KERNELS

OPERATION = operations.get("kda_prefill")
BASELINES = {b.name: b for b in candidates.baselines("kda_prefill")}
REGIMES = sorted(r.name for r in OPERATION.regimes.values())


def run(name: str, workload: operations.Workload, regime: str, device: str = "cpu"):
    inputs = OPERATION.generate(workload, OPERATION.regimes[regime], seed=7, device=device)
    raw = OPERATION.raw_form(workload, OPERATION.regimes[regime], seed=7, device=device)
    outputs = OPERATION.outputs(inputs)
    call = BASELINES[name].load(workload, raw).bind(inputs, outputs)
    return OPERATION.compare(
        call(), OPERATION.fast_oracle(inputs), workload, OPERATION.regimes[regime]
    )


def test_the_controls_are_the_four_peers_and_plain_torch() -> None:
    assert list(BASELINES) == ["flashkda", "fla", "cudnn_fused", "cudnn_segmented", "torch"]
    assert {n: b.input_form for n, b in BASELINES.items() if b.input_form == "raw"} == {
        "flashkda": "raw"
    }


@pytest.mark.parametrize("regime", REGIMES)
def test_plain_torch_is_within_tolerance_in_every_regime(regime: str) -> None:
    checked = 0
    for workload in OPERATION.reduced():
        errors = run("torch", workload, regime)
        assert errors
        bad = [e for e in errors if not e.within]
        assert not bad, f"{workload.name}: {bad[0]}"
        checked += 1
    assert checked


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_an_absent_peer_is_named_with_the_fix() -> None:
    for name in ("flashkda", "fla", "cudnn_fused", "cudnn_segmented"):
        reason = BASELINES[name].missing()
        assert reason is not None
        assert "\n" not in reason
        assert any(word in reason for word in ("install", "build", "needs an sm90 GPU"))
    assert BASELINES["torch"].missing() is None
    assert BASELINES["torch"].version().startswith("torch ")


def test_flashkda_is_known_by_its_kernels_mangled_or_not() -> None:
    seen = (  # as a profiler on an H200 wrote them, and the plain forms
        "_Z22_flash_kda_fwd_prepareIN4cute9TiledCopyINS0_9Copy_AtomIJ",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<",
        "_flash_kda_fwd_recurrence",
        "void _flash_kda_build_tile_prefix(long const*, int, int, int*)",
    )
    assert all(name.startswith(KERNELS) for name in seen)
    assert not any(name.startswith(KERNELS) for name in ("kda_prep_32_mid_0", "_Z3fooi", ""))


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(BASELINES))
@pytest.mark.parametrize("regime", ["production", "slow"])
def test_a_present_peer_is_within_tolerance(name: str, regime: str) -> None:
    baseline = BASELINES[name]
    if reason := baseline.missing():
        pytest.skip(reason)
    workload = OPERATION.workloads["2048/12/1"]
    if (
        baseline.input_form == "raw"
        and OPERATION.raw_form(workload, OPERATION.regimes[regime], seed=7) is None
    ):
        pytest.skip(f"{regime} has no raw form")
    errors = [e for e in run(name, workload, regime, "cuda") if e.scope == "all"]
    assert errors
    assert all(e.within for e in errors), errors
