"""The rules of the house that a reader would otherwise have to remember."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("operations", "candidates", "factory", "leaderboard")

# package -> project packages it may import: operations <- candidates <- factory -> leaderboard
MAY_IMPORT = {
    "operations": {"operations"},
    "candidates": {"candidates", "operations"},
    "factory": set(PACKAGES),
    "leaderboard": {"leaderboard"},
}
# package -> third-party packages that it must not know at all
MUST_NOT_KNOW = {
    "operations": {"ray", "optuna", "sqlalchemy", "alembic", "cutlass", "tvm_ffi"},
    "candidates": {"ray", "optuna", "sqlalchemy", "alembic"},
    "factory": {"sqlalchemy", "alembic"},
    "leaderboard": {"torch", "cutlass", "tvm_ffi", "ray", "optuna"},
}


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} has no source: the check would pass on an empty set"
    return found


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    for path in sources(package):
        used = imported(path)
        wrong = (used & set(PACKAGES)) - MAY_IMPORT[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"
        known = used & MUST_NOT_KNOW[package]
        assert not known, f"{path.relative_to(ROOT)} must not know {sorted(known)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def loaded_by(statement: str, *names: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


HEAVY = ("torch", "ray", "cutlass", "optuna", "sqlalchemy", "alembic", "tvm_ffi")


def test_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_by("import factory.cli", *HEAVY) == set()


def test_the_leaderboard_records_load_no_database() -> None:
    assert loaded_by("import leaderboard.records", *HEAVY) == set()


def test_help_answers_quickly() -> None:
    # best of several: a loaded CI machine must not decide what the code costs
    best = min(_help_seconds() for _ in range(5))
    assert best < 0.3, f"factory --help took {best:.2f} s"


def _help_seconds() -> float:
    start = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv = ['factory', '--help']; from factory.cli import main; main()",
        ],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    return time.perf_counter() - start


BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_oracle_emulation_and_leaderboard_work_without_the_dsl_and_ray() -> None:
    code = (
        BLOCK.format(blocked={"cutlass", "ray", "tvm_ffi", "cuda"})
        + """
import candidates, operations, leaderboard
op = operations.get("kda_prefill")
family = candidates.get("kda_prefill")
w = min(op.reduced(), key=lambda w: w.tokens)
inputs = op.generate(w, op.regimes["production"], seed=1)
expected = op.oracle(inputs)
schedule = family.offered("quickstart")[0]
got = family.emulate(schedule, inputs)
assert {e.tensor for e in op.compare(got, expected, w)} == {"o", "final_state"}
print("ok")
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "ok", done.stderr
