"""Numbers of shipped results on the pages are those of the shipped store.

As in ``test_docs.py`` every table has a rendering here and a comment that marks its place.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from test_docs import OPERATION, code, page, section, table

import leaderboard
from candidates.kda_prefill.kernel.fused_plan import BT, SHORT, pieces_of

_SMS = 132
_COPY_BYTES_PER_US = 4.25e6
"""What a plain copy reaches on an H200; see docs/kernel.md."""


@pytest.fixture(scope="module")
def shipped() -> Iterator[leaderboard.Store]:
    with leaderboard.shipped_store() as store:
        yield store


def _campaign() -> str:
    """The campaign that the pages show; others may be shipped beside it."""
    return code(section(page("results.md"), "The run").partition("| campaign |")[2])[0]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _least(values: Iterable[float | None]) -> list[str]:
    """Times of one line, the shortest of them in bold."""
    known = [v for v in values if v is not None]
    return [f"**{_us(v)}**" if v == min(known) else _us(v) for v in known]


# Head of a column, regime, clock, state of the cache, phase.
_CLOCKS = [
    ("`gpu`", "production", "gpu", "warm", "search"),
    ("`gpu`, cold", "production", "gpu", "cold", "search"),
    ("`per_call`", "production", "per_call", "warm", "search"),
    ("`pipelined`", "production", "pipelined", "warm", "search"),
    ("`gpu`, slow gates", "slow", "gpu", "warm", "search"),
    ("`gpu`, finals", "production", "gpu", "warm", "final"),
]


class _Times:
    """Times of one trial and of the controls beside it, by workload."""

    def __init__(self, store: leaderboard.Store, trial: int) -> None:
        self.shapes = {
            (r.workload, r.regime, r.clock.value, r.cache, r.phase): r
            for r in leaderboard.shapes(store, trial)
        }

    def of(
        self, who: str | None, clock: tuple[str, str, str, str, str], names: Iterable[str]
    ) -> list[float | None]:
        """Medians, of the trial itself where ``who`` is None; with the geomean if all are there."""
        found: list[float | None] = []
        for name in names:
            row = self.shapes.get((name, *clock[1:]))
            us: dict[str | None, float] = {}
            if row is not None:
                us = {c.control: c.median_us for c in row.controls} | {None: row.median_us}
            found.append(us.get(who))
        known = [v for v in found if v is not None]
        return [*found, statistics.geometric_mean(known) if len(known) == len(found) else None]


def _errors(found: Iterable[leaderboard.WorstError | dict[str, Any]]) -> Iterator[list[str]]:
    """Largest max and rms of each regime's outputs."""
    worst: dict[str, dict[str, list[float]]] = {}
    for e in (e if isinstance(e, dict) else e.model_dump() for e in found):
        if not e["out_of_contract"]:
            pair = worst.setdefault(e["regime"], {}).setdefault(e["tensor"], [0.0, 0.0])
            pair[:] = max(pair[0], e["max_rel"]), max(pair[1], e["rms_rel"])
    for regime, of in worst.items():
        yield [f"`{regime}`", *(f"{x:.1e}" for name in ("o", "final_state") for x in of[name])]


def results(store: leaderboard.Store) -> dict[str, str]:
    """Tables of shipped results, by the comment in front of them."""
    ranked = leaderboard.ranked(store, campaign_id=_campaign(), control="cudnn_fused")
    fused = ranked[0]
    split = next(r for r in ranked if r.schedule["form"] == "split")
    times = {r.id: _Times(store, r.id) for r in (fused, split)}
    tuned = [w.name for w in OPERATION.tuned()]
    floors = [OPERATION.floor_bytes(w) / _COPY_BYTES_PER_US for w in OPERATION.tuned()]
    floors.append(statistics.geometric_mean(floors))
    heads = [f"`{name}`" for name in tuned] + ["geomean"]
    side: list[tuple[int, str | None]]
    side = [(fused.id, "cudnn_fused"), (fused.id, None), (split.id, None)]
    sides = [
        list(zip(*(times[trial].of(name, clock, tuned) for trial, name in side), strict=True))
        for clock in (_CLOCKS[0], _CLOCKS[4])
    ]
    found = {
        "results": table(
            "shape | floor | cudnn_fused | fused | split | slow: cudnn_fused | slow: fused"
            " | slow: split",
            (
                [head, _us(floor), *(c for times_of in sides for c in _least(times_of[i]))]
                for i, (head, floor) in enumerate(zip(heads, floors, strict=True))
            ),
        ),
        "ranked": table(
            "rank | trial | production | slow gates | / cudnn_fused | slower than it on | schedule",
            (
                [
                    *map(str, (r.rank, r.id)),
                    *(f"{us:.1f}" for us in (r.score_us, r.slow_us) if us is not None),
                    f"{r.ratio:.3f}",
                    "all" if len(r.losses) == len(tuned) else ", ".join(r.losses),
                    f"`{r.schedule_key}`",
                ]
                for r in ranked
            ),
        ),
        "rejected": table(
            "trial | stage | schedule | reason",
            (
                [str(r.id), r.stage, f"`{r.schedule_key}`", r.reason]
                for r in leaderboard.rejected(store, campaign_id=_campaign())
            ),
        ),
        "errors": table(
            "regime | o, max | o, rms | final_state, max | final_state, rms",
            _errors(leaderboard.worst_errors(store, fused.id)),
        ),
    }
    finals = leaderboard.finals(store, _campaign())
    seen = {f.id: times.get(f.id) or _Times(store, f.id) for f in finals}
    held = [w.name for w in OPERATION.held_out()]
    met = [seen[f.id].of(None, _CLOCKS[5], held) for f in finals]
    found["held-out"] = table(
        "workload | " + " | ".join(f"trial {f.id}" for f in finals),
        (
            [head, *(_us(v[i]) for v in met)]
            for i, head in enumerate([f"`{name}`" for name in held] + ["geomean"])
        ),
    )
    for name, trial, who in (
        ("fused", fused.id, None),
        ("split", split.id, None),
        ("cudnn_fused", fused.id, "cudnn_fused"),
        ("torch", fused.id, "torch"),
    ):
        columns = {c[0]: times[trial].of(who, c, tuned) for c in _CLOCKS}
        columns = {c: v for c, v in columns.items() if any(x is not None for x in v)}
        found[f"times of {name}"] = table(
            "shape | " + " | ".join(columns),
            ([head, *(_us(v[i]) for v in columns.values())] for i, head in enumerate(heads)),
        )
    return found


def fused_table(store: leaderboard.Store) -> str:
    """The winner by shape: how it is cut at production gates, and its times against the floor."""
    winner = leaderboard.winner(store, _campaign())
    assert winner is not None
    shapes = OPERATION.tuned()
    times = _Times(store, winner.id)
    warm, slow = (times.of(None, _CLOCKS[i], [w.name for w in shapes]) for i in (0, 4))
    lines = []
    for w, fast_us, slow_us in zip(shapes, warm, slow, strict=False):
        lengths, heads = w.lengths, w.heads  # type: ignore[attr-defined]
        chunks = -(-lengths[0] // BT)
        parts = max(min(pieces_of(1, len(lengths), heads, _SMS), chunks // 2), 1)
        ends = [chunks * i // parts for i in range(parts + 1)]
        longest = max(ends[i + 1] - ends[i] + min(SHORT, ends[i]) for i in range(parts))
        floor = OPERATION.floor_bytes(w) / _COPY_BYTES_PER_US
        assert fast_us is not None
        lines.append(
            [
                f"`{w.name}`",
                *map(str, (len(lengths) * heads * parts, longest)),
                *(_us(us) for us in (floor, fast_us)),
                f"{fast_us / floor:.1f}",
                _us(slow_us),
            ]
        )
    return table("shape | CTAs | chunks | floor | production | over floor | slow gates", lines)


@pytest.fixture(scope="module")
def rendered(shipped: leaderboard.Store) -> dict[str, str]:
    return results(shipped) | {"fused": fused_table(shipped)}


_RESULTS = ["ranked", "rejected", "errors", "held-out"]
_RESULTS += [f"times of {name}" for name in ("fused", "split", "cudnn_fused", "torch")]


@pytest.mark.parametrize(
    ("name", "mark"),
    [("README.md", "results"), ("kernel.md", "fused"), *(("results.md", m) for m in _RESULTS)],
)
def test_tables_of_results_equal_the_shipped_store(
    rendered: dict[str, str], name: str, mark: str
) -> None:
    want = f"<!-- {mark} -->\n\n{rendered[mark]}\n\n"
    assert want in page(name), f"{name} should have\n{want}"


def test_errors_of_controls_equal_the_shipped_job(shipped: leaderboard.Store) -> None:
    row = leaderboard.ranked(shipped, campaign_id=_campaign(), limit=1)[0]
    assert row.job_id is not None
    job = shipped.get_job(row.job_id)
    lines = (
        [f"`{control}`", *line]
        for control, errors in job.details["control_errors"].items()
        for line in _errors(errors)
    )
    head = "control | regime | o, max | o, rms | final_state, max | final_state, rms"
    want = f"<!-- control errors -->\n\n{table(head, lines)}\n\n"
    assert want in page("results.md"), f"docs/results.md should have\n{want}"
    assert f"{job.drift:.2%}" in section(page("results.md"), "The run")
