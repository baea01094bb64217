"""A right kernel whose warps meet at an mbarrier: what a checker of races makes of it.

``arrivals.py thread``: each of 32 threads that wrote shared memory arrives for itself.
``arrivals.py lane``: one lane arrives for its warp, after ``bar.warp.sync``, as the fused kernels
do it.  Either way the 32 threads of another warp wait for the barrier and read.
"""

from __future__ import annotations

import sys

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import memory

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op

F32, I32 = cutlass.Float32, cutlass.Int32
LANES = 32


class Arrivals:
    """Reverse 32 numbers through shared memory."""

    def __init__(self, by_lane: bool) -> None:
        self.by_lane = by_lane

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: CUstream):
        self.kernel(x, y).launch(grid=(1, 1, 1), block=(2 * LANES, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        at = memory.SmemAllocator().allocate_array(F32, LANES + 4, byte_alignment=16).toint()
        bar = at + 4 * LANES
        if thread == 0:
            ops.bar_init(bar, 1 if self.by_lane else LANES)
        cute.arch.sync_threads()
        if thread < LANES:
            op.store_f32(at + lane * 4, x[lane])
            if cutlass.const_expr(self.by_lane):
                ops.sync_warp()
                if lane == 0:
                    ops.bar_arrive(bar)
            else:
                ops.bar_arrive(bar)
        else:
            ops.bar_wait(bar, I32(0))
            y[lane] = load_f32(at + (LANES - 1 - lane) * 4)


def load_f32(address):
    """Load a float from shared memory."""
    return op.ptx("ld.shared.f32 {$w0}, [{$r0}];", [F32], [address])


def job(by_lane: bool):
    """What the DSL compiles: a kernel of two fp32 vectors of 32, and arguments like its own."""
    x, y = (
        cute.runtime.make_fake_compact_tensor(F32, (LANES,), stride_order=(0,), assumed_align=4)
        for _ in range(2)
    )
    return Arrivals(by_lane), (x, y, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))


def main() -> None:
    import torch

    x = torch.arange(LANES, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    kernel, arguments = job(by_lane=sys.argv[1] == "lane")
    cute.compile(kernel, *arguments, options="--enable-tvm-ffi --gpu-arch sm_90a")(x, y)
    torch.cuda.synchronize()
    assert torch.equal(y, x.flip(0)), y


if __name__ == "__main__":
    main()
