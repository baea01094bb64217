"""Compile the fused kernel and run it on the CPU, for the tests that read or interpret it."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from kept import Kept, compile_kept, once
from operand_places import along_channels, channels_as_columns, swizzled
from ptx_interpreter import Cta, Memory, Part, parsed, run_cluster

from candidates._delta_rule.kernel.image import ImageLayout
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.pieces import MAPS, Scratch
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.kda_prefill.kernel.fused_plan import ALIKE, BT, NEVER, Cuts, FusedPlan

LAYOUT = ImageLayout(BT)


@once
def compiled_fused(
    frame: str,
    builders: int,
    with_state: bool,
    options: Options = PLAIN,
) -> Kept:
    """One variant and its fix-up."""
    require_dsl()
    from candidates.kda_prefill.kernel import host
    from candidates.kda_prefill.kernel.entry import FusedConfig

    return compile_kept(*host.fused_job(FusedConfig(frame, builders), with_state, options))


PARTS = {
    2 * BT: Part(0, LAYOUT.off_k, along_channels),  # W over Q
    128: Part(LAYOUT.off_k, 1, channels_as_columns(BT)),  # K
    BT: Part(LAYOUT.off_a, 1, lambda first, k, n: swizzled(first + n * 32 + k * 2, 1)),
}
"""Where the scan's three products find their operands, by number of columns."""


FIXUP_PARTS = {
    128: Part(1 << 16, MAPS << 15, channels_as_columns(128)),  # maps
    64: Part(0, 1 << 14, along_channels),  # the state
}
"""The same for the fix-up, in all of its shared memory."""


def input_of(memory: Memory, x: torch.Tensor, compact: bool, channels: bool = True) -> bytes:
    """An input ``[T, ...]`` as a fused kernel is given it: where it is not compact, with strides
    of its own but for its channels, if it has some."""
    base = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    bits = base.view({2: torch.int16, 4: torch.int32}[x.element_size()]).numpy()
    dims = x.dim() - channels
    strides = x.stride()[: 1 if compact else dims]
    return memory.tensor(bits[x.storage_offset() :], x.shape[:dims], strides)


def run_fused(
    frame: str,
    builders: int,
    inputs: Mapping[str, Any],
    pieces: int,
    order: int | None = None,
    offsets: list[int] | None = None,
    options: Options = PLAIN,
    how: int = ALIKE,
) -> dict[str, torch.Tensor]:
    """What the compiled kernel returns for inputs on the CPU.

    Parameters
    ----------
    frame, builders : str, int
        The variant.
    inputs : Mapping
        As an operation generates them; in the form of ``options`` with strides, ``A_log``,
        ``dt_bias`` and ``lower_bound`` of their own.
    pieces : int
        Per sequence, at most; of 1, none is cut.  If ``how`` is not ALIKE, CTAs.
    order : int, optional
        Seed of a random order of warps.
    offsets : list of int, optional
        Passed instead of the inputs' own.
    options : Options
        The form of ``inputs``.
    how : int
        How sequences are cut.
    """
    plan = FusedPlan(frame, builders, scales=options.l2norm)
    state = inputs["initial_state"]
    ptx = compiled_fused(frame, builders, state is not None, options).ptx
    fused, fixup = (parsed(ptx, f"kda_{name}") for name in ("fused", "fixup"))
    T, H = inputs["v"].shape[-3:-1]
    equal = options.offsets == "equal"
    if equal:
        N = inputs["v"].shape[0]
        T = N * T
    else:
        raw = inputs["cu_seqlens"].tolist() if offsets is None else offsets
        N = len(raw) - 1
    memory = Memory()

    tensor = memory.tensor

    def given(x: torch.Tensor, channels: bool = True) -> bytes:
        return input_of(memory, x.flatten(0, 1) if equal else x, options.compact, channels)

    def states(kind: str | None) -> np.ndarray:
        if kind == "bfloat16":
            return np.full((N, H, 128, 128), 0x7FC0, np.uint16)
        return np.full((N, H, 128, 128), np.nan, np.float32)

    o, final = np.full((T, H, 128), 0x7FC0, np.uint16), states(options.final_state)  # NaN
    parameters = [given(inputs[name]) for name in ("q", "k", "v", "g")]
    parameters.append(given(inputs["beta"], channels=False))
    if equal:
        parameters.append(struct.pack("<i", T // N))
    else:
        kind = np.int64 if options.offsets == "int64" else np.int32
        parameters.append(tensor(np.array(raw, kind), (N + 1,), ()))
    if state is not None:
        bits = state.view(torch.int16) if state.element_size() == 2 else state
        parameters.append(tensor(bits.numpy(), (N, H), (H * 16384,)))
    parameters.append(tensor(o, (T, H), (H * 128,)))
    if options.final_state is not None:
        parameters.append(tensor(final, (N, H), (H * 16384,)))
    runs = (pieces if how != ALIKE else N * pieces * H) + 1 & -2
    how = NEVER if pieces == 1 else how
    words = Scratch(runs).words(T, H) if how > NEVER else 1
    scratch = tensor(np.full(words, np.nan, np.float32), (words,), ())
    number = struct.Struct("<i").pack
    fixing = [*parameters[7 if state is not None else 6 :], scratch, number(runs)]
    parameters += [scratch, struct.pack("<f", inputs["scale"]), number(runs), number(how)]
    parameters += map(number, Cuts.shares(N, H, runs, how))
    if options.raw_gate:
        parameters.append(tensor(inputs["A_log"].numpy(), (H,), ()))
    if options.bias:
        parameters.append(tensor(inputs["dt_bias"].numpy(), (H,), ()))
    if options.gate == "safe":
        parameters.append(struct.pack("<f", inputs["lower_bound"]))
    rng = None if order is None else random.Random(order)
    for first in range(0, runs, 2):
        run_cluster(
            [
                Cta(
                    fused, memory, parameters, index, runs, plan.smem_bytes, plan.stage, PARTS,
                    rng,
                )
                for index in (first, first + 1)
            ]
        )  # fmt: skip
    if how > NEVER:
        from candidates._delta_rule.kernel.fixup import SMEM_BYTES as size

        for index in range(runs):
            Cta(fixup, memory, fixing, index, runs, size, size, FIXUP_PARTS, rng).run()
    out = {"o": torch.from_numpy(o.view(np.int16)).view(torch.bfloat16)}
    if options.final_state is not None:
        words = final.view(np.int16) if final.dtype == np.uint16 else final
        got = torch.from_numpy(words)
        out["final_state"] = got.view(torch.bfloat16) if final.dtype == np.uint16 else got
    return out
