"""Shapes of GDN prefill: tuned, held out, and reduced ones for CPU emulation.

Head counts are those of Qwen3-Next, 16 of q and k and 32 of v, and what is left of them on each
device when a layer is split over 2, 4 or 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from operations._delta_rule.spec import DEFAULT_SCALE
from operations._delta_rule.workloads import DeltaRuleWorkload

__all__ = ["REDUCED", "WORKLOADS", "GdnWorkload"]


@dataclass(frozen=True)
class GdnWorkload(DeltaRuleWorkload):
    """One shape of GDN prefill.

    Parameters
    ----------
    name : str
        ``"T/H/HV/N"`` for N equal sequences, else descriptive with the head
        counts ``H/HV`` after the slash.
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
    value_heads : int
        HV, of v, g, beta, o and the states.

    Raises
    ------
    ValueError
        If ``heads`` is not positive, ``value_heads`` not a positive multiple
        of it, or a length is negative.
    """

    value_heads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_heads < 1 or self.value_heads % self.heads:
            raise ValueError(
                f"workload {self.name!r}: value_heads must be a positive multiple of heads = "
                f"{self.heads}, got {self.value_heads}"
            )

    @property
    def state_heads(self) -> int:
        """HV: each value head has a state of its own."""
        return self.value_heads

    @property
    def group(self) -> int:
        """HV / H, value heads that read one head of q and k."""
        return self.value_heads // self.heads

    def _with_heads(self, heads: int) -> dict[str, int]:
        return {"heads": heads, "value_heads": heads * self.group}


def _equal(tokens: int, heads: int, value_heads: int, sequences: int) -> GdnWorkload:
    return GdnWorkload(
        f"{tokens}/{heads}/{value_heads}/{sequences}",
        heads=heads,
        value_heads=value_heads,
        lengths=(tokens // sequences,) * sequences,
    )


_TUNED = (
    _equal(8192, 16, 32, 1),
    _equal(2048, 16, 32, 1),
    _equal(16384, 16, 32, 8),
    _equal(8192, 8, 16, 1),
    _equal(4096, 8, 16, 1),
    # A serving batch of prompts, many more of them than fit a device at once.
    _equal(8192, 8, 16, 64),
    _equal(8192, 4, 8, 1),
    _equal(2048, 4, 8, 1),
    _equal(16384, 2, 4, 1),
    # One prompt dominates: half of the tokens, the rest halves again.
    GdnWorkload(
        "halves-8192/4/8",
        heads=4,
        value_heads=8,
        lengths=(4096, 2048, 1024, 512, 256, 128, 64, 63, 1),
    ),
)


def _held(
    name: str,
    heads: int,
    value_heads: int,
    lengths: tuple[int, ...],
    *,
    initial_state: bool = True,
    scale: float = DEFAULT_SCALE,
) -> GdnWorkload:
    return GdnWorkload(
        f"{name}/{heads}/{value_heads}",
        True,
        heads=heads,
        value_heads=value_heads,
        lengths=lengths,
        initial_state=initial_state,
        scale=scale,
    )


_HELD_OUT = (
    _held("one-token", 1, 2, (1,)),
    _held("odd-17", 1, 1, (17,)),
    _held("odd-500", 5, 10, (500,)),
    _held("odd-2047", 7, 14, (2047,)),
    _held("ragged-0-1-63-64", 3, 6, (0, 1, 63, 64)),
    _held("empty-around-37", 3, 3, (0, 37, 0)),
    # One either side of every chunk length in use, so that each meets a full last chunk, a
    # last chunk of one token and one that lacks a token.
    _held("chunk-edges", 2, 4, (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)),
    # Total and mean say nothing about the longest sequence here, from either end.
    _held("short-short-short-long", 2, 4, (1, 1, 1, 4093)),
    _held("long-short-short-short", 2, 4, (4093, 1, 1, 1)),
    _held("uneven-7-4096-0-130-1999-1", 8, 16, (7, 4096, 0, 130, 1999, 1)),
    _held("many-short", 4, 8, tuple(1 + (37 * n) % 128 for n in range(64))),
    _held("primes-1021-509-1031", 16, 32, (1021, 509, 1031)),
    _held("equal-1000-by-4", 8, 16, (1000,) * 4),
    _held("long-32768", 2, 4, (32768,)),
    _held("no-state-3001", 4, 8, (3001,), initial_state=False),
    _held("no-state-empty-between", 2, 4, (0, 100, 0, 511), initial_state=False),
    _held("scale-half-777-1300", 3, 6, (777, 1300), scale=0.5),
    # Value heads that share no key head, and groups of another size than the models'.
    _held("ungrouped-1500", 8, 8, (1500,)),
    _held("groups-of-4-1111-300", 4, 16, (1111, 300)),
    _held("groups-of-3-640", 2, 6, (640,)),
)

WORKLOADS: dict[str, GdnWorkload] = {w.name: w for w in (*_TUNED, *_HELD_OUT)}
"""Tuned workloads in reporting order, then the held-out ones."""

REDUCED: tuple[GdnWorkload, ...] = (
    # 13 chunks of 64: eight segments all have work and the carry crosses every one of them.
    GdnWorkload("reduced-777/1/1", heads=1, value_heads=1, lengths=(777,)),
    GdnWorkload("reduced-200/1/2", heads=1, value_heads=2, lengths=(200,)),
    GdnWorkload("reduced-1-63-64-0-37/2/4", heads=2, value_heads=4, lengths=(1, 63, 64, 0, 37)),
    GdnWorkload(
        "reduced-no-state-33-16/1/3",
        heads=1,
        value_heads=3,
        lengths=(33, 16),
        initial_state=False,
        scale=0.5,
    ),
)
"""Small enough to emulate every offered schedule on a CPU, ragged enough to show its mistakes."""
