"""The schedule space of KDA prefill as data: knobs, budgets, gate bounds, what is offered.

Two forms share it: ``split``, where PREP leaves images that the scan reads, and ``fused``, where
the CTA that scans builds them itself.  :class:`KdaSchedule` and :class:`FusedSchedule` are their
typed views.

Import-light on purpose (neither torch nor the DSL): listing a space, counting it and
judging a schedule by its budgets must cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from candidates._base import Parameter, Schedule, Value
from candidates._delta_rule.kernel.image import unroll_of
from candidates._delta_rule.space import SHARED_MEMORY_BYTES, scan_problems
from candidates.kda_prefill.kernel.fused_plan import FusedPlan
from candidates.kda_prefill.kernel.prep_plan import Plan

__all__ = [
    "CONTRACT_GATE",
    "EXPONENT_BUDGET",
    "PARAMETERS",
    "PRESETS",
    "FusedSchedule",
    "KdaSchedule",
    "bears_any_gate",
    "exponent_steps",
    "gate_bound",
    "is_fused",
    "offered",
    "own_bound",
    "problems",
]

_SPLIT = {"form": ("split",)}
_FUSED = {"form": ("fused",)}

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "form",
        ("split", "fused"),
        "whether a kernel of its own prepares the chunks, or the CTA that scans them",
    ),
    Parameter(
        "bt",
        (16, 32, 64),
        "tokens per chunk: more of them make fewer serial steps and more work in each",
        _SPLIT,
    ),
    Parameter(
        "anchor",
        ("start", "mid", "end", "halving", "pairs"),
        "which cumulative gate splits exp(b_i - b_j) into a row and a column factor",
        _SPLIT,
    ),
    Parameter(
        "block",
        (16, 32),
        "tokens per sub-block: every pair of different blocks has its own anchor",
        {"anchor": ("pairs",)},
    ),
    Parameter(
        "diagonal",
        ("start", "mid", "end", "halving"),
        "anchor inside the diagonal sub-blocks",
        {"anchor": ("pairs",)},
    ),
    Parameter(
        "segments",
        (1, 2, 4, 8),
        "pieces of a sequence that are scanned at the same time and tied by an affine carry",
        _SPLIT,
    ),
    Parameter("rows", (64, 128), "rows of the transposed state (value channels) per CTA", _SPLIT),
    Parameter(
        "frame",
        ("middle", "boundary"),
        "token at which the state is held between chunks: the middle one spares two operands, "
        "the boundary keeps the decay off the dependent path",
        _FUSED,
    ),
    Parameter("builders", (2, 3), "warpgroups that take turns at building chunks", _FUSED),
    Parameter(
        "waves",
        (1, 2, 4),
        "runs that all chunks are cut into, for each SM: more balance better, and start early "
        "more often",
        _FUSED,
    ),
)

CONTRACT_GATE = -5.0
"""Per-token log gate that every candidate must bear: models ship ``lower_bound = -5``."""

EXPONENT_BUDGET = 80.0
"""Largest exponent a factor may have and the schedule still be right.

Overflow comes at ``e**88.7``, but beside a factor ``e**x`` stands one of ``e**-x``, which
multiplies an element of a key or query and is flushed to 0 below ``e**-87.3``.  At 80 only
elements under 1/1500 are lost; at 83 the emulated error of ``o`` on constant gates leaves the
tolerance (2.9e-2), and at 86.4 a chunk's last row is lost as a whole (0.94).
"""


@dataclass(frozen=True)
class KdaSchedule:
    """A schedule with typed fields.

    Parameters
    ----------
    bt : int
        Tokens per chunk.
    anchor : str
        ``"start"``, ``"mid"``, ``"end"``, ``"halving"`` or ``"pairs"``.
    block : int or None
        Tokens per sub-block; only with ``pairs``.
    diagonal : str or None
        Anchor of the diagonal sub-blocks; only with ``pairs``.
    segments : int
        Pieces per sequence, at most.
    rows : int
        Value rows per CTA of the scan.
    """

    bt: int
    anchor: str
    block: int | None
    diagonal: str | None
    segments: int
    rows: int

    @classmethod
    def of(cls, schedule: Schedule) -> KdaSchedule:
        """View a :class:`candidates.Schedule` of this family."""
        values = schedule.as_dict()
        block, diagonal = values.get("block"), values.get("diagonal")
        return cls(
            bt=int(values["bt"]),
            anchor=str(values["anchor"]),
            block=None if block is None else int(block),
            diagonal=None if diagonal is None else str(diagonal),
            segments=int(values["segments"]),
            rows=int(values["rows"]),
        )

    def schedule(self) -> Schedule:
        """The same point as a :class:`candidates.Schedule`."""
        values: dict[str, Value | None] = {
            "form": "split",
            "bt": self.bt,
            "anchor": self.anchor,
            "block": self.block,
            "diagonal": self.diagonal,
            "segments": self.segments,
            "rows": self.rows,
        }
        return Schedule.of(PARAMETERS, {k: v for k, v in values.items() if v is not None})

    @property
    def window(self) -> int:
        """Tokens that share one anchor on the diagonal: the sub-block, or the whole chunk."""
        return self.bt if self.block is None else self.block

    @property
    def rule(self) -> str:
        """Anchor rule on the diagonal: ``start``, ``mid``, ``end`` or ``halving``."""
        return self.anchor if self.diagonal is None else self.diagonal

    @property
    def unroll(self) -> int:
        """Chunks per turn of the scan's loop."""
        return unroll_of(self.bt, self.rows)


@dataclass(frozen=True)
class FusedSchedule:
    """A schedule of the fused kernel with typed fields.

    Parameters
    ----------
    frame : str
        ``"middle"`` or ``"boundary"``; see :class:`.kernel.fused_plan.FusedPlan`.
    builders : int
        Warpgroups that build chunks.
    waves : int
        Runs that the chunks of all sequences and heads are cut into, for each SM.
    """

    frame: str
    builders: int
    waves: int

    @classmethod
    def of(cls, schedule: Schedule) -> FusedSchedule:
        """View a :class:`candidates.Schedule` of this family."""
        return cls(str(schedule["frame"]), int(schedule["builders"]), int(schedule["waves"]))

    def schedule(self) -> Schedule:
        """The same point as a :class:`candidates.Schedule`."""
        values: dict[str, Value] = {
            "form": "fused",
            "frame": self.frame,
            "builders": self.builders,
            "waves": self.waves,
        }
        return Schedule.of(PARAMETERS, values)


def is_fused(schedule: Schedule) -> bool:
    """Whether the schedule is one of the fused kernel."""
    return schedule["form"] == "fused"


# --------------------------------------------------------------------------- gate bounds


def exponent_steps(view: KdaSchedule) -> int:
    """Gates summed in the largest exponent that an anchored factor can have.

    With ``|g| <= L`` no exponent exceeds ``exponent_steps * L``.  From the start of a window
    of n tokens the last column is n gates away; from its end the first row is n - 1; from its
    middle the last column is n / 2 (the first row one less).  Halving, and pairs of different
    blocks anchored between them, have no positive exponent at all.  Steep chunks, which some
    schedules take another way (:func:`bears_any_gate`), are left out.
    """
    n = view.window
    return {"start": n, "mid": n // 2, "end": n - 1, "halving": 0}[view.rule]


def bears_any_gate(view: KdaSchedule) -> bool:
    """Whether no gate leads to an exponent beyond the budget.

    Halving has no positive exponent.  Behind a window of up to 32 tokens that is anchored in its
    middle stands another way, which PREP takes with chunks that are steeper.
    """
    return view.rule == "halving" or (view.rule == "mid" and view.window <= 32)


def own_bound(view: KdaSchedule) -> float | None:
    """Most negative gate whose exponents fit the budget; None where every gate's do."""
    return None if bears_any_gate(view) else -EXPONENT_BUDGET / exponent_steps(view)


def gate_bound(schedule: Schedule) -> float | None:
    """Gate bound that the schedule declares, as a per-token log gate; None means any.

    It is the schedule's own bound, but never milder than :data:`CONTRACT_GATE`.  A weak
    schedule would otherwise escape its gate by declaring the production regimes out of its
    contract: 64 tokens anchored in the middle are right down to -2.5 only, declare -5 like
    everybody, and are rejected by what they return there.

    The fused kernel bears any gate: chunks that are too steep for its frame go another way.
    """
    if is_fused(schedule):
        return None
    own = own_bound(KdaSchedule.of(schedule))
    return None if own is None else min(own, CONTRACT_GATE)


def bears_contract(view: KdaSchedule) -> bool:
    """Whether the exponents fit at :data:`CONTRACT_GATE`."""
    own = own_bound(view)
    return own is None or own <= CONTRACT_GATE


# ------------------------------------------------------------------------------- budgets


def problems(schedule: Schedule) -> tuple[str, ...]:
    """Budgets that the schedule breaks, each in one line; empty if it can be built."""
    if is_fused(schedule):
        return _fused_problems(FusedSchedule.of(schedule))
    view = KdaSchedule.of(schedule)
    found = []
    if view.block is not None and view.block >= view.bt:
        found.append(f"block={view.block} leaves no pair of blocks in a chunk of bt={view.bt}")
    else:
        prep = Plan(view.bt, view.anchor, view.block, view.diagonal).smem_bytes
        if prep > SHARED_MEMORY_BYTES:
            found.append(
                f"bt={view.bt} anchor={view.anchor}: operands and image take {prep} bytes of "
                f"shared memory in PREP, {SHARED_MEMORY_BYTES} are there"
            )
    return (*found, *scan_problems(view))


def _fused_problems(view: FusedSchedule) -> tuple[str, ...]:
    try:
        plan = FusedPlan(view.frame, view.builders)
    except ValueError as error:
        return (f"{error}",)
    if plan.smem_bytes > SHARED_MEMORY_BYTES:
        return (
            f"frame={view.frame} builders={view.builders}: {plan.smem_bytes} bytes of shared "
            f"memory, {SHARED_MEMORY_BYTES} are there",
        )
    return ()


# ------------------------------------------------------------------------------- presets

_INSTRUCTIVE = (
    KdaSchedule(32, "start", None, None, 1, 64),
    KdaSchedule(32, "end", None, None, 1, 64),
    KdaSchedule(64, "start", None, None, 1, 64),
    KdaSchedule(64, "mid", None, None, 1, 64),
)
"""Schedules that look attractive and overflow at -5: offered so that each campaign shows why."""


def _whole_space() -> Iterator[KdaSchedule]:
    """Every point of the space, buildable or not, in parameter order."""
    choices = {p.name: p.choices for p in PARAMETERS}
    for bt in choices["bt"]:
        for anchor in choices["anchor"]:
            inner: list[tuple[int | None, str | None]] = [(None, None)]
            if anchor == "pairs":
                inner = [(int(b), str(d)) for b in choices["block"] for d in choices["diagonal"]]
            for block, diagonal in inner:
                for segments in choices["segments"]:
                    for rows in choices["rows"]:
                        yield KdaSchedule(
                            int(bt), str(anchor), block, diagonal, int(segments), int(rows)
                        )


def _full() -> tuple[Schedule, ...]:
    """The fused kernel, whatever of the split form can be built and bears gates of -5, then the
    instructive failures."""
    legal = (v.schedule() for v in _whole_space() if bears_contract(v))
    split = (s for s in legal if not problems(s))
    return (*_fused(), *split, *(v.schedule() for v in _INSTRUCTIVE))


def _quickstart() -> tuple[Schedule, ...]:
    """One of each kind: ten that hold, and the two failures that everybody tries first."""
    points = (
        KdaSchedule(16, "start", None, None, 1, 64),
        KdaSchedule(16, "mid", None, None, 1, 64),
        KdaSchedule(16, "halving", None, None, 1, 64),
        KdaSchedule(32, "mid", None, None, 1, 64),
        KdaSchedule(32, "mid", None, None, 1, 128),
        KdaSchedule(32, "mid", None, None, 4, 64),
        KdaSchedule(32, "halving", None, None, 1, 64),
        KdaSchedule(32, "pairs", 16, "mid", 1, 64),
        KdaSchedule(64, "pairs", 16, "halving", 1, 64),
        KdaSchedule(64, "pairs", 32, "mid", 4, 64),
        KdaSchedule(32, "start", None, None, 1, 64),
        KdaSchedule(64, "mid", None, None, 1, 64),
    )
    return tuple(point.schedule() for point in points)


def _fused() -> tuple[Schedule, ...]:
    """The fused kernel alone, what should be fastest first."""
    kinds = (("middle", 3), ("boundary", 2), ("middle", 2))
    choices = {p.name: p.choices for p in PARAMETERS}
    return tuple(
        FusedSchedule(frame, builders, int(waves)).schedule()
        for waves in choices["waves"]
        for frame, builders in kinds
    )


def _survey() -> tuple[Schedule, ...]:
    """Of all kinds, for a few minutes of a GPU: anchors with one pass and with four segments,
    the other knobs beside the plain schedule, two failures, the fused kernel."""
    kinds: tuple[tuple[int, str, int | None, str | None], ...] = (
        (16, "start", None, None),
        (16, "mid", None, None),
        (16, "halving", None, None),
        (32, "mid", None, None),
        (32, "halving", None, None),
        (32, "pairs", 16, "mid"),
        (64, "pairs", 16, "mid"),
        (64, "pairs", 32, "mid"),
    )
    points = (
        *(KdaSchedule(*kind, segments, 64) for kind in kinds for segments in (1, 4)),
        *(KdaSchedule(32, "mid", None, None, segments, 64) for segments in (2, 8)),
        *(KdaSchedule(bt, "mid", None, None, 4, 128) for bt in (16, 32)),
        KdaSchedule(32, "mid", None, None, 1, 128),
        KdaSchedule(32, "start", None, None, 1, 64),
        KdaSchedule(64, "mid", None, None, 1, 64),
    )
    return (*(point.schedule() for point in points), *_fused()[:4])


PRESETS = {
    "kda_prefill": _full,
    "quickstart": _quickstart,
    "survey": _survey,
    "fused": _fused,
}
"""Offered subset by name: a function of no arguments to schedules in a stable order."""


def offered(preset: str) -> tuple[Schedule, ...]:
    """Schedules of a preset, at most 128, always in the same order.

    Raises
    ------
    ValueError
        If there is no such preset; the message names those there are.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; choices: {', '.join(PRESETS)}")
    return PRESETS[preset]()
