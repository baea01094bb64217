"""The part of an :class:`~operations.Operation` that all gated delta rules share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from operations._base import Inputs, Operation, Outputs, Probe, Regime, TensorError, Workload
from operations._delta_rule.recipes import Recipe
from operations._delta_rule.spec import ARGUMENTS, HEAD_DIM
from operations._delta_rule.workloads import DeltaRuleWorkload

if TYPE_CHECKING:
    import torch

__all__ = ["DeltaRulePrefill"]

W = TypeVar("W", bound=DeltaRuleWorkload)

_LONGEST_CHUNK = 64
"""Tokens that an implementation may compute together where it does not say how many."""


class DeltaRulePrefill(Operation, Generic[W]):
    """Forward pass of a gated delta rule over packed sequences.

    A subclass names its shapes and recipes, draws its inputs and says what each shape moves.

    Attributes
    ----------
    workload_type : type
        The workloads that it takes.
    gate_channels : int
        Gates of one token and state head: 128, or 1.
    recipes : Mapping[str, Recipe]
        By regime name.
    """

    workload_type: type[W]
    gate_channels: ClassVar[int]
    recipes: ClassVar[Mapping[str, Recipe]]

    @abstractmethod
    def draw(self, workload: W, regime: Regime, *, seed: int, device: str) -> dict[str, Any]:
        """Draw one input set with every form it has; the regime is known."""

    def generate(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any]:
        """Draw the arguments of one call, as the operation's tensors say.

        Parameters
        ----------
        workload : Workload
            Of the operation's own class.
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
            ``q, k, v, g, beta, cu_seqlens, initial_state, scale``; q and k of
            unit norm, ``initial_state`` None where the workload has none,
            ``scale`` a float.

        Raises
        ------
        TypeError
            If the workload is another operation's.
        ValueError
            If the regime is unknown.
        """
        drawn = self._drawn(workload, regime, seed, device)
        return {name: drawn[name] for name in ARGUMENTS}

    def raw_form(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any] | None:
        """The same draw before activation, beside the activated tensors; see :meth:`draw`.

        Returns
        -------
        dict or None
            None for regimes whose gates no pre-activation gives exactly.
        """
        recipe = self.recipes.get(regime.name)
        if recipe is not None and not recipe.raw:
            return None
        return self._drawn(workload, regime, seed, device)

    def outputs(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """``o`` like v in bf16 and ``final_state`` [N, HV, 128, 128] fp32, filled with NaN."""
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
        from operations._delta_rule.oracle import token_by_token

        return token_by_token(inputs)

    def fast_oracle(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """``o`` and ``final_state`` in float64, chunked; equals :meth:`oracle` to 1e-10."""
        from operations._delta_rule.oracle import chunked

        return chunked(inputs)

    def floor_bytes(self, workload: Workload) -> int:
        """q, k, v and o in bf16, g and beta in fp32, and the states there are, each moved once."""
        return self._moved_bytes(self._own(workload), gate_bytes=4)

    def raw_floor_bytes(self, workload: Workload) -> int:
        """The same with gates and logits in bf16, and with A_log and dt_bias in fp32."""
        w = self._own(workload)
        return self._moved_bytes(w, gate_bytes=2) + 4 * w.state_heads * (1 + self.gate_channels)

    def _moved_bytes(self, w: W, *, gate_bytes: int) -> int:
        values = 2 * 2 * (w.heads + w.state_heads) * HEAD_DIM
        gates = gate_bytes * w.state_heads * (self.gate_channels + 1)
        states = (1 + w.initial_state) * w.sequences * w.state_heads * HEAD_DIM * HEAD_DIM * 4
        return w.tokens * (values + gates) + states

    def compare(
        self,
        outputs: Outputs,
        expected: Outputs,
        workload: Workload,
        regime: Regime | None = None,
    ) -> tuple[TensorError, ...]:
        """Errors of ``o`` and ``final_state``: over all, per head, per sequence.

        Judged by the operation's tolerances, or by the regime's own where it
        has some.  A head is one that has a state.

        Where the reference of a slice is all zero (largest magnitude at most
        1e-30) the output must be as small; its errors are then 0, else inf.

        Raises
        ------
        ValueError
            On missing outputs, other shapes, or a reference that is not finite.
        """
        from operations._delta_rule.compare import compare

        own = regime.tolerances if regime is not None else None
        return compare(outputs, expected, self._own(workload), own or self.tolerances)

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
        two of q and k.  Without a stated ``chunk`` the longest one in use,
        64 tokens, is allowed for.
        """
        from operations._delta_rule.probes import probes

        def drawn(shape: W, seed: int) -> dict[str, Any]:
            return self.generate(shape, regime, seed=seed, device=device)

        return probes(self._own(workload), drawn, seed=seed, chunk=chunk or _LONGEST_CHUNK)

    def _own(self, workload: Workload) -> W:
        if not isinstance(workload, self.workload_type):
            raise TypeError(
                f"{self.name} takes a {self.workload_type.__name__}, "
                f"got {type(workload).__name__} {workload.name!r}"
            )
        return workload

    def _drawn(self, workload: Workload, regime: Regime, seed: int, device: str) -> dict[str, Any]:
        if regime.name not in self.recipes:
            raise ValueError(
                f"unknown {self.name} regime {regime.name!r}; known: {', '.join(self.recipes)}"
            )
        return self.draw(self._own(workload), regime, seed=seed, device=device)
