"""What a schedule should cost on one H200: PREP and the scan behind it, or the fused kernel.

The scan's model, measured constants included, is that of :mod:`candidates._delta_rule.cost`.
PREP's part and the fused kernel's are estimates from formulas and counted instructions.  On one
H200 the fused kernel took two to three times its own (docs/gdn.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from candidates._base import Schedule
from candidates._delta_rule.cost import H200, Constants, makespan, prep_us, scan_us
from candidates._delta_rule.kernel.image import HEAD, slots
from candidates.gdn_prefill.kernel.fused_plan import PIECE, parts_of, pieces_of, span_of
from candidates.gdn_prefill.kernel.prep_plan import Plan
from candidates.gdn_prefill.space import FusedSchedule, GdnSchedule, is_fused

if TYPE_CHECKING:
    from operations import Workload

__all__ = ["kernel_us", "modelled_us"]

_PREP_INSTRUCTIONS = 14.0
"""fp32 instructions per element of ``[T, HV, 128]``: q, k and v fetched in pieces of 16 bytes, two
rows unpacked, three products and three roundings, W and U.  Counted, not measured."""

_SCORE_INSTRUCTIONS = 8.0
"""The same per element of a 16 x 8 tile of scores: its exponent, factors, selection, store."""


_SCAN_STEP_US, _BUILD_US = {(64, 64): 1.2, (64, 128): 1.9, (32, 128): 1.0}, {64: 4.6, 32: 2.1}
"""What the fused kernel takes for a chunk: its scan, by tokens and value rows, and a builder, by
tokens; builders take turns, so that a step is the longer of the two.

Measured on an H200 on 2026-11-30: 4.6 us a chunk of 64 tokens with 128 rows, where one builder is
what binds, and 2.7 with 64 rows and two of them.  The rest is estimated: KDA's steps for the scan,
and for 32 tokens a builder's instructions on its longest path."""

_FUSED_WARM = 128
"""Tokens of early start at gates of models, on the average of heads; an assumption."""


def modelled_us(schedule: Schedule, workload: Workload, constants: Constants = H200) -> float:
    """Estimated GPU time of a call, in microseconds: the sum over its kernels.

    Parameters
    ----------
    schedule : Schedule
    workload : Workload
        Of GDN prefill: with ``heads``, ``value_heads`` and ``lengths``.
    constants : Constants
    """
    return sum(kernel_us(schedule, workload, constants).values())


def kernel_us(
    schedule: Schedule, workload: Workload, constants: Constants = H200
) -> dict[str, float]:
    """Estimated time of each kernel of a call, by its name, in launch order."""
    heads: int = workload.heads  # type: ignore[attr-defined]
    value_heads: int = workload.value_heads  # type: ignore[attr-defined]
    lengths: tuple[int, ...] = workload.lengths  # type: ignore[attr-defined]
    if is_fused(schedule):
        return _fused(FusedSchedule.of(schedule), heads, value_heads, lengths, constants)
    view = GdnSchedule.of(schedule)
    times = {"gdn_prep": _prep(view, heads, value_heads, lengths, constants)}
    times.update(scan_us(view, value_heads, lengths, constants))
    return times


def _fused(
    view: FusedSchedule,
    heads: int,
    value_heads: int,
    lengths: tuple[int, ...],
    constants: Constants,
) -> dict[str, float]:
    """Pieces over the SMs, one CTA to each; at gates under which every piece may start early."""
    tokens, sequences = sum(lengths), len(lengths)
    step = max(_SCAN_STEP_US[view.bt, view.rows], _BUILD_US[view.bt] / view.builders)
    pieces = pieces_of(
        view.bt, view.rows, view.waves, tokens, sequences, value_heads, constants.sms
    )
    durations: list[float] = []
    span, row = span_of(max(pieces, sequences), tokens, sequences), 0
    for length in lengths:
        parts = max(min(parts_of(row, row + length, span), -(-length // PIECE) // 2), 1)
        row += length
        for part in range(parts):
            tokens_here = length / parts + (_FUSED_WARM if part else 0)
            duration = constants.fused_cta_us + math.ceil(tokens_here / view.bt) * step
            durations += [duration] * (value_heads * HEAD // view.rows)
    moved = tokens * (4 * (heads + value_heads) * HEAD + 8 * value_heads)
    moved += 2 * sequences * value_heads * HEAD * HEAD * 4
    busy = max(makespan(durations, constants.sms), moved / constants.copy_bytes_per_us)
    out = {"gdn_fused": constants.launch_us + busy}
    if pieces > sequences:
        out["gdn_fixup"] = constants.fixup_us
    return out


def _prep(
    view: GdnSchedule, heads: int, value_heads: int, lengths: tuple[int, ...], constants: Constants
) -> float:
    """Traffic, arithmetic and waves of CTAs that each wait for memory, mostly overlapped."""
    plan, bt = Plan(view.bt), view.bt
    tokens = sum(lengths)
    ctas = value_heads * slots(tokens, len(lengths), bt, view.unroll)
    # q and k of a head come from L2 for all of its value heads but the first.
    read = tokens * HEAD * 2 * (2 * heads + value_heads) + 8 * tokens * value_heads
    traffic = (read + ctas * plan.layout.image) / constants.copy_bytes_per_us

    width = 16 if plan.wide else 8
    scores = len(plan.jobs) * 16 * width
    multiply_adds = scores * HEAD + 2 * HEAD * bt**2
    instructions = bt * HEAD * _PREP_INSTRUCTIONS + scores * _SCORE_INSTRUCTIONS
    clocks = (
        (scores + 2 * bt) / constants.exp_per_clock
        + instructions / constants.fma_per_clock
        + multiply_adds / constants.mma_per_clock
    )
    rounds = len(plan.rounds) + 1 + math.log2(bt)  # scores, scaled rows, levels of the inverse
    return prep_us(ctas, plan.blocks_per_sm, traffic, clocks, rounds, constants)
