"""Compile a host function and keep what the compiler made, for the tests that read or run it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from candidates._delta_rule.kernel.resources import (
    Cubin,
    KernelResources,
    dynamic_smem,
    kernel_resources,
)

T = TypeVar("T")


class Kept(NamedTuple):
    """What the compiler made of one host function, and the remarks that it printed."""

    function: Any
    cubin: bytes
    ptx: str
    remarks: str

    @property
    def smem(self) -> dict[str, int]:
        """Dynamic shared memory by kernel, in launch order."""
        return dynamic_smem(str(self.function.ir_module))

    @property
    def kernels(self) -> tuple[KernelResources, ...]:
        """Resources of each kernel."""
        return kernel_resources(Cubin(self.cubin), self.smem)[0]


def once(function: Callable[..., T]) -> Callable[..., T]:
    """As ``functools.cache``, but a default counts as the same when it is left out."""
    signature, cached = inspect.signature(function), functools.cache(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **how: Any) -> T:
        bound = signature.bind(*args, **how)
        bound.apply_defaults()
        return cached(*bound.args, **bound.kwargs)

    return wrapper


def compile_kept(job: Any, arguments: tuple[Any, ...]) -> Kept:
    """Compile ``job``, which has a ``@cute.jit`` ``__call__``, for fake arguments."""
    from cutlass import cute
    from cutlass.base_dsl import dsl

    # Where in the source each operation came from is a quarter of the time, and not asked for.
    track = getattr(dsl, "_set_enable_frame_filtering", None)  # 4.8.1

    def never(_: bool) -> None:
        if track:
            track(False)

    remarks = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(dsl, "_set_enable_frame_filtering", never, create=True),
        contextlib.redirect_stdout(remarks),
        contextlib.redirect_stderr(remarks),
    ):
        flags = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {folder}"
        function = cute.compile(job, *arguments, options=flags + " remarks{ptx}")
        return Kept(function, function.__cubin__, function.__ptx__, remarks.getvalue())
