"""What a schedule should cost on one H200: PREP and the scan behind it, or the fused kernel.

The scan's model, measured constants included, is that of :mod:`candidates._delta_rule.cost`.
PREP's part is an estimate from formulas and counted instructions.  The fused kernel's has constants
that were fitted to a measured campaign, that of docs/gdn_results.md.
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


_STEP_US = {(32, 128, 3): 1.4, (32, 128, 2): 1.45, (64, 128, 1): 3.6, (64, 64, 2): 2.3}
"""What the fused kernel takes for a chunk, all SMs busy, by (tokens of a chunk, value rows,
builders).

These and the three constants below are a fit to what the ten fused schedules of the shipped
campaign took on ten shapes (``gpu``, production gates, one H200, 2026-11-30; least squares of
logarithms), rounded; two builders are put 0.05 behind three, as 16384/16/32/8 has them, where
nothing is cut and an SM takes 128 chunks of 32 tokens in 198 and 202 us."""

_CTA_US, _STATE_US = 4.0, 4.0
"""What a CTA costs beside its chunks: itself, and each sequence's state of 128 value rows."""

_CUT_US = 15.0
"""What a call that cuts sequences takes beside its chunks: the guard in front of them, and the
fix-up, which composes exact segments and corrects their outputs.  Which of the two was not told
apart: it stands with the fix-up."""

_CUT_STEPS = 2
"""Chunks that a CTA scans for one of its piece, where pieces are few: heads that remember decide.
Where its gates forget too little, a pair of CTAs takes two pieces as one job, by halves of the
value rows or as values and map; and an early start is up to a piece long."""


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
    """Pieces, sequences or pairs of them over the SMs, one CTA to each.

    As though every head remembered.  At production gates some forget, so that many waves of short
    pieces are promised too little: 456 us for 316 with four of them on 16384/16/32/8.
    """
    tokens, sequences = sum(lengths), len(lengths)
    step = _STEP_US[view.bt, view.rows, view.builders]
    state = _STATE_US * view.rows / HEAD
    pieces = pieces_of(
        view.bt, view.rows, view.waves, tokens, sequences, value_heads, constants.sms
    )
    durations: list[float] = []

    def scanned(ctas: int, *of: float) -> None:
        """CTAs that scan so many tokens of one sequence, or of each of two."""
        chunks = sum(math.ceil(x / view.bt) for x in of)
        durations.extend([_CTA_US + state * len(of) + chunks * step] * ctas)

    if pieces > sequences:
        span, row = span_of(pieces, tokens, sequences), 0
        for length in lengths:
            parts = max(min(parts_of(row, row + length, span), -(-length // PIECE) // 2), 1)
            row += length
            scanned(parts * value_heads, length * (_CUT_STEPS if parts > 1 else 1) / parts)
    else:
        each = 2 if pieces < sequences else 1
        for n in range(0, sequences, each):
            scanned(value_heads * HEAD // view.rows, *lengths[n : n + each])
    moved = tokens * (4 * (heads + value_heads) * HEAD + 8 * value_heads)
    moved += 2 * sequences * value_heads * HEAD * HEAD * 4
    busy = max(makespan(durations, constants.sms), moved / constants.copy_bytes_per_us)
    out = {"gdn_fused": constants.launch_us + busy}
    if pieces > sequences:
        out["gdn_fixup"] = _CUT_US
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
