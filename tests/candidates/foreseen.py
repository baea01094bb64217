"""What the fused kernel's host code decides before a launch, as a function of numbers.

Imports the DSL.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from candidates.kda_prefill.kernel.fused import foresee

__all__ = ["foreseen"]


@cute.jit
def _foreseen(
    out: cute.Tensor,
    N: cutlass.Int32,
    T: cutlass.Int32,
    H: cutlass.Int32,
    runs: cutlass.Int32,
    how: cutlass.Int32,
    equal: cutlass.Constexpr,
):
    out[0], out[1], out[2] = foresee(N, T, H, runs, how, equal)


def foreseen(equal: bool) -> Callable[..., tuple[int, ...]]:
    """Compile it; takes N, T, H, runs and how, and gives pieces, whole and how."""
    out = torch.zeros(3, dtype=torch.int32)
    numbers = [cutlass.Int32(1)] * 5
    compiled = cute.compile(_foreseen, from_dlpack(out), *numbers, equal)

    def call(*given: int) -> tuple[int, ...]:
        compiled(from_dlpack(out), *map(cutlass.Int32, given))
        return tuple(out.tolist())

    return call
