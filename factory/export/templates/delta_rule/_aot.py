"""Kernels compiled ahead of time, where the export was made with ``--aot``: the ``aot/`` folder.

Loading them needs torch and apache-tvm-ffi, and the DSL's runtime library that lies beside them; it
needs neither nvidia-cutlass-dsl nor a compiler.  Forms of arguments that were not compiled ahead
are compiled when they are first called, where the DSL is installed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from .kernel import entry

__all__ = ["install", "missing", "present"]

FOLDER = Path(__file__).resolve().parent / "aot"
_LIBRARY, _RUNTIME = "any_prefill_sm90a.so", "libcute_dsl_runtime.so"
_CACHED = 512


def present() -> bool:
    """Whether there are kernels compiled ahead of time."""
    return bool(_symbols())


def missing(config: Any, with_state: bool, options: Any) -> str:
    """Why a form of arguments cannot be served on this machine; empty if it can."""
    if _key(config, with_state, options) in _symbols():
        return ""
    if importlib.util.find_spec("cutlass") is not None:
        return ""
    return (
        "this form of arguments is not among the kernels that were compiled ahead of time, and"
        " nvidia-cutlass-dsl is not installed to compile it: pip install"
        " 'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'"
    )


def install() -> None:
    """Let the entry point look here before it compiles anything."""
    if not present():
        return
    if importlib.util.find_spec("tvm_ffi") is not None:
        _library()  # now, and not in the first call
    compile_now = entry.compiled

    @functools.lru_cache(maxsize=_CACHED)
    def compiled(config: Any, with_state: bool, options: Any = entry.Options()) -> Any:  # noqa: B008
        symbol = _symbols().get(_key(config, with_state, options))
        if symbol is not None:
            return getattr(_library(), symbol)
        if problem := missing(config, with_state, options):
            raise RuntimeError(problem)
        return compile_now(config, with_state, options)

    entry.compiled = compiled


@functools.lru_cache(maxsize=1)
def _symbols() -> dict[str, str]:
    """Form to the name of its function in the library."""
    index = FOLDER / "index.json"
    if not index.is_file():
        return {}
    told = json.loads(index.read_text("utf-8"))
    return {form["key"]: form["symbol"] for form in told["forms"]}


def _key(config: Any, with_state: bool, options: Any) -> str:
    """A form in words.  Into how many pieces a sequence is cut is a number at the launch."""
    if hasattr(config, "waves"):
        config = replace(config, waves=1)
    return repr((config, bool(with_state), options))


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    import tvm_ffi

    # Before the library that needs it, and for the whole process.
    ctypes.CDLL(str(FOLDER / _RUNTIME), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(FOLDER / _LIBRARY))
