"""The ahead-of-time form: kernels compiled into one shared library, with what loads it.

Needs nvidia-cutlass-dsl and a C compiler's linker, and no GPU.  Equal sources and toolchains give
equal bytes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from candidates import ToolchainError
from factory.errors import MachineError
from factory.export.exporter import Exporter, Form

__all__ = ["FOLDER", "compile_library"]

FOLDER = "aot"
_RUNTIME = "libcute_dsl_runtime.so"
_LICENCE_OF = ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl")


def compile_library(
    exporter: Exporter,
    forms: Sequence[Form],
    on_event: Callable[[str, str], None] | None = None,
) -> dict[str, bytes]:
    """Compile forms for sm_90a into the files of the folder's ``aot/``.

    Parameters
    ----------
    exporter : Exporter
    forms : sequence of Form
        For a dispatch table those of :meth:`.exporter.Exporter.forms`.
    on_event : callable, optional
        Takes a word and a line.

    Returns
    -------
    dict
        Path in the export to contents: the library, the DSL's runtime library and its licence, and
        an index.

    Raises
    ------
    MachineError
        Without the DSL, a linker, or the DSL's runtime library.
    """
    event = on_event or (lambda kind, line: None)
    linker = shutil.which("cc") or shutil.which("gcc")
    if linker is None:
        raise MachineError("--aot links a shared library and there is no cc; install gcc")
    try:
        version = exporter.require_dsl()
    except ToolchainError as error:
        raise MachineError(f"--aot compiles the kernels: {error}") from error
    import cutlass.cute as cute

    libraries = [Path(p) for p in cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)]
    runtime = next((p for p in libraries if p.name == _RUNTIME), None)
    if runtime is None:
        raise MachineError(f"nvidia-cutlass-dsl {version} brings no {_RUNTIME}")
    name = exporter.operation
    index = [{"key": form.key, "symbol": f"{name}_{n}"} for n, form in enumerate(forms)]
    with tempfile.TemporaryDirectory(prefix="export-aot-") as folder:
        objects = []
        for number, form in enumerate(forms):
            event("aot", f"{number + 1} of {len(forms)}: {form.key}")
            objects.append(Path(folder) / f"{number}.o")
            symbol = index[number]["symbol"]
            exporter.compile(form).export_to_c(str(objects[-1]), function_name=symbol)
        library = Path(folder) / f"{name}_sm90a.so"
        done = subprocess.run(
            [linker, "-shared", "-Wl,--build-id=none", "-o", library, *objects, *libraries],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise MachineError(f"--aot: {linker} failed: {said[-1] if said else 'no message'}")
        data = library.read_bytes()
    told = {
        "target": "sm_90a",
        "nvidia-cutlass-dsl": version,
        "apache-tvm-ffi": metadata.version("apache-tvm-ffi"),
        "forms": index,
    }
    return {
        f"{FOLDER}/{library.name}": data,
        f"{FOLDER}/{_RUNTIME}": runtime.read_bytes(),
        f"{FOLDER}/{_RUNTIME}.LICENSE": _licence(),
        f"{FOLDER}/index.json": (json.dumps(told, indent=1, sort_keys=True) + "\n").encode(),
    }


def _licence() -> bytes:
    """Of the DSL's runtime library, which is copied beside ours."""
    for name in _LICENCE_OF:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for file in found.files or ():
            if file.name.upper().startswith("LICENSE"):
                return Path(str(file.locate())).read_bytes()
    raise MachineError("nvidia-cutlass-dsl came without its licence; it cannot be copied")
