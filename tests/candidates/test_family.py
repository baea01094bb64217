"""The family as others meet it: found by name, cheap to import, joined lazily."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import candidates
import operations
from candidates import Build
from candidates.kda_prefill import FAMILY, _family

ROOT = Path(__file__).resolve().parents[2]


def test_the_operation_finds_its_family() -> None:
    assert candidates.get("kda_prefill") is FAMILY
    assert FAMILY.name == FAMILY.operation == operations.get("kda_prefill").name


def test_listing_and_costing_a_space_loads_neither_torch_nor_the_dsl() -> None:
    code = (
        "import sys, candidates, operations\n"
        "f = candidates.get('kda_prefill')\n"
        "w = operations.get('kda_prefill').tuned()[0]\n"
        "assert all(f.modelled_us(s, w) > 0 for s in f.offered('quickstart'))\n"
        "print(sorted({'torch', 'cutlass', 'tvm_ffi'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_emulating_does_not_load_the_dsl() -> None:
    code = (
        "import sys, candidates.kda_prefill.emulate\n"
        "print(sorted({'cutlass', 'tvm_ffi'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_source_hash_follows_kernels_and_arithmetic_but_not_baselines_or_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FAMILY.source_hash() == FAMILY.source_hash()
    assert len(FAMILY.source_hash()) == 64
    monkeypatch.setattr(_family, "_ROOT", tmp_path)
    for name in ("space.py", "kernel/prep.py", "baselines/fla.py", "cost.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    first = FAMILY.source_hash()
    (tmp_path / "baselines/fla.py").write_text("a = 2\n")
    (tmp_path / "cost.py").write_text("a = 2\n")
    (tmp_path / "notes.txt").write_text("b\n")
    assert FAMILY.source_hash() == first
    (tmp_path / "kernel/prep.py").write_text("a = 2\n")
    changed = FAMILY.source_hash()
    assert changed != first
    (tmp_path / "kernel/prep.py").rename(tmp_path / "kernel/scan.py")
    assert FAMILY.source_hash() not in (first, changed)


def test_compile_and_load_are_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    from candidates.kda_prefill.kernel import launch

    schedule = FAMILY.offered("quickstart")[0]
    build = Build(schedule.key, (), 0.0, "0" * 64)
    loaded = object()
    monkeypatch.setattr(launch, "compile_schedule", {schedule: build}.__getitem__)
    monkeypatch.setattr(launch, "load_schedule", {schedule: loaded}.__getitem__)
    assert FAMILY.compile(schedule) is build
    assert FAMILY.load(schedule) is loaded
