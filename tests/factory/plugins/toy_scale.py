"""A plugged-in operation small enough for unit tests: y = x * exp(g), row by row.

Its family holds candidates that are right, wrong, overflowing, over budget,
raising, dying and hanging, so that every verdict of the funnel can be met.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from candidates import (
    Build,
    BuildError,
    Family,
    KernelResources,
    Parameter,
    Runnable,
    Schedule,
    ToolchainError,
)
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


@dataclass(frozen=True)
class ToyWorkload(Workload):
    rows: int = 1


def _regime(name: str, role: Any, floor: float) -> Regime:
    return Regime(name, role, floor, source="made up for tests", statistics={"min": floor})


class ToyOperation(Operation):
    name = "toy_scale"
    version = "1"
    tensors = (
        TensorSpec("x", ("R", 8), "float32", "input", "values"),
        TensorSpec("g", ("R",), "float32", "input", "log factors"),
        TensorSpec("y", ("R", 8), "float32", "output", "x * exp(g)"),
    )
    regimes = {  # noqa: RUF012
        r.name: r
        for r in (
            _regime("mild", "mild", -0.8),
            _regime("slow", "slow", -0.01),
            _regime("constant", "edge", -5.0),
            _regime("beyond", "edge", -20.0),
            _regime("production", "production", -5.0),
        )
    }
    workloads = {  # noqa: RUF012
        w.name: w
        for w in (
            ToyWorkload("64", rows=64),
            ToyWorkload("256", rows=256),
            ToyWorkload("17", held_out=True, rows=17),
        )
    }
    tolerances = {"y": Tolerance(1e-2, 1e-2, "made up")}  # noqa: RUF012
    contract = Contract(("rows of 8",))

    def generate(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any]:
        assert isinstance(workload, ToyWorkload)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(workload.rows, 8, generator=generator)
        g = torch.full((workload.rows,), regime.gate_floor)
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
        max_rel = rms_rel = math.inf
        if not bad:
            max_rel = float((y - ref).abs().max() / ref.abs().max())
            rms_rel = float((y - ref).norm() / ref.norm())
        bound = ((regime and regime.tolerances) or self.tolerances)["y"]
        within = not bad and max_rel <= bound.max_rel and rms_rel <= bound.rms_rel
        return (TensorError("y", "all", max_rel, rms_rel, not bad, bad, within),)

    def reduced(self) -> tuple[Workload, ...]:
        return (ToyWorkload("r5", rows=5), ToyWorkload("r3", rows=3))

    def floor_bytes(self, workload: Workload) -> int:
        assert isinstance(workload, ToyWorkload)
        return workload.rows * 68


KINDS = (
    "exact",
    "offset",
    "overflow",
    "greedy",
    "raises",
    "dies",
    "dies_once",
    "hangs",
    "no_build",
    "no_dsl",
    "miscompiled",
)


@dataclass
class ToyRunnable:
    """Launches on the simulated device; ``factor`` is what its machine code got wrong."""

    us: float
    factor: float
    kernel_names: tuple[str, ...] = ("toy_",)

    def bind(self, inputs: Any, outputs: Any) -> Callable[[], Mapping[str, torch.Tensor]]:
        from factory.device.simulated import launch

        def call() -> Mapping[str, torch.Tensor]:
            launch("toy_main", self.us)
            outputs["y"].copy_(inputs["x"] * inputs["g"].exp()[:, None] * self.factor)
            result: Mapping[str, torch.Tensor] = outputs
            return result

        return call


def _note(what: str, schedule: Schedule) -> None:
    """Tell a test what was done, in whichever process."""
    path = os.environ.get("TOY_NOTES")
    if path:
        with open(path, "a") as notes:
            notes.write(f"{what} {schedule.key}\n")


def _wait_to_be_let_go(schedule: Schedule) -> None:
    """A test may hold all blocks above a number: see :class:`held.Hold`."""
    hold = os.environ.get("TOY_HOLD")
    while hold and (last := let_go(hold)) is not None and int(schedule.get("block", 1)) > last:
        Path(hold, f"block-{schedule['block']}").write_text(f"{os.getpid()}\n")
        time.sleep(0.01)


def let_go(hold: str) -> int | None:
    """The last block that is not held; None if none is."""
    try:
        return int(Path(hold, "last").read_text())
    except FileNotFoundError:
        return None


class ToyFamily(Family):
    name = "toy"
    operation = "toy_scale"
    parameters = (
        Parameter("kind", KINDS, "what the candidate does"),
        Parameter("block", tuple(range(1, 41)), "rows per block", {"kind": ("exact",)}),
    )

    def presets(self) -> tuple[str, ...]:
        return ("six", "many", "deadly", "hanging", "unbuildable", "no_dsl", "wrong", "measured")

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        exact = [self.schedule({"kind": "exact", "block": b}) for b in range(1, 41)]
        other = {k: self.schedule({"kind": k}) for k in KINDS[1:]}
        match preset:
            case "six":
                return (*exact[:3], other["offset"], other["overflow"], other["greedy"])
            case "many":
                return tuple(exact)
            case "deadly":
                return (exact[0], other["dies"], other["raises"], other["dies_once"], exact[1])
            case "hanging":
                return (exact[0], other["hangs"], exact[1])
            case "unbuildable":
                return (exact[0], other["no_build"])
            case "no_dsl":
                return (exact[0], other["no_dsl"])
            case "measured":
                return (*exact[:4], exact[39], other["miscompiled"], other["offset"])
            case "wrong":
                return (other["offset"], other["overflow"])
        raise ValueError(f"unknown preset {preset!r}; choices: {', '.join(self.presets())}")

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        return ("wants 300 KiB of 227",) if schedule["kind"] == "greedy" else ()

    def gate_bound(self, schedule: Schedule) -> float | None:
        return -5.5

    def emulate(self, schedule: Schedule, inputs: Inputs) -> dict[str, torch.Tensor]:
        time.sleep(float(os.environ.get("TOY_EMULATE_S", "0")))
        _wait_to_be_let_go(schedule)
        y = inputs["x"] * inputs["g"].exp()[:, None]
        match schedule["kind"]:
            case "offset":
                y = y * 1.1
            case "overflow" if float(inputs["g"].min()) <= -5:
                y = y * math.nan
            case "raises":
                raise RuntimeError("made to raise")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "dies_once":
                mark = os.environ["TOY_MARK"]
                if not os.path.exists(mark):
                    open(mark, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(3600)
        return {"y": y}

    def largest_exponent(self, schedule: Schedule, inputs: Inputs) -> float:
        return 103.0 if schedule["kind"] == "overflow" else 0.0

    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        assert isinstance(workload, ToyWorkload)
        return workload.rows / 10 + abs(int(schedule.get("block", 1)) - 7)

    def source_hash(self) -> str:
        return os.environ.get("TOY_SOURCE", "0" * 64)

    def compile(self, schedule: Schedule) -> Build:
        if schedule["kind"] == "no_dsl":
            raise ToolchainError("nvidia-cutlass-dsl is not installed; install it")
        if schedule["kind"] == "no_build":
            raise BuildError("does not\ncompile")
        _note("compiled", schedule)
        kernel = KernelResources("toy", 32, 0, 1024, 128)
        return Build(schedule.key, (kernel,), 0.01, "ab" * 32)

    def load(self, schedule: Schedule) -> Runnable:
        _note("loaded", schedule)
        return self._runnable(schedule)

    def _runnable(self, schedule: Schedule) -> Runnable:
        block = int(schedule.get("block", 1))
        return ToyRunnable(10.0 + block, 1.1 if schedule["kind"] == "miscompiled" else 1.0)

    def objects(self, schedule: Schedule) -> Mapping[str, bytes]:
        _note("ahead", schedule)
        return {"toy.o": b"machine code of " + schedule.key.encode()}

    def load_objects(self, schedule: Schedule, folder: Path) -> Runnable:
        if (folder / "toy.o").read_bytes() != b"machine code of " + schedule.key.encode():
            raise ValueError("toy.o is of another schedule")
        _note("linked", schedule)
        return self._runnable(schedule)


OPERATION = ToyOperation()
FAMILY = ToyFamily()
