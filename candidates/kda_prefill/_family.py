"""KDA prefill as a :class:`candidates.Family`: where its parts are joined, each loaded on use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from candidates._base import Build, Family, Runnable, Schedule
from candidates._delta_rule.sources import source_hash
from candidates.kda_prefill import space
from candidates.kda_prefill.cost import modelled_us
from operations import Inputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILY", "KdaPrefillFamily"]

_ROOT = Path(__file__).resolve().parent


class KdaPrefillFamily(Family):
    """Chunked KDA prefill, in two kernels or fused into one.

    Attributes
    ----------
    name, operation : str
        Both ``"kda_prefill"``.
    parameters : tuple of Parameter
        See :data:`candidates.kda_prefill.space.PARAMETERS`.
    """

    name = "kda_prefill"
    operation = "kda_prefill"
    parameters = space.PARAMETERS

    def presets(self) -> tuple[str, ...]:
        """``kda_prefill`` (all split forms), ``quickstart`` (one of each kind), ``fused``."""
        return tuple(space.PRESETS)

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        """See :func:`candidates.kda_prefill.space.offered`."""
        return space.offered(preset)

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        """See :func:`candidates.kda_prefill.space.problems`."""
        return space.problems(schedule)

    def gate_bound(self, schedule: Schedule) -> float | None:
        """See :func:`candidates.kda_prefill.space.gate_bound`."""
        return space.gate_bound(schedule)

    def emulate(self, schedule: Schedule, inputs: Inputs) -> dict[str, torch.Tensor]:
        """See :func:`candidates.kda_prefill.emulate.emulate`."""
        if space.is_fused(schedule):
            from candidates.kda_prefill import emulate_fused

            return emulate_fused.emulate(schedule, inputs)
        from candidates.kda_prefill import emulate

        return emulate.emulate(schedule, inputs)

    def largest_exponent(self, schedule: Schedule, inputs: Inputs) -> float:
        """See :func:`candidates.kda_prefill.emulate.largest_exponent`."""
        if space.is_fused(schedule):
            from candidates.kda_prefill import emulate_fused

            return emulate_fused.largest_exponent(schedule, inputs)
        from candidates.kda_prefill import emulate

        return emulate.largest_exponent(schedule, inputs)

    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        """See :func:`candidates.kda_prefill.cost.modelled_us`."""
        return modelled_us(schedule, workload)

    def source_hash(self) -> str:
        """See :func:`candidates._delta_rule.sources.source_hash`."""
        return source_hash(_ROOT)

    def compile(self, schedule: Schedule) -> Build:
        """See :func:`candidates.kda_prefill.kernel.launch.compile_schedule`."""
        from candidates.kda_prefill.kernel.launch import compile_schedule

        return compile_schedule(schedule)

    def load(self, schedule: Schedule) -> Runnable:
        """See :func:`candidates.kda_prefill.kernel.launch.load_schedule`."""
        from candidates.kda_prefill.kernel.launch import load_schedule

        return load_schedule(schedule)

    def objects(self, schedule: Schedule) -> Mapping[str, bytes]:
        """See :func:`candidates.kda_prefill.ahead.objects`."""
        from candidates.kda_prefill.ahead import objects

        return objects(schedule)

    def load_objects(self, schedule: Schedule, folder: Path) -> Runnable:
        """See :func:`candidates.kda_prefill.ahead.load_objects`."""
        from candidates.kda_prefill.ahead import load_objects

        return load_objects(schedule, folder)


FAMILY = KdaPrefillFamily()
