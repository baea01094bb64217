"""Ours on raw inputs: ``kda_prefill`` with what models have in front of the activations."""

from __future__ import annotations

import functools

from candidates._baselines.common import RawOperands
from candidates._baselines.ours import FORM, FedRaw, Function

__all__ = ["KdaFedRaw"]


class KdaFedRaw(FedRaw):
    """A fused schedule of KDA prefill behind the safe gate; split ones do not normalise."""

    operation = "kda_prefill"

    def kernels(self) -> tuple[str, ...]:
        from candidates.kda_prefill.kernel import arguments, entry
        from candidates.kda_prefill.kernel.launch import LoadedSchedule, config_of

        options = entry.Options(gate="safe", **FORM)
        config = config_of(self.schedule)
        if isinstance(config, entry.Config):
            arguments.decline_for_split(options)
        assert isinstance(config, entry.FusedConfig)
        kind, *behind = LoadedSchedule(config).kernel_names
        return (f"{kind}{config.frame}_b{config.builders}{options.suffix}", *behind)

    def function(self, given: RawOperands) -> Function:
        from candidates.kda_prefill.kernel import entry
        from candidates.kda_prefill.kernel.launch import config_of

        return functools.partial(
            entry.kda_prefill,
            schedule=config_of(self.schedule),
            gate="safe",
            lower_bound=given.lower_bound,
        )
