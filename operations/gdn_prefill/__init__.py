"""GDN prefill: the chunkwise forward pass of Gated DeltaNet over packed sequences.

What it computes, on what, and how right it has to be.  How it is computed fast
is none of this package's business.
"""

from __future__ import annotations

from typing import Any

from operations._base import Regime, Workload
from operations._delta_rule.operation import DeltaRulePrefill
from operations.gdn_prefill._regimes import RECIPES, REGIMES
from operations.gdn_prefill._spec import CONTRACT, TENSORS, TOLERANCES
from operations.gdn_prefill._workloads import REDUCED, WORKLOADS, GdnWorkload

__all__ = ["OPERATION", "GdnPrefill", "GdnWorkload"]


class GdnPrefill(DeltaRulePrefill[GdnWorkload]):
    """Gated delta rule with one forget gate per token and value head.

    For one value head, with ``S`` of shape [K, V], token t does ::

        S~  = exp(g_t) S
        r_t = v_t - S~^T k_t
        S   = S~ + beta_t k_t r_t^T
        o_t = scale * S^T q_t

    where q and k are those of head ``j // (HV / H)`` for value head j.  States are passed and
    returned value-major, as ``S^T``: ``[N, HV, V, K]``.
    """

    name = "gdn_prefill"
    version = "1"
    tensors = TENSORS
    regimes = REGIMES
    recipes = RECIPES
    workloads = WORKLOADS
    workload_type = GdnWorkload
    gate_channels = 1
    tolerances = TOLERANCES
    contract = CONTRACT

    def draw(
        self, workload: GdnWorkload, regime: Regime, *, seed: int, device: str
    ) -> dict[str, Any]:
        """Draw one input set with every form it has.

        Returns
        -------
        dict
            ``q, k`` [T, H, 128] and ``v`` [T, HV, 128] bf16, ``g``, ``beta`` [T, HV] fp32,
            ``cu_seqlens`` [N + 1] int32, ``initial_state`` [N, HV, 128, 128] fp32 or None,
            ``scale`` float; ``q_raw``, ``k_raw`` [T, H, 128] bf16 (not normalised) and
            ``beta_logits`` [T, HV] bf16; where the gate is a softplus gate ``g_raw`` [T, HV]
            bf16 (which models call ``a``), ``A_log`` and ``dt_bias`` [HV] fp32.
        """
        from operations.gdn_prefill._generators import draw

        return draw(workload, regime, seed=seed, device=device)

    def reduced(self) -> tuple[Workload, ...]:
        """Four small workloads: one long chain, ragged ones, groups of 1 to 3, one stateless."""
        return REDUCED


OPERATION = GdnPrefill()
