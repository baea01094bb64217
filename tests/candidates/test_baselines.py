"""Baselines: the plain torch ones are right everywhere; the others say what they lack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import candidates
import operations
from candidates.gdn_prefill.baselines import BASELINES as GDN_BASELINES
from candidates.kda_prefill.baselines._flashkda import KERNELS
from operations.gdn_prefill import GdnWorkload
from operations.kda_prefill import KdaWorkload

BASELINES = {
    "kda_prefill": {b.name: b for b in candidates.baselines("kda_prefill")},
    "gdn_prefill": {b.name: b for b in GDN_BASELINES},
}
EACH = [(operation, name) for operation, found in BASELINES.items() for name in found]
REGIMES = [(o, r) for o in BASELINES for r in sorted(operations.get(o).regimes)]


def run(
    operation: str, name: str, workload: operations.Workload, regime: str, device: str = "cpu"
) -> tuple[operations.TensorError, ...]:
    op = operations.get(operation)
    inputs = op.generate(workload, op.regimes[regime], seed=7, device=device)
    raw = op.raw_form(workload, op.regimes[regime], seed=7, device=device)
    outputs = op.outputs(inputs)
    call = BASELINES[operation][name].load(workload, raw).bind(inputs, outputs)
    return op.compare(call(), op.fast_oracle(inputs), workload, op.regimes[regime])


def test_the_controls_are_the_peers_and_plain_torch() -> None:
    assert {o: list(found) for o, found in BASELINES.items()} == {
        "kda_prefill": ["flashkda", "fla", "cudnn_fused", "cudnn_segmented", "torch"],
        "gdn_prefill": ["fla", "flashqla", "flashinfer", "torch"],
    }
    for operation, name in EACH:
        baseline = BASELINES[operation][name]
        assert baseline.operation == operation
        assert baseline.input_form == ("raw" if name == "flashkda" else "activated")


@pytest.mark.parametrize(("operation", "regime"), REGIMES)
def test_plain_torch_is_within_tolerance_in_every_regime(operation: str, regime: str) -> None:
    checked = 0
    for workload in operations.get(operation).reduced():
        errors = run(operation, "torch", workload, regime)
        assert errors
        bad = [e for e in errors if not e.within]
        assert not bad, f"{workload.name}: {bad[0]}"
        checked += 1
    assert checked


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.parametrize(("operation", "name"), EACH)
def test_an_absent_peer_is_named_with_the_fix(operation: str, name: str) -> None:
    baseline = BASELINES[operation][name]
    reason = baseline.missing()
    if name == "torch":
        assert reason is None
        assert baseline.version().startswith("torch ")
        return
    assert reason is not None
    assert "\n" not in reason
    assert any(word in reason for word in ("install", "build", "needs an sm90 GPU"))


def gated_delta_rule(
    operation: str, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, state: Any, cu: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a right kernel returns for one packed call with value-major states."""
    names = ("q", "k", "v", "g", "beta", "scale", "initial_state", "cu_seqlens")
    call = dict(zip(names, (q, k, v, g, beta, scale, state, cu), strict=True))
    out = operations.get(operation).fast_oracle(call)
    return out["o"].bfloat16(), out["final_state"].float()


def fla_like(operation: str) -> Callable[..., Any]:
    """A stand-in with the signature of fla's operators: one batch row of packed tokens."""

    def chunk(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, state_v_first: bool = False,
        cu_seqlens: Any = None, cu_seqlens_cpu: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert {x.shape[0] for x in (q, k, v, g, beta)} == {1}
        assert output_final_state
        assert state_v_first
        assert cu_seqlens.dtype == torch.int64
        assert cu_seqlens_cpu is None or torch.equal(cu_seqlens_cpu, cu_seqlens)
        rows = (x.squeeze(0) for x in (q, k, v, g, beta))
        o, final = gated_delta_rule(operation, *rows, scale, initial_state, cu_seqlens)
        return o.unsqueeze(0), final

    return chunk


def flashinfer_like(
    q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, scale: Any = None,
    initial_state: Any = None, output_final_state: bool = False, cu_seqlens: Any = None,
    use_qk_l2norm_in_kernel: bool = False, output: Any = None, output_state: Any = None,
    backend: str = "auto", max_seqlen: Any = None, *, gate_domain: str = "linear",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A stand-in with the signature of FlashInfer's operator, writing what it was given."""
    assert output_final_state
    assert not use_qk_l2norm_in_kernel
    assert backend == "flashinfer", "never another engine's kernel"
    assert max_seqlen == cu_seqlens.diff().max()
    g = g if gate_domain == "log" else g.log()
    o, final = gated_delta_rule("gdn_prefill", q, k, v, g, beta, scale, initial_state, cu_seqlens)
    output.copy_(o)
    output_state.copy_(final)
    return output, output_state


PEERS: dict[tuple[str, str], tuple[str, str, Callable[..., Any]]] = {
    ("kda_prefill", "fla"): ("fla.ops.kda", "chunk_kda", fla_like("kda_prefill")),
    ("gdn_prefill", "fla"): (
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        fla_like("gdn_prefill"),
    ),
    ("gdn_prefill", "flashqla"): (
        "flash_qla",
        "chunk_gated_delta_rule",
        fla_like("gdn_prefill"),
    ),
    ("gdn_prefill", "flashinfer"): (
        "flashinfer.gdn_prefill",
        "chunk_gated_delta_rule",
        flashinfer_like,
    ),
}
SHAPES = {
    "kda_prefill": KdaWorkload("peers", heads=2, lengths=(33, 0, 70), scale=0.5),
    "gdn_prefill": GdnWorkload("peers", heads=2, value_heads=4, lengths=(33, 0, 70), scale=0.5),
}


def pretend(patch: pytest.MonkeyPatch, operation: str, name: str) -> None:
    """Let a peer's stand-in be imported as the peer, in an environment that asks for others."""
    module, function, stand_in = PEERS[operation, name]
    parts = module.split(".")
    for depth in range(len(parts)):
        path = ".".join(parts[: depth + 1])
        patch.setitem(sys.modules, path, ModuleType(path))
    patch.setattr(sys.modules[module], function, stand_in, raising=False)
    for variable in ("FLA_FLASH_KDA", "FLA_FLASH_QLA", "FLA_INTRACARD_CP"):
        patch.setenv(variable, "1")


@pytest.mark.parametrize(("operation", "name"), list(PEERS))
def test_an_adapter_asks_its_peer_for_this_operation(
    operation: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, operation, name)
    errors = run(operation, name, SHAPES[operation], "production")
    assert errors
    assert all(e.within for e in errors)
    if name == "fla":
        other = {"kda_prefill": "FLA_FLASH_KDA", "gdn_prefill": "FLA_FLASH_QLA"}[operation]
        assert os.environ[other] == "0", "else another engine answers under fla's name"


def test_flashinfer_refuses_inputs_without_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "gdn_prefill", "flashinfer")
    nothing = GdnWorkload("nothing", heads=2, value_heads=4, lengths=())
    with pytest.raises(ValueError, match="flashinfer needs a sequence"):
        run("gdn_prefill", "flashinfer", nothing, "production")


def test_peers_of_gdn_are_known_by_their_own_kernels_only() -> None:
    seen = {  # as the peers' sources name them
        "fla": (
            "chunk_local_cumsum_scalar_kernel",
            "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
            "recompute_w_u_fwd_kernel",
            "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
            "chunk_fwd_kernel_o",
        ),
        "flashqla": (
            "tilelang_chunk_local_cumsum_kernel_kernel",
            "tilelang_kkt_solve_kernel_kernel",
            "tilelang_prepare_h_kernel_kernel",
            "tilelang_correct_h0_kernel_kernel",
            "tilelang_fused_chunk_gdr_fwd_kernel_kernel",
        ),
    }
    for name, kernels in seen.items():
        for other in seen:
            loaded = _declared(other)
            assert all(k.startswith(loaded) == (other == name) for k in kernels)


def _declared(name: str) -> tuple[str, ...]:
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, "gdn_prefill", name)
        runnable = BASELINES["gdn_prefill"][name].load(SHAPES["gdn_prefill"], None)
    return tuple(runnable.kernel_names)


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
@pytest.mark.parametrize(("operation", "name"), EACH)
@pytest.mark.parametrize("regime", ["production", "slow"])
def test_a_present_peer_is_within_tolerance(operation: str, name: str, regime: str) -> None:
    op, baseline = operations.get(operation), BASELINES[operation][name]
    if reason := baseline.missing():
        pytest.skip(reason)
    workload = next(w for w in op.tuned() if w.name.startswith("2048/"))
    if baseline.input_form == "raw" and op.raw_form(workload, op.regimes[regime], seed=7) is None:
        pytest.skip(f"{regime} has no raw form")
    errors = [e for e in run(operation, name, workload, regime, "cuda") if e.scope == "all"]
    assert errors
    assert all(e.within for e in errors), errors
