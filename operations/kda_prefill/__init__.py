"""KDA prefill: the chunkwise forward pass of Kimi Delta Attention over packed sequences.

What it computes, on what, and how right it has to be.  How it is computed fast
is none of this package's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from operations._base import Inputs, Operation, Outputs, Probe, Regime, TensorError, Workload
from operations.kda_prefill._regimes import RECIPES, REGIMES
from operations.kda_prefill._spec import CONTRACT, HEAD_DIM, TENSORS, TOLERANCES
from operations.kda_prefill._workloads import REDUCED, WORKLOADS, KdaWorkload

if TYPE_CHECKING:
    import torch

__all__ = ["OPERATION", "KdaPrefill", "KdaWorkload"]

_ARGUMENTS = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "scale")


class KdaPrefill(Operation):
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
    workloads = WORKLOADS
    tolerances = TOLERANCES
    contract = CONTRACT

    def generate(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any]:
        """Draw the arguments of one call.

        Parameters
        ----------
        workload : KdaWorkload
        regime : Regime
        seed : int
            Mixed with the names of workload and regime, so equal seeds give
            unrelated data on different workloads.
        device : str
            Drawn on it directly.  Bytes are equal for equal arguments on one
            device type and torch version, not across them.

        Returns
        -------
        dict
            ``q, k, v`` [T, H, 128] bf16 (q and k of unit norm), ``g``
            [T, H, 128] fp32, ``beta`` [T, H] fp32, ``cu_seqlens`` [N + 1]
            int32, ``initial_state`` [N, H, 128, 128] fp32 or None, ``scale``
            float.

        Raises
        ------
        TypeError
            If the workload is not a :class:`KdaWorkload`.
        ValueError
            If the regime is unknown.
        """
        drawn = self._draw(workload, regime, seed, device)
        return {name: drawn[name] for name in _ARGUMENTS}

    def raw_form(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any] | None:
        """The same draw before activation, beside the activated tensors.

        Returns
        -------
        dict or None
            Everything :meth:`generate` returns, and ``q_raw``, ``k_raw``
            [T, H, 128] bf16 (not normalised), ``g_raw`` [T, H, 128] bf16,
            ``A_log`` [H] fp32, ``dt_bias`` [H, 128] fp32, ``beta_logits``
            [T, H] bf16, ``lower_bound`` float; None for regimes whose gates
            no safe gate gives exactly.
        """
        recipe = RECIPES.get(regime.name)
        if recipe is not None and not recipe.has_raw_form:
            return None
        return self._draw(workload, regime, seed, device)

    def outputs(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """``o`` [T, H, 128] bf16 and ``final_state`` [N, H, 128, 128] fp32, filled with NaN."""
        import torch

        v = inputs["v"]
        N = max(int(inputs["cu_seqlens"].shape[0]) - 1, 0)
        state = (N, int(v.shape[1]), HEAD_DIM, HEAD_DIM)
        nan = float("nan")
        return {
            "o": torch.full(v.shape, nan, dtype=torch.bfloat16, device=v.device),
            "final_state": torch.full(state, nan, dtype=torch.float32, device=v.device),
        }

    def oracle(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """``o`` and ``final_state`` in float64, token by token; minutes for long sequences."""
        from operations.kda_prefill._oracle import token_by_token

        return token_by_token(inputs)

    def fast_oracle(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """``o`` and ``final_state`` in float64, chunked; equals :meth:`oracle` to 1e-10."""
        from operations.kda_prefill._oracle import chunked

        return chunked(inputs)

    def compare(
        self,
        outputs: Outputs,
        expected: Outputs,
        workload: Workload,
        regime: Regime | None = None,
    ) -> tuple[TensorError, ...]:
        """Errors of ``o`` and ``final_state``: over all, per head, per sequence.

        Judged by :data:`TOLERANCES`, or by the regime's own where it has some.

        Where the reference of a slice is all zero (largest magnitude at most
        1e-30) the output must be as small; its errors are then 0, else inf.

        Raises
        ------
        ValueError
            On missing outputs, other shapes, or a reference that is not finite.
        """
        from operations.kda_prefill._compare import compare

        own = regime.tolerances if regime is not None else None
        return compare(outputs, expected, _own(workload), own or TOLERANCES)

    def reduced(self) -> tuple[Workload, ...]:
        """Four small workloads: one long chain, ragged ones, one without initial state."""
        return REDUCED

    def floor_bytes(self, workload: Workload) -> int:
        """q, k, v and o in bf16, g and beta in fp32, and both states, each moved once."""
        w = _own(workload)
        states = 2 * w.sequences * w.heads * HEAD_DIM * HEAD_DIM * 4
        return 12 * w.tokens * w.heads * HEAD_DIM + 4 * w.tokens * w.heads + states

    def probes(
        self,
        workload: Workload,
        regime: Regime,
        *,
        seed: int,
        device: str = "cpu",
        chunk: int | None = None,
    ) -> tuple[Probe, ...]:
        """Causality, and every optional argument honoured, on four short ragged sequences.

        Sizes do not grow with ``workload``; of it only the heads count, at most
        two.  Without a stated ``chunk`` the longest one in use, 64 tokens, is
        allowed for.
        """
        from operations.kda_prefill._probes import probes

        return probes(_own(workload), regime, seed=seed, device=device, chunk=chunk or 64)

    def _draw(self, workload: Workload, regime: Regime, seed: int, device: str) -> dict[str, Any]:
        from operations.kda_prefill._generators import draw

        return draw(_own(workload), regime, seed=seed, device=device)


def _own(workload: Workload) -> KdaWorkload:
    if not isinstance(workload, KdaWorkload):
        raise TypeError(
            f"kda_prefill takes a KdaWorkload, got {type(workload).__name__} {workload.name!r}"
        )
    return workload


OPERATION = KdaPrefill()
