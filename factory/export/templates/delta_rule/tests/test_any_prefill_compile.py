"""Every row of the table compiles to sm_90a machine code here, without a GPU, and without spills.

Where the compiler is the one that the campaign used, it is also the machine code that was timed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import struct
from dataclasses import replace

import any_prefill_vendored as vendored
import pytest
from any_prefill_vendored import ROOT, package

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

MANIFEST = json.loads((ROOT / "MANIFEST.json").read_text("utf-8"))


def sections(cubin: bytes) -> dict[str, bytes]:
    """Sections of an ELF file by name."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    raw = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = raw[names][4]

    def text(at: int) -> str:
        return cubin[at : cubin.index(b"\0", at)].decode()

    return {text(strings + r[0]): cubin[r[4] : r[4] + r[5]] for r in raw if r[1] != 8}


@functools.lru_cache(maxsize=64)
def compiled(config):
    """Machine code of a schedule, part by part as the campaign compiled it."""
    host = importlib.import_module(f"{package.__name__}.kernel.host")
    if hasattr(config, "any_fused_field"):
        jobs = [host.fused_job(config, True)]
    else:
        jobs = [host.prep_job(config), host.scan_job(config, True)]
    return [host.compile_function(*job, keep=True)[1] for job in jobs]


CONFIGS = tuple(
    # How many pieces a sequence is cut into is a number at the launch.
    dict.fromkeys(replace(c, waves=1) if hasattr(c, "waves") else c for c in vendored.CONFIGS)
)


def code_of(cubin: bytes, names: list[str]) -> str:
    """sha256 over name and machine code of the kernels of one part, in launch order."""
    found = sections(cubin)
    digest = hashlib.sha256()
    for name in names:
        if f".text.{name}" in found:
            digest.update(name.encode() + b"\0" + found[f".text.{name}"])
    return digest.hexdigest()


@pytest.mark.parametrize("number", range(len(package.ROWS)))
def test_a_row_compiles_to_the_machine_code_that_was_timed(number):
    said, config = MANIFEST["rows"][number], package.ROWS[number].config
    names = [k["name"] for k in said["kernels"]]
    cubins = compiled(replace(config, waves=1) if hasattr(config, "waves") else config)
    there = [n for c in cubins for n in sections(c) if n.startswith(any_kernel_sections)]
    assert there
    if not MANIFEST["source"]["same_as_measured"]:
        pytest.skip("it compiles; its source is not the one that was timed")
    assert {f".text.{name}" for name in names} <= set(there)
    if cutlass.__version__ != MANIFEST["toolchain"]["compiler"]:
        pytest.skip(f"compiled by {cutlass.__version__}, timed as of another compiler")
    found = hashlib.sha256("".join(code_of(c, names) for c in cubins).encode()).hexdigest()
    assert found == said["machine_code_sha256"]


def test_calls_without_an_initial_state_compile_too():
    host = importlib.import_module(f"{package.__name__}.kernel.host")
    for config in CONFIGS:
        job = host.fused_job if hasattr(config, "any_fused_field") else host.scan_job
        _, cubin = host.compile_function(*job(config, False), keep=True)
        assert any(name.startswith(any_kernel_sections) for name in sections(cubin))
