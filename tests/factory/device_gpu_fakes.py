"""Small CUDA kernels that behave, sleep, hang or fault, for tests on a real GPU."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from device_fakes import COLUMNS, OPERATION, FakeFamily

from candidates import Parameter, Schedule

SOURCE = """
extern "C" __global__ void fake_main(
    const float* g, const float* v, const float* initial, float* o, float* total,
    int rows, int kind, int scale_bits, int has_initial)
{
    float scale = __int_as_float(scale_bits);
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    if (kind == 2) *reinterpret_cast<volatile float*>(16) = 1.0f;    // illegal address
    if (kind == 3) while (*reinterpret_cast<const volatile float*>(v) < 1e30f) {}   // hang
    __syncthreads();
    int column = threadIdx.x;
    float sum = 0.0f;
    for (int row = 0; row < rows; row++) {
        int i = row * 8 + column;
        if (kind == 4 && row == rows - 1) break;  // leaves the last row unwritten
        o[i] = scale * expf(g[i]) * v[i] + (has_initial ? initial[column] : 0.0f);
        sum += o[i];
    }
    total[column] = sum;
    if (kind == 1) {  // sleeps: 50 us in all, its work included
        do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < 50000);
    }
}
"""
KINDS = ("good", "sleeps", "faults", "hangs", "last_row")
OTHERS = (
    "twin",
    "library",
    "oracle",
    "replays",
    "empty",
    "greedy",
    "zeroes_v",
    "nan",
    "overwrites_initial",
    "forges_clock",
)
NAMES = tuple(f"name_{n}" for n in range(10))
"""One kernel under ten names."""


@dataclass
class GpuRunnable:
    kind: str
    kernel_names: tuple[str, ...] = ("fake_main",)
    kernel: Any = None
    cache: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def bind(self, i: Any, o: Any) -> Callable[[], Mapping[str, torch.Tensor]]:
        number = KINDS.index(self.kind) if self.kind in KINDS else 0

        def launch(into: Mapping[str, torch.Tensor] = o) -> Mapping[str, torch.Tensor]:
            arguments = [
                i["g"],
                i["v"],
                i["initial"] if i["initial"] is not None else i["v"],
                into["o"],
                into["total"],
                len(i["v"]),
                number,
                # As bits: whether a Python float travels as float or double depends on torch.
                struct.unpack("<i", struct.pack("<f", i["scale"]))[0],
                int(i["initial"] is not None),
            ]
            self.kernel((1, 1, 1), (COLUMNS, 1, 1), arguments)
            return into

        def library() -> Mapping[str, torch.Tensor]:
            product = i["scale"] * i["g"].exp() * i["v"]
            if i["initial"] is not None:
                product = product + i["initial"]
            return {"o": product, "total": product.sum(0)}

        def replays() -> Mapping[str, torch.Tensor]:
            key = i["v"].data_ptr()
            if key not in self.cache:
                self.cache[key] = tuple(t.clone() for t in launch().values())
            launch({n: torch.empty_like(t) for n, t in o.items()})
            return dict(zip(("o", "total"), self.cache[key], strict=True))

        def empty() -> Mapping[str, torch.Tensor]:
            launch({n: torch.empty_like(t) for n, t in o.items()})
            return {"o": torch.empty(o["o"].shape, device="cuda"), "total": o["total"]}

        def greedy() -> Mapping[str, torch.Tensor]:
            torch.empty(1 << 37, dtype=torch.uint8, device="cuda")
            return launch()

        def oracle() -> Mapping[str, torch.Tensor]:
            return {n: t.to(o[n].dtype) for n, t in OPERATION.oracle(i).items()}

        def zeroes_v() -> Mapping[str, torch.Tensor]:
            launch()
            i["v"].zero_()
            o["o"].zero_()
            return o

        def nan() -> Mapping[str, torch.Tensor]:
            launch()
            o["total"][3] = float("nan")
            return o

        def overwrites_initial() -> Mapping[str, torch.Tensor]:
            launch()
            if i["initial"] is not None:
                i["initial"].copy_(o["total"])
            return o

        others = {
            "library": library,
            "oracle": oracle,
            "replays": replays,
            "empty": empty,
            "greedy": greedy,
            "zeroes_v": zeroes_v,
            "nan": nan,
            "overwrites_initial": overwrites_initial,
        }
        return others.get(self.kind, launch)


class GpuFamily(FakeFamily):
    name = "gpu fakes"
    parameters = (Parameter("kind", (*KINDS, *OTHERS, *NAMES), "how it behaves"),)

    def load(self, schedule: Schedule) -> GpuRunnable:  # type: ignore[override]
        kernel = torch.cuda._compile_kernel(SOURCE, "fake_main")
        kind = str(schedule["kind"])
        if kind == "forges_clock":
            time.perf_counter_ns = lambda: 0
            torch.cuda.synchronize = lambda *_: None
            torch.cuda.Event.elapsed_time = lambda *_: 0.0  # type: ignore[method-assign]
        names = ("fake_main", "Memcpy") if kind == "replays" else ("fake_main",)
        return GpuRunnable(kind, names, kernel)


FAMILY = GpuFamily()
