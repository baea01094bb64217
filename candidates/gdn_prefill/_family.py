"""GDN prefill as a :class:`candidates.Family`: where its parts are joined, each loaded on use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from candidates._base import Build, Family, Runnable, Schedule
from candidates._delta_rule.sources import source_hash
from candidates.gdn_prefill import space
from candidates.gdn_prefill.cost import modelled_us
from operations import Inputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILY", "GdnPrefillFamily"]

_ROOT = Path(__file__).resolve().parent


class GdnPrefillFamily(Family):
    """Chunked GDN prefill: a PREP for scalar gates and a scan, or both in one kernel.

    Attributes
    ----------
    name, operation : str
        Both ``"gdn_prefill"``.
    parameters : tuple of Parameter
        See :data:`candidates.gdn_prefill.space.PARAMETERS`.
    """

    name = "gdn_prefill"
    operation = "gdn_prefill"
    parameters = space.PARAMETERS

    def presets(self) -> tuple[str, ...]:
        """``gdn_prefill`` (all that can be built), ``quickstart`` (one of each kind)."""
        return tuple(space.PRESETS)

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        """See :func:`candidates.gdn_prefill.space.offered`."""
        return space.offered(preset)

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        """See :func:`candidates.gdn_prefill.space.problems`."""
        return space.problems(schedule)

    def gate_bound(self, schedule: Schedule) -> float | None:
        """See :func:`candidates.gdn_prefill.space.gate_bound`."""
        return space.gate_bound(schedule)

    def emulate(self, schedule: Schedule, inputs: Inputs) -> dict[str, torch.Tensor]:
        """See :func:`candidates.gdn_prefill.emulate.emulate`, and ``emulate_fused``."""
        if space.is_fused(schedule):
            from candidates.gdn_prefill import emulate_fused

            return emulate_fused.emulate(schedule, inputs)
        from candidates.gdn_prefill import emulate

        return emulate.emulate(schedule, inputs)

    def largest_exponent(self, schedule: Schedule, inputs: Inputs) -> float:
        """See :func:`candidates.gdn_prefill.emulate.largest_exponent`."""
        from candidates.gdn_prefill import emulate

        if space.is_fused(schedule):  # chunks of a split one of the same length
            schedule = space.GdnSchedule(int(schedule["bt"])).schedule()
        return emulate.largest_exponent(schedule, inputs)

    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        """See :func:`candidates.gdn_prefill.cost.modelled_us`."""
        return modelled_us(schedule, workload)

    def source_hash(self) -> str:
        """See :func:`candidates._delta_rule.sources.source_hash`."""
        return source_hash(_ROOT)

    def compile(self, schedule: Schedule) -> Build:
        """See :func:`candidates.gdn_prefill.kernel.launch.compile_schedule`."""
        from candidates.gdn_prefill.kernel.launch import compile_schedule

        return compile_schedule(schedule)

    def load(self, schedule: Schedule) -> Runnable:
        """See :func:`candidates.gdn_prefill.kernel.launch.load_schedule`."""
        from candidates.gdn_prefill.kernel.launch import load_schedule

        return load_schedule(schedule)

    def objects(self, schedule: Schedule) -> Mapping[str, bytes]:
        """See :func:`candidates.gdn_prefill.ahead.objects`."""
        from candidates.gdn_prefill.ahead import objects

        return objects(schedule)

    def load_objects(self, schedule: Schedule, folder: Path) -> Runnable:
        """See :func:`candidates.gdn_prefill.ahead.load_objects`."""
        from candidates.gdn_prefill.ahead import load_objects

        return load_objects(schedule, folder)


FAMILY = GdnPrefillFamily()
