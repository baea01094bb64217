"""The vocabulary in which an operation states what is to be computed.

An :class:`Operation` names its tensors, its input regimes, its workloads, its
fp64 oracle and its tolerances.  It must not know how anything is computed
fast, timed or stored: this package imports nothing of ``candidates``,
``factory`` or ``leaderboard``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "Contract",
    "Inputs",
    "Operation",
    "Outputs",
    "Probe",
    "Regime",
    "Region",
    "TensorError",
    "TensorSpec",
    "Tolerance",
    "Workload",
]

Inputs = Mapping[str, Any]
"""Argument name to tensor, scalar or None, exactly as a candidate receives it."""

Outputs = Mapping[str, "torch.Tensor"]
"""Output name to tensor."""

RegimeRole = Literal["production", "slow", "sweep", "edge", "mild"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the operation.

    Parameters
    ----------
    name : str
        Argument or output name.
    dims : tuple of (str or int)
        Symbolic or fixed sizes, outermost first, for example ``("T", "H", 128)``.
    dtype : str
        torch dtype name, for example ``"bfloat16"``.
    role : {"input", "optional", "output"}
        Optional tensors may be ``None``.
    doc : str
        Meaning and unit.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str
    role: Literal["input", "optional", "output"]
    doc: str


@dataclass(frozen=True)
class Regime:
    """A family of inputs with a stated source.

    Parameters
    ----------
    name : str
        Unique within the operation.
    role : {"production", "slow", "sweep", "edge", "mild"}
        ``production`` ranks and gates; ``slow`` gates and is timed beside
        production; ``sweep`` and ``edge`` gate; ``mild`` is kept as a
        documented mistake: it neither ranks nor decides.
    gate_floor : float
        The most negative per-token log gate the regime can produce
        (``-inf`` allowed).  A candidate whose declared bound is above it is
        *out of its contract* there.
    source : str
        Where this distribution comes from, in words.
    statistics : Mapping[str, float]
        Measured statistics of the generated data (mean, std, min, max, ...).
    severity : float or None
        Position on the severity sweep (the lower bound), for sweep regimes.
    tolerances : Mapping[str, Tolerance] or None
        By output name, where the rounding of operands alone costs more in this
        regime than the operation's own tolerances allow; None means those.
    """

    name: str
    role: RegimeRole
    gate_floor: float
    source: str
    statistics: Mapping[str, float]
    severity: float | None = None
    tolerances: Mapping[str, Tolerance] | None = None

    @property
    def ranks(self) -> bool:
        """Whether a time read on this regime may order candidates."""
        return self.role == "production"

    @property
    def gates(self) -> bool:
        """Whether an error in this regime rejects a candidate."""
        return self.role != "mild"


@dataclass(frozen=True)
class Workload:
    """One shape of the operation; operations subclass it with their own sizes.

    Parameters
    ----------
    name : str
        Unique within the operation, for example ``"2048/12/1"``.
    held_out : bool
        Held-out workloads are never tuned on: they are met before a winner is
        named.
    """

    name: str
    held_out: bool = False


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted error of one output.

    Parameters
    ----------
    max_rel : float
        Bound on ``max|x - ref| / max|ref|``.
    rms_rel : float
        Bound on ``||x - ref|| / ||ref||``.
    source : str
        Where the bound comes from.
    """

    max_rel: float
    rms_rel: float
    source: str


@dataclass(frozen=True)
class TensorError:
    """Error of one output, over all of it or one slice of it.

    Parameters
    ----------
    tensor : str
        Output name.
    scope : str
        ``"all"``, ``"head 3"`` or ``"sequence 5"``.
    max_rel, rms_rel : float
        See :class:`Tolerance`; ``inf`` where anything is not finite.
    finite : bool
        Whether every element is finite.
    nonfinite_count : int
        Elements that are NaN or infinite.
    within : bool
        Whether the slice is finite and inside its tolerance.
    """

    tensor: str
    scope: str
    max_rel: float
    rms_rel: float
    finite: bool
    nonfinite_count: int
    within: bool


@dataclass(frozen=True)
class Region:
    """Part of one output that a probe looks at.

    Parameters
    ----------
    tensor : str
        Output name.
    rows : tuple of (int, int)
        Half-open ranges on its first axis.
    """

    tensor: str
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Probe:
    """One more call that shows a property of an implementation; see :meth:`Operation.probes`.

    Its outputs are compared with the oracle's and, where ``base`` names an
    earlier probe, with the outputs of that one.

    Parameters
    ----------
    name : str
        What is asked, in words; unique within its workload and regime.
    workload : Workload
        Shape of ``inputs``.
    inputs : Mapping
        Arguments of the call.
    base : str or None
        Earlier probe to compare with.
    same : tuple of Region
        Must hold the same bytes as in the base.
    near : tuple of Region
        May differ from the base by ``bound`` of the largest magnitude that the
        base has in the same index of the second axis (a head); by nothing if
        the implementation claims ``bitwise_causal``.
    bound : float
    other_form : bool
        Whether an argument is of another kind (None instead of a tensor), for
        which an implementation may have to compile again: asked of finalists
        and of single checks, not of every candidate of a search.
    """

    name: str
    workload: Workload
    inputs: Inputs
    base: str | None = None
    same: tuple[Region, ...] = ()
    near: tuple[Region, ...] = ()
    bound: float = 1e-2
    other_form: bool = False


@dataclass(frozen=True)
class Contract:
    """What is served and what is declined, each line in words a user reads."""

    served: tuple[str, ...]
    declined: tuple[str, ...] = field(default=())


class Operation(ABC):
    """What is to be computed, and how right it has to be.

    Attributes
    ----------
    name : str
        For example ``"kda_prefill"``.
    version : str
        Changes whenever a regime, a workload, the oracle or a tolerance
        changes meaning: scores of another version do not count.
    tensors : tuple of TensorSpec
    regimes : Mapping[str, Regime]
    workloads : Mapping[str, Workload]
        Tuned ones first, in reporting order.
    tolerances : Mapping[str, Tolerance]
        By output name.
    contract : Contract
    """

    name: str
    version: str
    tensors: tuple[TensorSpec, ...]
    regimes: Mapping[str, Regime]
    workloads: Mapping[str, Workload]
    tolerances: Mapping[str, Tolerance]
    contract: Contract

    def tuned(self) -> tuple[Workload, ...]:
        """Workloads that candidates are tuned and ranked on."""
        return tuple(w for w in self.workloads.values() if not w.held_out)

    def held_out(self) -> tuple[Workload, ...]:
        """Workloads that are met only before a winner is named."""
        return tuple(w for w in self.workloads.values() if w.held_out)

    @abstractmethod
    def generate(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any]:
        """Draw one input set.

        Equal arguments give equal bytes on one device type and torch version.
        """

    @abstractmethod
    def raw_form(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any] | None:
        """The un-activated form of the same draw, or None where the regime has none.

        Baselines that activate gates themselves are fed this; ``generate``
        with the same arguments holds the activated values of it.
        """

    @abstractmethod
    def outputs(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Allocate outputs for ``inputs``, filled with NaN."""

    @abstractmethod
    def oracle(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Evaluate the definition token by token in float64."""

    @abstractmethod
    def fast_oracle(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """A faster float64 form that equals :meth:`oracle` to 1e-10; runs on any device."""

    @abstractmethod
    def compare(
        self,
        outputs: Outputs,
        expected: Outputs,
        workload: Workload,
        regime: Regime | None = None,
    ) -> tuple[TensorError, ...]:
        """Errors per output: over all of it, per head and per sequence.

        Judged by the regime's own tolerances where it has some.
        """

    @abstractmethod
    def reduced(self) -> tuple[Workload, ...]:
        """Small workloads for CPU emulation: ragged, several sequences, few heads."""

    @abstractmethod
    def floor_bytes(self, workload: Workload) -> int:
        """Bytes that any implementation must move through device memory."""

    def raw_floor_bytes(self, workload: Workload) -> int:
        """The same of one that is fed :meth:`raw_form`; as many, unless an operation says."""
        return self.floor_bytes(workload)

    def probes(
        self,
        workload: Workload,
        regime: Regime,
        *,
        seed: int,
        device: str = "cpu",
        chunk: int | None = None,
    ) -> tuple[Probe, ...]:
        """Further calls that the gate makes: causality, arguments that must be honoured.

        Parameters
        ----------
        workload : Workload
            Says how large the calls may be.
        regime : Regime
        seed : int
        device : str
        chunk : int or None
            Rows that an implementation says it computes together; None where it
            says nothing.

        Returns
        -------
        tuple of Probe
            Empty by default: what to ask is the operation's own knowledge.
        """
        return ()
