"""``factory show``: all that was seen of one trial."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from factory.cli.common import (
    db_option,
    json_option,
    open_reading,
    print_json,
    print_table,
    us_text,
)

__all__ = ["show"]

_SHOWN = ("gpu", "driver", "torch", "dsl", "tvm_ffi", "python")
"""What of a fingerprint is printed."""


@click.command()
@click.argument("trial")
@db_option
@json_option
def show(trial: str, db: str | None, as_json: bool) -> None:
    """All that was seen of TRIAL (an id): stages, errors, times, its log file.

    With --json: the trial's record, one object with id, schedule, status,
    stage, reason, score_us, stages, errors, measurements and log_path, and the
    fingerprint (names to versions) of the job that timed it.
    """
    from leaderboard import shapes, worst_errors

    with open_reading(db) as store:
        record = store.get_trial(trial)
        made = _fingerprint(store, record)
        if as_json:
            print_json({**record.model_dump(mode="json"), "fingerprint": made})
            return
        _print_head(record)
        if made:
            known = ", ".join(f"{k} {v}" for k, v in made.items() if k in _SHOWN and v)
            click.echo(f"job {record.job_id}: {known}")
        click.echo()
        print_table(
            ["stage", "verdict", "seconds", "what it saw"],
            (
                [s.stage, s.status.value, f"{s.seconds:.2f}", s.reason or _facts(s.details)]
                for s in record.stages
            ),
            right="seconds",
        )
        errors = worst_errors(store, record.id)
        if errors:
            click.echo()
            print_table(
                ["regime", "output", "workload", "max error", "rms error", "verdict"],
                (
                    [
                        e.regime,
                        e.tensor,
                        f"{e.workload} {e.scope}" if e.scope != "all" else e.workload,
                        _error_text(e.max_rel),
                        _error_text(e.rms_rel),
                        _within(e),
                    ]
                    for e in errors
                ),
                title="largest error of each output in each regime",
                right="max error,rms error",
            )
        times = shapes(store, record.id) if record.score_us is not None else []
        if times:
            click.echo()
            print_table(
                ["workload", "regime", "clock", "cache", "phase", "us", "low", "high", "controls"],
                (_time_row(t) for t in times),
                title="times",
                right="us,low,high",
            )
        elif record.score_us is not None:
            _print_modelled(record)


def _fingerprint(store: Any, record: Any) -> dict[str, Any] | None:
    """Machine and toolchain of the trial's job."""
    if record.job_id is None:
        return None
    values: dict[str, Any] = store.get_fingerprint(
        store.get_job(record.job_id).fingerprint_id
    ).values
    return values


def _print_head(record: Any) -> None:
    click.echo(f"trial {record.id} of {record.campaign_id}, number {record.number}")
    click.echo(f"schedule {record.schedule_key}")
    if record.score_us is not None:
        slow = f", slow gates {us_text(record.slow_us)} us" if record.slow_us else ""
        click.echo(f"passed: {us_text(record.score_us)} us {record.clock.value}{slow}")
    else:
        click.echo(f"{record.status.value} at {record.stage or 'begin'}: {record.reason or '-'}")
    bound = "any gate" if record.gate_bound is None else f"gates down to {record.gate_bound:g}"
    click.echo(f"declared for {bound}; attempt {record.attempt}; source {record.source_hash[:12]}")
    click.echo(f"log {record.log_path or '-'}")
    for log in dict.fromkeys(s.details["log"] for s in record.stages if "log" in s.details):
        click.echo(f"log {log}")


def _facts(details: dict[str, Any]) -> str:
    """A stage's details in a few words."""

    def words() -> Iterator[str]:
        for kernel in details.get("kernels") or ():
            if isinstance(kernel, dict):
                stack = f", {kernel['stack_bytes']} B stack" if kernel["stack_bytes"] else ""
                yield f"{kernel['name']}: {kernel['registers']} registers{stack}"
        if "cases" in details:
            yield f"{details['cases']} cases, worst max error {details['worst_max_rel']:.1e}"
        if "estimate_us" in details:
            yield f"about {us_text(details['estimate_us'])} us"

    return "; ".join(words()) or "-"


def _error_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _within(error: Any) -> str:
    if error.out_of_contract:
        return "out of contract"
    if not error.finite:
        return "not finite"
    return "within" if error.within else "beyond"


def _time_row(t: Any) -> list[str]:
    controls = ", ".join(f"{c.control} {us_text(c.median_us)} ({c.ratio:.2f})" for c in t.controls)
    return [
        f"{t.workload}{' (held out)' if t.held_out else ''}",
        t.regime,
        t.clock.value,
        t.cache,
        t.phase,
        us_text(t.median_us),
        us_text(t.low_us),
        us_text(t.high_us),
        controls or "-",
    ]


def _print_modelled(record: Any) -> None:
    times: dict[str, float] = next(
        (s.details["modelled_us"] for s in record.stages if "modelled_us" in s.details), {}
    )
    if times:
        click.echo()
        print_table(
            ["workload", "modelled us"],
            ([name, us_text(us)] for name, us in times.items()),
            right="modelled us",
        )
