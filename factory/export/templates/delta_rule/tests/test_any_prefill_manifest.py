"""The folder is what was exported, and asks for nothing that it does not say."""

from __future__ import annotations

import ast
import hashlib
import json
import sys

import pytest
from any_prefill_vendored import ROOT, package

MANIFEST = json.loads((ROOT / "MANIFEST.json").read_text("utf-8"))
ALLOWED = {"torch", "cutlass", "cuda", "tvm_ffi"}
OPTIONAL = {"fla_backend.py": {"fla"}}
TESTS_TOO = {"pytest"}


def sources():
    return [p for p in sorted(ROOT.rglob("*.py")) if "__pycache__" not in p.parts]


def test_every_file_is_the_one_that_was_exported():
    for name, said in MANIFEST["files"].items():
        found = hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        assert found == said, f"{name} was altered"


def test_no_source_is_there_that_was_not_exported():
    names = {p.relative_to(ROOT).as_posix() for p in sources()}
    assert names <= set(MANIFEST["files"])


def test_the_table_names_a_measurement_for_every_row():
    told = MANIFEST["rows"]
    assert len(told) == len(package.ROWS)
    for row, said in zip(package.ROWS, told, strict=True):
        assert row.trial == said["trial"]
        assert row.job == said["job"]
        assert list(row.measurements) == [m["uid"] for m in said["measurements"]]
        assert said["measurements"]
    assert [row.shape for row in package.ROWS].count(None) == 1


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_are_the_standard_library_and_what_is_declared(path):
    allowed = ALLOWED | OPTIONAL.get(path.name, set()) | set(sys.stdlib_module_names)
    if path.parent.name == "tests":
        allowed |= TESTS_TOO | OPTIONAL["fla_backend.py"]
        allowed |= {p.stem for p in path.parent.glob("*.py")}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            assert name.partition(".")[0] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_source_reads_the_environment_or_the_network(path):
    if path.parent.name == "tests":
        pytest.skip("a test may")
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "environb", "getenv", "putenv"), path.name
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            tops = {n.partition(".")[0] for n in names}
            assert not tops & {"socket", "urllib", "http", "requests", "ssl"}, path.name


def test_every_cache_is_bounded():
    prefix = f"{package.__name__}."
    modules = [m for name, m in sys.modules.items() if name.startswith(prefix)]
    assert len(modules) > 5
    cached = {
        f"{module.__name__}.{name}": value.cache_info().maxsize
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "cache_info")
    }
    assert cached
    assert None not in cached.values(), cached
