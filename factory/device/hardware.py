"""What the job needs of a device, on both sides of the process boundary.

A :class:`Device` is picklable and travels to the child, which turns it into a
:class:`Bench`.  Whether calls are right, fast or honest is decided elsewhere:
the code above is the same for every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from factory.device.protocol import Ref

if TYPE_CHECKING:
    import torch

__all__ = ["Arena", "Bench", "Device", "KernelEvent", "RecordingError"]


class RecordingError(RuntimeError):
    """The profiler did not show what the device must have run."""


@dataclass(frozen=True)
class KernelEvent:
    """One kernel, copy or fill as the device ran it; nanoseconds of one clock."""

    name: str
    start_ns: int
    duration_ns: int


class Arena(ABC):
    """One allocation that a job shares with its children."""

    size: int
    handle: Any
    """Picklable; all that a child needs to map it."""

    @abstractmethod
    def view(self, ref: Ref) -> torch.Tensor:
        """The tensor at ``ref``, with a storage of its own (offset 0)."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; views die with it."""


class Bench(ABC):
    """A child's side: the tensors it was lent, and a clock bound before foreign code."""

    marker: str
    """Name under which :meth:`record` shows :meth:`mark`."""

    @abstractmethod
    def view(self, ref: Ref) -> torch.Tensor:
        """The tensor at ``ref``, with a storage of its own (offset 0)."""

    @abstractmethod
    def now_ns(self) -> int:
        """Host clock."""

    def sm_share(self) -> float | None:
        """SM clock now over its maximum; None where it cannot be read."""
        return None

    @abstractmethod
    def rest(self, seconds: float) -> None:
        """Leave the device idle for a while."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of this process on the device."""

    @abstractmethod
    def record(self, body: Callable[[], None]) -> list[KernelEvent]:
        """Run ``body`` and return what the device ran meanwhile, by start time.

        Raises
        ------
        RecordingError
            If the profiler is not available or shows nothing.
        """

    @abstractmethod
    def mark(self) -> None:
        """Launch the marker kernel on the current stream."""

    @abstractmethod
    def flush(self) -> None:
        """Evict the last-level cache."""

    @abstractmethod
    def disturb(self) -> None:
        """Keep another stream busy for a moment."""

    @abstractmethod
    def poison(self, nbytes: int) -> None:
        """Leave NaN in a freed block of that size."""


class Device(ABC):
    """The job's side.

    Attributes
    ----------
    torch_device : str
        Where the job generates inputs and expected answers.
    method : str
        How ``gpu`` time is read; stored with each time.
    peak_bytes_per_s : float
        Memory bandwidth by the data sheet, for the lower bound of any time.
    real_time : bool
        Whether its times pass on the job's own clock too.
    """

    torch_device: str
    method: str
    peak_bytes_per_s: float
    real_time: bool = True

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Machine and toolchain by name; ``gpu`` is the device's name."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that can still be taken."""

    @abstractmethod
    def create_arena(self, nbytes: int) -> Arena:
        """Allocate what is shared with children."""

    @abstractmethod
    def check(self) -> None:
        """Wait for the job's own work; raises RuntimeError if the device is lost."""

    @abstractmethod
    def bench(self, arena: Any, gpu_bytes: int) -> Bench:
        """Attach a child: map the arena, limit memory, bind the clock."""
