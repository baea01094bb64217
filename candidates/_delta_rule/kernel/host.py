"""How host functions are compiled for sm_90a, and the scan's; arguments stand in for tensors.

T, N, H and the number of slots are run-time values: one compilation serves every shape.  The DSL's
compiler is not thread-safe: :func:`compile_function` holds a lock.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel.image import HEAD, ImageLayout, boundary_words
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.scan import Scan

__all__ = [
    "TYPES",
    "NoFunctionError",
    "bare_function",
    "boundaries_of",
    "compile_function",
    "fake",
    "images_of",
    "offsets_of",
    "scan_job",
    "strided",
]

TYPES = {"float32": cutlass.Float32, "bfloat16": cutlass.BFloat16}
"""The DSL's type of each that options name."""


class NoFunctionError(TypeError):
    """The DSL ignored ``--enable-tvm-ffi``: its object would convert every tensor at every call."""


_LOCK = threading.Lock()
_TARGET = "--enable-tvm-ffi --gpu-arch sm_90a"


def fake(dtype: Any, shape: tuple[Any, ...], align: int = 16) -> Any:
    """Row-major compact tensor (the DSL's own default is column-major)."""
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(
        dtype, shape, stride_order=order, assumed_align=align
    )


def strided(dtype: Any, shape: tuple[Any, ...], align: int = 16) -> Any:
    """Tensor with strides of its own, but in the last dimension of a tensor of channels."""
    step = max(align * 8 // dtype.width, 1)
    free = len(shape) if shape[-1] is not HEAD else len(shape) - 1
    strides = [cute.sym_int64(divisibility=step) for _ in range(free)]
    strides += [1] * (len(shape) - free)
    return cute.runtime.make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)


def offsets_of(options: Options) -> Any:
    """cu_seqlens; None where sequences are of equal length."""
    if options.offsets == "equal":
        return None
    kind = cutlass.Int64 if options.offsets == "int64" else cutlass.Int32
    return fake(kind, (cute.sym_int(),), align=kind.width // 8)


def images_of(bt: int, heads: Any) -> Any:
    """What PREP leaves for the scan."""
    # Bulk copies of whole images: torch's allocator aligns to 512 bytes.
    return fake(cutlass.BFloat16, (cute.sym_int(), heads, ImageLayout(bt).elements), align=128)


def boundaries_of(segments: int, heads: Any) -> Any:
    """Scratch of the scan's segments; None where there is one."""
    if segments == 1:
        return None
    return fake(cutlass.Float32, (cute.sym_int(), heads, boundary_words(segments)), align=128)


def scan_job(
    bt: int, rows: int, segments: int, with_state: bool, options: Options = PLAIN
) -> tuple[Any, tuple[Any, ...]]:
    """SCAN alone, with the arguments to compile it."""
    T, N, H = (cute.sym_int() for _ in range(3))
    state = (N, H, HEAD, HEAD)
    S0 = fake(TYPES[options.initial_state], state) if with_state else None
    S = None
    if options.final_state is not None:
        S = fake(TYPES[options.final_state], state)
    boundaries = boundaries_of(segments, H)
    return Scan(bt, rows, segments), (
        images_of(bt, H), offsets_of(options), S0, fake(cutlass.BFloat16, (T, H, HEAD)), S,
        None if boundaries is None else (boundaries,),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip


def compile_function(job: Any, arguments: tuple[Any, ...], keep: bool = False) -> tuple[Any, bytes]:
    """Compile one host function.

    Parameters
    ----------
    job : object
        With a ``@cute.jit`` ``__call__``.
    arguments : tuple
        Fake tensors, scalars and a fake stream.
    keep : bool
        Whether to read the cubin back.

    Returns
    -------
    compiled : object
    cubin : bytes
        Empty unless ``keep``.
    """
    with _LOCK, tempfile.TemporaryDirectory(prefix="kda-cubin-") as folder:
        options = _TARGET
        if keep:  # the folder has to exist, or nothing is kept, without a word
            options += f" --keep-cubin --dump-dir {folder}"
        compiled = cute.compile(job, *arguments, options=options)
        cubin = compiled.__cubin__ if keep else b""
    if keep and not isinstance(cubin, bytes):
        raise FileNotFoundError(f"the compiler kept no cubin in {os.path.dirname(folder)}")
    return compiled, cubin


def bare_function(compiled: Any) -> Callable[..., None]:
    """The TVM-FFI function inside a compiled object: positional arguments, least host time."""
    import tvm_ffi

    make = getattr(compiled, "__tvm_ffi_object__", None)
    function = make() if make is not None else None
    if not isinstance(function, tvm_ffi.Function):
        raise NoFunctionError(
            f"cute.compile returned {type(compiled).__name__}, which holds no TVM-FFI function: "
            "--enable-tvm-ffi was ignored"
        )
    call: Callable[..., None] = function
    return call
