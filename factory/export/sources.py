"""The kernel's own source: which modules an entry point needs, as they stand alone.

Text is taken as it is; only the package prefix of its imports becomes a relative one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from factory.export.select import ExportError

__all__ = ["contract_docstring", "kernel_sources", "standing_alone"]

ALLOWED = frozenset({"torch", "cutlass", "cuda", "tvm_ffi"})
"""Distributions that an export may import: torch, nvidia-cutlass-dsl (with the CUDA bindings that
it brings) and apache-tvm-ffi.  Beside them the standard library only."""

_PREFIX = "candidates.kda_prefill.kernel"


def kernel_sources(folder: Path, roots: Iterable[str]) -> dict[str, str]:
    """Modules that ``roots`` need, each with its imports made relative.

    Parameters
    ----------
    folder : Path
        The package that holds them.
    roots : iterable of str
        Module names in it, without a suffix.

    Returns
    -------
    dict
        File name to text, by name; ``__init__.py`` is among them.

    Raises
    ------
    ExportError
        If a module needs something that an export may not import.
    """
    texts: dict[str, str] = {}
    waiting = ["__init__", *roots]
    while waiting:
        name = waiting.pop()
        if f"{name}.py" in texts:
            continue
        path = folder / f"{name}.py"
        text = standing_alone(path.read_text("utf-8"))
        texts[f"{name}.py"] = text
        waiting += _siblings(text, folder, path.name)
    return dict(sorted(texts.items()))


def standing_alone(text: str) -> str:
    """``text`` with imports of its own package made relative; nothing else changes."""
    prefix = re.escape(_PREFIX)
    text = re.sub(rf"^(\s*)from {prefix}\.(\w+) import ", r"\1from .\2 import ", text, flags=re.M)
    return re.sub(rf"^(\s*)from {prefix} import ", r"\1from . import ", text, flags=re.M)


def _siblings(text: str, folder: Path, name: str) -> list[str]:
    """Modules of the same package that a source imports; refuses what may not be imported."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _check(alias.name, name)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                _check(node.module or "", name)
            elif node.level == 1 and node.module:
                found.append(node.module.partition(".")[0])
            elif node.level == 1:
                found += [a.name for a in node.names if (folder / f"{a.name}.py").is_file()]
            else:
                raise ExportError(f"{name} imports from outside its package; it cannot stand alone")
    return found


def _check(module: str, name: str) -> None:
    import sys

    top = module.partition(".")[0]
    if top not in ALLOWED and top not in sys.stdlib_module_names:
        raise ExportError(f"{name} imports {top}, which an export must do without")


def contract_docstring(text: str, function: str, leave_out: Iterable[str]) -> str:
    """Docstring of a function without the entries of some parameters.

    Parameters
    ----------
    text : str
        Source of the module.
    function : str
    leave_out : iterable of str
        Parameters that the exported function does not have.

    Returns
    -------
    str
        Dedented.

    Raises
    ------
    ExportError
        If there is no such function, or it says nothing.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            doc = ast.get_docstring(node)
            if doc:
                dropped = "|".join(map(re.escape, leave_out))
                return re.sub(
                    rf"^(?:{dropped}) : .*\n(?:    .*\n|\n(?=    ))+", "", doc, flags=re.M
                )
    raise ExportError(f"{function} has no docstring to take the contract from")
