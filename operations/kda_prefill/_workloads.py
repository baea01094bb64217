"""Shapes of KDA prefill: tuned, held out, and reduced ones for CPU emulation."""

from __future__ import annotations

from dataclasses import dataclass

from operations._delta_rule.spec import DEFAULT_SCALE
from operations._delta_rule.workloads import DeltaRuleWorkload

__all__ = ["REDUCED", "WORKLOADS", "KdaWorkload"]


@dataclass(frozen=True)
class KdaWorkload(DeltaRuleWorkload):
    """One shape of KDA prefill.

    Parameters
    ----------
    name : str
        ``"T/H/N"`` for N equal sequences, else descriptive with the head
        count after the slash.
    held_out : bool
        See :class:`operations.Workload`.
    heads : int
        H, the same for q, k and v.
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


def _equal(tokens: int, heads: int, sequences: int) -> KdaWorkload:
    return KdaWorkload(
        f"{tokens}/{heads}/{sequences}",
        heads=heads,
        lengths=(tokens // sequences,) * sequences,
    )


_TUNED = (
    _equal(2048, 12, 1),
    _equal(2048, 16, 1),
    _equal(4096, 8, 1),
    _equal(4096, 12, 1),
    _equal(8192, 12, 4),
    _equal(8192, 16, 1),
    _equal(1024, 4, 1),
    _equal(3072, 10, 1),
    _equal(8192, 24, 1),
    _equal(16384, 16, 8),
)


def _held(
    name: str,
    heads: int,
    lengths: tuple[int, ...],
    *,
    initial_state: bool = True,
    scale: float = DEFAULT_SCALE,
) -> KdaWorkload:
    return KdaWorkload(f"{name}/{heads}", True, heads, lengths, initial_state, scale)


_HELD_OUT = (
    _held("one-token", 1, (1,)),
    _held("odd-17", 1, (17,)),
    _held("odd-500", 5, (500,)),
    _held("odd-2047", 7, (2047,)),
    _held("ragged-0-1-63-64", 3, (0, 1, 63, 64)),
    _held("empty-around-37", 3, (0, 37, 0)),
    # One either side of every chunk length in use, so that each meets a full last chunk, a
    # last chunk of one token and one that lacks a token.
    _held("chunk-edges", 2, (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)),
    # Total and mean say nothing about the longest sequence here, from either end.
    _held("short-short-short-long", 4, (1, 1, 1, 4093)),
    _held("long-short-short-short", 4, (4093, 1, 1, 1)),
    _held("uneven-7-4096-0-130-1999-1", 16, (7, 4096, 0, 130, 1999, 1)),
    _held("many-short", 8, tuple(1 + (37 * n) % 128 for n in range(64))),
    _held("primes-1021-509-1031", 32, (1021, 509, 1031)),
    _held("equal-1000-by-4", 24, (1000,) * 4),
    _held("long-32768", 4, (32768,)),
    _held("no-state-3001", 12, (3001,), initial_state=False),
    _held("no-state-empty-between", 2, (0, 100, 0, 511), initial_state=False),
    _held("scale-half-777-1300", 6, (777, 1300), scale=0.5),
)

WORKLOADS: dict[str, KdaWorkload] = {w.name: w for w in (*_TUNED, *_HELD_OUT)}
"""Tuned workloads in reporting order, then the held-out ones."""

REDUCED: tuple[KdaWorkload, ...] = (
    # 13 chunks of 64: eight segments all have work and the carry crosses every one of them.
    KdaWorkload("reduced-777/1", heads=1, lengths=(777,)),
    KdaWorkload("reduced-200/2", heads=2, lengths=(200,)),
    KdaWorkload("reduced-1-63-64-0-37/2", heads=2, lengths=(1, 63, 64, 0, 37)),
    KdaWorkload(
        "reduced-no-state-33-16/1", heads=1, lengths=(33, 16), initial_state=False, scale=0.5
    ),
)
"""Small enough to emulate every offered schedule on a CPU, ragged enough to show its mistakes."""
