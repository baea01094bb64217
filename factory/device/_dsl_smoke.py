"""The smoke kernel in the CuTe DSL: ``y = x + 1``, compiled for sm_90a through TVM-FFI.

Imports the DSL; only the smoke test's own child imports this module.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

__all__ = ["compile_smoke"]

_THREADS = 128


@cute.kernel  # type: ignore[untyped-decorator]
def _add_one(X: cute.Tensor, Y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * _THREADS + thread
    if i < cute.size(X):
        Y[i] = X[i] + 1.0


@cute.jit  # type: ignore[untyped-decorator]
def _launch(X: cute.Tensor, Y: cute.Tensor, stream: CUstream) -> None:
    _add_one(X, Y).launch(
        grid=(cute.ceil_div(cute.size(X), _THREADS), 1, 1), block=(_THREADS, 1, 1), stream=stream
    )


def compile_smoke() -> Any:
    """A function of two fp32 tensors of one size, on torch's current stream."""
    size = cute.sym_int()
    x, y = (
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float32, (size,), stride_order=(0,), assumed_align=4
        )
        for _ in range(2)
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(_launch, x, y, stream, options="--enable-tvm-ffi --gpu-arch sm_90a")
