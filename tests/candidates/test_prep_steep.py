"""PREP on gates of any strength, in the PTX interpreter: its images against float64."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from prep_compile import Variant, compiled_prep
from prep_reference import FIELDS, batch_of, reference, unpack
from ptx_interpreter import Cta, Memory, Program

import operations
from operations.kda_prefill import KdaWorkload

OPERATION = operations.get("kda_prefill")
ANCHORED: list[Variant] = [
    (16, "mid", None, None),
    (32, "mid", None, None),
    (32, "pairs", 16, "mid"),
    (64, "pairs", 32, "mid"),
]


def inputs_of(lengths: tuple[int, ...], regime: str) -> dict[str, Any]:
    workload = KdaWorkload("case", heads=1, lengths=lengths)
    return OPERATION.generate(workload, OPERATION.regimes[regime], seed=0)


def largest_errors(variant: Variant, inputs: dict[str, Any]) -> dict[str, float]:
    """Of each field of the images, over its largest magnitude; the kernel runs on the CPU."""
    prep, kept = compiled_prep(variant)
    program, memory = Program(kept.ptx), Memory()
    T, H, _ = inputs["q"].shape
    offsets = inputs["cu_seqlens"].tolist()
    batch = batch_of(offsets, T, variant[0], 1)

    def tensor(array: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        data = struct.pack("<Q", memory.add(array)) + struct.pack(f"<{len(shape)}i", *shape)
        return data + bytes(-len(data) % 8) + struct.pack(f"<{len(strides)}q", *strides)

    def words(x: torch.Tensor) -> np.ndarray:
        return x.contiguous().view(torch.int16).numpy()

    size = prep.layout.elements
    images = np.full((batch.slots, H, size), 0x7FC0, np.uint16)  # NaN
    parameters = [tensor(words(inputs[n]), (T, H), (H * 128,)) for n in ("q", "k", "v")]
    parameters += [
        tensor(inputs["g"].numpy(), (T, H), (H * 128,)),
        tensor(inputs["beta"].numpy(), (T, H), (H,)),
        tensor(np.array(offsets, np.int32), (len(offsets),), ()),
        tensor(np.zeros((T, H, 128), np.uint16), (T, H), (H * 128,)),
        tensor(images, (batch.slots, H), (H * size,)),
        struct.pack("<f", 1.0),
    ]
    count = batch.slots * H
    for index in range(count):
        Cta(program, memory, parameters, index, count, prep.smem_bytes, prep.smem_bytes, {}).run()
    found = torch.from_numpy(images.view(np.int16)).view(torch.bfloat16)[batch.owned]
    got, want = unpack(found, variant[0]), reference(inputs, batch, 1.0)
    return {
        name: float((got[name] - want[name]).abs().max() / want[name].abs().max().clamp(min=1e-30))
        for name in FIELDS
    }


@pytest.mark.parametrize("variant", ANCHORED, ids=str)
@pytest.mark.parametrize("regime", ["constant", "beyond_inf", "beyond_scattered"])
def test_images_are_right_for_every_gate(variant: Variant, regime: str) -> None:
    pytest.importorskip("cutlass")
    errors = largest_errors(variant, inputs_of((33,), regime))
    assert max(errors.values()) <= 8e-3, errors


@pytest.mark.parametrize("variant", ANCHORED, ids=str)
def test_steep_chunks_beside_mild_ones(variant: Variant) -> None:
    pytest.importorskip("cutlass")
    inputs = inputs_of((70, 17), "slow")
    gates = inputs["g"]
    gates[3, :, 1::2], gates[5:7, :, ::3] = float("-inf"), -1e4
    gates[40:48, :, ::2], gates[64:70, :, ::2] = -30.0, -15.0
    errors = largest_errors(variant, inputs)
    assert max(errors.values()) <= 8e-3, errors
