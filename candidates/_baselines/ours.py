"""A schedule of ours that is fed raw inputs, timed beside others that are.

It stands in a bench only.  It is none of an operation's baselines: a time over a kernel that
changes with ours would say nothing of ours.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from candidates._base import Baseline, Runnable, Schedule
from candidates._baselines.common import Bound, RawOperands, no_sm90, raw_operands
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["FORM", "FedRaw", "Function"]

FORM: Mapping[str, Any] = {
    "gate_dtype": "bfloat16",
    "bias": True,
    "beta_dtype": "bfloat16",
    "beta_logits": True,
    "l2norm": True,
}
"""What is compiled in, beside the gate: options by name."""

Function = Callable[..., tuple[Any, Any]]


class FedRaw(Baseline):
    """A family's public function on raw inputs: the form of all that take them.

    Gates and logits in bf16, which the kernels activate, and q and k, which they normalise; see
    :func:`candidates._baselines.common.raw_operands`.

    Parameters
    ----------
    schedule : Schedule
    name : str
        Of the contestant.
    """

    input_form = "raw"

    def __init__(self, schedule: Schedule, name: str = "ours_raw") -> None:
        self.schedule = schedule
        self.name = name

    @abstractmethod
    def kernels(self) -> tuple[str, ...]:
        """Prefixes of the kernels that it launches, those of this form of inputs alone.

        Raises
        ------
        ValueError
            If the schedule does not take this form; in the words of the public function.
        """

    @abstractmethod
    def function(self, given: RawOperands) -> Function:
        """The public function, with what it is to know of the gate and of the schedule."""

    def missing(self) -> str | None:
        try:
            self.kernels()
        except ValueError as error:
            return str(error)
        return no_sm90()

    def version(self) -> str:
        return self.schedule.key

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        given = raw_operands(self.name, raw)
        function = self.function(given)

        def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
            q, k, v, offsets, initial = (
                inputs[name] for name in ("q", "k", "v", "cu_seqlens", "initial_state")
            )
            arguments = (q, k, v, given.g, given.beta, offsets, initial)
            how = {
                "scale": float(inputs["scale"]),
                "A_log": given.A_log,
                "dt_bias": given.dt_bias,
                "beta_logits": True,
                "l2norm": True,
                "out": outputs["o"],
                "final_state": outputs["final_state"],
            }

            def call() -> Mapping[str, torch.Tensor]:
                function(*arguments, **how)
                return outputs

            return call

        return Bound(self.kernels(), bind)
