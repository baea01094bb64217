"""Baselines: the plain torch ones are right everywhere; the others say what they lack."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import candidates
import operations
from candidates._delta_rule.kernel.options import PLAIN
from candidates.gdn_prefill.baselines import BASELINES as GDN_BASELINES
from candidates.gdn_prefill.kernel import entry as gdn_entry
from candidates.kda_prefill.baselines._flashkda import KERNELS
from candidates.kda_prefill.kernel import entry as kda_entry
from operations.gdn_prefill import GdnWorkload
from operations.kda_prefill import KdaWorkload
from operations.kda_prefill.raw import plain

BASELINES = {
    "kda_prefill": {b.name: b for b in candidates.baselines("kda_prefill")},
    "gdn_prefill": {b.name: b for b in GDN_BASELINES},
}
EACH = [(operation, name) for operation, found in BASELINES.items() for name in found]
REGIMES = [(o, r) for o in BASELINES for r in sorted(operations.get(o).regimes)]


def run(
    operation: str, name: str, workload: operations.Workload, regime: str, device: str = "cpu"
) -> tuple[operations.TensorError, ...]:
    return run_of(BASELINES[operation][name], operation, workload, regime, device)


def run_of(
    baseline: candidates.Baseline,
    operation: str,
    workload: operations.Workload,
    regime: str,
    device: str = "cpu",
) -> tuple[operations.TensorError, ...]:
    op = operations.get(operation)
    inputs = op.generate(workload, op.regimes[regime], seed=7, device=device)
    raw = op.raw_form(workload, op.regimes[regime], seed=7, device=device)
    outputs = op.outputs(inputs)
    call = baseline.load(workload, raw).bind(inputs, outputs)
    return op.compare(call(), op.fast_oracle(inputs), workload, op.regimes[regime])


def test_the_controls_are_the_peers_and_plain_torch() -> None:
    assert {o: list(found) for o, found in BASELINES.items()} == {
        "kda_prefill": [
            "flashkda", "fla", "cudnn_fused", "cudnn_fused_raw", "cudnn_segmented", "torch",
        ],
        "gdn_prefill": ["fla", "flashqla", "flashinfer", "torch"],
    }  # fmt: skip
    for operation, name in EACH:
        baseline = BASELINES[operation][name]
        assert baseline.operation == operation
        raw = name in ("flashkda", "cudnn_fused_raw")
        assert baseline.input_form == ("raw" if raw else "activated")


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


def of_raw(
    operation: str, q: Any, k: Any, v: Any, g: Any, beta: Any, cu: Any, state: Any, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a raw call in the one form that all who take raw inputs are fed."""
    assert {x.dtype for x in (q, k, v, g, beta)} == {torch.bfloat16}
    assert {x.is_contiguous() for x in (g, beta)} == {True}
    assert {how[n].dtype for n in ("A_log", "dt_bias")} == {torch.float32}
    assert how["beta_logits"] is how["l2norm"] is True
    call = plain(q, k, v, g, beta, cu, state, **how)
    out = operations.get(operation).fast_oracle(call)
    return out["o"].bfloat16(), out["final_state"].float()


def flashkda_like(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, out: Any, A_log: Any, dt_bias: Any,
    lower_bound: Any, initial_state: Any = None, final_state: Any = None, cu_seqlens: Any = None,
) -> None:  # fmt: skip
    """A stand-in with the signature of FlashKDA's function, which normalises and activates."""
    assert {x.shape[0] for x in (q, k, v, g, beta, out)} == {1}
    assert cu_seqlens.dtype == torch.int64
    rows = (x.squeeze(0) for x in (q, k, v, g, beta))
    o, final = of_raw(
        "kda_prefill", *rows, cu_seqlens, initial_state, scale=scale, gate="safe", A_log=A_log,
        dt_bias=dt_bias, lower_bound=lower_bound, beta_logits=True, l2norm=True,
    )  # fmt: skip
    out.copy_(o.unsqueeze(0))
    final_state.copy_(final)


def cudnn_like(raw: bool) -> Callable[..., Any]:
    """A stand-in with the signature of cuDNN's operator, that expects one form of inputs."""

    def attention(
        q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, scale: Any = None,
        initial_state: Any = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
        safe_gate: bool = False, gate_lower_bound: Any = None, a_log: Any = None,
        dt_bias: Any = None, plan_name: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert output_final_state
        assert plan_name.startswith("kda_hopper")
        if raw:
            assert safe_gate
            return of_raw(
                "kda_prefill", q, k, v, g, beta, cu_seqlens, initial_state, scale=scale,
                gate="safe", A_log=a_log, dt_bias=dt_bias, lower_bound=gate_lower_bound,
                beta_logits=use_beta_sigmoid_in_kernel, l2norm=use_qk_l2norm_in_kernel,
            )  # fmt: skip
        asked = (safe_gate, gate_lower_bound, a_log, dt_bias, use_beta_sigmoid_in_kernel)
        assert asked == (False, None, None, None, False)
        return gated_delta_rule("kda_prefill", q, k, v, g, beta, scale, initial_state, cu_seqlens)

    return attention


CUDNN = ("cudnn.linear_attention.ops", "kimi_delta_attention")
PEERS: dict[tuple[str, str], tuple[str, str, Callable[..., Any]]] = {
    ("kda_prefill", "fla"): ("fla.ops.kda", "chunk_kda", fla_like("kda_prefill")),
    ("kda_prefill", "flashkda"): ("flash_kda", "fwd", flashkda_like),
    ("kda_prefill", "cudnn_fused"): (*CUDNN, cudnn_like(raw=False)),
    ("kda_prefill", "cudnn_fused_raw"): (*CUDNN, cudnn_like(raw=True)),
    ("kda_prefill", "cudnn_segmented"): (*CUDNN, cudnn_like(raw=False)),
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


@pytest.mark.parametrize("name", ["flashkda", "cudnn_fused_raw"])
def test_who_takes_raw_inputs_declines_a_regime_without_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "kda_prefill", name)
    with pytest.raises(ValueError, match=f"{name} takes raw gates; this regime has no raw form"):
        run("kda_prefill", name, SHAPES["kda_prefill"], "constant")


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


# -- ours on raw inputs ------------------------------------------------------------------------

OURS = [
    pytest.param(operation, candidates.get(operation).schedule(values), id=f"{operation}-{name}")
    for operation, name, values in (
        ("kda_prefill", "middle", {"form": "fused", "frame": "middle", "builders": 3, "waves": 1}),
        (
            "kda_prefill",
            "bounds",
            {"form": "fused", "frame": "boundary", "builders": 2, "waves": 1},
        ),
        ("gdn_prefill", "split", {"form": "split", "bt": 32, "rows": 64, "segments": 1}),
        ("gdn_prefill", "fused", {"form": "fused", "bt": 64, "rows": 128, "waves": 1}),
    )
]
ENTRIES = {"kda_prefill": kda_entry, "gdn_prefill": gdn_entry}


def ours_on_raw_inputs(operation: str, schedule: candidates.Schedule) -> Any:
    make = candidates.fed_raw(operation)
    assert make is not None
    return make(schedule, "ours_raw")


def ours_like(operation: str, said: list[Any]) -> Callable[..., Any]:
    """A stand-in for our own function that leaves its judgement of the arguments in place."""
    entry = ENTRIES[operation]
    signature = inspect.signature(getattr(entry, operation))

    def prefill(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = signature.bind(*args, **kwargs).arguments
        said.append(call.pop("schedule"))
        out, final = call.pop("out"), call.pop("final_state")
        scale = call.pop("scale")
        given = (call.pop(n) for n in ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state"))
        tensors = tuple(given)
        said.append(entry.check(*tensors, out, final, False, **call))
        o, state = of_raw(operation, *tensors, scale=scale, **call)
        return out.copy_(o), final.copy_(state)

    return prefill


@pytest.mark.parametrize(("operation", "schedule"), OURS)
def test_ours_on_raw_inputs_is_our_function_on_what_the_others_get(
    operation: str, schedule: candidates.Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    entry = ENTRIES[operation]
    monkeypatch.setattr(entry.arguments, "on_gpu", lambda x: True)
    monkeypatch.setattr(entry, operation, ours_like(operation, said))
    contestant = ours_on_raw_inputs(operation, schedule)
    assert (contestant.name, contestant.input_form) == ("ours_raw", "raw")
    assert contestant.version() == schedule.key
    for regime in ("production", "slow"):
        errors = run_of(contestant, operation, SHAPES[operation], regime)
        assert errors
        assert all(e.within for e in errors)
    configs, options = said[::2], said[1::2]
    assert {type(c) for c in configs} <= {entry.Config, entry.FusedConfig}
    declared = contestant.kernels()[0]
    assert len(options) == 2, "one call a regime"
    assert all(compiled_name(operation, configs[0], o).startswith(declared) for o in options)
    assert not compiled_name(operation, configs[0], PLAIN).startswith(declared)


def compiled_name(operation: str, config: Any, options: Any) -> str:
    """What the first kernel of that form is called where it is compiled."""
    pytest.importorskip("cutlass")
    from candidates.gdn_prefill.kernel.fused import Fused as GdnFused
    from candidates.gdn_prefill.kernel.prep import Prep as GdnPrep
    from candidates.kda_prefill.kernel.fused import Fused

    if operation == "kda_prefill":
        return Fused(config.frame, config.builders, options).name
    if isinstance(config, gdn_entry.Config):
        return GdnPrep(config.bt, config.unroll, options).name
    return GdnFused(config.bt, config.rows, config.builders, options).name


def test_a_split_schedule_of_kda_says_that_it_takes_no_raw_inputs() -> None:
    offered = candidates.get("kda_prefill").offered("kda_prefill")
    split = next(s for s in offered if s.get("form") == "split")
    said = ours_on_raw_inputs("kda_prefill", split).missing()
    assert said == "l2norm: not served by a split schedule; use a fused one"


def test_ours_on_raw_inputs_is_no_baseline() -> None:
    for operation, found in BASELINES.items():
        make = candidates.fed_raw(operation)
        assert make is not None
        assert not [b for b in found.values() if isinstance(b, make)]
    assert candidates.fed_raw("toy_scale") is None


@pytest.mark.gpu
@pytest.mark.parametrize(("operation", "schedule"), OURS)
@pytest.mark.parametrize("regime", ["production", "slow"])
def test_ours_on_raw_inputs_is_right_and_launches_its_own_kernels(
    operation: str, schedule: candidates.Schedule, regime: str
) -> None:
    op, contestant = operations.get(operation), ours_on_raw_inputs(operation, schedule)
    if reason := contestant.missing():
        pytest.skip(reason)
    workload = next(w for w in op.tuned() if w.name.startswith("2048/"))
    inputs = op.generate(workload, op.regimes[regime], seed=7, device="cuda")
    raw = op.raw_form(workload, op.regimes[regime], seed=7, device="cuda")
    outputs = op.outputs(inputs)
    runnable = contestant.load(workload, raw)
    call = runnable.bind(inputs, outputs)
    assert all(x.isnan().all() for x in outputs.values()), "nothing is computed beforehand"
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        got = call()
        torch.cuda.synchronize()
    launched = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    first, *_ = runnable.kernel_names
    assert any(name.startswith(first) for name in launched), launched
    assert all(name.startswith(runnable.kernel_names) for name in launched), launched
    assert all(got[n].data_ptr() == x.data_ptr() for n, x in outputs.items())
    errors = op.compare(got, op.fast_oracle(inputs), workload, op.regimes[regime])
    assert [e for e in errors if not e.within] == []
