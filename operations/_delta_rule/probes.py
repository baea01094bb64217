"""Calls that show causality and the use of every argument, on short ragged sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from operations._base import Probe, Region
from operations._delta_rule.workloads import DeltaRuleWorkload

__all__ = ["probes"]

W = TypeVar("W", bound=DeltaRuleWorkload)

_LENGTHS = (70, 207, 0, 64)
_MOVED_LENGTHS = (33, 180, 64, 64)
"""As many tokens and sequences, with every boundary elsewhere."""
_CHANGED = 1
"""Sequence in which tokens are changed; it has sequences before and after it."""
_TOKEN = 165
"""First changed token of it: inside a chunk of 16, 32, 64 or 128 tokens, never the first."""
_DRAWN = "as drawn"
_MOVED_TOKENS = ("q", "k", "v", "g", "beta")


def probes(
    workload: W, draw: Callable[[W, int], dict[str, Any]], *, seed: int, chunk: int
) -> tuple[Probe, ...]:
    """See :meth:`operations.Operation.probes`.

    ``draw`` gives the arguments of one call for a shape and a seed, in one regime on one device.
    Changed values come from a second draw of the same regime: they are finite,
    of the usual size and within whatever gate bound the regime itself is.
    """
    shape = workload.small(_LENGTHS)
    drawn = draw(shape, seed)
    other = draw(shape, seed + 1)
    found = [Probe(_DRAWN, shape, drawn)]

    begin, end = shape.boundaries[_CHANGED], shape.boundaries[_CHANGED + 1]
    first = begin + _TOKEN
    unit = begin + _TOKEN // chunk * chunk
    untouched = (
        Region("o", ((0, unit), (end, shape.tokens))),
        Region("final_state", ((0, _CHANGED), (_CHANGED + 1, shape.sequences))),
    )
    for name in _MOVED_TOKENS:
        tensor = drawn[name].clone()
        tensor[first:end] = other[name][first:end]
        found.append(
            Probe(
                f"causality: {name} changed from token {_TOKEN} of sequence {_CHANGED} on",
                shape,
                {**drawn, name: tensor},
                base=_DRAWN,
                same=untouched,
                near=(Region("o", ((unit, first),)),),
            )
        )

    def asked(name: str, changed: W, *, other_form: bool = False, **values: Any) -> None:
        found.append(Probe(name, changed, {**drawn, **values}, other_form=other_form))

    asked("scale doubled", shape, scale=2 * drawn["scale"])
    asked("scale of 0", shape, scale=0.0)
    asked("another initial_state", shape, initial_state=other["initial_state"])
    moved = replace(shape, lengths=_MOVED_LENGTHS)
    boundaries = drawn["cu_seqlens"].new_tensor(moved.boundaries)
    asked("other boundaries in cu_seqlens", moved, cu_seqlens=boundaries)
    stateless = replace(shape, initial_state=False)
    asked("initial_state of None", stateless, initial_state=None, other_form=True)
    return tuple(found)
