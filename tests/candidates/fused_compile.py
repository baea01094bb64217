"""Compile the fused kernel and run it on the CPU, for the tests that read or interpret it."""

from __future__ import annotations

import functools
import random
import struct
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ptx_interpreter import Cta, Memory, Part, Program

from candidates.kda_prefill.kernel.fused_plan import BT, FusedPlan
from candidates.kda_prefill.kernel.image import ImageLayout
from candidates.kda_prefill.kernel.toolchain import require_dsl

LAYOUT = ImageLayout(BT)


@functools.cache
def compiled_fused(frame: str, builders: int, with_state: bool, remarks: bool = False) -> Any:
    """(compiled function, cubin, PTX) of one variant."""
    require_dsl()
    from cutlass import cute

    from candidates.kda_prefill.kernel import host
    from candidates.kda_prefill.kernel.entry import FusedConfig

    job, arguments = host.fused_job(FusedConfig(frame, builders), with_state)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {folder}"
        if remarks:
            options += " remarks{ptx}"
        function = cute.compile(job, *arguments, options=options)
        return function, function.__cubin__, function.__ptx__


def _swizzled(byte: np.ndarray, mask: int) -> np.ndarray:
    """128-byte rows (``mask`` 7) or 32-byte rows (1) of the copy engine's swizzle."""
    return byte ^ ((byte >> 7 & mask) << 4)


PARTS = {
    2 * BT: Part(  # W over Q, along channels
        0,
        LAYOUT.off_k,
        lambda first, k, n: _swizzled(first + n * 128 + k * 2, 7),
    ),
    128: Part(  # K, channels are the columns
        LAYOUT.off_k,
        1,
        lambda first, k, n: _swizzled(first + n // 64 * (BT * 128) + k * 128 + n % 64 * 2, 7),
    ),
    BT: Part(LAYOUT.off_a, 1, lambda first, k, n: _swizzled(first + n * 32 + k * 2, 1)),
}
"""Where the scan's three products find their operands, by number of columns."""


def run_fused(
    frame: str,
    builders: int,
    inputs: Mapping[str, Any],
    pieces: int,
    order: int | None = None,
    offsets: list[int] | None = None,
) -> dict[str, torch.Tensor]:
    """What the compiled kernel returns for inputs on the CPU.

    Parameters
    ----------
    frame, builders : str, int
        The variant.
    inputs : Mapping
        As an operation generates them.
    pieces : int
        Per sequence, at most.
    order : int, optional
        Seed of a random order of warps.
    offsets : list of int, optional
        Passed instead of the inputs' own.
    """
    plan = FusedPlan(frame, builders)
    state = inputs["initial_state"]
    program = Program(compiled_fused(frame, builders, state is not None)[2])
    T, H, _ = inputs["q"].shape
    raw = inputs["cu_seqlens"].tolist() if offsets is None else offsets
    N = len(raw) - 1
    memory = Memory()

    def tensor(array: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        data = struct.pack("<Q", memory.add(array)) + struct.pack(f"<{len(shape)}i", *shape)
        return data + bytes(-len(data) % 8) + struct.pack(f"<{len(strides)}q", *strides)

    def tokens(x: np.ndarray) -> bytes:
        return tensor(x, (T, H), (H * 128,))

    def words(x: torch.Tensor) -> np.ndarray:
        return x.contiguous().view(torch.int16).numpy()

    o = np.full((T, H, 128), 0x7FC0, np.uint16)  # NaN
    final = np.full((N, H, 128, 128), np.nan, np.float32)
    parameters = [tokens(words(inputs[name])) for name in ("q", "k", "v")]
    parameters += [
        tokens(inputs["g"].numpy()),
        tensor(inputs["beta"].numpy(), (T, H), (H,)),
        tensor(np.array(raw, np.int32), (N + 1,), ()),
    ]
    if state is not None:
        parameters.append(tensor(state.numpy(), (N, H), (H * 16384,)))
    parameters += [tokens(o), tensor(final, (N, H), (H * 16384,))]
    parameters += [struct.pack("<f", inputs["scale"]), struct.pack("<i", pieces)]
    count = N * pieces * H
    for index in range(count):
        rng = None if order is None else random.Random(1000 * order + index)
        Cta(
            program, memory, parameters, index, count, plan.smem_bytes, plan.stage, PARTS, rng
        ).run()
    out = torch.from_numpy(o.view(np.int16)).view(torch.bfloat16)
    return {"o": out, "final_state": torch.from_numpy(final)}
