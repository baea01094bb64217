"""What the scan and its segments' extra passes should cost on one H200, and how CTAs fill a chip.

A model of what orders schedules, not a simulator: traffic, arithmetic, waves of CTAs over
the SMs and the serial chain of the scan.  Every constant is in :class:`Constants`, with its
source, so that a measured campaign can replace them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from candidates._delta_rule.kernel.config import Split
from candidates._delta_rule.kernel.image import (
    HEAD,
    ImageLayout,
    chunks_of,
    segment_turns,
    segments_of,
    slots,
)

__all__ = ["H200", "Constants", "makespan", "prep_us", "scan_us"]


@dataclass(frozen=True)
class Constants:
    """Numbers of one machine; times in microseconds.

    Parameters
    ----------
    sms : int
        Streaming multiprocessors.
    clock_mhz : float
        SM clock under load.
    copy_bytes_per_us : float
        Rate at which a streaming kernel moves bytes.
    scan_bytes_per_us : float
        Rate at which the scan moves bytes once memory limits it.
    launch_us : float
        Of a kernel that follows another on a stream: start and drain.
    step_us : dict of (bt, rows) to float
        One chunk of the scan in one CTA, all SMs busy with one CTA each.
    cta_us : dict of rows to float
        What a scan CTA costs beside its steps: state in and out, the ring's first fill.
    no_output_step : float
        A step without its two output products and stores, as a fraction of a step.
    carry_us : float
        One segment's affine carry, in the serial chain of the carry kernel.
    overlap : float
        Exponent p of the norm by which PREP's limits (traffic, arithmetic, waiting) combine:
        1 would add them, infinity take the largest.
    prep_latency_us : float
        A PREP CTA from its loads to its stores, without its rounds.
    prep_round_us : float
        One round of PREP between barriers: operands and their products, or a level of the
        inverse.
    mma_per_clock : float
        bf16 multiply-adds per clock and SM through warp-level products.
    exp_per_clock, fma_per_clock : float
        Per clock and SM.
    fused_cta_us : float
        What a fused CTA costs beside its chunks: the guard, the first chunk, the state.
    fixup_us : float
        The fix-up behind a fused kernel that cuts sequences, where no piece needs it.
    """

    sms: int
    clock_mhz: float
    copy_bytes_per_us: float
    scan_bytes_per_us: float
    launch_us: float
    step_us: dict[tuple[int, int], float] = field(hash=False)
    cta_us: dict[int, float] = field(hash=False)
    no_output_step: float
    carry_us: float
    overlap: float
    prep_latency_us: float
    prep_round_us: float
    mma_per_clock: float
    exp_per_clock: float
    fma_per_clock: float
    fused_cta_us: float
    fixup_us: float


H200 = Constants(
    # Data sheet; clock read during the scan measurements below.
    sms=132,
    clock_mhz=1980.0,
    # Measured on one H200, 2026-11-30: a streaming copy reaches 4.25e6 bytes per us; strided
    # reads of packed tokens and 1 KiB pieces are taken to lose a few percent of it.
    copy_bytes_per_us=4.0e6,
    # Measured there: 2048 tokens of 128 heads take 94 to 105 us whatever BT is, for 290 MB of
    # images, 67 MB of outputs and 17 MB of states.
    scan_bytes_per_us=3.7e6,
    # Slope and intercept of the plain scan between 2048 and 8192 tokens, measured there: 54.8
    # and 207 us at BT = 16, 39.9 and 148 at 32, 36.8 and 138 at 64 (64 rows); 79.4 and 300,
    # 64.1 and 237 (128 rows; at BT = 64 the time per step itself, since it spills).
    launch_us=2.0,
    step_us={
        (16, 64): 0.396,
        (32, 64): 0.563,
        (64, 64): 1.054,
        (16, 128): 0.575,
        (32, 128): 0.900,
        (64, 128): 2.575,
    },
    cta_us={64: 2.0, 128: 4.0},
    # Measured there at BT = 32 and 64: 0.385 of 0.578 and 0.768 of 1.076.
    no_output_step=0.69,
    # 128^3 through one warpgroup is 8 products of 128 columns (0.32 us measured there); the
    # rest is the latency of fetching M and C (estimate).
    carry_us=1.0,
    # Estimate: overlap within an SM is good, not perfect.
    overlap=3.0,
    # Estimates: two dependent trips to memory and a cumulative sum; a product, a trip through
    # shared memory and a barrier per round.
    prep_latency_us=3.5,
    prep_round_us=0.3,
    # Data sheet: 4096 flop per clock and SM through wgmma, about 60% of it through mma.sync;
    # 16 special-function and 128 fp32 lanes.
    mma_per_clock=1200.0,
    exp_per_clock=16.0,
    fma_per_clock=128.0,
    # With a launch and the fix-up, what KDA's fused kernel takes beside its steps in the shipped
    # campaign, 2026-11-30: 9.3 us over ten shapes.
    fused_cta_us=6.0,
    # Measured on one H200, 2026-11-30: 1.0 to 1.3 on nine shapes.
    fixup_us=1.2,
)
"""One H200 SXM, driver 580, CUDA 13.0."""


def prep_us(
    ctas: int, resident: int, traffic: float, clocks: float, rounds: float, constants: Constants
) -> float:
    """Time of a PREP whose CTAs move, compute and wait, mostly overlapped.

    Parameters
    ----------
    ctas, resident : int
        Of all, and of an SM at a time.
    traffic : float
        Microseconds that the memory takes.
    clocks : float
        Of one CTA's arithmetic.
    rounds : float
        Phases of a CTA that wait for one another.
    constants : Constants
    """
    work = ctas / constants.sms * clocks / constants.clock_mhz
    latency = constants.prep_latency_us + constants.prep_round_us * rounds
    waiting = max(1.0, ctas / (constants.sms * resident)) * latency
    p = constants.overlap
    combined: float = (traffic**p + work**p + waiting**p) ** (1 / p)
    return constants.launch_us + combined


def makespan(durations: Iterable[float], sms: int) -> float:
    """When the last of the CTAs ends that start in this order, one to an SM."""
    busy: list[float] = []
    for duration in durations:
        start = heapq.heappop(busy) if len(busy) == sms else 0.0
        heapq.heappush(busy, start + duration)
    return max(busy, default=0.0)


def scan_us(
    view: Split, heads: int, lengths: tuple[int, ...], constants: Constants
) -> dict[str, float]:
    """Times of the scan's kernels: one pass, or pass 1, carry and replay."""
    bt, unroll, image = view.bt, view.unroll, ImageLayout(view.bt)
    step, fixed = constants.step_us[bt, view.rows], constants.cta_us[view.rows]
    composed: list[float] = []  # pass 1: every segment but a sequence's last
    replay: list[float] = []
    deepest, composed_chunks = 1, 0
    for length in lengths:
        chunks = chunks_of(length, bt, unroll)
        parts = segments_of(chunks, view.segments, unroll)
        deepest = max(deepest, parts)
        for part in range(parts):
            first, stop = segment_turns(chunks, part, parts, unroll)
            ctas = heads * HEAD // view.rows
            replay += [fixed + (stop - first) * step] * ctas
            if part < parts - 1:
                # The first starts from the true state; [C | M] of another has twice the rows.
                cost = fixed + (stop - first) * step * constants.no_output_step
                composed += [cost] * (ctas if part == 0 else 2 * ctas)
                composed_chunks += stop - first
    state_bytes = 4 * HEAD * HEAD * heads
    moved = (
        heads * slots(sum(lengths), len(lengths), bt, unroll) * image.image
        + 2 * HEAD * heads * sum(lengths)
        + 2 * state_bytes * len(lengths)
    )
    times = {}
    # A segmented launch has all its kernels, whatever the lengths turn out to be.
    if view.segments > 1:
        loaded = heads * composed_chunks * image.image
        times["kda_pass1"] = constants.launch_us + max(
            makespan(composed, constants.sms), loaded / constants.scan_bytes_per_us
        )
    if view.segments > 2:
        times["kda_carry"] = constants.launch_us + max(deepest - 2, 0) * constants.carry_us
    times["kda_scan"] = constants.launch_us + max(
        makespan(replay, constants.sms), moved / constants.scan_bytes_per_us
    )
    return times
