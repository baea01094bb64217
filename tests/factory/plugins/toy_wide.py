"""A plugged-in operation with a space too large to try: thousands of schedules, each with a time.

The times are a function of the schedule, so that every search over it can be judged and repeated;
wrong ones are found by emulation, as in life.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from toy_scale import ToyOperation, ToyRunnable

from candidates import Build, Family, KernelResources, Parameter, Schedule
from operations import Inputs, Workload

FLAT = {"form": ("flat",)}
TREE = {"form": ("tree",)}
SIZES = {"wide": 4, "wider": 32}
"""Choices of ``pad`` by preset: 1,536 and 10,752 schedules."""


class WideOperation(ToyOperation):
    name = "toy_wide"


class WideFamily(Family):
    name = "wide"
    operation = "toy_wide"
    parameters = (
        Parameter("form", ("flat", "tree"), "which knobs there are"),
        Parameter("tile", (8, 16, 32, 64, 128, 256, 512, 1024), "has a best", FLAT),
        Parameter("depth", (1, 2, 3, 4, 5, 6, 7, 8), "has a best", FLAT),
        Parameter("order", ("a", "b", "c", "d", "e"), "b is best, c is wrong", FLAT),
        Parameter("arity", (2, 3, 4, 5, 6, 7, 8, 9), "hardly matters", TREE),
        Parameter("root", (1, 2, 3, 4, 5, 6, 7, 8), "hardly matters", TREE),
        Parameter("pad", tuple(range(32)), "a little"),
    )

    def presets(self) -> tuple[str, ...]:
        return tuple(SIZES)

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        choices = {p.name: p.choices for p in self.parameters}
        pads = range(SIZES[preset])
        flat = [
            {"form": "flat", "tile": t, "depth": d, "order": o, "pad": p}
            for t in choices["tile"]
            for d in choices["depth"]
            for o in choices["order"]
            for p in pads
        ]
        tree = [
            {"form": "tree", "arity": a, "root": r, "pad": p}
            for a in choices["arity"]
            for r in choices["root"]
            for p in pads
        ]
        return tuple(self.schedule(v) for v in (*flat, *tree))

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        return ()

    def gate_bound(self, schedule: Schedule) -> None:
        return None

    def emulate(self, schedule: Schedule, inputs: Inputs) -> dict[str, torch.Tensor]:
        _tell(schedule)
        time.sleep(float(os.environ.get("TOY_EMULATE_S", "0")))
        wrong = 1.1 if schedule.get("order") == "c" else 1.0
        return {"y": inputs["x"] * inputs["g"].exp()[:, None] * wrong}

    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        return score(schedule)

    def source_hash(self) -> str:
        return "7" * 64

    def compile(self, schedule: Schedule) -> Build:
        _tell(schedule)
        kernel = KernelResources("toy", 32, 0, 1024, 128)
        return Build(schedule.key, (kernel,), 0.01, "ab" * 32)

    def load(self, schedule: Schedule) -> ToyRunnable:
        return ToyRunnable(score(schedule), 1.0)


def _tell(schedule: Schedule) -> None:
    """Leave word of what this process works on, for a test that is to kill it."""
    folder = os.environ.get("TOY_TASKS")
    if folder:
        Path(folder, str(os.getpid())).write_text(schedule.key)


def score(schedule: Schedule | Mapping[str, Any]) -> float:
    """Microseconds; the best is ``form=flat tile=64 depth=4 order=b`` with the luckiest pad."""
    values = schedule.as_dict() if isinstance(schedule, Schedule) else dict(schedule)
    text = " ".join(f"{k}={v}" for k, v in values.items())
    noise = int.from_bytes(hashlib.sha256(text.encode()).digest()[:2], "big") / 65536
    if values["form"] == "tree":
        return 150.0 + 2.0 * int(values["arity"]) + int(values["root"]) + noise
    tile = abs(int(values["tile"]).bit_length() - (64).bit_length())
    depth = abs(int(values["depth"]) - 4)
    return 100.0 + 12.0 * tile + 5.0 * depth + (0.0 if values["order"] == "b" else 9.0) + noise


OPERATION = WideOperation()
FAMILY = WideFamily()
