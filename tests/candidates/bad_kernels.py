"""Small kernels that compile and must not pass: they spill, or ask for too much."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import memory

F32, I32 = cutlass.Float32, cutlass.Int32


class LocalArray:
    """Indexes a register array at run time, which puts it into the thread's stack."""

    threads = 128

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: CUstream):
        self.kernel.set_name_prefix(
            "bad_local", keep_mangled_name=False, remove_cutlass_symbol=True
        )
        self.kernel(x).launch(grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(cute.make_layout(64), F32)
        for i in cutlass.range_constexpr(64):
            values[i] = x[i]
        for i in cutlass.range(64, unroll=1):
            values[I32(x[i])] = values[i] + 1.0
        x[tidx] = values[tidx % 64]


class TwoKernels:
    """Two launches: a plain one, and one whose shared memory no block can have."""

    def __init__(self, smem_bytes: int) -> None:
        self.elements = smem_bytes // 4

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: CUstream):
        self.plain.set_name_prefix(
            "good_plain", keep_mangled_name=False, remove_cutlass_symbol=True
        )
        self.large.set_name_prefix("bad_smem", keep_mangled_name=False, remove_cutlass_symbol=True)
        self.plain(x).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)
        self.large(x).launch(grid=(1, 1, 1), block=(32, 2, 1), stream=stream)

    @cute.kernel
    def plain(self, x: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        x[tidx] = x[tidx] + 1.0

    @cute.kernel
    def large(self, x: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        smem = memory.SmemAllocator()
        buffer = smem.allocate_tensor(F32, cute.make_layout(self.elements), byte_alignment=16)
        buffer[self.elements - 1 - tidx] = x[tidx]
        cute.arch.sync_threads()
        x[tidx] = buffer[self.elements - 2 - tidx]


def fake_arguments():
    """A vector of unknown length, and the caller's stream."""
    x = cute.runtime.make_fake_compact_tensor(
        F32, (cute.sym_int(),), stride_order=(0,), assumed_align=16
    )
    return x, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
