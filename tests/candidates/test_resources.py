"""The cubin reader and the budgets, without a compiler."""

from __future__ import annotations

import hashlib
import struct

import pytest

from candidates import KernelResources
from candidates._delta_rule.kernel.resources import (
    MAX_DYNAMIC_SMEM_BYTES,
    Cubin,
    budget_problems,
    dynamic_smem,
    kernel_resources,
)

REGCOUNT, FRAME_SIZE, REQNTID = 0x2F, 0x11, 0x10


def sized(attribute, *values):
    return struct.pack(f"<BBH{len(values)}I", 4, attribute, 4 * len(values), *values)


def cubin(kernels, subroutine=None):
    """An ELF file as ptxas writes it; kernels: name to (registers, stack, threads, code)."""
    strings, symbols, info, sections = b"\0", b"\0" * 24, b"", []
    names = [*kernels, *([subroutine] if subroutine else [])]
    for index, name in enumerate(names, start=1):
        symbols += struct.pack("<IIQQ", len(strings), 0, 0, 0)
        strings += name.encode() + b"\0"
        registers, stack, ntid, code = kernels.get(name, (8, 0, None, b""))
        info += sized(FRAME_SIZE, index, stack) + sized(REGCOUNT, index, registers)
        if name in kernels:
            own = struct.pack("<BBH", 3, 0x1B, 255)  # an entry without a sized value
            own += sized(0x37, 134)
            own += sized(REQNTID, *ntid) if ntid else b""
            sections += [(f".nv.info.{name}", own), (f".text.{name}", code)]
    sections += [(".strtab", strings), (".symtab", symbols), (".nv.info", info)]
    header_names = b"\0"
    offsets = []
    for name, _ in [*sections, (".shstrtab", b"")]:
        offsets.append(len(header_names))
        header_names += name.encode() + b"\0"
    sections.append((".shstrtab", header_names))
    body, table = b"", struct.pack("<IIQQQQIIQQ", *[0] * 10)
    for (_, data), offset in zip(sections, offsets, strict=True):
        table += struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0)
        body += data
    count = len(sections) + 1
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, count, count - 1)
    return header.ljust(64, b"\0") + body + table


def launch(kernel, constant, size="%9"):
    """Host code as the compiler writes it, with one launch."""
    config = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    return f"""
    {size} = llvm.mlir.constant({constant} : i64) : i64
    %15 = llvm.getelementptr %13[0, 1, 0] : (!llvm.ptr) -> !llvm.ptr, {config}
    llvm.store %7, %15 : i32, !llvm.ptr
    %19 = llvm.getelementptr %13[0, 2] : (!llvm.ptr) -> !llvm.ptr, {config}
    llvm.store {size}, %19 : i64, !llvm.ptr
    %38 = llvm.call @printf(%37) vararg(!llvm.func<i32 (ptr, ...)>) : (!llvm.ptr) -> i32
    %98 = llvm.mlir.addressof @kernels_{kernel} : !llvm.ptr
    %100 = llvm.call @_cudaLaunchKernelEx(%70, %99, %73) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
"""


HOST = "  llvm.func @host(%arg0: !llvm.ptr) -> i32 {\n"


def test_reads_registers_stack_threads_and_code_of_every_kernel():
    data = cubin(
        {
            "kda_prep_0": (128, 0, (256, 1, 1), b"prep code"),
            "kda_scan_0": (202, 16, (32, 4, 2), b"scan"),
            "open_0": (40, 0, None, b"x"),
        }
    )
    read = Cubin(data)
    assert read.kernels == ("kda_prep_0", "kda_scan_0", "open_0")
    assert [read.registers(k) for k in read.kernels] == [128, 202, 40]
    assert [read.stack_bytes(k) for k in read.kernels] == [0, 16, 0]
    assert [read.threads(k) for k in read.kernels] == [256, 256, None]
    assert read.code("kda_prep_0") == b"prep code"


def test_a_device_subroutine_is_no_kernel():
    data = cubin({"kda_prep_0": (32, 0, (64, 1, 1), b"c")}, subroutine="helper")
    assert Cubin(data).kernels == ("kda_prep_0",)


@pytest.mark.parametrize("size", [0, 3, 64, 100, 300])
def test_anything_else_is_refused(size):
    data = cubin({"kda_prep_0": (32, 0, (64, 1, 1), b"c")})
    with pytest.raises(ValueError, match="cubin"):
        Cubin(data[:size])
    with pytest.raises(ValueError, match="cubin"):
        Cubin(b"\x7fELF\x01\x01" + data[6:])


def test_shared_memory_is_read_per_launch_in_order():
    ir = HOST + launch("b_0", 227 * 1024) + launch("a_0", 1024, size="%10")
    assert list(dynamic_smem(ir).items()) == [("b_0", 232448), ("a_0", 1024)]


def test_shared_memory_computed_at_run_time_is_unknown():
    ir = HOST + launch("a_0", 1024).replace("llvm.store %9,", "llvm.store %77,")
    assert dynamic_smem(ir) == {"a_0": None}


def test_constants_of_another_function_do_not_count():
    ir = HOST + "    %77 = llvm.mlir.constant(5 : i64) : i64\n  }\n" + HOST
    ir += launch("a_0", 1024).replace("llvm.store %9,", "llvm.store %77,")
    assert dynamic_smem(ir) == {"a_0": None}


def test_a_kernel_launched_twice_has_its_largest_amount():
    assert dynamic_smem(HOST + launch("a_0", 4096) + launch("a_0", 512)) == {"a_0": 4096}


def test_resources_come_in_launch_order_and_the_hash_follows_code_and_order():
    kernels = {"a_0": (32, 0, (64, 1, 1), b"aaaa"), "b_0": (40, 8, (128, 1, 1), b"bb")}
    read = Cubin(cubin(kernels))
    found, digest = kernel_resources(read, {"b_0": 100, "a_0": None})
    assert found == (
        KernelResources("b_0", 40, 8, 100, 128),
        KernelResources("a_0", 32, 0, None, 64),
    )
    assert digest == hashlib.sha256(b"b_0\0bba_0\0aaaa").hexdigest()
    assert kernel_resources(read, {"a_0": 0, "b_0": 0})[1] != digest
    kernels["a_0"] = (32, 0, (64, 1, 1), b"aaab")
    assert kernel_resources(Cubin(cubin(kernels)), {"b_0": 100, "a_0": None})[1] != digest


def test_a_launched_kernel_that_is_not_in_the_cubin_is_an_error():
    read = Cubin(cubin({"a_0": (32, 0, (64, 1, 1), b"aaaa")}))
    with pytest.raises(ValueError, match="b_0 is launched but not in the cubin"):
        kernel_resources(read, {"b_0": 0})
    with pytest.raises(ValueError, match="launches no kernel"):
        kernel_resources(read, {})


def kernel(registers=168, stack=0, smem=1024, threads=384):
    return KernelResources("k_0", registers, stack, smem, threads)


@pytest.mark.parametrize(
    "fits",
    [
        kernel(),
        kernel(registers=255, threads=256),
        kernel(smem=MAX_DYNAMIC_SMEM_BYTES),
        kernel(registers=64, threads=1024),
        kernel(threads=None),
    ],
)
def test_what_fits_has_no_problem(fits):
    assert budget_problems(fits) == ()


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (kernel(stack=8), "spills: k_0 keeps 8 bytes"),
        (kernel(smem=MAX_DYNAMIC_SMEM_BYTES + 1), "smem: k_0 asks for 232449 bytes"),
        (kernel(smem=None), "smem: k_0 asks for an amount not known"),
        (kernel(registers=32, threads=1056), "threads: k_0 has 1056"),
        (kernel(registers=176), "registers: k_0 needs 67584"),
        # 9 warps are given registers as though they were 12.
        (kernel(registers=176, threads=288), "registers: k_0 needs 67584"),
        # 169 registers are given as 176.
        (kernel(registers=169), "registers: k_0 needs 67584"),
    ],
)
def test_each_broken_budget_is_named(broken, word):
    (problem,) = budget_problems(broken)
    assert problem.startswith(word)
