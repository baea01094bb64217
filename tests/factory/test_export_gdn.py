"""The export of GDN prefill: its fla backend, ahead-of-time form and interchange, without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import export_board as board
import pytest
import torch
from fla_stand_in import vendored

from factory.cli import _run
from factory.export import aot, trace
from factory.export.exporter import exporter_of
from factory.export.render import render
from factory.export.render import vendored as vendored_for_gate
from factory.export.select import Selection
from leaderboard import open_store

OPERATION = board.GDN.operation
HEADS, VALUE_HEADS = 2, 4
FAMILY = board.GDN.family
SUBJECTS = {
    form: dataclasses.replace(
        board.GDN,
        schedules=tuple(s for s in FAMILY.offered("gdn_prefill") if s["form"] == form)[:3],
    )
    for form in ("split", "fused")
}
"""A campaign that each form of schedule wins."""


def by_the_oracle(package: str) -> Callable[[Any, bool, Any], Callable[..., None]]:
    """Kernels that compute in float64 what they are handed, in the form they were compiled for.

    They activate and normalise what the form says, and nothing else.
    """

    def compiled(config: Any, with_state: bool, options: Any) -> Callable[..., None]:
        host = importlib.import_module(f"{package}.kernel.host")
        abi = host.FUSED_ABI if hasattr(config, "waves") else host.ABI
        return functools.partial(run, abi, with_state, options)

    def run(abi: tuple[str, ...], with_state: bool, options: Any, *handed: Any) -> None:
        a = dict(zip(abi, handed, strict=True))
        assert with_state is (a["initial_state"] is not None)
        assert (options.final_state is None) is (a["final_state"] is None)
        assert (options.raw_gate, options.bias) == (
            a["A_log"] is not None,
            a["dt_bias"] is not None,
        )
        for name, said in (
            ("g", options.gate_dtype), ("beta", options.beta_dtype), ("cu_seqlens", options.offsets)
        ):  # fmt: skip
            assert str(a[name].dtype) == f"torch.{said}"
        inputs = [a[name] for name in ("q", "k", "v", "g", "beta")]
        assert options.compact is all(x.is_contiguous() for x in inputs)
        q, k, v, g, beta = (x.double() for x in inputs)
        if options.raw_gate:
            shifted = g + a["dt_bias"][:, 0].double() if options.bias else g
            g = -a["A_log"].double().exp() * torch.nn.functional.softplus(shifted)
        if options.beta_logits:
            beta = beta.sigmoid()
        if options.l2norm:
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        found = OPERATION.oracle(
            {"q": q, "k": k, "v": v, "g": g, "beta": beta}
            | {name: a[name] for name in ("cu_seqlens", "initial_state", "scale")}
        )
        a["o"].copy_(found["o"])
        if a["final_state"] is not None:
            a["final_state"].copy_(found["final_state"])

    return compiled


@pytest.fixture(scope="module", params=SUBJECTS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The exported module, registered with a stand-in of ``fla.backends``."""
    package = f"gdn_{request.param}_for_fla"
    folder, subject = tmp_path_factory.mktemp("fla"), SUBJECTS[request.param]
    with vendored(folder, subject, package, by_the_oracle(package)) as (module, registered):
        assert registered == {"gated_delta_rule": module.GdnPrefillBackend}
        yield module.GdnPrefillBackend()


def call(**changes: Any) -> dict[str, Any]:
    """As a model calls ``chunk_gated_delta_rule``: activated gates, q and k to be normalised."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    made = {
        "q": normal(1, 37, HEADS, 128).bfloat16(),
        "k": normal(1, 37, HEADS, 128).bfloat16(),
        "v": normal(1, 37, VALUE_HEADS, 128).bfloat16(),
        "g": -torch.rand(1, 37, VALUE_HEADS, generator=draw),
        "beta": torch.rand(1, 37, VALUE_HEADS, generator=draw).bfloat16(),
        "initial_state": normal(2, VALUE_HEADS, 128, 128),
        "cu_seqlens": torch.tensor([0, 20, 37]),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    return {**made, **changes}


def raw(**changes: Any) -> dict[str, Any]:
    """As a model does that leaves the activations to fla too."""
    return call(
        g=torch.randn(1, 37, VALUE_HEADS).bfloat16(),
        beta=torch.randn(1, 37, VALUE_HEADS).bfloat16(),
        A_log=torch.randn(VALUE_HEADS) * 0.2,
        dt_bias=torch.randn(VALUE_HEADS),
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        **changes,
    )


def expected(x: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lead = {n: x[n].squeeze(0) for n in ("q", "k", "v", "g", "beta")}
    lead |= {n: torch.nn.functional.normalize(lead[n].double(), dim=-1) for n in "qk"}
    told = {"initial_state": x["initial_state"], "scale": 128**-0.5, **changes}
    found = OPERATION.oracle({**lead, "cu_seqlens": x["cu_seqlens"], **told})
    return found["o"], found["final_state"]


def served(backend: Any, x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert backend.chunk_gated_delta_rule_verifier(**x) == (True, None)
    o, state = backend.chunk_gated_delta_rule(**x)
    assert o.shape == x["v"].shape
    return o[0].double(), None if state is None else state.double()


def test_what_models_pass_is_computed_as_fla_defines_it_and_states_are_in_its_layout(
    backend: Any,
) -> None:
    x = call()
    o, state = served(backend, x)
    want_o, want = expected(x, initial_state=x["initial_state"].mT)
    assert torch.allclose(o, want_o, atol=2e-2)
    assert state is not None
    assert torch.allclose(state, want.mT, atol=1e-2)  # k is rounded to bf16 once normalised
    v_first = call(state_v_first=True, output_final_state=False, scale=0.5)
    o, state = served(backend, v_first)
    assert state is None
    assert torch.allclose(o, expected(v_first, scale=0.5)[0], atol=2e-2)


def test_raw_gates_and_logits_are_activated(backend: Any) -> None:
    x = raw(state_v_first=True)
    o, _ = served(backend, x)
    shifted = torch.nn.functional.softplus(x["g"].double() + x["dt_bias"].double())
    told = {**x, "g": -x["A_log"].double().exp() * shifted, "beta": x["beta"].double().sigmoid()}
    assert torch.allclose(o, expected(told)[0], atol=2e-2)


def test_slices_of_one_projection_are_served(backend: Any) -> None:
    x = call(state_v_first=True)
    wide = torch.cat([x[n].flatten(-2) for n in ("q", "k", "v")], dim=-1)
    sizes = [HEADS * 128, HEADS * 128, VALUE_HEADS * 128]
    parts = dict(zip("qkv", wide.split(sizes, dim=-1), strict=True))
    views = {n: part.unflatten(-1, (-1, 128)) for n, part in parts.items()}
    assert not any(view.is_contiguous() for view in views.values())
    o, _ = served(backend, {**x, **views})
    assert torch.allclose(o, expected(x)[0], atol=2e-2)


def test_a_batch_is_packed(backend: Any) -> None:
    x = call(state_v_first=True)
    lead = {n: x[n][:, :36].unflatten(1, (2, 18)).squeeze(0) for n in ("q", "k", "v", "g", "beta")}
    batch = {**x, **lead, "cu_seqlens": None}
    assert backend.chunk_gated_delta_rule_verifier(**batch) == (True, None)
    o, _ = backend.chunk_gated_delta_rule(**batch)
    assert o.shape == lead["v"].shape
    packed = {n: t.flatten(0, 1)[None] for n, t in lead.items()}
    want, _ = expected({**x, **packed, "cu_seqlens": torch.tensor([0, 18, 36])})
    assert torch.allclose(o.flatten(0, 1).double(), want, atol=2e-2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"allow_neg_eigval": True}, "allow_neg_eigval is not served"),
        ({"cp_context": object()}, "cp_context is not served"),
        ({"transpose_state_layout": True}, "transpose_state_layout is not served"),
        ({"q": torch.zeros(2, 37, HEADS, 128)}, "a batch of 2 beside cu_seqlens"),
        ({"initial_state": torch.zeros(2, HEADS, 128, 128)}, "initial_state is"),
        ({"use_gate_in_kernel": True}, "use_gate_in_kernel without A_log"),
        ({"v": torch.zeros(1, 37, 3, 128).bfloat16(), "initial_state": None}, "v has 3 heads"),
        ({"k": torch.zeros(1, 37, HEADS, 128).half()}, "k is float16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_the_verifier_says_why_not(backend: Any, changes: dict[str, Any], said: str) -> None:
    answer, reason = backend.chunk_gated_delta_rule_verifier(**call(**changes))
    assert not answer
    assert said in reason


def test_the_verifier_launches_nothing(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked before each call: what is to be activated is activated once, in the call."""
    for name in ("softplus", "normalize"):
        monkeypatch.setattr(torch.nn.functional, name, pytest.fail)
    for name in ("float", "sigmoid", "square", "contiguous"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, **k: pytest.fail("it computes"))
    for x in (call(), raw()):
        assert backend.chunk_gated_delta_rule_verifier(**x) == (True, None)


@pytest.mark.parametrize("name", ["v", "initial_state", "A_log", "dt_bias"])
def test_gradients_stay_with_fla(backend: Any, name: str) -> None:
    x = raw()
    x[name].requires_grad_()
    answer, reason = backend.chunk_gated_delta_rule_verifier(**x)
    assert (answer, "forward only" in reason) == (False, True)
    with torch.no_grad():
        assert backend.chunk_gated_delta_rule_verifier(**x)[0] is True


@pytest.mark.parametrize("final", [True, False], ids=["final state", "no final state"])
@pytest.mark.parametrize("state", ["given", "transposed", "none"])
def test_what_is_compiled_ahead_is_what_fla_asks_for_and_then_calls(
    backend: Any, monkeypatch: pytest.MonkeyPatch, final: bool, state: str
) -> None:
    """Where the DSL is not installed a call that the verifier let through must not raise."""
    package = type(backend).__module__.rpartition(".")[0]
    aot, entry = (importlib.import_module(f"{package}.{name}") for name in ("_aot", "kernel.entry"))
    subject = SUBJECTS[package.split("_")[1]]
    ahead = {form.key for form in exporter_of("gdn_prefill").forms(subject.schedules)}
    monkeypatch.setattr(aot, "_symbols", lambda: dict.fromkeys(ahead, "f"))
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    compiled, called = entry.compiled, []

    def looked_up(*form: Any) -> Any:
        called.append(aot._key(*form))
        return compiled(*form)

    monkeypatch.setattr(entry, "compiled", looked_up)
    known = importlib.import_module(f"{package}.delta_rule.known")
    monkeypatch.setattr(known, "_KNOWN", {})  # calls of other tests, whose kernels are at hand
    monkeypatch.setattr(known, "_PREPARED", {})
    for x in (call(), raw()):
        x["output_final_state"] = final
        given = x["initial_state"]
        x["initial_state"] = {"given": given, "transposed": given.mT, "none": None}[state]
        assert backend.chunk_gated_delta_rule_verifier(**x) == (True, None)
        _, found = backend.chunk_gated_delta_rule(**x)
        assert (found is not None) is final
    assert len(called) == 2
    assert set(called) <= ahead
    monkeypatch.setattr(aot, "_symbols", lambda: dict.fromkeys(ahead - set(called), "f"))
    answer, reason = backend.chunk_gated_delta_rule_verifier(**call(**x))
    assert (answer, "compiled ahead of time" in reason) == (False, True)


def test_kernels_that_bear_some_gates_alone_leave_the_rest_to_fla(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = type(backend).__module__
    for name in (module, module.replace("fla_backend", "api")):
        monkeypatch.setattr(sys.modules[name], "GATE_BOUND", -5.0)
    for x in (call(), raw()):
        assert "stronger than -5" in backend.chunk_gated_delta_rule_verifier(**x)[1]


# -- ahead of time, interchange, and what is not there yet -----------------------------


@pytest.fixture(scope="module")
def selection() -> Selection:
    return board.selected(subject=SUBJECTS["split"])


def test_a_form_is_compiled_ahead_under_the_operations_name(selection: Selection) -> None:
    pytest.importorskip("cutlass")
    exporter = exporter_of("gdn_prefill")
    forms = exporter.forms([row.schedule for row in selection.rows])
    keys = [form.key for form in forms]
    assert len(keys) == len(set(keys)) == 24
    assert any("gate='softplus'" in key for key in keys)
    assert any("gate='log'" in key and "l2norm=True" in key for key in keys)
    made = aot.compile_library(exporter, forms[:1])
    assert "aot/gdn_prefill_sm90a.so" in made
    (told,) = json.loads(made["aot/index.json"])["forms"]
    assert told == {"key": keys[0], "symbol": "gdn_prefill_0"}
    fused = exporter.forms(SUBJECTS["fused"].schedules[:1])
    assert {form.options for form in fused} == {form.options for form in forms}


def test_the_definition_has_the_axes_of_the_operation_and_its_oracle(selection: Selection) -> None:
    files = trace.render_traces(selection, render(selection))
    told = json.loads(files["definitions/gdn_prefill/gdn_prefill.json"])
    assert list(told["axes"]) == ["T", "H", "HV", "N", "num_offsets", "D"]
    assert told["inputs"]["g"]["shape"] == ["T", "HV"]
    assert told["inputs"]["initial_state"]["shape"] == ["N", "HV", "D", "D"]
    first = json.loads(files["workloads/gdn_prefill/gdn_prefill.jsonl"].splitlines()[0])
    assert first["workload"]["axes"] == {"T": 2048, "H": 4, "HV": 8, "N": 1, "num_offsets": 2}
    space: dict[str, Any] = {}
    exec(told["reference"], space)
    workload = next(w for w in OPERATION.reduced() if w.initial_state)  # type: ignore[attr-defined]
    x = OPERATION.generate(workload, OPERATION.regimes["production"], seed=3)
    o, state = space["run"](*(x[name] for name in told["inputs"]))
    want = OPERATION.oracle(x)
    assert torch.allclose(o.double(), want["o"], rtol=1e-2, atol=1e-4)
    assert torch.allclose(state.double(), want["final_state"], atol=1e-5)


def test_the_gate_holds_the_folder_to_its_own_kernels_and_to_none_of_ours(tmp_path: Path) -> None:
    for form, names in (("split", ("gdn_prep_", "kda_scan_")), ("fused", ("gdn_fused_",))):
        told = vendored_for_gate(board.selected(subject=SUBJECTS[form]), tmp_path, "0" * 64)
        assert told.function == "gdn_prefill"
        assert set(names) <= set(told.kernels)
        assert told.foreign == ("candidates.gdn_prefill.kernel", "candidates._delta_rule.kernel")


@pytest.mark.parametrize("form", SUBJECTS)
def test_no_source_names_a_package_that_is_not_in_the_folder(form: str) -> None:
    files = render(board.selected(subject=SUBJECTS[form]))
    sources = {name: data.decode() for name, data in files.items() if name.endswith(".py")}
    assert ":mod:`..delta_rule.image`" in sources["kernel/__init__.py"]
    assert not [name for name, text in sources.items() if "candidates.gdn_prefill" in text]
    assert not [name for name, text in sources.items() if "candidates.kda_prefill" in text]
    assert not [name for name, text in sources.items() if "candidates._delta_rule" in text]
    assert {name.partition("/")[0] for name in sources if "/" in name} == {
        "kernel",
        "delta_rule",
        "tests",
    }


def test_a_row_of_one_shape_is_keyed_by_its_value_heads_too() -> None:
    faster = {**board.even(board.GDN), (2, "8192/8/16/64", "production"): 90.0}
    faster[2, "8192/8/16/64", "slow"] = 90.0
    files = render(board.selected(faster, board.GDN))
    table = files["dispatch.py"].decode()
    assert "shape: tuple[int, int, int, int] | None" in table
    assert "shape=(8192, 8, 16, 64)," in table


@pytest.mark.parametrize("form", SUBJECTS)
def test_the_command_exports_what_was_measured_and_finds_it_unaltered(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    db = ("--db", "sqlite:///factory.db")
    with open_store(db[1]) as store:
        board.fill(store, subject=SUBJECTS[form])
    assert _run(["export", "gdn_prefill", "--to", "gdn", *db]) == 0
    said = capsys.readouterr().out
    assert SUBJECTS[form].schedules[0].key in said
    assert (tmp_path / "gdn" / "tests").is_dir()
    assert _run(["export", "gdn_prefill", "--check", "gdn", *db]) == 0
    assert "gdn" in capsys.readouterr().out
    (tmp_path / "gdn" / "dispatch.py").write_text("")
    assert _run(["export", "gdn_prefill", "--check", "gdn", *db]) == 1
    assert "dispatch.py" in "".join(capsys.readouterr())


def test_without_measured_rows_nothing_is_exported_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///factory.db"):
        pass
    argv = ["export", "gdn_prefill", "--to", "x", "--db", "sqlite:///factory.db"]
    assert _run(argv) == 1
    assert "no winner of gdn_prefill to export" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
