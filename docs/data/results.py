"""Blocks of README.md and of a page of results, from the shipped results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import candidates
import leaderboard
from docs.data.pages import table
from docs.data.shown import CLOCKS, Column, Shown
from factory.config import load_campaign, preset_names
from factory.stages.model import model
from leaderboard import LeaderboardRow

__all__ = ["PRODUCTION", "SLOW", "readme_blocks", "results_blocks", "us_text"]

PRODUCTION, SLOW, _FINALS = CLOCKS[0], CLOCKS[4], CLOCKS[5]


def us_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _least(values: Sequence[float | None], equal: float) -> list[str]:
    """Times of one line, in bold the shortest and what is about equal to it."""
    most = min((v for v in values if v is not None), default=0.0) * (1 + equal)
    return [f"**{us_text(v)}**" if v is not None and v <= most else us_text(v) for v in values]


def _list(words: Iterable[str]) -> str:
    found = list(words)
    return ", ".join(found[:-1]) + f" and {found[-1]}" if len(found) > 1 else "".join(found)


def _text(value: object) -> str:
    return "-" if value is None else str(value).split("+")[0]


# ---------------------------------------------------------------------------------- README


def readme_blocks(shown: Shown) -> dict[str, str]:
    """The summary and the table of the first page."""
    return {"summary": _summary(shown), "results": _table(shown, PRODUCTION, more=SLOW)}


def _summary(shown: Shown) -> str:
    """What came out, in sentences that are true of any campaign."""
    w, c, f = shown.winner, shown.campaign, shown.fingerprint
    final = shown.times(w).of(None, _FINALS, shown.tuned)[-1]
    lines = [
        f"On one {w.gpu} ours takes **{us_text(w.score_us)} us** at production gates"
        + ("" if w.slow_us is None else f" and **{us_text(w.slow_us)} us** on slow ones")
        + f" (`{w.schedule_key}`, geomean of `gpu` time over {len(shown.tuned)} shapes"
        + ("" if final is None else f"; {us_text(final)} us when the finalists were timed again")
        + "). Beside it, in the same job:",
        "",
        *(f"* {_against(shown, control)}" for control in shown.controls),
    ]
    if shown.steady is not None:
        s = shown.steady
        lines += [
            f"* our own `{s.schedule_key}`, the fastest whose time does not depend on the gates: "
            f"{us_text(s.score_us)} us at production gates, {us_text(s.slow_us)} us on slow ones",
        ]
    timed = sum(t.score_us is not None for t in shown.store.list_trials(c.id))
    asked = _list(f"`{x}`" for x in _left_out(shown))
    lines += [
        "",
        f"{c.created_at:%Y-%m-%d}, driver {_text(f.get('driver'))}, CUDA {_text(f.get('cuda'))}, "
        f"torch {_text(f.get('torch'))}, {_compiler(shown)}; `{_command(shown)}`, "
        f"{c.budget} schedules, {timed} timed. Controls drifted by {shown.job.drift:.2%}, and a "
        f"job may drift by {shown.equal:.0%}: times closer than that are called about equal."
        + (f" Not in this job: {asked}." if asked else ""),
    ]
    return "\n".join(lines)


def _against(shown: Shown, control: str) -> str:
    times = shown.times(shown.winner)
    words = []
    for column, where in ((PRODUCTION, "at production gates"), (SLOW, "on slow ones")):
        mine = times.of(None, column, shown.tuned)
        theirs = times.of(control, column, shown.tuned)
        if mine[-1] is None or theirs[-1] is None:
            if column is SLOW:
                words.append(f"no time {where}")
            continue
        how = _much(mine[-1] / theirs[-1], shown.equal)
        said = f"{us_text(theirs[-1])} us {where}, ours {how}"
        if column is PRODUCTION:
            pairs = zip(mine[:-1], theirs[:-1], strict=True)
            stands = Counter(
                _much(a / b, shown.equal).rpartition(" ")[2]
                for a, b in pairs
                if a is not None and b is not None
            )
            if len(stands) > 1:
                names = {"fast": "faster on", "slow": "slower on", "equal": "about equal on"}
                said += f" ({', '.join(f'{names[k]} {stands[k]}' for k in names if stands[k])})"
        words.append(said)
    return f"`{control}`: " + "; ".join(words)


def _much(ratio: float, equal: float) -> str:
    """How a time stands to another, by the first over the second; the last word is the verdict."""
    if abs(ratio - 1) <= equal:
        return "about equal"
    times, verdict = (1 / ratio, "fast") if ratio < 1 else (ratio, "slow")
    return f"{times:.{1 if times >= 1.5 else 2}f} times as {verdict}"


def _compiler(shown: Shown) -> str:
    f = shown.fingerprint
    if f.get("dsl"):
        return f"nvidia-cutlass-dsl {f['dsl']}"
    return _text(f.get("ptxas")).replace("-libs-base", "")


def _command(shown: Shown) -> str:
    """What launched it, with the sampler where that is not the preset's."""
    name, sampler = shown.campaign.name, shown.campaign.config.get("sampler")
    usual = name not in preset_names() or load_campaign(name).sampler == sampler
    return f"factory launch {name}" if usual else f"factory launch {name} --sampler {sampler}"


def _left_out(shown: Shown) -> list[str]:
    """Baselines of the operation that have no complete time here."""
    known = [b.name for b in candidates.baselines(shown.campaign.operation)]
    return [b for b in known if b not in shown.controls and b != "torch"]


def _table(shown: Shown, column: Column, *, more: Column | None = None) -> str:
    """Each shape: the floor, the controls, ours; in bold the fastest and its equals."""
    who: list[tuple[LeaderboardRow, str | None]]
    who = [(shown.winner, c) for c in shown.controls] + [(r, None) for r in shown.ours]
    heads = [*shown.controls, *map(shown.name, shown.ours)]

    def lines_of(at: Column) -> list[Sequence[float | None]]:
        return list(
            zip(*(shown.times(row).of(name, at, shown.tuned) for row, name in who), strict=True)
        )

    lines = [
        [f"`{name}`", us_text(floor), *_least(values, shown.equal)]
        for name, floor, values in zip(
            [*shown.tuned, "geomean"], shown.floors, lines_of(column), strict=True
        )
    ]
    lines[-1][0] = "geomean"
    if more is not None:
        lines.append(
            [
                "geomean, slow gates",
                us_text(shown.floors[-1]),
                *_least(lines_of(more)[-1], shown.equal),
            ]
        )
    return table("shape | floor | " + " | ".join(heads), lines)


# ----------------------------------------------------------------------------- results.md


def results_blocks(shown: Shown) -> dict[str, str]:
    """Every table of the page of results."""
    w = shown.winner
    found = {
        "run": _run(shown),
        "ranked": _ranked(shown),
        "rejected": _rejected(shown),
        "finals": _finals(shown),
        "cost model": _cost_model(shown),
        "slow gates": _table(shown, SLOW),
        "winner": f"Trial {w.id}, `{w.schedule_key}`.\n\n{_times(shown, w, None)}",
        "controls": "\n\n".join(
            f"### {c}\n\n{_times(shown, w, c)}" for c in shown.times(w).controls
        ),
        "held-out": _held_out(shown),
        "errors": table(
            f"regime | {_error_heads(shown)}",
            _errors(leaderboard.worst_errors(shown.store, w.id), _outputs(shown)),
        ),
        "all errors": _all_errors(shown),
        "control errors": table(
            f"control | regime | {_error_heads(shown)}",
            (
                [f"`{name}`", *line]
                for name, errors in (shown.job.details.get("control_errors") or {}).items()
                for line in _errors(errors, _outputs(shown))
            ),
        ),
        "left out": _missing(shown),
    }
    found["steady"] = (
        "The winner is that itself."
        if shown.steady is None
        else f"Trial {shown.steady.id}, `{shown.steady.schedule_key}`.\n\n"
        f"{_times(shown, shown.steady, None)}"
    )
    return found


def _run(shown: Shown) -> str:
    c, f, job = shown.campaign, shown.fingerprint, shown.job
    verdicts = Counter(t.status.value for t in shown.store.list_trials(c.id))
    throttled = job.details.get("throttled") or ()
    lines = {
        "command": f"`{_command(shown)}`: {c.budget} schedules",
        "campaign": f"`{c.id}`, {c.created_at:%Y-%m-%d}, {c.created_at:%H:%M} to "
        f"{c.updated_at:%H:%M} UTC",
        "machine": f"one {f.get('gpu')} ({f.get('sku')}), {f.get('multiprocessors')} SMs, "
        f"{f.get('max_sm_mhz')} MHz, {f.get('power_limit_w')} W; driver {f.get('driver')}, "
        f"CUDA {f.get('cuda')}",
        "toolchain": f"Python {f.get('python')}, torch {_text(f.get('torch'))}, {_compiler(shown)}",
        "source of the kernels": f"sha256 `{c.source_hash[:12]}`...",
        "verdicts": ", ".join(f"{n} {status}" for status, n in verdicts.most_common()),
        "job": f"`{job.id}`, {job.status.value}; the largest drift of a control is "
        f"{job.drift:.2%}; {len(throttled) or 'no'} times were refused for a low clock",
        "controls": _list(f"`{x}`" for x in shown.times(shown.winner).controls),
    }
    return table("what | value", ([k, v] for k, v in lines.items()))


def _ranked(shown: Shown) -> str:
    control = next((r.control for r in shown.rows if r.control), None)
    return table(
        f"rank | trial | production | slow gates | / {control} | slower than it on | schedule",
        (
            [
                *map(str, (r.rank, r.id)),
                f"{r.score_us:.1f}",
                "-" if r.slow_us is None else f"{r.slow_us:.1f}",
                "-" if r.ratio is None else f"{r.ratio:.3f}",
                f"{len(r.losses)} of {len(shown.tuned)}",
                f"`{r.schedule_key}`",
            ]
            for r in shown.rows
        ),
    )


def _rejected(shown: Shown) -> str:
    failed = leaderboard.rejected(shown.store, campaign_id=shown.campaign.id)
    return table(
        "trial | stage | schedule | reason",
        ([str(r.id), r.stage, f"`{r.schedule_key}`", r.reason] for r in failed),
    )


def _finals(shown: Shown) -> str:
    rows = leaderboard.finals(shown.store, shown.campaign.id)
    if not rows:
        return "The campaign had no finals."
    first = next((r for r in rows if r.rank == 1), None)
    tied = [r for r in rows if first is not None and r.group == first.group]
    lines = table(
        "rank | trial | production | slow gates | held out | schedule",
        (
            [
                "-" if r.rank is None else str(r.rank),
                str(r.id),
                *map(us_text, (r.score_us, r.slow_us, r.held_out_us)),
                f"`{r.schedule_key}`",
            ]
            for r in rows
        ),
    )
    if first is None:
        return f"{lines}\n\nNo finalist met every workload, so there is no winner."
    words = [f"Trial {first.id} is the winner"]
    if len(tied) > 1:
        words.append(f"not told apart from {_list(f'trial {r.id}' for r in tied[1:])}")
    for control in shown.controls:
        times = shown.times(shown.winner)
        mine, theirs = (times.of(who, _FINALS, shown.tuned)[-1] for who in (None, control))
        if first.id == shown.winner.id and mine is not None and theirs is not None:
            words.append(
                f"{mine / theirs:.3f} of the time of `{control}` in the same rounds "
                f"({us_text(theirs)} us)"
            )
    return f"{lines}\n\n{'; '.join(words)}."


def _cost_model(shown: Shown) -> str:
    """How well the model had ordered, and what it promised."""
    from scipy.stats import spearmanr

    family = candidates.get(shown.campaign.family)
    pairs: list[tuple[str, float, float]] = []
    for r in shown.rows:
        guess = model(shown.operation, family, family.schedule(r.schedule)).score_us
        assert guess is not None
        pairs.append((str(r.schedule.get("form", "all")), guess, r.score_us))
    lines = []
    for form in ["", *dict.fromkeys(p[0] for p in pairs)]:
        mine = [p for p in pairs if form in ("", p[0])]
        if len(mine) < 2:
            continue
        correlation = spearmanr([p[1] for p in mine], [p[2] for p in mine]).statistic
        ratios = [p[1] / p[2] for p in mine]
        lines.append(
            [
                f"`form={form}`" if form else "all",
                str(len(mine)),
                f"{correlation:.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    return table("schedules | timed | rank correlation | modelled over measured", lines)


def _times(shown: Shown, row: LeaderboardRow, who: str | None) -> str:
    """One contestant on every shape, by each clock that was read."""
    times = shown.times(row)
    columns = {c.head: times.of(who, c, shown.tuned) for c in CLOCKS}
    columns = {c: v for c, v in columns.items() if any(x is not None for x in v)}
    heads = [*(f"`{name}`" for name in shown.tuned), "geomean"]
    return table(
        "shape | " + " | ".join(columns),
        ([head, *(us_text(v[i]) for v in columns.values())] for i, head in enumerate(heads)),
    )


def _held_out(shown: Shown) -> str:
    rows = leaderboard.finals(shown.store, shown.campaign.id)
    placed = {r.id: r for r in shown.rows}
    finalists = [placed[f.id] for f in rows if f.id in placed]
    if not finalists:
        return "Nothing met them."
    held = [w.name for w in shown.operation.held_out()]
    met = [shown.times(r).of(None, _FINALS, held) for r in finalists]
    heads = [*(f"`{name}`" for name in held), "geomean"]
    return table(
        "workload | " + " | ".join(f"trial {r.id}" for r in finalists),
        ([head, *(us_text(v[i]) for v in met)] for i, head in enumerate(heads)),
    )


def _outputs(shown: Shown) -> list[str]:
    return [t.name for t in shown.operation.tensors if t.role == "output"]


def _error_heads(shown: Shown) -> str:
    return " | ".join(f"{name}, {what}" for name in _outputs(shown) for what in ("max", "rms"))


def _errors(
    found: Iterable[leaderboard.WorstError | dict[str, Any]], outputs: Sequence[str]
) -> Iterator[list[str]]:
    """Largest max and rms of each regime's outputs."""
    worst: dict[str, dict[str, list[float]]] = {}
    for e in (e if isinstance(e, dict) else e.model_dump() for e in found):
        if not e["out_of_contract"]:
            pair = worst.setdefault(e["regime"], {}).setdefault(e["tensor"], [0.0, 0.0])
            sizes = (e["max_rel"], e["rms_rel"])
            pair[:] = (
                max(p, float("inf") if x is None else x) for p, x in zip(pair, sizes, strict=True)
            )
    for regime, of in worst.items():
        yield [f"`{regime}`", *(f"{x:.1e}" for name in outputs for x in of[name])]


def _all_errors(shown: Shown) -> str:
    """How near any ranked schedule came to a bound, and where."""
    largest = {"max": (0.0, ""), "rms": (0.0, "")}
    for row in shown.rows:
        for e in leaderboard.worst_errors(shown.store, row.id):
            if e.out_of_contract:
                continue
            for what, value in (("max", e.max_rel), ("rms", e.rms_rel)):
                largest[what] = max(largest[what], (value or 0.0, e.regime))
    said = _list(f"{what} {v:.1e} on `{regime}`" for what, (v, regime) in largest.items())
    return f"Largest of all {len(shown.rows)} schedules with a time: {said}."


def _missing(shown: Shown) -> str:
    """What this job cannot say, counted."""
    family = candidates.get(shown.campaign.family)
    offered = {s.key for space in family.presets() for s in family.offered(space)}
    named = shown.campaign.config.get("controls")
    # Without names every baseline that can run is asked.
    asked = set(_left_out(shown) if named is None else named)
    there = set(shown.times(shown.winner).controls)
    lines = [
        f"`{name}`: {'asked for, and has no time' if name in asked else 'not asked for'}"
        for name in _left_out(shown)
        if name not in there
    ]
    lines += [f"`{name}`: not timed on every shape" for name in _left_out(shown) if name in there]
    met = {t.schedule_key for t in shown.store.list_trials(shown.campaign.id)}
    lines.append(f"{len(offered - met)} other schedules that the family offers")
    return "\n".join(f"* {line}" for line in lines)
