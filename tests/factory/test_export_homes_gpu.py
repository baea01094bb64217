"""Homes of an export on an sm90 GPU: the engine of the docs, and the backend beside fla itself.

fla's autotuner takes about a minute for each form of call that nothing tuned before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import export_board as board
import pytest
import torch
from docs_engine import load_engine

import candidates
from factory.export.folder import write
from factory.export.render import render
from operations.kda_prefill import KdaWorkload

pytestmark = pytest.mark.gpu

WORKLOAD = KdaWorkload("engine", heads=2, lengths=(300, 0, 65), scale=0.1)
TENSORS = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    return load_engine()


@pytest.fixture(scope="module")
def kernel(engine: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A vendored folder, imported as a library would."""
    folder = tmp_path_factory.mktemp("homes") / "kda_behind_an_engine"
    write(render(board.selected()), folder)
    return engine.load(folder)


def a_pack(regime: str, device: str = "cuda") -> dict[str, Any]:
    """Tensors of one execution, outputs full of NaN."""
    inputs = board.OPERATION.generate(
        WORKLOAD, board.OPERATION.regimes[regime], seed=1, device=device
    )
    return {**{n: inputs[n] for n in TENSORS}, **board.OPERATION.outputs(inputs)}


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def assert_right(pack: dict[str, Any], want: Any) -> None:
    for name in ("o", "final_state"):
        assert apart(pack[name], want[name]) < 1e-2, name


@pytest.mark.parametrize("regime", ["production", "slow"])
def test_the_engine_executes_on_its_stream_and_in_a_graph(
    engine: ModuleType, kernel: Any, regime: str
) -> None:
    pack = a_pack(regime)
    want = board.OPERATION.fast_oracle({**pack, "scale": WORKLOAD.scale})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    plan = engine.build(kernel, engine.KdaNode(scale=WORKLOAD.scale), pack, stream=side)
    side.synchronize()
    for name in ("o", "final_state"):
        pack[name].fill_(float("nan"))
    side.wait_stream(torch.cuda.current_stream())
    plan.execute(pack, stream=side)
    side.synchronize()
    assert_right(pack, want)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        plan.execute(pack, stream=side)
    for name in ("o", "final_state"):
        pack[name].fill_(float("nan"))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert_right(pack, want)


def test_the_engine_computes_what_flas_own_function_does(engine: ModuleType, kernel: Any) -> None:
    fla = next(b for b in candidates.baselines("kda_prefill") if b.name == "fla")
    if reason := fla.missing():
        pytest.skip(reason)
    pack = a_pack("production")
    outputs = {name: torch.empty_like(pack[name]) for name in ("o", "final_state")}
    theirs = fla.load(WORKLOAD, None).bind({**pack, "scale": WORKLOAD.scale}, outputs)()
    stream = torch.cuda.current_stream()
    plan = engine.build(kernel, engine.KdaNode(scale=WORKLOAD.scale), pack, stream=stream)
    plan.execute(pack, stream=stream)
    assert_right(pack, theirs)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("subject", [board.KDA, board.GDN], ids=lambda s: s.operation.name)
def test_the_backend_answers_for_fla_as_fla_would(subject: board.Subject, tmp_path: Path) -> None:
    """By the folder's own tests of it, for which fla has to be there."""
    pytest.importorskip("fla")
    folder = tmp_path / "vendored_beside_fla"
    write(render(board.selected(subject=subject)), folder)
    (tests,) = (folder / "tests").glob("test_*_fla_gpu.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    last = done.stdout.splitlines()[-1]
    assert " passed" in last
    assert "skipped" not in last
