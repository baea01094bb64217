"""Bring the CuTe DSL in for sm_90a, or say in one line what is missing and how to get it.

Must be called before anything imports ``prep``, ``scan`` or ``host``: the DSL reads its
target from the environment once, while it is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata

from candidates._base import ToolchainError

__all__ = ["ARCH", "require_dsl"]

ARCH = "sm_90a"
"""The only target: wgmma exists there alone."""

_DSL = "nvidia-cutlass-dsl"
_FFI = "apache-tvm-ffi"
_OLDEST, _TOO_NEW = (4, 8, 1), (4, 9)
_FIX_DSL = f"pip install '{_DSL}[cu13]>=4.8.1,<4.9'"
_FIX_FFI = f"pip install '{_FFI}>=0.1.15'"


def require_dsl() -> str:
    """Import ``cutlass`` and ``tvm_ffi`` for sm_90a; quick once done.

    Returns
    -------
    str
        Version of the DSL, for example ``"4.8.1"``.

    Raises
    ------
    ToolchainError
        A package is absent, broken, of the wrong version or of the wrong CUDA flavour.  The
        message names the package, the version found and the command that mends it.
    """
    # Read once, by the import below.  Compilation names the target again, so that a process
    # that had the DSL imported for another one still gets sm_90a.
    os.environ.setdefault("CUTE_DSL_ARCH", ARCH)
    cutlass = _import("cutlass", _DSL, _FIX_DSL)
    version = str(getattr(cutlass, "__version__", "of unknown version"))
    if not _OLDEST <= _numbers(version) < _TOO_NEW:
        raise ToolchainError(
            f"{_DSL} {version} is not one these kernels were checked with "
            f"(4.8.1 or newer, under 4.9): {_FIX_DSL}"
        )
    flavour = _flavour()
    if flavour not in ("cu13", None):
        raise ToolchainError(
            f"{_DSL} {version} is in use with its {flavour} libraries, not cu13: {_FIX_DSL} "
            "(and a driver for CUDA 13, 580 or newer)"
        )
    _import("tvm_ffi", _FFI, _FIX_FFI)
    return version


def _import(module: str, package: str, fix: str):
    """Import ``module``; every way that can fail is the toolchain's fault."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # extension modules fail to load in many ways
        found = _installed(package)
        what = f"{package} {found} does not import" if found else f"{package} is not installed"
        reason = (str(error).splitlines() or [""])[0]
        raise ToolchainError(
            f"{what} ({type(error).__name__}: {reason}); needed to compile: {fix}"
        ) from error


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _flavour() -> str | None:
    """CUDA flavour of the DSL's loaded compiler, for example ``"cu13"``; None if it has no mark.

    The DSL picks among the installed flavours by the driver it finds; the file name of the
    extension module tells which.
    """
    extension = sys.modules.get("cutlass._mlir._mlir_libs._cutlass_ir")
    for part in os.path.basename(getattr(extension, "__file__", None) or "").split("."):
        if part.startswith("cu") and part[2:].isdigit():
            return part
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version; ``()`` if there are none."""
    out = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        out.append(int(digits))
    return tuple(out)
