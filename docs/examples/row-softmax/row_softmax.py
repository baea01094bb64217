"""Softmax of each row, the smallest operation that can go wrong as big ones do.

Without the largest value of a row taken off first, ``exp`` is right on mild logits and overflows
fp32 on those that models have.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from candidates import Baseline, Build, BuildError, Family, Parameter, Runnable, Schedule
from operations import Contract, Operation, Regime, TensorError, TensorSpec, Tolerance, Workload

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Rows(Workload):
    rows: int = 1


class RowSoftmax(Operation):
    """``y[r] = exp(x[r] - max x[r])`` over its sum."""

    name, version = "row_softmax", "1"
    tensors = (
        TensorSpec("x", ("R", 256), "float32", "input", "logits"),
        TensorSpec("y", ("R", 256), "float32", "output", "softmax of each row"),
    )
    # How hard a regime is, as what a schedule says it is right for: minus the largest logit.
    regimes = {
        "production": Regime("production", "production", -100.0, "uncapped logits", {"max": 100}),
        "mild": Regime("mild", "mild", -4.0, "what looks right with any arithmetic", {"max": 4}),
    }
    workloads = {
        w.name: w for w in (Rows("4096", False, 4096), Rows("65536", False, 65536),
                            Rows("odd-1021", held_out=True, rows=1021))
    }  # fmt: skip
    tolerances = {"y": Tolerance(1e-4, 1e-4, "fp32 throughout, with room")}
    contract = Contract(served=("rows of 256 logits in fp32",), declined=("other sizes",))

    def generate(self, workload: Any, regime: Regime, *, seed: int, device: str = "cpu"):
        draw = torch.Generator().manual_seed(seed)
        x = torch.rand(workload.rows, 256, generator=draw) * 2 - 1
        return {"x": (regime.statistics["max"] * x).to(device)}

    def raw_form(self, workload: Any, regime: Regime, *, seed: int, device: str = "cpu"):
        return None

    def outputs(self, inputs: Tensors) -> Tensors:
        return {"y": torch.full_like(inputs["x"], math.nan)}

    def oracle(self, inputs: Tensors) -> Tensors:
        return {"y": inputs["x"].double().softmax(dim=1)}

    fast_oracle = oracle

    def compare(self, outputs: Tensors, expected: Tensors, workload: Any, regime: Any = None):
        y, ref = outputs["y"].double(), expected["y"]
        bad = int((~torch.isfinite(y)).sum())
        over = (float((y - ref).abs().max() / ref.max()), float((y - ref).norm() / ref.norm()))
        errors = (math.inf, math.inf) if bad else over
        within = max(errors) <= self.tolerances["y"].max_rel
        return (TensorError("y", "all", *errors, not bad, bad, within),)

    def reduced(self) -> tuple[Workload, ...]:
        return (Rows("reduced-37", rows=37),)

    def floor_bytes(self, workload: Any) -> int:
        return workload.rows * 256 * 8


class RowSoftmaxFamily(Family):
    name = operation = "row_softmax"
    parameters = (
        Parameter("shift", ("max", "none"), "what is taken off a row before it is exponentiated"),
        Parameter("rows", (1, 4, 16), "rows per block"),
    )

    def presets(self) -> tuple[str, ...]:
        return ("all",)

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        shifts, rows = (p.choices for p in self.parameters)
        return tuple(self.schedule({"shift": s, "rows": r}) for s in shifts for r in rows)

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        return ()

    def gate_bound(self, schedule: Schedule) -> None:
        return None  # every one of them says that it is right for any logits

    def emulate(self, schedule: Schedule, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        e = (x - x.amax(1, keepdim=True) if schedule["shift"] == "max" else x).exp()
        return {"y": e / e.sum(1, keepdim=True)}

    def modelled_us(self, schedule: Schedule, workload: Any) -> float:
        us = OPERATION.floor_bytes(workload) / 4.25e6 + 1e-4 * workload.rows / schedule["rows"]
        return 2.0 + us * (1.5 if schedule["shift"] == "max" else 1.0)

    def source_hash(self) -> str:
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def compile(self, schedule: Schedule) -> Build:
        raise BuildError("this example has no kernel; campaigns of it stop after emulate")

    def load(self, schedule: Schedule) -> Runnable:
        raise BuildError("this example has no kernel; campaigns of it stop after emulate")


class TorchSoftmax(Baseline):
    """``torch.softmax``; every name that it launches has to match one of ``kernel_names``."""

    name, operation, input_form = "torch_softmax", "row_softmax", "activated"
    kernel_names = ("at::native::", "softmax_warp_forward", "cunn_SoftMax")

    def missing(self) -> None:
        return None

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        return self

    def bind(self, inputs: Tensors, outputs: Tensors) -> Callable[[], Tensors]:
        return lambda: {"y": torch.softmax(inputs["x"], 1, out=outputs["y"])}


OPERATION, FAMILY, BASELINES = RowSoftmax(), RowSoftmaxFamily(), (TorchSoftmax(),)
