"""The vendored package under the name of its folder, and inputs for its tests."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

package = importlib.import_module(ROOT.name)
arguments = importlib.import_module(f"{ROOT.name}.kernel.arguments")
api = importlib.import_module(f"{ROOT.name}.api")
entry = importlib.import_module(f"{ROOT.name}.kernel.entry")

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm90 GPU (H100, H200)",
)

CONFIGS = tuple(dict.fromkeys(row.config for row in package.ROWS))
"""The distinct schedules of the dispatch table."""


# part: keys
def inputs(
    offsets: list[int],
    heads: int = 3,
    *,
    device: str = "cuda",
    seed: int = 0,
    gates: tuple[float, float] = (-5.0, 0.0),
    state: bool = True,
    tokens: int | None = None,
) -> dict[str, torch.Tensor | None]:
    """Arguments of one packed call; gates are uniform in ``gates``, q and k of unit norm."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    T, N = offsets[-1] if tokens is None else tokens, len(offsets) - 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    low, high = gates
    q, k = (torch.nn.functional.normalize(normal(T, any_key_heads, 128), dim=-1) for _ in range(2))
    made = {
        "q": q.bfloat16(),
        "k": k.bfloat16(),
        "v": normal(T, heads, 128).bfloat16(),
        "g": low + (high - low) * torch.rand(any_gate_shape, generator=draw),
        "beta": torch.rand(T, heads, generator=draw),
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        "initial_state": normal(N, heads, 128, 128) if state else None,
    }
    return {name: x if x is None else x.to(device) for name, x in made.items()}
