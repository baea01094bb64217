"""The kernel's own source: which modules an entry point needs, as they stand alone.

Text is taken as it is; only the package prefix of modules that it imports or names becomes a
relative one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path

from factory.export.exporter import ExportError

__all__ = ["contract_docstring", "kernel_sources", "package_folder", "standing_alone"]

ALLOWED = frozenset({"torch", "cutlass", "cuda", "tvm_ffi"})
"""Distributions that an export may import: torch, nvidia-cutlass-dsl (with the CUDA bindings that
it brings) and apache-tvm-ffi.  Beside them the standard library only."""


def kernel_sources(packages: Mapping[str, str], roots: Iterable[str]) -> dict[str, str]:
    """Modules that ``roots`` need, each with its imports made relative.

    Parameters
    ----------
    packages : Mapping[str, str]
        Package that holds modules to its folder in the export, all of one level.  Roots are of
        the first one.
    roots : iterable of str
        Module names in it, without a suffix.

    Returns
    -------
    dict
        Path in the export to text, by path; an ``__init__.py`` of each folder is among them.

    Raises
    ------
    ExportError
        If a module needs something that an export may not import.
    """
    folders = {folder: package_folder(package) for package, folder in packages.items()}
    first = next(iter(folders))
    texts: dict[str, str] = {}
    waiting = [(first, name) for name in ("__init__", *roots)]
    while waiting:
        folder, name = waiting.pop()
        path = f"{folder}/{name}.py"
        if path in texts:
            continue
        read = (folders[folder] / f"{name}.py").read_text("utf-8")
        texts[path] = standing_alone(read, packages, folder)
        waiting += _needed(texts[path], folders, folder, name)
        waiting.append((folder, "__init__"))
    return dict(sorted(texts.items()))


def package_folder(package: str) -> Path:
    """Where the modules of a kernel package lie."""
    return Path(import_module(package).__path__[0])


def standing_alone(text: str, packages: Mapping[str, str], own: str) -> str:
    """``text`` with names of modules of kernel packages made relative; nothing else changes.

    Those that it imports from, and those that docstrings and comments mention.  ``own`` is the
    folder that the module itself goes to.
    """
    for package, folder in packages.items():
        prefix = re.escape(package)
        here = "." if folder == own else f"..{folder}."
        # Not of "import a.b.c", which cannot be relative: it is refused as what it is.
        text = re.sub(rf"(?<!import )(?<![\w.]){prefix}\.(?=\w)", here, text)
        here = "." if folder == own else f"..{folder}"
        text = re.sub(rf"^(\s*)from {prefix} import ", rf"\1from {here} import ", text, flags=re.M)
    return text


def _needed(text: str, folders: Mapping[str, Path], own: str, name: str) -> list[tuple[str, str]]:
    """Modules of kernel packages that a source imports, as folder and name; refuses others."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _check(alias.name, f"{name}.py")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            folder = own
            if node.level == 0:
                _check(module, f"{name}.py")
                continue
            if node.level == 2:
                folder, _, module = module.partition(".")
            if node.level > 2 or folder not in folders:
                raise ExportError(
                    f"{name}.py imports from outside its package; it cannot stand alone"
                )
            if module:
                found.append((folder, module.partition(".")[0]))
            else:
                there = [a.name for a in node.names if (folders[folder] / f"{a.name}.py").is_file()]
                found += [(folder, module) for module in there]
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
