"""What an entry point must bear on a GPU, whichever kernel it is of; for the tests of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

Call = Callable[[dict[str, Any]], tuple[torch.Tensor, torch.Tensor]]


def made_safe(offsets: list[int], rows: int) -> list[int]:
    """What the kernels make of offsets that may be malformed."""
    return list(accumulate((min(max(offset, 0), rows) for offset in offsets), max))


def moved(call: dict[str, Any], device: str = "cuda") -> dict[str, Any]:
    """Arguments of a call on another device; views keep the strides that ``to`` alone drops."""

    def with_strides(x: torch.Tensor) -> torch.Tensor:
        base = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        return base.to(device).as_strided(x.shape, x.stride(), x.storage_offset())

    return {n: with_strides(x) if isinstance(x, torch.Tensor) else x for n, x in call.items()}


def assert_streams_share_nothing(call: Call, cases: list[dict[str, Any]], times: int) -> None:
    """Calls in flight on streams of their own, ``times`` of each, give what each gives alone."""
    wants = [call(x) for x in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for i in range(times):
        results = []
        for stream, x in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                results.append(call(x))
        torch.cuda.synchronize()
        for got, want in zip(results, wants, strict=True):
            assert torch.equal(got[0], want[0]), i
            assert torch.equal(got[1], want[1]), i


def assert_replays_in_a_graph(call: Call, first: dict[str, Any], second: dict[str, Any]) -> None:
    """A captured call gives what a call does, for inputs of the same shapes."""
    wants = [call(x) for x in (first, second)]
    static = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, s = call(static)
    for x, want in zip((first, second, first), (wants[0], wants[1], wants[0]), strict=True):
        for name, tensor in static.items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(x[name])
        o.fill_(math.nan)
        s.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, want[0])
        assert torch.equal(s, want[1])
