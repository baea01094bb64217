"""Read what the compiler gave each kernel, without CUDA tools and without a GPU.

Registers, stack, threads and machine code come from the cubin (an ELF file with NVIDIA's
``.nv.info`` sections).  Dynamic shared memory is not in the cubin: it is an argument of the
launch, read from the compiled host code.  Imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from candidates._base import KernelResources

__all__ = [
    "MAX_DYNAMIC_SMEM_BYTES",
    "Cubin",
    "budget_problems",
    "dynamic_smem",
    "kernel_resources",
]

MAX_DYNAMIC_SMEM_BYTES = 227 * 1024
"""Dynamic shared memory a block may have on sm_90 (CUDA programming guide, compute capability 9.0).

The compiler does not check it: a kernel above it compiles and then fails at its launch.
"""

_MAX_REGISTERS = 65536  # 32-bit registers of an SM, and of a block (same table)
_MAX_THREADS = 1024
_REGISTER_UNIT = 8  # registers are given to a warp in steps of 8 per thread,
_WARP_UNIT = 4  # and to a block as though it had a multiple of 4 warps

# Attributes of .nv.info, in the format 4 "size, then value".
_REGCOUNT, _FRAME_SIZE, _REQNTID = 0x2F, 0x11, 0x10


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int


class Cubin:
    """The kernels of one cubin.

    Parameters
    ----------
    data : bytes
        A 64-bit little-endian ELF file as ptxas writes it.

    Raises
    ------
    ValueError
        If it is not one.
    """

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a cubin: no 64-bit little-endian ELF header")
        self._data = data
        try:
            self._sections = self._read_sections()
            self._kernels = self._read_kernels()
        except (struct.error, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"not a readable cubin: {type(error).__name__}: {error}") from error

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of the symbol table."""
        return tuple(self._kernels)

    def registers(self, kernel: str) -> int:
        """32-bit registers per thread."""
        return self._kernels[kernel][_REGCOUNT]

    def stack_bytes(self, kernel: str) -> int:
        """Bytes of stack per thread; above 0 means spills or an indexed local array."""
        return self._kernels[kernel].get(_FRAME_SIZE, 0)

    def threads(self, kernel: str) -> int | None:
        """Threads per block that the kernel was compiled for, or None if it is open."""
        for attribute, value in self._attributes(self._sections[f".nv.info.{kernel}"]):
            if attribute == _REQNTID:
                x, y, z = struct.unpack_from("<III", self._data, value)
                return int(x * y * z)
        return None

    def code(self, kernel: str) -> bytes:
        """Machine code of one kernel."""
        section = self._sections[f".text.{kernel}"]
        return self._data[section.offset : section.offset + section.size]

    def _text(self, offset: int) -> str:
        return self._data[offset : self._data.index(b"\0", offset)].decode()

    def _read_sections(self) -> dict[str, _Section]:
        (table,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count, names = struct.unpack_from("<HHH", self._data, 0x3A)
        raw = [
            struct.unpack_from("<IIQQQQIIQQ", self._data, table + i * size) for i in range(count)
        ]
        found = (_Section(self._text(raw[names][4] + r[0]), r[4], r[5]) for r in raw)
        return {section.name: section for section in found}

    def _attributes(self, section: _Section) -> Iterable[tuple[int, int]]:
        """(attribute, offset of its value) of those entries that carry a sized value."""
        at, end = section.offset, section.offset + section.size
        while at < end:
            form, attribute, size = struct.unpack_from("<BBH", self._data, at)
            if form == 4:
                yield attribute, at + 4
                at += size
            at += 4

    def _read_kernels(self) -> dict[str, dict[int, int]]:
        symbols, strings = self._sections[".symtab"], self._sections[".strtab"]
        out: dict[str, dict[int, int]] = {}
        for attribute, value in self._attributes(self._sections[".nv.info"]):
            if attribute in (_REGCOUNT, _FRAME_SIZE):
                symbol, number = struct.unpack_from("<II", self._data, value)
                (name,) = struct.unpack_from("<I", self._data, symbols.offset + 24 * symbol)
                out.setdefault(self._text(strings.offset + name), {})[attribute] = number
        # A device subroutine has these attributes too, but no launch information of its own.
        kernels = (name for name in out if f".nv.info.{name}" in self._sections)
        return {name: out[name] for name in kernels}


def dynamic_smem(host_ir: str) -> dict[str, int | None]:
    """Dynamic shared memory of each launch in compiled host code, in launch order.

    Parameters
    ----------
    host_ir : str
        The LLVM-dialect text of a compiled function (``str(compiled.ir_module)``).

    Returns
    -------
    dict
        Kernel name to bytes per block; None where the size is computed at run time.  A kernel
        launched more than once has its largest.
    """
    config = r"struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    constant = re.compile(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)")
    field = re.compile(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\].*{config}")
    out: dict[str, int | None] = {}
    constants: dict[str, int] = {}
    target, size, kernel = "", None, ""
    for line in host_ir.splitlines():
        if line.lstrip().startswith("llvm.func "):  # value names start anew in every function
            constants, target, size, kernel = {}, "", None, ""
        elif m := constant.search(line):
            constants[m[1]] = int(m[2])
        elif m := field.search(line):  # address of the launch configuration's shared memory
            target = m[1]
        elif target and (m := re.search(rf"llvm\.store (%\w+), {target} :", line)):
            size, target = constants.get(m[1]), ""
        elif m := re.search(r"addressof @kernels_(\S+) :", line):
            kernel = m[1]
        elif "llvm.call @_cudaLaunchKernelEx" in line and kernel:
            known = out.get(kernel, 0)
            out[kernel] = None if size is None or known is None else max(size, known)
    return out


def kernel_resources(
    cubin: Cubin, smem: dict[str, int | None]
) -> tuple[tuple[KernelResources, ...], str]:
    """Resources of the launched kernels in launch order, and a hash of their machine code.

    Parameters
    ----------
    cubin : Cubin
    smem : dict
        From :func:`dynamic_smem` of the same compilation.

    Returns
    -------
    tuple of KernelResources
    str
        sha256 over name and machine code of each kernel, in launch order.  The cubin as a whole
        is not hashed: notes in it name the compiler's command line.

    Raises
    ------
    ValueError
        If a launched kernel is not in the cubin, or nothing is launched.
    """
    if not smem:
        raise ValueError("the host code launches no kernel")
    digest = hashlib.sha256()
    out = []
    for name, bytes_ in smem.items():
        if name not in cubin.kernels:
            raise ValueError(f"kernel {name} is launched but not in the cubin {cubin.kernels}")
        digest.update(name.encode() + b"\0" + cubin.code(name))
        out.append(
            KernelResources(
                name=name,
                registers=cubin.registers(name),
                stack_bytes=cubin.stack_bytes(name),
                dynamic_smem_bytes=bytes_,
                threads=cubin.threads(name),
            )
        )
    return tuple(out), digest.hexdigest()


def budget_problems(kernel: KernelResources) -> tuple[str, ...]:
    """Why a compiled kernel cannot run, or should not; empty if nothing is wrong.

    The first word says which budget: ``spills``, ``smem``, ``threads`` or ``registers``.
    """
    out = []
    if kernel.stack_bytes:
        out.append(f"spills: {kernel.name} keeps {kernel.stack_bytes} bytes of stack a thread")
    smem = kernel.dynamic_smem_bytes
    if smem is None:
        out.append(f"smem: {kernel.name} asks for an amount not known before its launch")
    elif smem > MAX_DYNAMIC_SMEM_BYTES:
        out.append(
            f"smem: {kernel.name} asks for {smem} bytes, a block has {MAX_DYNAMIC_SMEM_BYTES}"
        )
    if kernel.threads is not None:
        if kernel.threads > _MAX_THREADS:
            out.append(
                f"threads: {kernel.name} has {kernel.threads}, a block at most {_MAX_THREADS}"
            )
        warps = _up(-(-kernel.threads // 32), _WARP_UNIT)
        needed = 32 * warps * _up(kernel.registers, _REGISTER_UNIT)
        if needed > _MAX_REGISTERS:
            out.append(
                f"registers: {kernel.name} needs {needed} for {kernel.threads} threads of "
                f"{kernel.registers}, an SM has {_MAX_REGISTERS}"
            )
    return tuple(out)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
