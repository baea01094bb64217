"""The schedule space of GDN prefill as data: knobs, budgets, what is offered.

With one gate a token and head nothing needs an anchor: every exponent is at most 0, at every
chunk length and for every gate.  So what is left of KDA's spaces is how the work is cut.

Import-light on purpose (neither torch nor the DSL): listing a space, counting it and
judging a schedule by its budgets must cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from candidates._base import Parameter, Schedule, Value
from candidates._delta_rule.kernel.image import HEAD, unroll_of
from candidates._delta_rule.space import SHARED_MEMORY_BYTES, scan_problems
from candidates.gdn_prefill.kernel.fused_plan import BUILDERS, FusedPlan
from candidates.gdn_prefill.kernel.prep_plan import Plan

__all__ = [
    "PARAMETERS",
    "PRESETS",
    "FusedSchedule",
    "GdnSchedule",
    "gate_bound",
    "is_fused",
    "offered",
    "problems",
]

_SPLIT: dict[str, tuple[Value, ...]] = {"form": ("split",)}

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
    ),
    Parameter(
        "segments",
        (1, 2, 4, 8),
        "pieces of a sequence that are scanned at the same time and tied by an affine carry",
        _SPLIT,
    ),
    Parameter("rows", (64, 128), "rows of the transposed state (value channels) per CTA"),
    Parameter(
        "waves",
        (1, 2, 4),
        "pieces of all sequences, in CTAs for each SM: more balance better and warm up more often",
        {"form": ("fused",), "rows": (128,)},
    ),
    Parameter(
        "builders",
        (2, 3),
        "warpgroups that take turns at making chunks: more hide more latency, and leave the scan "
        "fewer registers",
        {"form": ("fused",), "bt": (32,)},
    ),
)


@dataclass(frozen=True)
class GdnSchedule:
    """A schedule of the split form with typed fields.

    Parameters
    ----------
    bt : int
        Tokens per chunk.
    segments : int
        Pieces per sequence, at most.
    rows : int
        Value rows per CTA of the scan.
    """

    bt: int
    segments: int = 1
    rows: int = 64

    @classmethod
    def of(cls, schedule: Schedule) -> GdnSchedule:
        """View a :class:`candidates.Schedule` of this family."""
        return cls(*(int(schedule[name]) for name in ("bt", "segments", "rows")))

    def schedule(self) -> Schedule:
        """The same point as a :class:`candidates.Schedule`."""
        values = {"bt": self.bt, "segments": self.segments, "rows": self.rows}
        return Schedule.of(PARAMETERS, {"form": "split", **values})

    @property
    def unroll(self) -> int:
        """Chunks per turn of the scan's loop."""
        return unroll_of(self.bt, self.rows)


@dataclass(frozen=True)
class FusedSchedule:
    """A schedule of the fused kernel with typed fields.

    Parameters
    ----------
    rows : int
        Value rows per CTA.
    waves : int
        CTAs per SM that the sequences are cut into pieces for; with 64 rows they are not cut.
    bt : int
        Tokens per chunk.
    builders : int
        Building warpgroups; as many as there can be if 0.
    """

    rows: int
    waves: int = 1
    bt: int = 64
    builders: int = 0

    def __post_init__(self) -> None:
        if self.builders == 0:
            object.__setattr__(self, "builders", BUILDERS.get((self.bt, self.rows), 1))

    @classmethod
    def of(cls, schedule: Schedule) -> FusedSchedule:
        """View a :class:`candidates.Schedule` of this family."""
        values = schedule.as_dict()
        rows, waves, bt, builders = (
            int(values.get(name, other))
            for name, other in (("rows", 0), ("waves", 1), ("bt", 0), ("builders", 0))
        )
        return cls(rows, waves, bt, builders)

    def schedule(self) -> Schedule:
        """The same point as a :class:`candidates.Schedule`."""
        values: dict[str, Value] = {"form": "fused", "bt": self.bt, "rows": self.rows}
        if self.rows == HEAD:
            values["waves"] = self.waves
        if self.bt == 32:
            values["builders"] = self.builders
        return Schedule.of(PARAMETERS, values)


def is_fused(schedule: Schedule) -> bool:
    """Whether one kernel makes the chunks and scans them."""
    return schedule["form"] == "fused"


def gate_bound(schedule: Schedule) -> float | None:
    """None: a schedule of this family is right for every gate, minus infinity included."""
    return None


def problems(schedule: Schedule) -> tuple[str, ...]:
    """Budgets that the schedule breaks, each in one line; empty if it can be built."""
    if is_fused(schedule):
        fused = FusedSchedule.of(schedule)
        try:
            size = FusedPlan(fused.bt, fused.rows, fused.builders).smem_bytes
        except ValueError as error:
            return (str(error),)
        if size <= SHARED_MEMORY_BYTES:
            return ()
        return (f"{size} bytes of shared memory, {SHARED_MEMORY_BYTES} are there",)
    view = GdnSchedule.of(schedule)
    found = []
    prep = Plan(view.bt).smem_bytes
    if prep > SHARED_MEMORY_BYTES:
        found.append(
            f"bt={view.bt}: operands and image take {prep} bytes of shared memory in PREP, "
            f"{SHARED_MEMORY_BYTES} are there"
        )
    return (*found, *scan_problems(view))


# ------------------------------------------------------------------------------- presets


def _whole_space() -> Iterator[GdnSchedule | FusedSchedule]:
    """Every point of the space, buildable or not, in parameter order."""
    choices = {p.name: p.choices for p in PARAMETERS}
    for bt in choices["bt"]:
        for segments in choices["segments"]:
            for rows in choices["rows"]:
                yield GdnSchedule(int(bt), int(segments), int(rows))
    for bt in choices["bt"]:
        for builders in choices["builders"] if bt == 32 else (0,):
            yield FusedSchedule(64, 1, int(bt), int(builders))
            for waves in choices["waves"]:
                yield FusedSchedule(HEAD, int(waves), int(bt), int(builders))


def _full() -> tuple[Schedule, ...]:
    """Whatever can be built."""
    return tuple(s for s in (view.schedule() for view in _whole_space()) if not problems(s))


def _quickstart() -> tuple[Schedule, ...]:
    """Every chunk length, alone and cut; both widths of the scan; and the fused form."""
    points: tuple[GdnSchedule | FusedSchedule, ...] = (
        GdnSchedule(16),
        GdnSchedule(32),
        GdnSchedule(64),
        GdnSchedule(16, 4),
        GdnSchedule(32, 4),
        GdnSchedule(64, 4),
        GdnSchedule(64, 2),
        GdnSchedule(32, 1, 128),
        FusedSchedule(64),
        FusedSchedule(HEAD),
        FusedSchedule(HEAD, 1, 32),
    )
    return tuple(point.schedule() for point in points)


PRESETS = {"gdn_prefill": _full, "quickstart": _quickstart}
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
