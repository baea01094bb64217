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
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from candidates import Schedule, ToolchainError
from factory.errors import MachineError

__all__ = ["FOLDER", "Form", "compile_library", "forms_of"]

FOLDER = "aot"
_LIBRARY = "kda_prefill_sm90a.so"
_RUNTIME = "libcute_dsl_runtime.so"
_LICENCE_OF = ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl")


@dataclass(frozen=True)
class Form:
    """One function of the library.

    Parameters
    ----------
    config : Config or FusedConfig
    with_state : bool
    options : Options
    """

    config: Any
    with_state: bool
    options: Any

    @property
    def key(self) -> str:
        """In words, as the loader of the folder looks it up."""
        return repr((self.config, self.with_state, self.options))


def forms_of(schedules: Sequence[Schedule]) -> tuple[Form, ...]:
    """What is compiled ahead of time for a dispatch table.

    The plain form and what models pass (raw gates and logits in bf16, q and k to be normalised),
    each packed and as a batch, with and without an initial state.  Split schedules serve the plain
    form alone.
    """
    from candidates.kda_prefill.kernel.config import Config, FusedConfig
    from candidates.kda_prefill.kernel.options import PLAIN, Options

    raw = Options(
        gate="safe", gate_dtype="bfloat16", bias=True, beta_dtype="bfloat16", beta_logits=True,
        l2norm=True,
    )  # fmt: skip
    wanted = [PLAIN, replace(PLAIN, offsets="equal"), replace(PLAIN, offsets="int64")]
    wanted += [raw, replace(raw, offsets="equal"), replace(raw, offsets="int64")]
    found: dict[Form, None] = {}
    for schedule in schedules:
        values = schedule.as_dict()
        config: Any
        if values.pop("form") == "fused":
            config = replace(FusedConfig(**values), waves=1)  # type: ignore[arg-type]
        else:
            config = Config(**values)  # type: ignore[arg-type]
        for options in wanted if isinstance(config, FusedConfig) else wanted[:1]:
            for with_state in (True, False):
                found.setdefault(Form(config, with_state, options))
    return tuple(found)


def compile_library(
    forms: Sequence[Form], on_event: Callable[[str, str], None] | None = None
) -> dict[str, bytes]:
    """Compile forms for sm_90a into the files of the folder's ``aot/``.

    Parameters
    ----------
    forms : sequence of Form
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
    from candidates.kda_prefill.kernel.toolchain import require_dsl

    linker = shutil.which("cc") or shutil.which("gcc")
    if linker is None:
        raise MachineError("--aot links a shared library and there is no cc; install gcc")
    try:
        version = require_dsl()
    except ToolchainError as error:
        raise MachineError(f"--aot compiles the kernels: {error}") from error
    import cutlass.cute as cute

    libraries = [Path(p) for p in cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)]
    runtime = next((p for p in libraries if p.name == _RUNTIME), None)
    if runtime is None:
        raise MachineError(f"nvidia-cutlass-dsl {version} brings no {_RUNTIME}")
    index = [{"key": form.key, "symbol": f"kda_prefill_{n}"} for n, form in enumerate(forms)]
    with tempfile.TemporaryDirectory(prefix="export-aot-") as folder:
        objects = []
        for number, form in enumerate(forms):
            event("aot", f"{number + 1} of {len(forms)}: {form.key}")
            objects.append(Path(folder) / f"{number}.o")
            _compile(form).export_to_c(str(objects[-1]), function_name=f"kda_prefill_{number}")
        library = Path(folder) / _LIBRARY
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
        f"{FOLDER}/{_LIBRARY}": data,
        f"{FOLDER}/{_RUNTIME}": runtime.read_bytes(),
        f"{FOLDER}/{_RUNTIME}.LICENSE": _licence(),
        f"{FOLDER}/index.json": (json.dumps(told, indent=1, sort_keys=True) + "\n").encode(),
    }


def _compile(form: Form) -> Any:
    """The compiled object of the call that the entry point would make for the form."""
    from candidates.kda_prefill.kernel import host

    return host.compile_function(*host.call_job(form.config, form.with_state, form.options))[0]


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
