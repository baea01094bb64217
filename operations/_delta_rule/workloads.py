"""Shapes of packed sequences with heads, as the gated delta rules take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from operations._base import Workload
from operations._delta_rule.spec import DEFAULT_SCALE

__all__ = ["DeltaRuleWorkload"]


@dataclass(frozen=True)
class DeltaRuleWorkload(Workload):
    """One shape of a gated delta rule.

    Parameters
    ----------
    name : str
    held_out : bool
        See :class:`operations.Workload`.
    heads : int
        H, of q and k.
    lengths : tuple of int
        Tokens of each sequence in packed order; 0 is allowed.
    initial_state : bool
        Whether an initial state is given; False passes ``None``.
    scale : float
        Factor on the outputs.

    Raises
    ------
    ValueError
        If ``heads`` is not positive or a length is negative.
    """

    heads: int = 1
    lengths: tuple[int, ...] = ()
    initial_state: bool = True
    scale: float = DEFAULT_SCALE

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"workload {self.name!r}: heads must be at least 1, got {self.heads}")
        if any(n < 0 for n in self.lengths):
            raise ValueError(f"workload {self.name!r}: lengths must be >= 0, got {self.lengths}")

    @property
    def state_heads(self) -> int:
        """Heads that have a state of their own: those of v, o and the states."""
        return self.heads

    @property
    def tokens(self) -> int:
        """T, tokens of all sequences together."""
        return sum(self.lengths)

    @property
    def sequences(self) -> int:
        """N, sequences including empty ones."""
        return len(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the length of the serial chain."""
        return max(self.lengths, default=0)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """``cu_seqlens`` as integers, N + 1 of them."""
        out = [0]
        for n in self.lengths:
            out.append(out[-1] + n)
        return tuple(out)

    def small(self, lengths: tuple[int, ...]) -> Self:
        """A shape of this kind with other lengths, at most two key heads and an initial state."""
        return replace(
            self,
            name="probe",
            held_out=False,
            lengths=lengths,
            initial_state=True,
            scale=DEFAULT_SCALE,
            **self._with_heads(min(self.heads, 2)),
        )

    def _with_heads(self, heads: int) -> dict[str, int]:
        """Head counts in these proportions, as arguments."""
        return {"heads": heads}
