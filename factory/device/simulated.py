"""A device made of CPU memory and a virtual clock, to run jobs without a GPU.

The job, its processes, the gate and the timer are the real ones; only the
hardware is simulated.  A kernel for it calls :func:`launch` with the time it
pretends to take.  Times read here say nothing about any GPU.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from factory.device.hardware import Arena, Bench, Device, KernelEvent
from factory.device.protocol import Ref

if TYPE_CHECKING:
    import torch

__all__ = ["SimulatedDevice", "launch", "neighbour_is_busy", "throttle"]

_MARKER = "simulated_marker"


@dataclass
class _Timeline:
    """Virtual nanoseconds: a host that launches, a device that runs in order."""

    host_ns: int = 0
    device_ns: int = 0
    busy_until_ns: int = 0
    """When what another stream runs ends."""
    slow_until_ns: int = 0
    """When the device's clock is high again."""
    events: list[KernelEvent] | None = field(default=None)

    def launch(self, name: str, us: float, host_us: float) -> None:
        self.host_ns += round(host_us * 1000)
        start = max(self.host_ns, self.device_ns)
        duration = round(us * 1000 * (2 if start < self.slow_until_ns else 1))
        self.device_ns = start + duration
        if self.events is not None:
            self.events.append(KernelEvent(name, start, duration))

    def neighbour(self, us: float) -> None:
        """Another stream: runs beside the device's own order."""
        self.busy_until_ns = self.host_ns + round(us * 1000)

    def wait(self) -> None:
        self.host_ns = max(self.host_ns, self.device_ns, self.busy_until_ns)


_TIMELINE = _Timeline()


def launch(name: str, us: float, *, host_us: float = 2.0) -> None:
    """Let a simulated kernel of ``us`` microseconds start; the work itself is the caller's."""
    _TIMELINE.launch(name, us, host_us)


def throttle(us: float) -> None:
    """Let the device run at half its clock for so long: kernels take twice their time."""
    _TIMELINE.slow_until_ns = _TIMELINE.host_ns + round(us * 1000)


def neighbour_is_busy() -> bool:
    """Whether another stream runs something now, as a racing kernel would notice."""
    return _TIMELINE.host_ns < _TIMELINE.busy_until_ns


def _tensor(bound: Any, memory: mmap.mmap, ref: Ref) -> torch.Tensor:
    """``bound`` is torch: to import it here would give an import hook its turn."""
    dtype: torch.dtype = getattr(bound, ref.dtype)
    if ref.nbytes == 0:
        nothing: torch.Tensor = bound.empty(ref.shape, dtype=dtype)
        return nothing
    count = ref.nbytes // dtype.itemsize
    flat: torch.Tensor = bound.frombuffer(memory, dtype=dtype, count=count, offset=ref.offset)
    return flat.view(ref.shape)


class _MemoryArena(Arena):
    """Memory with a number but no name: gone with the last process that maps it, however it ends.

    Its size is sealed, so that no child can cut it short under the job.
    """

    def __init__(self, nbytes: int) -> None:
        self._number = os.memfd_create("kernel-factory-arena", os.MFD_ALLOW_SEALING)
        os.ftruncate(self._number, nbytes)  # sparse: only pages in use take room
        fcntl.fcntl(
            self._number,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
        import torch

        self._torch = torch
        self._memory = mmap.mmap(self._number, nbytes)
        self.size, self.handle = nbytes, f"/proc/{os.getpid()}/fd/{self._number}"
        self._open = True

    def view(self, ref: Ref) -> torch.Tensor:
        return _tensor(self._torch, self._memory, ref)

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._number)


class _SimulatedBench(Bench):
    marker = _MARKER

    def __init__(self, path: str) -> None:
        import torch

        self._torch = torch
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._time = _TIMELINE

    def view(self, ref: Ref) -> torch.Tensor:
        return _tensor(self._torch, self._memory, ref)

    def now_ns(self) -> int:
        return self._time.host_ns

    def sm_share(self) -> float | None:
        return 0.5 if self._time.host_ns < self._time.slow_until_ns else 1.0

    def rest(self, seconds: float) -> None:
        self._time.host_ns += round(seconds * 1e9)

    def synchronize(self) -> None:
        self._time.wait()

    def record(self, body: Callable[[], None]) -> list[KernelEvent]:
        self._time.events = []
        try:
            body()
            return self._time.events
        finally:
            self._time.events = None

    def mark(self) -> None:
        self._time.launch(_MARKER, 1.0, 2.0)

    def flush(self) -> None:
        self._time.launch("simulated_flush", 40.0, 2.0)

    def disturb(self) -> None:
        self._time.neighbour(100.0)

    def poison(self, nbytes: int) -> None:
        """The CPU allocator makes no promise about freed blocks: nothing to poison."""


@dataclass(frozen=True)
class SimulatedDevice(Device):
    """See the module.

    Parameters
    ----------
    memory_bytes : int
        Memory it claims to have free.
    gpu : str
        Name it goes by in records.
    """

    memory_bytes: int = 1 << 28
    gpu: str = "simulated"
    torch_device: str = "cpu"
    method: str = "simulated"
    peak_bytes_per_s: float = 4.8e12
    real_time: bool = False

    def describe(self) -> dict[str, Any]:
        import torch

        return {"gpu": self.gpu, "torch": torch.__version__}

    def free_bytes(self) -> int:
        return self.memory_bytes

    def create_arena(self, nbytes: int) -> Arena:
        return _MemoryArena(nbytes)

    def check(self) -> None:
        """CPU memory cannot be lost."""

    def bench(self, arena: Any, gpu_bytes: int) -> Bench:
        return _SimulatedBench(arena)
