"""An operation, a family of schedules and a baseline, as small as they can be.

``y = x * exp(g)``, row by row.  The family may form the factor in bf16, which is
right on mild gates and beyond the tolerance on those of production.
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
from operations import (
    Contract,
    Inputs,
    Operation,
    Outputs,
    Regime,
    TensorError,
    TensorSpec,
    Tolerance,
    Workload,
)

# --------------------------------------------------------------------- what is to be computed


@dataclass(frozen=True)
class Rows(Workload):
    """So many rows of 64 values."""

    rows: int = 1


def _regime(name: str, role: Any, low: float, high: float, source: str) -> Regime:
    return Regime(name, role, gate_floor=low, source=source, statistics={"min": low, "max": high})


class RowScale(Operation):
    """``y[r] = x[r] * exp(g[r])``."""

    name = "row_scale"
    version = "1"
    tensors = (
        TensorSpec("x", ("R", 64), "float32", "input", "values"),
        TensorSpec("g", ("R",), "float32", "input", "log factors, natural log, <= 0"),
        TensorSpec("y", ("R", 64), "float32", "output", "x * exp(g)"),
    )
    regimes = {  # noqa: RUF012
        r.name: r
        for r in (
            _regime("production", "production", -5.0, 0.0, "the range that its users have"),
            _regime("slow", "slow", -0.01, 0.0, "factors near 1"),
            _regime("mild", "mild", -0.01, 0.0, "what looks right with any arithmetic"),
        )
    }
    workloads = {  # noqa: RUF012
        w.name: w
        for w in (
            Rows("4096", rows=4096),
            Rows("65536", rows=65536),
            Rows("odd-1021", held_out=True, rows=1021),
        )
    }
    tolerances = {"y": Tolerance(1e-3, 1e-3, "fp32 throughout, with room")}  # noqa: RUF012
    contract = Contract(served=("rows of 64 values in fp32",), declined=("other dtypes",))

    def generate(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any]:
        assert isinstance(workload, Rows)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(workload.rows, 64, generator=generator)
        low, high = regime.statistics["min"], regime.statistics["max"]
        g = low + (high - low) * torch.rand(workload.rows, generator=generator)
        return {"x": x.to(device), "g": g.to(device)}

    def raw_form(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> None:
        return None

    def outputs(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {"y": torch.full_like(inputs["x"], math.nan)}

    def oracle(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {"y": inputs["x"].double() * inputs["g"].double().exp()[:, None]}

    fast_oracle = oracle

    def compare(
        self,
        outputs: Outputs,
        expected: Outputs,
        workload: Workload,
        regime: Regime | None = None,
    ) -> tuple[TensorError, ...]:
        y, ref = outputs["y"].double(), expected["y"]
        bad = int((~torch.isfinite(y)).sum())
        if bad:
            return (TensorError("y", "all", math.inf, math.inf, False, bad, False),)
        max_rel = float((y - ref).abs().max() / ref.abs().max())
        rms_rel = float((y - ref).norm() / ref.norm())
        bound = self.tolerances["y"]
        within = max_rel <= bound.max_rel and rms_rel <= bound.rms_rel
        return (TensorError("y", "all", max_rel, rms_rel, True, 0, within),)

    def reduced(self) -> tuple[Workload, ...]:
        return (Rows("reduced-37", rows=37),)

    def floor_bytes(self, workload: Workload) -> int:
        assert isinstance(workload, Rows)
        return workload.rows * (64 * 4 * 2 + 4)


# --------------------------------------------------------------------- how it may be computed


class RowScaleFamily(Family):
    """Schedules: in what the factor is formed, and how many rows a block takes."""

    name = "row_scale"
    operation = "row_scale"
    parameters = (
        Parameter("factor", ("fp32", "bf16"), "type in which exp(g) is kept"),
        Parameter("rows", (1, 4, 16), "rows of a block"),
    )

    def presets(self) -> tuple[str, ...]:
        return ("all",)

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        return tuple(
            self.schedule({"factor": factor, "rows": rows})
            for factor in self.parameters[0].choices
            for rows in self.parameters[1].choices
        )

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        return ()

    def gate_bound(self, schedule: Schedule) -> float | None:
        return None

    def emulate(self, schedule: Schedule, inputs: Inputs) -> dict[str, torch.Tensor]:
        factor = inputs["g"].exp()
        if schedule["factor"] == "bf16":
            factor = factor.bfloat16().float()
        return {"y": inputs["x"] * factor[:, None]}

    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        assert isinstance(workload, Rows)
        blocks = workload.rows / int(schedule["rows"])
        return 2.0 + OPERATION.floor_bytes(workload) / 4.25e6 + 1e-4 * blocks

    def source_hash(self) -> str:
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def compile(self, schedule: Schedule) -> Build:
        raise BuildError("this example has no kernel; campaigns of it stop after emulate")

    def load(self, schedule: Schedule) -> Runnable:
        raise BuildError("this example has no kernel; campaigns of it stop after emulate")


# ------------------------------------------------------------------------- what it is up against


@dataclass(frozen=True)
class Eager(Runnable):
    """PyTorch's own kernels; every name that it launches has to match one of these."""

    kernel_names: tuple[str, ...] = ("at::native::",)

    def bind(self, inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
        def call() -> Mapping[str, torch.Tensor]:
            torch.mul(inputs["x"], inputs["g"].exp()[:, None], out=outputs["y"])
            return outputs

        return call


class TorchEager(Baseline):
    """``torch.mul`` of ``torch.exp``."""

    name = "torch_eager"
    operation = "row_scale"
    input_form = "activated"

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        return Eager()


OPERATION = RowScale()
FAMILY = RowScaleFamily()
BASELINES = (TorchEager(),)
