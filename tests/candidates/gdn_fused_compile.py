"""Compile the fused GDN kernel and run it on the CPU, for the tests that interpret it."""

from __future__ import annotations

import contextlib
import functools
import io
import random
import struct
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from fused_compile import FIXUP_PARTS
from ptx_interpreter import Cta, Memory, Part, Program

from candidates.gdn_prefill.kernel.fused_plan import BT, HEAD, FusedPlan
from candidates.kda_prefill.kernel.fused_plan import Scratch
from candidates.kda_prefill.kernel.options import PLAIN, Options
from candidates.kda_prefill.kernel.toolchain import require_dsl


def compiled_fused(rows: int, with_state: bool, options: Options = PLAIN) -> Any:
    """(compiled function, cubin, PTX, the compiler's remarks) of one variant."""
    return _compiled(rows, with_state, options)


@functools.cache
def _compiled(rows: int, with_state: bool, options: Options) -> Any:
    require_dsl()
    from cutlass import cute

    from candidates.gdn_prefill.kernel import host
    from candidates.gdn_prefill.kernel.config import FusedConfig

    job, arguments = host.fused_job(FusedConfig(rows), with_state, options)
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {folder}"
        remarks = io.StringIO()
        with contextlib.redirect_stdout(remarks), contextlib.redirect_stderr(remarks):
            function = cute.compile(job, *arguments, options=flags + " remarks{ptx}")
        return function, function.__cubin__, function.__ptx__, remarks.getvalue()


def _swizzled(byte: np.ndarray) -> np.ndarray:
    """128-byte rows of the copy engine's swizzle."""
    return byte ^ ((byte >> 7 & 7) << 4)


def _parts(plan: FusedPlan) -> dict[int, Part]:
    """Where operands stand in shared memory, by number of columns: along rows of 128 bytes, or,
    with 128 columns, channels as columns."""
    return {
        64: Part(0, plan.smem_bytes, lambda first, k, n: _swizzled(first + n * 128 + k * 2)),
        128: Part(
            0,
            plan.smem_bytes,
            lambda first, k, n: _swizzled(first + n // 64 * (BT * 128) + k * 128 + n % 64 * 2),
        ),
    }


def run_fused(
    rows: int,
    inputs: Mapping[str, Any],
    pieces: int = 1,
    order: int | None = None,
    offsets: list[int] | None = None,
    flags: list[int] | None = None,
    options: Options = PLAIN,
) -> dict[str, torch.Tensor]:
    """What the compiled kernel returns for inputs on the CPU.

    Parameters
    ----------
    rows : int
        The variant.
    inputs : Mapping
        As an operation generates them.
    pieces : int
        Per sequence, at most.
    order : int, optional
        Seed of a random order of warps.
    offsets : list of int, optional
        Passed instead of the inputs' own.
    flags : list of int, optional
        Takes the flag of each piece, of which there have to be several for each sequence.
    options : Options
        The form of ``inputs``.
    """
    plan = FusedPlan(rows, options.l2norm)
    state = inputs["initial_state"]
    ptx = compiled_fused(rows, state is not None, options)[2]
    T, H = inputs["v"].shape[:2]
    raw = inputs["cu_seqlens"].tolist() if offsets is None else offsets
    N = len(raw) - 1
    memory = Memory()

    def tensor(array: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        data = struct.pack("<Q", memory.add(array)) + struct.pack(f"<{len(shape)}i", *shape)
        return data + bytes(-len(data) % 8) + struct.pack(f"<{len(strides)}q", *strides)

    def given(x: torch.Tensor, channels: bool = True) -> bytes:
        """An input; its strides as far as they are not known at compile time."""
        base = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        bits = base.view({2: torch.int16, 4: torch.int32}[x.element_size()]).numpy()
        strides = x.stride()[:1] if options.compact else x.stride()[: x.dim() - channels]
        return tensor(bits[x.storage_offset() :], tuple(x.shape[:2]), tuple(strides))

    o, final = np.full((T, H, HEAD), 0x7FC0, np.uint16), np.full((N, H, HEAD, HEAD), np.nan, "f4")
    parameters = [given(inputs[name]) for name in ("q", "k", "v")]
    parameters += [given(inputs[name], channels=False) for name in ("g", "beta")]
    kind = np.int64 if options.offsets == "int64" else np.int32
    parameters.append(tensor(np.array(raw, kind), (N + 1,), ()))
    if state is not None:
        bits = state.view(torch.int16) if state.element_size() == 2 else state
        parameters.append(tensor(bits.numpy(), (N, H), (H * HEAD * HEAD,)))
    parameters.append(tensor(o, (T, H), (H * HEAD,)))
    parameters.append(tensor(final, (N, H), (H * HEAD * HEAD,)))
    words = Scratch(N * H * pieces).words(T, H) if pieces > 1 else 1
    room = np.full(words, np.nan, np.float32)
    scratch = tensor(room, (words,), ())
    fixing = [parameters[5], *parameters[-2:], scratch, struct.pack("<i", pieces)]
    parameters += [scratch, struct.pack("<f", inputs["scale"]), struct.pack("<i", pieces)]
    if options.raw_gate:
        parameters.append(tensor(inputs["A_log"].numpy(), (H,), ()))
    if options.bias:
        parameters.append(tensor(inputs["dt_bias"].numpy(), (H,), ()))
    count = max(N, 1) * H * pieces * (HEAD // rows)
    if pieces > 1:
        count = (count + 1) // 2 * 2
    rng = None if order is None else random.Random(order)
    program, size = Program(ptx, "gdn_fused"), plan.smem_bytes
    for index in range(count):
        Cta(program, memory, parameters, index, count, size, size, _parts(plan), rng).run()
    if pieces > 1:
        from candidates.kda_prefill.kernel.fixup import SMEM_BYTES

        fixup, size = Program(ptx, "gdn_fixup"), SMEM_BYTES
        for index in range(count):
            Cta(fixup, memory, fixing, index, count, size, size, FIXUP_PARTS, rng).run()
    if flags is not None:
        flags[:] = room.view(np.int32)[:count].tolist()
    return {
        "o": torch.from_numpy(o.view(np.int16)).view(torch.bfloat16),
        "final_state": torch.from_numpy(final),
    }
