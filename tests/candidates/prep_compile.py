"""Compile PREP alone, for the tests that read or launch it."""

from __future__ import annotations

import functools
from typing import Any

from kept import Kept, compile_kept, once

from candidates._delta_rule.kernel.toolchain import require_dsl

Variant = tuple[int, str, int | None, str | None]  # bt, anchor, block, diagonal

WHOLE: list[Variant] = [
    (bt, anchor, None, None) for bt in (16, 32, 64) for anchor in ("start", "mid", "end", "halving")
]
PAIRS: list[Variant] = [
    (bt, "pairs", block, diagonal)
    for bt, block in ((32, 16), (64, 16), (64, 32))
    for diagonal in ("start", "mid", "end", "halving")
]


@once
def compiled_prep(variant: Variant, unroll: int = 1) -> tuple[Any, Kept]:
    """One variant, and what the compiler made of it."""
    require_dsl()
    import cutlass
    from cutlass import cute

    from candidates.kda_prefill.kernel.prep import Prep

    def fake(dtype: Any, *shape: Any, align: int = 16) -> Any:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            dtype, shape, stride_order=order, assumed_align=align
        )

    prep = Prep(*variant, unroll=unroll)
    T, H, slots, offsets = (cute.sym_int() for _ in range(4))
    tokens = functools.partial(fake, cutlass.BFloat16, T, H, 128)
    arguments = (
        tokens(),
        tokens(),
        tokens(),
        fake(cutlass.Float32, T, H, 128),
        fake(cutlass.Float32, T, H),
        fake(cutlass.Int32, offsets, align=4),
        tokens(),
        fake(cutlass.BFloat16, slots, H, prep.layout.elements, align=128),
        cutlass.Float32(1.0),
        None,
        None,
        None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return prep, compile_kept(prep, arguments)
