"""Compile the fused GDN kernel and run it on the CPU, for the tests that interpret it."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fused_compile import FIXUP_PARTS, input_of
from kept import Kept, compile_kept, once
from operand_places import along_channels, channels_as_columns, swizzled
from ptx_interpreter import Cta, Memory, Part, parsed

from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.pieces import Scratch
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.gdn_prefill.kernel.fused_plan import HEAD, FusedPlan


@once
def compiled_fused(plan: FusedPlan, with_state: bool, options: Options = PLAIN) -> Kept:
    """One variant and, if it cuts, its fix-up."""
    require_dsl()
    from candidates.gdn_prefill.kernel import host
    from candidates.gdn_prefill.kernel.config import FusedConfig

    config = FusedConfig(plan.rows, bt=plan.bt, builders=plan.builders)
    return compile_kept(*host.fused_job(config, with_state, options))


def _parts(plan: FusedPlan) -> dict[int, Part]:
    """Where operands stand in shared memory, by number of columns."""

    def narrow(first: int, k: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Inputs, or a matrix of 32 tokens, which has rows of 64 bytes."""
        if first < plan.off_slot:
            return along_channels(first, k, n)
        return swizzled(first + n * 64 + k * 2, 3)

    return {
        32: Part(0, plan.smem_bytes, narrow),
        64: Part(0, plan.smem_bytes, along_channels),
        128: Part(0, plan.smem_bytes, channels_as_columns(2 * plan.bt)),
    }


def run_fused(
    plan: FusedPlan,
    inputs: Mapping[str, Any],
    pieces: int = 0,
    order: int | None = None,
    offsets: list[int] | None = None,
    flags: list[int] | None = None,
    options: Options = PLAIN,
) -> dict[str, torch.Tensor]:
    """What the compiled kernel returns for inputs on the CPU.

    Parameters
    ----------
    plan : FusedPlan
        The variant.
    inputs : Mapping
        As an operation generates them.
    pieces : int
        Of a head; as many as there are sequences if 0.
    order : int, optional
        Seed of a random order of warps.
    offsets : list of int, optional
        Passed instead of the inputs' own.
    flags : list of int, optional
        Takes the flag of each piece, if sequences are cut.
    options : Options
        The form of ``inputs``.
    """
    state = inputs["initial_state"]
    ptx = compiled_fused(plan, state is not None, options).ptx
    T, H = inputs["v"].shape[:2]
    raw = inputs["cu_seqlens"].tolist() if offsets is None else offsets
    N = len(raw) - 1
    memory = Memory()

    tensor = memory.tensor

    o, final = np.full((T, H, HEAD), 0x7FC0, np.uint16), np.full((N, H, HEAD, HEAD), np.nan, "f4")
    parameters = [
        input_of(memory, inputs[name], options.compact, channels=name in "qkv")
        for name in ("q", "k", "v", "g", "beta")
    ]
    kind = np.int64 if options.offsets == "int64" else np.int32
    parameters.append(tensor(np.array(raw, kind), (N + 1,), ()))
    if state is not None:
        bits = state.view(torch.int16) if state.element_size() == 2 else state
        parameters.append(tensor(bits.numpy(), (N, H), (H * HEAD * HEAD,)))
    parameters.append(tensor(o, (T, H), (H * HEAD,)))
    parameters.append(tensor(final, (N, H), (H * HEAD * HEAD,)))
    pieces, cut = pieces or N, pieces > N
    words = Scratch(H * pieces).words(T, H) if cut else 1
    room = np.full(words, np.nan, np.float32)
    scratch = tensor(room, (words,), ())
    fixing = [*parameters[-2:], scratch, struct.pack("<i", H * pieces)]
    parameters += [scratch, struct.pack("<f", inputs["scale"]), struct.pack("<i", pieces)]
    if options.raw_gate:
        parameters.append(tensor(inputs["A_log"].numpy(), (H,), ()))
    if options.bias:
        parameters.append(tensor(inputs["dt_bias"].numpy(), (H,), ()))
    count = max(pieces, 1) * H * (HEAD // plan.rows)
    if cut:
        count = (count + 1) // 2 * 2
    rng = None if order is None else random.Random(order)
    plan = replace(plan, l2norm=options.l2norm)
    program, size = parsed(ptx, "gdn_fused"), plan.smem_bytes
    for index in range(count):
        Cta(program, memory, parameters, index, count, size, size, _parts(plan), rng).run()
    if cut:
        from candidates._delta_rule.kernel.fixup import SMEM_BYTES

        fixup, size = parsed(ptx, "gdn_fixup"), SMEM_BYTES
        for index in range(count):
            Cta(fixup, memory, fixing, index, count, size, size, FIXUP_PARTS, rng).run()
    if flags is not None:
        flags[:] = room.view(np.int32)[: Scratch.RECORD * count : Scratch.RECORD].tolist()
    return {
        "o": torch.from_numpy(o.view(np.int16)).view(torch.bfloat16),
        "final_state": torch.from_numpy(final),
    }
