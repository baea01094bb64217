"""Errors of one output set against the oracle, over everything and slice by slice."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from operations._base import Outputs, TensorError, Tolerance
from operations._delta_rule.workloads import DeltaRuleWorkload

__all__ = ["ZERO_REFERENCE", "compare"]

ZERO_REFERENCE = 1e-30
"""A reference slice whose largest magnitude is at most this counts as all zero.

Nothing can be relative to it, so the slice is right (error 0) when the output
is finite and no larger, and wrong (error inf) otherwise.  It happens for the
state of an empty sequence without initial state and for ``scale = 0``.
"""

# Columns of a reduction: sums first, then maxima.
_SUMS = ("nonfinite", "diff_sq", "ref_sq")
_MAXIMA = ("diff_max", "ref_max")


def compare(
    outputs: Outputs,
    expected: Outputs,
    workload: DeltaRuleWorkload,
    tolerances: Mapping[str, Tolerance],
) -> tuple[TensorError, ...]:
    """Errors per output: scope ``"all"``, then each head, then each sequence.

    A slice without elements (``o`` of an empty sequence) has error 0.  All
    reductions stay on the output's device; one transfer per output brings them
    to the host.

    Raises
    ------
    ValueError
        If an output is missing, has another shape than the reference or the
        workload, or if the reference itself is not finite.
    """
    T, H, N = workload.tokens, workload.state_heads, workload.sequences
    leading = {"o": (T, H), "final_state": (N, H)}
    errors: list[TensorError] = []
    for name, tolerance in tolerances.items():
        if name not in outputs:
            raise ValueError(f"output {name!r} is missing; got {sorted(outputs)}")
        got, ref = outputs[name], expected[name]
        if got.shape != ref.shape:
            raise ValueError(
                f"output {name!r} has shape {list(got.shape)}, the reference {list(ref.shape)}"
            )
        if tuple(got.shape[:2]) != leading[name]:
            raise ValueError(
                f"output {name!r} has shape {list(got.shape)}, but workload {workload.name!r} "
                f"starts with {list(leading[name])}"
            )
        sums, maxima = _per_row(got, ref.to(got.device))
        lengths = workload.lengths if name == "o" else (1,) * N
        table = _slices(sums, maxima, lengths)
        scopes = ["all", *(f"head {h}" for h in range(H)), *(f"sequence {n}" for n in range(N))]
        for scope, row in zip(scopes, table, strict=True):
            errors.append(_judge(name, scope, row, tolerance))
    return tuple(errors)


def _per_row(got: torch.Tensor, ref: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce everything past the first two axes: sums [rows, H, 3] and maxima [rows, H, 2]."""
    x = got.flatten(2).double()
    y = ref.flatten(2).double()
    finite = x.isfinite()
    # A non-finite element is counted, and decides by that; as a number it would hide the rest.
    diff = torch.where(finite, x - y, x.new_zeros(()))
    sums = torch.stack(
        [(~finite).sum(-1).double(), diff.square().sum(-1), y.square().sum(-1)], dim=-1
    )
    maxima = torch.stack([diff.abs_().amax(-1), y.abs().amax(-1)], dim=-1)
    return sums, maxima


def _slices(
    sums: torch.Tensor, maxima: torch.Tensor, lengths: tuple[int, ...]
) -> list[list[float]]:
    """Rows ``[*_SUMS, *_MAXIMA]`` for all, each head and each run of ``lengths`` rows."""
    rows = sums.shape[0]
    head_sums, head_max = sums.sum(0), _amax0(maxima)
    row_sums, row_max = sums.sum(1), maxima.amax(1)
    sizes = torch.tensor(lengths, dtype=torch.int64, device=sums.device)
    parts = [
        torch.cat([head_sums.sum(0, keepdim=True), _amax0(head_max)[None]], dim=-1),
        torch.cat([head_sums, head_max], dim=-1),
    ]
    if lengths and rows:
        parts.append(
            torch.cat(
                [
                    torch.segment_reduce(row_sums, "sum", lengths=sizes, axis=0, unsafe=True),
                    torch.segment_reduce(
                        row_max, "max", lengths=sizes, axis=0, initial=0.0, unsafe=True
                    ),
                ],
                dim=-1,
            )
        )
    elif lengths:
        parts.append(sums.new_zeros(len(lengths), len(_SUMS) + len(_MAXIMA)))
    table: list[list[float]] = torch.cat(parts).tolist()
    return table


def _amax0(x: torch.Tensor) -> torch.Tensor:
    """Maximum over the first axis, 0 where it is empty (all values are magnitudes)."""
    return x.amax(0) if x.shape[0] else x.new_zeros(x.shape[1:])


def _judge(name: str, scope: str, row: list[float], tolerance: Tolerance) -> TensorError:
    nonfinite, diff_sq, ref_sq, diff_max, ref_max = row
    if not (math.isfinite(ref_max) and math.isfinite(ref_sq)):
        raise ValueError(f"the reference of {name!r} is not finite in {scope}")
    count = int(nonfinite)
    if count:
        max_rel = rms_rel = math.inf
    elif ref_max <= ZERO_REFERENCE:
        # |x - y| <= 2 * ZERO_REFERENCE is what two such magnitudes can differ by.
        max_rel = rms_rel = 0.0 if diff_max <= 2 * ZERO_REFERENCE else math.inf
    else:
        max_rel = diff_max / ref_max
        rms_rel = math.sqrt(diff_sq / ref_sq) if ref_sq > 0.0 else max_rel
    within = count == 0 and max_rel <= tolerance.max_rel and rms_rel <= tolerance.rms_rel
    return TensorError(name, scope, max_rel, rms_rel, count == 0, count, within)
