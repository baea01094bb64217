"""``--format flashinfer-trace``: read back by flashinfer-bench's own data models."""

from __future__ import annotations

import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import export_board as board
import pytest
import torch

from factory.cli import _run
from factory.export import trace
from factory.export.folder import write
from factory.export.render import render
from factory.export.select import Selection
from leaderboard import open_store

ARGUMENTS = tuple(t.name for t in board.OPERATION.tensors if t.role != "output")


@pytest.fixture(scope="module")
def data() -> Any:
    """flashinfer_bench.data of the real package."""
    try:
        return importlib.import_module("flashinfer_bench.data")
    except ImportError as error:
        said = f"flashinfer-bench is not installed ({error}); make brings it, without its GPU parts"
        if os.environ.get("FACTORY_REQUIRE_FLASHINFER_BENCH"):
            pytest.fail(said)
        pytest.skip(said)


@pytest.fixture(scope="module")
def selection() -> Selection:
    return board.selected(board.FASTER)


@pytest.fixture(scope="module")
def root(selection: Selection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("traces")
    for name, found in trace.render_traces(selection, render(selection)).items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(found)
    return base


def test_the_data_set_is_read_whole_by_the_real_package(data: Any, root: Path) -> None:
    found = data.TraceSet.from_path(str(root))
    (definition,) = found.definitions.values()
    assert definition.name == "kda_prefill"
    assert definition.const_axes == {"D": 128}
    assert list(definition.inputs) == [*ARGUMENTS, "scale"]
    (solution,) = found.solutions["kda_prefill"]
    assert solution.get_entry_symbol() == "run"
    assert not [s.path for s in solution.sources if "tests" in s.path]
    workloads, traces = found.workloads["kda_prefill"], found.traces["kda_prefill"]
    assert {t.workload.uuid for t in traces} == {w.workload.uuid for w in workloads}
    assert len(traces) == len(board.SHAPES) * 2
    assert all(t.is_successful() and t.solution == solution.name for t in traces)
    for w in workloads:
        shapes = definition.get_input_shapes(w.workload.axes)
        values = definition.get_axes_values(shapes)
        assert values == dict(w.workload.axes)


def test_the_data_set_of_another_operation_is_read_too(data: Any, tmp_path: Path) -> None:
    chosen = board.selected(subject=board.GDN)
    write(trace.render_traces(chosen, render(chosen)), tmp_path / "gdn")
    found = data.TraceSet.from_path(str(tmp_path / "gdn"))
    (definition,) = found.definitions.values()
    assert (definition.name, definition.const_axes) == ("gdn_prefill", {"D": 128})
    assert len(found.traces["gdn_prefill"]) == len(board.GDN.shapes) * 2
    for w in found.workloads["gdn_prefill"]:
        shapes = definition.get_input_shapes(w.workload.axes)
        assert definition.get_axes_values(shapes) == dict(w.workload.axes)


def test_traces_hold_what_was_measured_and_nothing_that_was_not(data: Any, root: Path) -> None:
    by_shape = {}
    for t in data.TraceSet.from_path(str(root)).traces["kda_prefill"]:
        axes = t.workload.axes
        regime = t.evaluation.log.rpartition("regime ")[2]
        by_shape[f"{axes['T']}/{axes['H']}/{axes['N']}", regime] = t.evaluation
    assert by_shape["8192/12/4", "production"].performance.latency_ms == pytest.approx(0.090)
    assert by_shape["8192/12/4", "slow"].performance.latency_ms == pytest.approx(0.097)
    first = by_shape["2048/12/1", "production"]
    assert first.performance.latency_ms == pytest.approx(0.026)
    assert first.correctness.max_relative_error == 0.006
    assert first.correctness.extra["rms_relative_error"] == 0.004
    assert first.environment.hardware == "NVIDIA H200"
    for e in by_shape.values():
        assert math.isnan(e.correctness.max_absolute_error)
        assert e.performance.speedup_factor == 0


def test_the_reference_of_the_definition_is_the_operations_oracle(root: Path) -> None:
    told = json.loads((root / "definitions/kda_prefill/kda_prefill.json").read_text())
    space: dict[str, Any] = {}
    exec(told["reference"], space)
    workload = min(board.OPERATION.reduced(), key=lambda w: w.tokens)  # type: ignore[attr-defined]
    regime = board.OPERATION.regimes["production"]
    x = board.OPERATION.generate(workload, regime, seed=3)
    if x["initial_state"] is None:
        x["initial_state"] = torch.zeros(
            len(x["cu_seqlens"]) - 1, x["q"].shape[1], 128, 128, dtype=torch.float32
        )
    o, state = space["run"](*(x[name] for name in (*ARGUMENTS, "scale")))
    found = board.OPERATION.oracle(x)
    assert o.dtype == torch.bfloat16
    assert torch.allclose(o.double(), found["o"], rtol=1e-2, atol=1e-4)
    assert torch.allclose(state.double(), found["final_state"], atol=1e-5)


def test_the_solution_is_built_by_the_real_builder(data: Any, root: Path) -> None:
    """Its sources import as a package of another name, and refuse what they do not serve."""
    builders = importlib.import_module("flashinfer_bench.compile.builders.python_builder")
    found = data.TraceSet.from_path(str(root))
    definition = found.definitions["kda_prefill"]
    runnable = builders.PythonBuilder().build(definition, found.solutions["kda_prefill"][0])
    try:
        x = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
        offsets, state = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, 128, 128)
        with pytest.raises(ValueError, match="q is on cpu"):
            runnable._callable(
                x, x, x, x.float(), x[..., 0].float(), offsets, state, 1.0, x.clone(), state.clone()
            )
    finally:
        runnable.cleanup()


def test_inputs_are_drawn_from_the_regimes_with_the_seeds_of_the_gate(
    selection: Selection, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    small = next(w for w in board.OPERATION.reduced() if w.initial_state)  # type: ignore[attr-defined]
    monkeypatch.setitem(board.OPERATION.workloads, "2048/12/1", small)
    written = trace.input_blobs(selection, ["2048/12/1"], root)
    assert [p.name for p in written] == [
        "2048-12-1-production.safetensors",
        "2048-12-1-slow.safetensors",
    ]
    got = safetensors.load_file(written[0])
    regime = board.OPERATION.regimes["production"]
    want = board.OPERATION.generate(small, regime, seed=1)  # the seed of the board's gate
    for name in ARGUMENTS:
        assert torch.equal(got[name], want[name]), name


def test_the_command_writes_it_over_its_own_and_keeps_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///factory.db") as store:
        board.fill(store)
    again = ["export", "kda_prefill", "--format", "flashinfer-trace", "--to", "data"]
    assert _run(again) == 0
    assert "no claim was made" in capsys.readouterr().out
    first = {p: p.read_bytes() for p in (tmp_path / "data").rglob("*") if p.is_file()}
    blob = tmp_path / "data/blob/workloads/x"
    blob.parent.mkdir(parents=True)
    blob.write_text("kept")
    assert _run(again) == 0
    assert blob.read_text() == "kept"
    assert {p: p.read_bytes() for p in first} == first
    capsys.readouterr()
    for argv, said in (
        (["export", "kda_prefill", "--check", "data"], "is a flashinfer-trace data set"),
        ([*again, "--inputs", "1/2/3"], "no traces of shape '1/2/3'"),
        ([*again, "--gate"], "--gate goes with a folder"),
        (["export", "kda_prefill", "--to", "x", "--inputs", "2048/12/1"], "--inputs goes with"),
    ):
        assert _run(argv) == 2
        assert said in capsys.readouterr().err
