"""The ahead-of-time form: compiled here without a GPU, loaded where the DSL cannot be imported."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import clean_environment
import export_board as board
import pytest

from factory.cli import _run
from factory.errors import MachineError
from factory.export import aot
from factory.export.exporter import exporter_of
from factory.export.folder import check, write
from factory.export.render import export_hash, render

pytest.importorskip("cutlass")

EXPORTER = exporter_of("kda_prefill")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export with one form compiled ahead of time."""
    base = tmp_path_factory.mktemp("aot")
    selection = board.selected()
    forms = EXPORTER.forms([row.schedule for row in selection.rows])[:1]
    files = render(selection, compiled=aot.compile_library(EXPORTER, forms))
    assert export_hash(files) == export_hash(render(selection)), "a claim is on the source"
    write(files, base / "kda_ahead")
    return base / "kda_ahead"


LOAD = """
import sys
from importlib.util import find_spec
assert find_spec("cutlass") is None
sys.path.insert(0, {base!r})
import torch
import kda_ahead
from kda_ahead import _aot, api
from kda_ahead.kernel import arguments, entry
config = kda_ahead.ROWS[-1].config
function = entry.compiled(config, True)
print("loaded", type(function).__module__)
x = torch.zeros(4, 2, 128)
try:
    function(x, x, x, x, x[..., 0], x[..., 0], x, x, x, 1.0, 1, None, None, None)
except (TypeError, ValueError) as error:
    print("checked", str(error).splitlines()[0][:80])
try:
    entry.compiled(config, False)
except RuntimeError as error:
    print("missing", error)
arguments.on_gpu = lambda x: True
api._machine_problem = lambda index: ""
bf16 = x.bfloat16()
call = dict(q=bf16, k=bf16, v=bf16, g=x, beta=x[..., 0].contiguous(),
            cu_seqlens=torch.zeros(2, dtype=torch.int32))
print("support", api.support(**call, initial_state=torch.zeros(1, 2, 128, 128)))
print("support", api.support(**call).reason[:60])
"""


def test_the_library_loads_without_the_dsl_and_says_what_is_not_in_it(
    folder: Path, tmp_path: Path
) -> None:
    python = clean_environment.make(tmp_path / "env", ["torch", "apache-tvm-ffi"])
    done = subprocess.run(
        [str(python), "-I", "-c", LOAD.format(base=str(folder.parent))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines["loaded"].startswith("tvm_ffi")
    assert lines["checked"], "the argument checks are compiled in"
    assert "not among the kernels that were compiled ahead of time" in lines["missing"]
    told = [line for line in done.stdout.splitlines() if line.startswith("support ")]
    assert told[0] == "support Support(served=True, reason='')"
    assert "this form of arguments is not among the kernels" in told[1]


def test_it_carries_the_runtime_library_with_its_licence(folder: Path) -> None:
    names = {p.name for p in (folder / "aot").iterdir()}
    assert names == {
        "kda_prefill_sm90a.so",
        "libcute_dsl_runtime.so",
        "libcute_dsl_runtime.so.LICENSE",
        "index.json",
    }
    assert (folder / "aot" / "libcute_dsl_runtime.so.LICENSE").stat().st_size > 1000
    assert check(folder).status == "unaltered"
    assert check(folder, [render(board.selected())]).status == "fine"
    index = json.loads((folder / "aot" / "index.json").read_text())
    assert index["target"] == "sm_90a"
    assert [form["symbol"] for form in index["forms"]] == ["kda_prefill_0"]


def test_equal_sources_give_equal_libraries(folder: Path) -> None:
    forms = EXPORTER.forms([row.schedule for row in board.selected().rows])[:1]
    again = aot.compile_library(EXPORTER, forms)
    for name, data in again.items():
        assert (folder / name).read_bytes() == data, name


def test_forms_are_the_plain_one_and_what_models_pass() -> None:
    keys = [form.key for form in EXPORTER.forms(board.SCHEDULES)]
    assert len(keys) == len(set(keys)) > 8
    assert any("gate='safe'" in key and "l2norm=True" in key for key in keys)
    split = EXPORTER.forms(board.FAMILY.offered("quickstart")[:1])
    assert {form.options.gate for form in split} == {"log"}
    for forms in (EXPORTER.forms(board.SCHEDULES), split):
        kept = [replace(form.options, final_state=None) for form in forms]
        assert {form.options for form in forms} >= set(kept), "fla's callers want no final state"


def test_without_a_linker_it_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.shutil, "which", lambda name: None)
    with pytest.raises(MachineError, match="there is no cc; install gcc"):
        aot.compile_library(EXPORTER, ())


def test_aot_goes_with_a_folder_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(["export", "kda_prefill", "--check", "x", "--aot"]) == 2
    assert "--aot goes with --to" in capsys.readouterr().err
