"""A graph library's engine around a vendored export: check support, build, execute on a stream.

The export stays as it is; this file is all that a library adds to put it behind its own interface.
``python kda_engine.py FOLDER`` tries it on a vendored folder and says what came of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["KdaNode", "KdaPlan", "NotSupportedError", "build", "check_support", "load"]

Pack = Mapping[str, torch.Tensor | None]
"""Tensors of one execution by the names of a node's ports."""

INPUTS = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")


class NotSupportedError(ValueError):
    """No plan of this engine serves the node; the graph asks its next engine."""


@dataclass(frozen=True)
class KdaNode:
    """A node of the graph: attributes only, tensors come with each execution.

    Parameters
    ----------
    scale : float or None
    gate : str
        ``log``, ``safe`` or ``softplus``.
    lower_bound : float or None
    """

    scale: float | None = None
    gate: str = "log"
    lower_bound: float | None = None

    def attributes(self) -> dict[str, Any]:
        return {"scale": self.scale, "gate": self.gate, "lower_bound": self.lower_bound}


@dataclass(frozen=True)
class KdaPlan:
    """A node that is compiled and loaded for one form of tensors."""

    kernel: ModuleType
    node: KdaNode

    def execute(self, pack: Pack, *, stream: torch.cuda.Stream | int) -> None:
        """Enqueue on ``stream``, handle 0 included, into the outputs of the pack.

        It allocates no results, synchronises with nothing and may be captured into a graph.
        """
        self.kernel.kda_prefill(
            *(pack.get(name) for name in INPUTS),
            **self.node.attributes(),
            stream=stream,
            out=pack["o"],
            final_state=pack["final_state"],
        )


def load(folder: Path) -> ModuleType:
    """Import a vendored export; a library would write ``from ..vendored import kda_prefill``."""
    sys.path.insert(0, str(folder.resolve().parent))
    try:
        return importlib.import_module(folder.name)
    finally:
        sys.path.pop(0)


def check_support(kernel: ModuleType, node: KdaNode, pack: Pack) -> str:
    """Why the node is not served for tensors like these; empty if it is.

    Nothing is launched and nothing waits for the device.
    """
    answer = kernel.support(
        *(pack.get(name) for name in INPUTS),
        **node.attributes(),
        out=pack["o"],
        final_state=pack["final_state"],
    )
    return str(answer.reason)


def build(
    kernel: ModuleType, node: KdaNode, pack: Pack, *, stream: torch.cuda.Stream | int
) -> KdaPlan:
    """Compile and load what tensors like these need, so that no execution has to.

    Raises
    ------
    NotSupportedError
    """
    if reason := check_support(kernel, node, pack):
        raise NotSupportedError(reason)
    plan = KdaPlan(kernel, node)
    plan.execute(pack, stream=stream)  # the first call compiles and loads
    return plan


def example(tokens: int = 300, heads: int = 2, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Tensors of one sequence, gates as strong as models have them."""
    normal = {"device": device}
    q, k = (
        torch.nn.functional.normalize(torch.randn(tokens, heads, 128, **normal), dim=-1)
        for _ in range(2)
    )
    state = (1, heads, 128, 128)
    return {
        "q": q.bfloat16(),
        "k": k.bfloat16(),
        "v": torch.randn(tokens, heads, 128, **normal).bfloat16(),
        "g": -5.0 * torch.rand(tokens, heads, 128, **normal),
        "beta": torch.rand(tokens, heads, **normal),
        "cu_seqlens": torch.tensor([0, tokens], dtype=torch.int32, device=device),
        "initial_state": torch.randn(state, **normal),
        "o": torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device=device),
        "final_state": torch.empty(state, **normal),
    }


def main(folder: str) -> int:
    """Build a plan and execute it on a stream of its own."""
    kernel, node = load(Path(folder)), KdaNode()
    pack = example(device="cuda" if torch.cuda.is_available() else "cpu")
    try:
        side = torch.cuda.Stream() if torch.cuda.is_available() else 0
        plan = build(kernel, node, pack, stream=side)
    except NotSupportedError as error:
        sys.stdout.write(f"not supported here: {error}\n")
        return 1
    plan.execute(pack, stream=side)
    torch.cuda.synchronize()
    sys.stdout.write(f"executed: o {list(pack['o'].shape)}, |o| {float(pack['o'].abs().max())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
