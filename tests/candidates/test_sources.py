"""The hash of a family's source covers every module that its kernels are made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from candidates._delta_rule import sources
from candidates._delta_rule.sources import hashed, source_hash

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("kda_prefill", "gdn_prefill")
VOCABULARY = ROOT / "candidates/_base.py"
"""Nothing of it is computed or timed."""


def imported(path: Path) -> Iterator[Path]:
    """Files of this project that a module imports, wherever in its text."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            above = path.parents[node.level - 1] if node.level else ROOT
            module = above.joinpath(*(node.module or "").split("."))
            found = [module, *(module / alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found = [ROOT.joinpath(*alias.name.split(".")) for alias in node.names]
        else:
            continue
        for name in found:
            yield from (p for p in (name.with_suffix(".py"), name / "__init__.py") if p.is_file())


def outside(family: str) -> set[str]:
    """What the hashed modules of a family import of ``candidates`` that is not hashed."""
    root = ROOT / "candidates" / family
    known = {folder / path for folder, path in hashed(root)}
    return {
        f"{path.relative_to(ROOT)} by {by.relative_to(ROOT)}"
        for by in known
        for path in imported(by)
        if ROOT / "candidates" in path.parents and path not in known and path != VOCABULARY
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_hashed_module_imports_is_hashed(family: str) -> None:
    # Beside the vocabulary there is the cost model, which the family passes on.
    own = f"candidates/{family}"
    assert outside(family) == {f"{own}/cost.py by {own}/_family.py"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("module", ["baselines/peer.py", "cost.py", "../other/kernel/scan.py"])
def test_a_module_that_is_imported_and_not_hashed_is_noticed(
    family: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module.removeprefix("../").removesuffix(".py").replace("/", ".")
    package = name if name.startswith("other") else f"{family}.{name}"
    for path, text in (
        (module, ""),
        ("kernel/prep.py", f"def late():\n    from candidates.{package} import x\n"),
    ):
        file = tmp_path / "candidates" / family / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setattr(sources, "_SHARED", tmp_path / "candidates/_delta_rule")
    path = package.replace(".", "/")
    assert outside(family) == {f"candidates/{path}.py by candidates/{family}/kernel/prep.py"}


def test_the_hash_follows_a_familys_modules_and_the_shared_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SHARED", tmp_path / "shared")
    decides = ("own/space.py", "own/kernel/prep.py", "shared/kernel/scan.py", "shared/emulate.py")
    others = ("own/baselines/fla.py", "own/cost.py", "shared/cost.py", "own/notes.txt")
    for name in (*decides, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("a = 1\n")
    first = source_hash(tmp_path / "own")
    assert len(first) == 64
    for name in others:
        (tmp_path / name).write_text("a = 2\n")
        assert source_hash(tmp_path / "own") == first, name
    seen = {first}
    for name in decides:
        (tmp_path / name).write_text("a = 2\n")
        seen.add(source_hash(tmp_path / "own"))
    (tmp_path / "own/kernel/prep.py").rename(tmp_path / "own/kernel/step.py")
    seen.add(source_hash(tmp_path / "own"))
    (tmp_path / "own/kernel/step.py").rename(tmp_path / "shared/kernel/step.py")
    seen.add(source_hash(tmp_path / "own"))
    assert len(seen) == len(decides) + 3


def test_both_families_hash_the_scan() -> None:
    for family in FAMILIES:
        names = {folder / path for folder, path in hashed(ROOT / "candidates" / family)}
        assert ROOT / "candidates/_delta_rule/kernel/scan.py" in names
        assert ROOT / "candidates" / family / "kernel/prep.py" in names
