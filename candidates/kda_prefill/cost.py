"""What a schedule should cost on one H200: PREP and the scan behind it, or the fused kernel.

A model of what orders schedules, not a simulator: traffic, arithmetic and waves of CTAs over the
SMs; the scan's is in :mod:`candidates._delta_rule.cost`.  It ranks candidates where there is no
GPU, and tells a search where to look first where there is one.  Every constant is in
:class:`Constants`, with its source, so that a measured campaign can replace them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from candidates._base import Schedule
from candidates._delta_rule import cost as shared
from candidates._delta_rule.cost import makespan, prep_us, scan_us
from candidates._delta_rule.kernel.image import (
    HEAD,
    slots,
)
from candidates._delta_rule.kernel.tiles import TILE
from candidates._delta_rule.space import SHARED_MEMORY_BYTES
from candidates.kda_prefill.kernel.fused_plan import BT, SECOND, SHORT, SHORTER, cuts_of, runs_of
from candidates.kda_prefill.kernel.prep_plan import Plan
from candidates.kda_prefill.space import (
    FusedSchedule,
    KdaSchedule,
    is_fused,
)

if TYPE_CHECKING:
    from operations import Workload

__all__ = [
    "H200",
    "Constants",
    "kernel_us",
    "modelled_us",
    "run_chunks",
]

_SM_THREADS = 2048
"""Threads that may be resident on an SM."""


@dataclass(frozen=True)
class Constants(shared.Constants):
    """Numbers of one machine and of KDA's own kernels; times in microseconds.

    Parameters
    ----------
    prep_base_instructions : float
        fp32 instructions per element of ``[T, H, 128]`` whatever the anchor is (gate sums,
        Qhat, Khat, Kbar, W, U, rounding, addresses).
    prep_operand_instructions : float
        The same per element of an anchored copy of q or k.
    fused_step_us : dict of (frame, builders) to float
        One chunk of the fused kernel in one CTA.
    others
        Of :class:`candidates._delta_rule.cost.Constants`.
    """

    prep_base_instructions: float
    prep_operand_instructions: float
    fused_step_us: dict[tuple[str, int], float] = field(hash=False)


H200 = Constants(
    **vars(shared.H200),
    # Instructions counted from the formulas.
    prep_base_instructions=30.0,
    prep_operand_instructions=6.0,
    # Slopes of times over the chunks of the longest run, in the shipped campaign: production gates,
    # ten shapes, one H200, 2026-11-30.
    fused_step_us={("middle", 3): 1.28, ("middle", 2): 1.45, ("boundary", 2): 1.57},
)
"""One H200 SXM, driver 580, CUDA 13.0."""


def modelled_us(schedule: Schedule, workload: Workload, constants: Constants = H200) -> float:
    """Estimated GPU time of a call, in microseconds: the sum over its kernels.

    Parameters
    ----------
    schedule : Schedule
    workload : Workload
        Of KDA prefill: with ``heads`` and ``lengths``.
    constants : Constants
    """
    return sum(kernel_us(schedule, workload, constants).values())


def kernel_us(
    schedule: Schedule, workload: Workload, constants: Constants = H200
) -> dict[str, float]:
    """Estimated time of each kernel of a call, by its name, in launch order."""
    heads: int = workload.heads  # type: ignore[attr-defined]
    lengths: tuple[int, ...] = workload.lengths  # type: ignore[attr-defined]
    if is_fused(schedule):
        fused = FusedSchedule.of(schedule)
        return {
            "kda_fused": _fused(fused, heads, lengths, constants),
            "kda_fixup": constants.fixup_us,
        }
    view = KdaSchedule.of(schedule)
    times = {"kda_prep": _prep(view, heads, lengths, constants)}
    times.update(scan_us(view, heads, lengths, constants))
    return times


# ---------------------------------------------------------------------------------- PREP


def _exponentials(view: KdaSchedule) -> float:
    """Per element of ``[T, H, 128]``: ``e^b``, ``e^(b_end - b)``, and what the anchors need.

    From the start the row factor is ``e^b`` itself and from the end the column factor is
    ``e^(b_end - b)`` itself, where the window is the whole chunk.  At each level of halving
    a token is either row or column.  Between blocks each row block needs its own factors of
    all columns before it.
    """
    size, blocks = view.window, view.bt // view.window
    shared = view.rule in ("start", "end") and blocks == 1
    within = math.log2(size) if view.rule == "halving" else 2 - shared
    between = (blocks - 1) / blocks + (blocks - 1) / 2
    return 2 + within + between


def _prep(view: KdaSchedule, heads: int, lengths: tuple[int, ...], constants: Constants) -> float:
    """Traffic, arithmetic and waves of CTAs that each wait for memory, mostly overlapped."""
    plan = Plan(view.bt, view.anchor, view.block, view.diagonal)
    tokens, elements = sum(lengths), view.bt * HEAD
    ctas = heads * slots(tokens, len(lengths), view.bt, view.unroll)
    read = tokens * heads * HEAD * (3 * 2 + 4)  # q, k, v in bf16, g in fp32
    traffic = (read + ctas * plan.layout.image) / constants.copy_bytes_per_us

    # What a chunk always costs, then each anchored copy of 16 rows and each 16 x 8 score tile;
    # W and U are two more products of BT x BT x 128.
    operands = sum(step.blocks for step in plan.steps) * TILE * HEAD
    tiles = sum(len(step.jobs) for step in plan.steps)
    multiply_adds = tiles * TILE * 8 * HEAD + 2 * HEAD * view.bt**2
    instructions = (
        elements * constants.prep_base_instructions + operands * constants.prep_operand_instructions
    )
    clocks = (
        elements * _exponentials(view) / constants.exp_per_clock
        + instructions / constants.fma_per_clock
        + multiply_adds / constants.mma_per_clock
    )
    rounds = len(plan.steps) + math.log2(view.bt)  # scores, then levels of the inverse
    resident = max(1, min(SHARED_MEMORY_BYTES // plan.smem_bytes, _SM_THREADS // plan.threads))
    return prep_us(ctas, resident, traffic, clocks, rounds, constants)


# --------------------------------------------------------------------------------- FUSED


def run_chunks(
    view: FusedSchedule,
    heads: int,
    lengths: tuple[int, ...],
    sms: int,
    how: int = SHORTER,
    early: int = SHORT,
) -> list[list[int]]:
    """Chunks that each run of a CTA scans, piece by piece, those of its early start among them.

    Parameters
    ----------
    view : FusedSchedule
    heads : int
    lengths : tuple of int
    sms : int
        Of the machine.
    how : int
        How sequences may be cut; see :mod:`.kernel.fused_plan`.
    early : int
        Chunks that a run begins early.

    Returns
    -------
    list of list of int
        Runs without a chunk are left out.
    """
    counts = [-(-length // BT) for length in lengths]
    cuts = cuts_of(lengths, heads, runs_of(view.waves, sms), how)
    found = []
    for (chain, begin), (last, stop) in itertools.pairwise(cuts):
        ends = [counts[i % len(counts)] for i in range(chain, last)] + [stop] * (stop > 0)
        pieces = [end - (i == 0) * begin for i, end in enumerate(ends)]
        if any(pieces):
            pieces[0] += min(early, begin)
            found.append(pieces)
    return found


def _fused(
    view: FusedSchedule, heads: int, lengths: tuple[int, ...], constants: Constants
) -> float:
    """Runs over the SMs, one CTA to each; at gates under which every run may start early.

    A piece behind the first of a run is taken for SECOND chunks more.
    """
    step = constants.fused_step_us[view.frame, view.builders]
    durations = [
        constants.fused_cta_us + (sum(run) + (len(run) - 1) * SECOND) * step
        for run in run_chunks(view, heads, lengths, constants.sms)
    ]
    moved = heads * (sum(lengths) * HEAD * 12 + 2 * 4 * HEAD * HEAD * len(lengths))
    limit = moved / constants.copy_bytes_per_us
    return constants.launch_us + max(makespan(durations, constants.sms), limit)
