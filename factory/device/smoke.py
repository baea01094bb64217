"""The smoke kernel: adds one to a tensor, in a child, gated and timed like any candidate.

A machine on which it fails can say nothing about candidates.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from candidates import Baseline
from factory.device.bank import Bank
from factory.device.process import Child, ChildFailure
from factory.device.protocol import Bound, Case, Sampling, Time
from factory.device.simulated import launch
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["Smoke", "run_smoke"]

_ELEMENTS = 1024


class _Launch:
    kernel_names = ("",)

    def bind(self, inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
        x, y = inputs["x"], outputs["y"]
        add_one = _kernel(on_gpu=x.is_cuda)

        def call() -> Mapping[str, torch.Tensor]:
            add_one(x, y)
            return outputs

        return call


def _kernel(*, on_gpu: bool) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """The DSL's where it is installed, torch's elsewhere."""
    import torch

    if on_gpu and find_spec("cutlass") is not None:
        # Read once, when the DSL is imported.
        os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
        from factory.device._dsl_smoke import compile_smoke

        compiled: Callable[[torch.Tensor, torch.Tensor], Any] = compile_smoke()
        return compiled

    def add_one(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.add(x, 1.0, out=y)
        if not on_gpu:
            launch("smoke", 1.0)

    return add_one


class Smoke(Baseline):
    """``y = x + 1``, in the DSL where it is installed: candidates need both to work."""

    name = "smoke"
    operation = "smoke"
    input_form = "activated"

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return "1"

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> _Launch:
        return _Launch()


def run_smoke(child: Child, bank: Bank, limit_s: float) -> None:
    """Time the smoke kernel in its child and look at what it computed.

    Raises
    ------
    ChildFailure
        Saying what does not work.
    """
    child.ready()
    with bank.scratch() as scratch:
        x, y = (scratch.take((_ELEMENTS,), "float32") for _ in range(2))
        bank.view(x).fill_(41.0)
        bank.view(y).fill_(math.nan)
        bank.settle()
        case = Case("smoke", Workload("smoke"), (Bound({"x": x}, {"y": y}),))
        reply = child.ask(Time((case,), Sampling(gpu=3, per_call=3)), limit_s)
        reading = reply["readings"]["smoke"]
        if not bool((bank.view(y) == 42.0).all()):
            raise ChildFailure("harness", "what it wrote does not arrive in the job")
        if reading["empty"] or not reading["kernels"]:
            raise ChildFailure("harness", "the profiler does not show its kernel")
