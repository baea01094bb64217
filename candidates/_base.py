"""The vocabulary in which a family of kernels states how an operation may be computed.

A :class:`Family` offers schedules of one operation, judges them by stated
budgets, emulates their arithmetic on the CPU, estimates and compiles them and
loads them on a GPU.  It must not know of Ray, Optuna or databases.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = [
    "Baseline",
    "Build",
    "BuildError",
    "Family",
    "KernelResources",
    "Parameter",
    "Runnable",
    "Schedule",
    "ToolchainError",
    "Value",
]

Value = int | str


class BuildError(Exception):
    """The candidate itself cannot be built: the verdict is on the candidate."""


class ToolchainError(Exception):
    """The machine or toolchain is at fault: never a verdict on a candidate.

    The message names package, version found and the fix.
    """


@dataclass(frozen=True)
class Parameter:
    """One knob of a schedule space.

    Parameters
    ----------
    name : str
    choices : tuple of (int or str)
    doc : str
        What it changes, in words.
    active_when : Mapping[str, tuple]
        Parent parameter to the values under which this one exists; empty
        means always.  An inactive parameter is absent from the schedule.
    """

    name: str
    choices: tuple[Value, ...]
    doc: str
    active_when: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)

    def active(self, values: Mapping[str, Value]) -> bool:
        """Whether this parameter exists beside ``values``."""
        return all(values.get(k) in allowed for k, allowed in self.active_when.items())


@dataclass(frozen=True, order=True)
class Schedule:
    """One point of a schedule space: named choices in the space's own order."""

    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, parameters: Iterable[Parameter], values: Mapping[str, Value]) -> Schedule:
        """Order ``values`` as the space does; refuse unknown, missing and foreign ones.

        Raises
        ------
        ValueError
            Naming the parameter, the value and the choices.
        """
        items: list[tuple[str, Value]] = []
        seen: dict[str, Value] = {}
        for p in parameters:
            if not p.active(seen):
                if p.name in values:
                    raise ValueError(f"{p.name} does not apply beside {seen}")
                continue
            if p.name not in values:
                raise ValueError(f"{p.name} is missing; choices: {list(p.choices)}")
            if values[p.name] not in p.choices:
                raise ValueError(f"{p.name}={values[p.name]!r} is not one of {list(p.choices)}")
            seen[p.name] = values[p.name]
            items.append((p.name, values[p.name]))
        for name in values:
            if name not in seen:
                raise ValueError(f"unknown parameter {name!r}")
        return cls(tuple(items))

    @property
    def key(self) -> str:
        """Canonical text, for example ``"bt=32 anchor=mid segments=1 rows=64"``."""
        return " ".join(f"{k}={v}" for k, v in self.items)

    def as_dict(self) -> dict[str, Value]:
        return dict(self.items)

    def get(self, name: str, default: Value | None = None) -> Value | None:
        return dict(self.items).get(name, default)

    def __getitem__(self, name: str) -> Value:
        return dict(self.items)[name]

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True)
class KernelResources:
    """What the compiler gave one kernel.

    Parameters
    ----------
    name : str
        Kernel name as the profiler shows it.
    registers : int
        Per thread.
    stack_bytes : int
        Per thread; above 0 means spills or an indexed local array.
    dynamic_smem_bytes : int or None
        Per block; None where only the launch knows it.
    threads : int or None
        Threads per block.
    """

    name: str
    registers: int
    stack_bytes: int
    dynamic_smem_bytes: int | None
    threads: int | None = None


@dataclass(frozen=True)
class Build:
    """Result of compiling one schedule for sm_90a.

    Parameters
    ----------
    schedule_key : str
    kernels : tuple of KernelResources
    seconds : float
        Wall time of the compilation.
    cubin_sha256 : str
        Over the machine code of all kernels, in launch order.
    problems : tuple of str
        Budgets broken (spills, shared memory over 227 KiB, ...); empty if none.
    """

    schedule_key: str
    kernels: tuple[KernelResources, ...]
    seconds: float
    cubin_sha256: str
    problems: tuple[str, ...] = ()


class Runnable(Protocol):
    """Something that can be launched on the current GPU."""

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Prefixes of the kernel names it launches; every launched name must match one."""

    def bind(self, inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
        """Prepare a call on fixed tensors.

        Whatever a caller would do once (views, conversions to this
        implementation's own input form) happens here, so that the returned
        function costs only the implementation's own call.  The function
        launches on the current stream, does not synchronise, and returns
        output name to tensor: ``outputs``' own tensors where the
        implementation can write to given memory.  It is a ``dict`` of
        ``torch.Tensor`` on the device of the inputs; a subclass of either is refused.
        """


class Family(ABC):
    """Schedules of one operation that share one source.

    Attributes
    ----------
    name, operation : str
    parameters : tuple of Parameter
        Parents before children.
    """

    name: str
    operation: str
    parameters: tuple[Parameter, ...]

    def schedule(self, values: Mapping[str, Value]) -> Schedule:
        """Build a schedule of this family; see :meth:`Schedule.of`."""
        return Schedule.of(self.parameters, values)

    @abstractmethod
    def presets(self) -> tuple[str, ...]:
        """Names of the offered subsets of the space."""

    @abstractmethod
    def offered(self, preset: str) -> tuple[Schedule, ...]:
        """Schedules of a preset, at most 128, in a stable order."""

    @abstractmethod
    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        """Why the schedule cannot be built (budgets, divisibility); empty if it can."""

    @abstractmethod
    def gate_bound(self, schedule: Schedule) -> float | None:
        """Most negative per-token log gate it is right for; None means any."""

    @abstractmethod
    def emulate(self, schedule: Schedule, inputs: Inputs) -> dict[str, torch.Tensor]:
        """The schedule's own arithmetic on the CPU: rounding, order, masking."""

    @abstractmethod
    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        """Cost model: estimated GPU time on one H200, in microseconds."""

    @abstractmethod
    def source_hash(self) -> str:
        """sha256 over the family's kernel and arithmetic source."""

    @abstractmethod
    def compile(self, schedule: Schedule) -> Build:
        """Compile to sm_90a machine code; needs no GPU.

        Raises
        ------
        BuildError
            The schedule does not compile.
        ToolchainError
            The DSL is missing or broken.
        """

    @abstractmethod
    def load(self, schedule: Schedule) -> Runnable:
        """Compile and make launchable on the current GPU."""

    def objects(self, schedule: Schedule) -> Mapping[str, bytes]:
        """Compile ahead of time what :meth:`load_objects` needs; needs no GPU.

        Returns
        -------
        Mapping of str to bytes
            File name to contents; empty for a family whose schedules are compiled on loading.

        Raises
        ------
        BuildError, ToolchainError
            As :meth:`compile`.
        """
        return {}

    def load_objects(self, schedule: Schedule, folder: Path) -> Runnable:
        """Make launchable what :meth:`objects` made, from its files in ``folder``.

        Raises
        ------
        Exception
            Whatever a file that does not fit here leads to; :meth:`load` is then the way.
        """
        return self.load(schedule)


class Baseline(ABC):
    """Somebody else's implementation, timed as a control.

    Attributes
    ----------
    name : str
        For example ``"flashkda"``.
    input_form : {"activated", "raw"}
        Which form of the inputs it is fed (stated beside its time).
    """

    name: str
    operation: str
    input_form: str

    @abstractmethod
    def missing(self) -> str | None:
        """Why it cannot run here, in one line with the fix, or None if it can."""

    @abstractmethod
    def version(self) -> str:
        """Distribution and version that would be run."""

    @abstractmethod
    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        """Make it launchable.  ``raw`` is :meth:`operations.Operation.raw_form` of the inputs.

        Raises
        ------
        ValueError
            If it takes only raw inputs and the regime has no raw form.
        """
