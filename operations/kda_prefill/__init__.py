"""KDA prefill: the chunkwise forward pass of Kimi Delta Attention over packed sequences.

What it computes, on what, and how right it has to be.  How it is computed fast
is none of this package's business.
"""

from __future__ import annotations

from typing import Any

from operations._base import Regime, Workload
from operations._delta_rule.operation import DeltaRulePrefill
from operations._delta_rule.spec import HEAD_DIM
from operations.kda_prefill._regimes import RECIPES, REGIMES
from operations.kda_prefill._spec import CONTRACT, TENSORS, TOLERANCES
from operations.kda_prefill._workloads import REDUCED, WORKLOADS, KdaWorkload

__all__ = ["OPERATION", "KdaPrefill", "KdaWorkload"]


class KdaPrefill(DeltaRulePrefill[KdaWorkload]):
    """Gated delta rule with one forget gate per token, head and key channel.

    For one head, with ``S`` of shape [K, V], token t does ::

        S~  = diag(exp(g_t)) S
        r_t = v_t - S~^T k_t
        S   = S~ + beta_t k_t r_t^T
        o_t = scale * S^T q_t

    States are passed and returned value-major, as ``S^T``: ``[N, H, V, K]``.
    """

    name = "kda_prefill"
    version = "2"
    tensors = TENSORS
    regimes = REGIMES
    recipes = RECIPES
    workloads = WORKLOADS
    workload_type = KdaWorkload
    gate_channels = HEAD_DIM
    tolerances = TOLERANCES
    contract = CONTRACT

    def draw(
        self, workload: KdaWorkload, regime: Regime, *, seed: int, device: str
    ) -> dict[str, Any]:
        """Draw one input set with every form it has.

        Returns
        -------
        dict
            ``q, k, v`` [T, H, 128] bf16, ``g`` [T, H, 128] fp32, ``beta`` [T, H] fp32,
            ``cu_seqlens`` [N + 1] int32, ``initial_state`` [N, H, 128, 128] fp32 or None,
            ``scale`` float; ``q_raw``, ``k_raw`` [T, H, 128] bf16 (not normalised) and
            ``beta_logits`` [T, H] bf16; where the gate is a safe gate ``g_raw`` [T, H, 128]
            bf16, ``A_log`` [H] fp32, ``dt_bias`` [H, 128] fp32, ``lower_bound`` float.
        """
        from operations.kda_prefill._generators import draw

        return draw(workload, regime, seed=seed, device=device)

    def reduced(self) -> tuple[Workload, ...]:
        """Four small workloads: one long chain, ragged ones, one without initial state."""
        return REDUCED


OPERATION = KdaPrefill()
