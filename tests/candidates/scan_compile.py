"""Compile the scan alone, for the tests that read or launch it."""

from __future__ import annotations

import functools
from typing import Any

from kept import Kept, compile_kept

from candidates._delta_rule.kernel.toolchain import require_dsl


@functools.cache
def compiled_scan(bt: int, rows: int, segments: int, with_state: bool) -> tuple[Any, Kept]:
    """One variant, and what the compiler made of it."""
    require_dsl()
    import cutlass
    from cutlass import cute

    from candidates._delta_rule.kernel.scan import Scan

    def fake(dtype: Any, *shape: Any, align: int = 16) -> Any:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            dtype, shape, stride_order=order, assumed_align=align
        )

    scan = Scan(bt, rows, segments)
    T, N, H, slots, offsets, entries = (cute.sym_int() for _ in range(6))
    state = functools.partial(fake, cutlass.Float32, N, H, 128, 128)
    arguments = (
        fake(cutlass.BFloat16, slots, H, scan.layout.elements, align=128),
        fake(cutlass.Int32, offsets, align=4),
        state() if with_state else None,
        fake(cutlass.BFloat16, T, H, 128),
        state(),
        None if segments == 1 else (fake(cutlass.Float32, entries, H, scan.words),),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return scan, compile_kept(scan, arguments)
