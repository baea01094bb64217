"""Homes of an export, without a GPU: a backend of fla, and the engine of the docs."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import export_board as board
import pytest
import torch
from docs_engine import ENGINE, load_engine
from fla_stand_in import vendored
from host_cost import counted

from factory.export.folder import write
from factory.export.render import render
from factory.export.select import select
from leaderboard import open_store


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The exported module, registered with a stand-in of ``fla.backends``."""
    base = tmp_path_factory.mktemp("fla")
    own = "fla.ops.kda.chunk.chunk_kda"
    with vendored(base, board.KDA, "vendored_for_fla", _by_the_oracle, own) as (module, registered):
        chunk_kda = sys.modules["fla.ops.kda.chunk"].chunk_kda
        assert registered == {chunk_kda: module.KdaPrefillBackend}
        yield module.KdaPrefillBackend()


def _by_the_oracle(config: Any, with_state: bool, options: Any) -> Callable[..., None]:
    """A kernel that computes in float64 what it is handed, in the form it was compiled for."""
    return functools.partial(_run_oracle, options)


def _run_oracle(options: Any, *handed: Any) -> None:
    abi = importlib.import_module("vendored_for_fla.kernel.host").FUSED_ABI
    a = dict(zip(abi, handed, strict=True))
    q, k, v, g, beta = (a[name] for name in ("q", "k", "v", "g", "beta"))
    A_log, dt_bias, bound = a["A_log"], a["dt_bias"], a["lower_bound"]
    if options.gate == "safe":
        shifted = g.double() + (0 if dt_bias is None else dt_bias.double())
        g = bound * torch.sigmoid(shifted * A_log.double().exp()[:, None])
    if options.l2norm:
        q, k = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (q, k))
    if options.beta_logits:
        beta = beta.double().sigmoid()
    assert (options.final_state is None) is (a["final_state"] is None)
    found = board.OPERATION.oracle(
        {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": a["cu_seqlens"],
         "initial_state": a["initial_state"], "scale": a["scale"]}
    )  # fmt: skip
    a["o"].copy_(found["o"])
    if a["final_state"] is not None:
        a["final_state"].copy_(found["final_state"])


def call(**changes: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    q, k = (torch.nn.functional.normalize(normal(1, 37, 3, 128), dim=-1) for _ in range(2))
    made = {
        "q": q.bfloat16(),
        "k": k.bfloat16(),
        "v": normal(1, 37, 3, 128).bfloat16(),
        "g": -torch.rand(1, 37, 3, 128, generator=draw),
        "beta": torch.rand(1, 37, 3, generator=draw),
        "initial_state": normal(2, 3, 128, 128),
        "cu_seqlens": torch.tensor([0, 20, 37]),
        "safe_gate": True,
        "output_final_state": True,
    }
    return {**made, **changes}


def expected(x: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lead = {n: x[n].squeeze(0) for n in ("q", "k", "v", "g", "beta")}
    told = {"initial_state": x["initial_state"], "scale": 128**-0.5, **changes}
    found = board.OPERATION.oracle({**lead, "cu_seqlens": x["cu_seqlens"], **told})
    return found["o"], found["final_state"]


def test_states_come_and_go_in_flas_layout(backend: Any) -> None:
    x = call()
    assert backend.chunk_kda_verifier(**x) == (True, None)
    o, state = backend.chunk_kda(**x)
    want_o, want = expected(x, initial_state=x["initial_state"].mT)
    assert o.shape == (1, 37, 3, 128)
    assert torch.allclose(o[0].double(), want_o, atol=2e-2)
    assert torch.allclose(state.double(), want.mT, atol=1e-4)
    v_first = call(state_v_first=True, output_final_state=False)
    o, none = backend.chunk_kda(**v_first)
    assert none is None
    assert torch.allclose(o[0].double(), expected(v_first)[0], atol=2e-2)


def test_what_a_model_passes_is_activated_as_fla_defines_it(backend: Any) -> None:
    x = call(
        state_v_first=True,
        g=torch.randn(1, 37, 3, 128).bfloat16(),
        beta=torch.randn(1, 37, 3).bfloat16(),
        A_log=torch.randn(3) * 0.2,
        dt_bias=torch.randn(3 * 128),
        lower_bound=-5.0,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert backend.chunk_kda_verifier(**x) == (True, None)
    longer = {name: x[name] * 2 for name in ("q", "k")}
    o, _ = backend.chunk_kda(**{**x, **longer})
    shifted = x["g"][0].double() + x["dt_bias"].view(3, 128).double()
    activated = {
        **x,
        "g": (-5.0 * torch.sigmoid(shifted * x["A_log"].double().exp()[:, None]))[None],
        "beta": x["beta"].double().sigmoid(),
    }
    assert torch.allclose(o[0].double(), expected(activated)[0], atol=2e-2)
    without = {**x, "A_log": None}
    assert backend.chunk_kda_verifier(**without) == (True, None), "exp(0) where there is none"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"return_intermediate_states": True}, "return_intermediate_states is not served"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval is not served"),
        ({"cp_context": object()}, "cp_context is not served"),
        ({"new_in_0_7": 1}, "new_in_0_7 is not served"),
        ({"q": torch.zeros(2, 37, 3, 128)}, "a batch of 2 beside cu_seqlens"),
        ({"initial_state": None, "v": torch.zeros(1, 37, 3, 64)}, "v is float32"),
        ({"initial_state": torch.zeros(2, 3, 128, 128).bfloat16()}, "initial_state is"),
        ({"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log"),
        ({"g": torch.zeros(1, 37, 3, 128).half()}, "g is float16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_the_verifier_says_why_not(backend: Any, changes: dict[str, Any], said: str) -> None:
    served, reason = backend.chunk_kda_verifier(**call(**changes))
    assert not served
    assert said in reason


@pytest.mark.parametrize("name", ["v", "initial_state", "A_log"])
def test_gradients_stay_with_fla(backend: Any, name: str) -> None:
    x = call(A_log=torch.zeros(3), lower_bound=-5.0, use_gate_in_kernel=True)
    x[name].requires_grad_()
    assert backend.chunk_kda_verifier(**x)[0] is False
    with torch.no_grad():
        assert backend.chunk_kda_verifier(**x)[0] is True


def test_unbounded_gates_are_served_only_by_kernels_that_bear_them(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[type(backend).__module__]
    api = sys.modules["vendored_for_fla.api"]
    plain = call(safe_gate=False)
    softplus = call(use_gate_in_kernel=True, A_log=torch.zeros(3))
    for bound, served in ((None, True), (-5.0, False)):
        monkeypatch.setattr(module, "GATE_BOUND", bound)
        monkeypatch.setattr(api, "GATE_BOUND", bound)
        assert backend.chunk_kda_verifier(**plain)[0] is served
        assert backend.chunk_kda_verifier(**softplus)[0] is served
    assert "safe_gate=True" in backend.chunk_kda_verifier(**plain)[1]
    steep = call(use_gate_in_kernel=True, A_log=torch.zeros(3), lower_bound=-6.0)
    assert "lower_bound is -6" in backend.chunk_kda_verifier(**steep)[1]


def test_two_copies_of_one_export_share_their_operator_and_another_export_has_its_own(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store("sqlite://") as store:
        board.fill(store)
        same = render(select(board.OPERATION, board.FAMILY, [store]))
        other = render(select(board.OPERATION, board.FAMILY, [store], trial="2"))
    write(same, tmp_path / "same_export")
    write(other, tmp_path / "other_export")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = sys.modules["vendored_for_fla._op"]
    again = importlib.import_module("same_export._op")
    assert again.NAME == mine.NAME
    assert again._operator() is mine._operator()
    assert importlib.import_module("other_export._op").NAME != mine.NAME


# -- what the exported function adds on the host ---------------------------------------


def test_the_table_is_asked_once_for_a_shape(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sys.modules["vendored_for_fla"]
    entry = sys.modules["vendored_for_fla.kernel.entry"]
    known = sys.modules["vendored_for_fla.delta_rule.known"]
    for name in ("_KNOWN", "_PREPARED"):
        monkeypatch.setattr(known, name, {})
    monkeypatch.setattr(entry, "compiled", lambda *_: lambda *args: None)
    x = {n: t.squeeze(0) for n, t in call().items() if n in ("q", "k", "v", "g", "beta")}
    x["cu_seqlens"] = torch.tensor([0, 20, 37], dtype=torch.int32)
    with torch.no_grad():
        for _ in range(2):
            kernel.kda_prefill(**x)
        monkeypatch.setattr(kernel.api, "_run", lambda *_: pytest.fail("came through _run again"))
        monkeypatch.setattr(kernel.api, "choose", lambda *_: pytest.fail("chose again"))
        found = counted(kernel.kda_prefill, x)
    assert {n: len(names) for n, names in found.items()} == {
        "looks": 15,
        "frames": 4,
        "allocations": 3,
    }


def test_what_the_export_alone_refuses_is_refused_also_where_its_kernels_served_it(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = sys.modules["vendored_for_fla"]
    entry = sys.modules["vendored_for_fla.kernel.entry"]
    known = sys.modules["vendored_for_fla.delta_rule.known"]
    for name in ("_KNOWN", "_PREPARED"):
        monkeypatch.setattr(known, name, {})
    monkeypatch.setattr(entry, "compiled", lambda *_: lambda *args: None)
    monkeypatch.setattr(kernel.api, "GATE_BOUND", -5.0)
    x = {n: t.squeeze(0) for n, t in call().items() if n in ("q", "k", "v", "g", "beta")}
    x |= {"cu_seqlens": torch.tensor([0, 20, 37], dtype=torch.int32), "A_log": torch.zeros(3)}
    offsets = x["cu_seqlens"]
    config = kernel.api.choose(x["q"], offsets)
    for lower_bound, gate in ((-6.0, "safe"), (None, "softplus"), (-4.0, "safe")):
        for _ in range(2):
            entry.kda_prefill(**x, gate=gate, lower_bound=lower_bound, schedule=config)
    for _ in range(3):
        kernel.kda_prefill(**x, gate="safe", lower_bound=-4.0)
        with pytest.raises(ValueError, match="lower_bound is -6"):
            kernel.kda_prefill(**x, gate="safe", lower_bound=-6.0)
        with pytest.raises(ValueError, match="no lower end"):
            kernel.kda_prefill(**x, gate="softplus")


# -- the engine of docs/examples -------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Any:
    return load_engine()


def test_the_engine_checks_builds_and_executes_on_the_stream_it_is_given(
    backend: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = sys.modules["vendored_for_fla"]
    seen = []
    entry = sys.modules["vendored_for_fla.kernel.entry"]
    monkeypatch.setattr(entry, "on_stream", lambda stream, device: seen.append(stream))
    node, pack = engine.KdaNode(scale=0.5), engine.example(60, device="cpu")
    assert engine.check_support(kernel, node, pack) == ""
    assert seen == []
    plan = engine.build(kernel, node, pack, stream=7)
    pack["o"].zero_()
    plan.execute(pack, stream=0)
    assert seen == [7, 0]
    inputs = {n: pack[n] for n in engine.INPUTS}
    found = board.OPERATION.oracle({**inputs, "scale": 0.5})
    assert torch.allclose(pack["o"].double(), found["o"], atol=2e-2)
    assert torch.allclose(pack["final_state"].double(), found["final_state"], atol=1e-4)


def test_the_engine_says_what_is_not_supported_before_anything_is_built(
    backend: Any, engine: Any
) -> None:
    kernel, pack = sys.modules["vendored_for_fla"], engine.example(60, device="cpu")
    pack["v"] = pack["v"].half()
    with pytest.raises(engine.NotSupportedError, match="v is float16"):
        engine.build(kernel, engine.KdaNode(), pack, stream=0)


def test_the_example_runs_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    write(render(board.selected()), tmp_path / "kda")
    done = subprocess.run(
        [sys.executable, str(ENGINE), str(tmp_path / "kda")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.stdout.startswith("not supported here: q is on cpu"), done.stderr
    assert done.returncode == 1
