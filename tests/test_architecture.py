"""The rules of the house that a reader would otherwise have to remember."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
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


def taken(path: Path, package: str) -> set[str]:
    """Names in ``package`` of the folders and modules that a source takes from it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            above = path.parents[node.level - 1].relative_to(ROOT)
            names.add(".".join((*above.parts, *(node.module or "").split("."))))
    dotted = (name.split(".") for name in names)
    return {parts[1] for parts in dotted if parts[0] == package and len(parts) > 1}


@pytest.mark.parametrize("package", ["operations", "candidates"])
def test_what_operations_share_is_in_one_place_that_knows_none_of_them(package: str) -> None:
    folders = {p.parent for p in sorted((ROOT / package).glob("*/__init__.py"))}
    names = {folder.name for folder in folders}
    assert {"_delta_rule", "gdn_prefill", "kda_prefill"} <= names
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            other = (taken(path, package) & names) - {folder.name}
            wrong = sorted(name for name in other if not name.startswith("_"))
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


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


HELP = "import sys; sys.argv = ['factory', '--help']; from factory.cli import main; main()"


def test_help_costs_little_more_than_python_itself() -> None:
    # 2.4 starts of the interpreter when this was written, 0.06 s.  CPU time, in turns, the best of
    # several: neither the machine's speed nor its load decides.
    taken = [(_cpu_seconds(HELP), _cpu_seconds("pass")) for _ in range(7)]
    help_s, bare_s = (min(seconds) for seconds in zip(*taken, strict=True))
    assert help_s < 5 * bare_s, f"factory --help took {help_s:.3f} s, python itself {bare_s:.3f} s"


def _cpu_seconds(code: str) -> float:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=ROOT)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


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
