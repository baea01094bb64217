"""Ours on raw inputs: ``gdn_prefill`` with what models have in front of the activations."""

from __future__ import annotations

import functools

from candidates._baselines.common import RawOperands
from candidates._baselines.ours import FORM, FedRaw, Function

__all__ = ["GdnFedRaw"]


class GdnFedRaw(FedRaw):
    """A schedule of GDN prefill behind the softplus gate."""

    operation = "gdn_prefill"

    def kernels(self) -> tuple[str, ...]:
        from candidates.gdn_prefill.kernel import entry
        from candidates.gdn_prefill.kernel.launch import LoadedSchedule, config_of

        # With more value heads than heads the name of the form goes on.
        options = entry.Options(gate="softplus", **FORM)
        config = config_of(self.schedule)
        size = str(config.bt)
        if isinstance(config, entry.FusedConfig):
            size = f"t{config.bt}_r{config.rows}_b{config.builders}"
        kind, *behind = LoadedSchedule(config).kernel_names
        return (f"{kind}{size}{options.suffix}", *behind)

    def function(self, given: RawOperands) -> Function:
        from candidates.gdn_prefill.kernel import entry
        from candidates.gdn_prefill.kernel.launch import config_of

        return functools.partial(
            entry.gdn_prefill, schedule=config_of(self.schedule), gate="softplus"
        )
