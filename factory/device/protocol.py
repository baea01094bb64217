"""What a job sends to a candidate's process, and the limits it sets.

Small frozen records without torch.  They cross to the child by pickle; answers
come back as JSON, because a process that ran foreign code may not be unpickled.
Seeds, expected answers and anything of the database have no place here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from candidates import Baseline, Family, Schedule
from operations import Workload

__all__ = [
    "TUNING_S",
    "Bound",
    "Case",
    "Limits",
    "Load",
    "Open",
    "Ref",
    "Run",
    "Sampling",
    "Target",
    "Time",
]


TUNING_S = 1800.0
"""One message to a control where all of them are asked for: an autotuner takes a minute for each
of a list of shapes' head counts."""


@dataclass(frozen=True)
class Limits:
    """What one child process may use, and when a job's times stop counting.

    Parameters
    ----------
    load_s : float
        From the start of a child to a launchable kernel: imports, compilation.
    gate_s, screen_s, time_s : float
        One message of the stage (all workloads of one regime).
    control_s : float
        One message to a baseline; some tune themselves on first use.
    gpu_bytes : int
        Device memory a child may allocate through torch.  Memory that it
        takes from the driver directly is not limited.
    host_bytes : int
        Resident host memory of a child, at most 0.8 of what the machine has left
        when it starts, or 8 GiB if that is more; watched while the job waits for it.
        An address-space limit is unusable: CUDA reserves hundreds of gigabytes.
    file_bytes : int
        Longest file a child may write, its log among them.
    arena_bytes, answer_bytes : int
        Device memory of the job itself: what it shares with children (inputs
        and outputs), and what it keeps to itself (pristine inputs, expected
        answers).  They are cut to 0.3 and 0.45 of what is free; the least
        recently used inputs make room.  All regimes and tuned workloads of
        KDA prefill take about 30 and 45 GiB: with less, every candidate waits
        for the oracle again.
    drift : float
        Relative change of a control's geomean within the job that voids it.
    clock_share : float
        Samples taken while the SM clock is below this share of its maximum are
        thrown away and taken again; a job in which that does not help is void.
        0 accepts any clock.
    slow_factor : float
        A screened candidate slower than this times the best is not timed.
    """

    load_s: float = 180.0
    gate_s: float = 30.0
    screen_s: float = 30.0
    time_s: float = 60.0
    control_s: float = 300.0
    gpu_bytes: int = 24 << 30
    host_bytes: int = 24 << 30
    file_bytes: int = 512 << 20
    arena_bytes: int = 40 << 30
    answer_bytes: int = 60 << 30
    drift: float = 0.03
    clock_share: float = 0.8
    slow_factor: float = 3.0


@dataclass(frozen=True)
class Sampling:
    """How many samples a clock takes.

    Parameters
    ----------
    gpu, per_call : int
        Samples of one call each; 0 leaves the clock out.
    pipelined, burst : int
        Samples of ``burst`` back-to-back calls each.
    budget_s : float
        Time one clock may spend on one workload; slow calls get fewer
        samples, never fewer than three.
    warm_s : float
        Longest warm-up of one workload.
    flush : bool
        Evict the L2 cache before each ``gpu`` and ``per_call`` sample.
    cold : int
        Further ``gpu`` samples with the L2 cache evicted before each; none of
        calls so long that three of them exceed the budget.
    clock_share : float
        Least SM clock, over its maximum, at which samples count.
    """

    gpu: int = 30
    per_call: int = 0
    pipelined: int = 0
    burst: int = 20
    budget_s: float = 0.25
    warm_s: float = 0.15
    flush: bool = False
    cold: int = 0
    clock_share: float = 0.0


@dataclass(frozen=True)
class Ref:
    """A contiguous tensor inside the arena: byte offset, shape, torch dtype name."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Bound:
    """Arguments of one call: references to tensors, scalars or None by name."""

    inputs: Mapping[str, Any]
    outputs: Mapping[str, Ref]
    raw: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """One workload in one regime.

    Parameters
    ----------
    label : str
        Regime and workload, for messages.
    workload : Workload
    sets : tuple of Bound
        For :class:`Run` the same inputs with outputs of their own, one call
        each.  For :class:`Time` different inputs.
    work : Bound or None
        Where the timed calls run when every sample gets new data at the same
        address; None rotates over ``sets`` instead.
    busy : tuple of int
        Sets that are called while another stream is busy, for :class:`Run`.
    """

    label: str
    workload: Workload
    sets: tuple[Bound, ...]
    work: Bound | None = None
    busy: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """What a child runs: a schedule of a family, or a baseline.

    ``objects`` is a folder of what the family made of the schedule ahead of time.
    """

    family: Family | None = None
    schedule: Schedule | None = None
    objects: str | None = None
    baseline: Baseline | None = None


@dataclass(frozen=True)
class Open:
    """First message: attach to the device.  Nothing foreign is imported yet."""

    device: Any
    arena: Any
    gpu_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class Load:
    """Second message: a pickled :class:`Target` to import and make launchable."""

    target: bytes


@dataclass(frozen=True)
class Run:
    """Call every set of every case once."""

    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Time:
    """Time every case."""

    cases: tuple[Case, ...]
    sampling: Sampling
