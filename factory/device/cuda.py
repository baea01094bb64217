"""An NVIDIA sm90 GPU: memory shared by CUDA IPC, kernel times by CUPTI through Kineto.

The arena is one driver allocation, mapped by every child through one handle.
torch's own sharing of tensors is not used: it counts references in the sender,
and a child that is killed never gives its count back.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from factory.device.hardware import Arena, Bench, Device, KernelEvent, RecordingError
from factory.device.nvml import Gauge
from factory.device.protocol import Ref
from factory.machine import Gpu, installed, sm90_gpus
from factory.stages.base import HarnessError

if TYPE_CHECKING:
    import torch

__all__ = ["CudaDevice", "peak_bytes_per_s"]

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_FLUSH_BYTES = 256 << 20
"""Several times the 60 MB L2 of an H200 (as torch reports it there)."""
_PEAK_BYTES_PER_S = {"H200": 4.8e12, "H100 PCIe": 2.0e12, "H100 NVL": 3.9e12, "H100": 3.35e12}
"""By NVIDIA's data sheets; the first name found in the GPU's own decides."""


def peak_bytes_per_s(gpu: str) -> float | None:
    """Memory bandwidth of a GPU by its name, or None for one that has no entry."""
    return next((peak for name, peak in _PEAK_BYTES_PER_S.items() if name in gpu), None)


def _sku(name: str) -> str:
    """Board of a Hopper GPU by its name: the same chip is sold with other memory and clocks."""
    for word in ("GH200", "H200 NVL", "H200", "H20", "H100 PCIe", "H100 NVL", "H100 80GB HBM3"):
        if word in name:
            return {"H200": "H200 SXM", "H100 80GB HBM3": "H100 SXM"}.get(word, word)
    return name


def _ptxas() -> str | None:
    """Version of the assembler: the one that the DSL brings, else the toolkit's."""
    for distribution in (
        "nvidia-cutlass-dsl-libs-base",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-nvcc-cu12",
    ):
        if found := installed(distribution):
            return f"{distribution} {found}"
    return None


class _Handle(ctypes.Structure):
    _fields_ = [("bytes_", ctypes.c_char * _HANDLE_BYTES)]


class _Driver:
    """The five driver calls that torch does not offer, in torch's own context."""

    def __init__(self) -> None:
        import torch

        torch.zeros(1, device="cuda")  # makes the context
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(0))
        self._context = context

    def allocate(self, nbytes: int) -> int:
        pointer = ctypes.c_uint64()
        self._current()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return pointer.value

    def free(self, pointer: int) -> None:
        self._current()
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def export(self, pointer: int) -> bytes:
        handle = _Handle()
        self._current()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES)

    def map(self, exported: bytes) -> int:
        pointer, handle = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(handle), exported, _HANDLE_BYTES)
        self._current()
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        return pointer.value

    def _current(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


class _Memory:
    """Bytes at a device address, as torch's ``__cuda_array_interface__`` wants them.

    A tensor made from it has a storage of its own that starts at the address:
    some launch paths reject views that are offset into a larger storage.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor(bound: Any, base: int, ref: Ref) -> torch.Tensor:
    """``bound`` is torch: to import it here would give an import hook its turn."""
    dtype: torch.dtype = getattr(bound, ref.dtype)
    if ref.nbytes == 0:
        nothing: torch.Tensor = bound.empty(ref.shape, dtype=dtype, device="cuda")
        return nothing
    flat: torch.Tensor = bound.as_tensor(_Memory(base + ref.offset, ref.nbytes), device="cuda")
    return flat.view(dtype).view(ref.shape)


class _CudaArena(Arena):
    def __init__(self, nbytes: int) -> None:
        import torch

        self._torch = torch
        self._driver = _Driver()
        self._base = self._driver.allocate(nbytes)
        self.size, self.handle = nbytes, self._driver.export(self._base)

    def view(self, ref: Ref) -> torch.Tensor:
        return _tensor(self._torch, self._base, ref)

    def close(self) -> None:
        self._driver.free(self._base)


class _CudaBench(Bench):
    """Everything used while timing is bound here, before foreign code is imported."""

    def __init__(self, handle: bytes, gpu_bytes: int, uuid: str) -> None:
        import torch
        from torch.autograd.profiler import profile

        self._torch = torch
        self._base = _Driver().map(handle)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_bytes / total))
        self._gauge = Gauge.find(uuid)
        self._now = time.perf_counter_ns
        self._sleep = time.sleep
        self._wait = torch._C._cuda_synchronize
        self._profile = profile
        self._cuda_events = torch._C._autograd.DeviceType.CUDA
        self._nextafter = torch.nextafter
        self._matmul = torch.matmul
        self._full = torch.full
        self._byte = torch.uint8
        self._stream_context = torch.cuda.stream
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._ones = torch.ones(32, device="cuda")
        self._twos = torch.full((32,), 2.0, device="cuda")
        self._nowhere = torch.empty(32, device="cuda")
        self._square = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self._product = torch.empty_like(self._square)
        self._evictor: torch.Tensor | None = None
        self.marker = self._learn_marker()

    def _learn_marker(self) -> str:
        """Names change with torch; what the marker is called is read off the recording."""
        self.mark()
        self._wait()

        def body() -> None:
            for _ in range(3):
                self.mark()
            self._wait()

        events = self.record(body)
        names = {e.name for e in events}
        if len(events) != 3 or len(names) != 1:
            raise RecordingError(
                f"three launches of one kernel were recorded as {len(events)} of {sorted(names)}"
            )
        return names.pop()

    def view(self, ref: Ref) -> torch.Tensor:
        return _tensor(self._torch, self._base, ref)

    def now_ns(self) -> int:
        return self._now()

    def sm_share(self) -> float | None:
        return None if self._gauge is None else self._gauge.sm_share()

    def rest(self, seconds: float) -> None:
        self._sleep(seconds)

    def synchronize(self) -> None:
        self._wait()

    def record(self, body: Callable[[], None]) -> list[KernelEvent]:
        with self._profile(use_cpu=False, use_device="cuda", use_kineto=True) as recording:
            body()
        events = [
            KernelEvent(e.name(), e.start_ns(), e.duration_ns())
            for e in recording.kineto_results.events()
            if e.device_type() == self._cuda_events and not e.is_user_annotation()
        ]
        if not events:
            raise RecordingError(
                "the profiler shows no kernels: CUPTI is missing or another profiler holds it"
            )
        return sorted(events, key=lambda e: e.start_ns)

    def mark(self) -> None:
        self._nextafter(self._ones, self._twos, out=self._nowhere)

    def flush(self) -> None:
        if self._evictor is None:
            self._evictor = self._full((_FLUSH_BYTES,), 0, dtype=self._byte, device="cuda")
        self._evictor.add_(1)

    def disturb(self) -> None:
        with self._stream_context(self._side):
            for _ in range(4):
                self._matmul(self._square, self._square, out=self._product)

    def poison(self, nbytes: int) -> None:
        if nbytes:
            self._full((nbytes,), 0xFF, dtype=self._byte, device="cuda")


@dataclass(frozen=True)
class CudaDevice(Device):
    """The first visible GPU; :meth:`find` says what is wrong where there is none.

    Parameters
    ----------
    gpu : Gpu
        As the driver describes it.
    """

    gpu: Gpu
    peak_bytes_per_s: float
    torch_device: str = "cuda"
    method: str = "cupti busy"

    @classmethod
    def find(cls) -> CudaDevice:
        """The first visible GPU.

        Raises
        ------
        HarnessError
            If there is no sm90 GPU, or torch cannot use it; names versions and the fix.
        """
        visible = sm90_gpus()
        if not visible:
            raise HarnessError("no sm90 GPU is visible; measured clocks need one (H100, H200)")
        try:
            import torch
        except ImportError as error:
            raise HarnessError(f"torch does not import: {error}") from error
        if not torch.cuda.is_available():
            raise HarnessError(
                f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use"
                f" {visible[0].name} with driver {visible[0].driver};"
                " install a CUDA build of torch that matches the driver"
            )
        name = torch.cuda.get_device_name(0)
        if torch.cuda.get_device_capability(0) != (9, 0):
            raise HarnessError(f"the first GPU that torch sees is {name}; an sm90 GPU is needed")
        first = next((g for g in visible if g.name == name), visible[0])
        return cls(first, peak_bytes_per_s(name) or max(_PEAK_BYTES_PER_S.values()))

    def describe(self) -> dict[str, Any]:
        import torch

        properties = torch.cuda.get_device_properties(0)
        gauge = Gauge.find(self.gpu.uuid)
        return {
            **({} if gauge is None else gauge.describe()),
            "gpu": self.gpu.name,
            "gpu_uuid": self.gpu.uuid,
            "sku": _sku(self.gpu.name),
            "ptxas": _ptxas(),
            "driver": self.gpu.driver,
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "torch": torch.__version__,
        }

    def free_bytes(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info(0)[0])

    def create_arena(self, nbytes: int) -> Arena:
        return _CudaArena(nbytes)

    def check(self) -> None:
        import torch

        torch.cuda.synchronize()

    def bench(self, arena: Any, gpu_bytes: int) -> Bench:
        return _CudaBench(arena, gpu_bytes, self.gpu.uuid)
