"""``factory show``: the whole story of one trial."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from factory.cli.common import (
    db_option,
    json_option,
    open_reading,
    print_json,
    print_note,
    print_table,
    us_text,
)
from factory.errors import EXIT_DONE, EXIT_NOTHING_PASSED, UserError

if TYPE_CHECKING:
    from leaderboard import CampaignRecord, ShapeRow, Store, TrialRecord

__all__ = ["show"]

_SHOWN = ("gpu", "driver", "cuda", "torch", "dsl", "ptxas", "tvm_ffi", "python")
"""What of a fingerprint is printed."""

_BESIDE = 4
"""Controls of a table of times."""


@click.command()
@click.argument("trial")
@click.option("--again", is_flag=True, help="Run its CPU stages once more, here.")
@db_option
@json_option
def show(trial: str, again: bool, db: str | None, as_json: bool) -> int:
    """The whole story of TRIAL (an id): schedule, stages, errors, kernels, times, log files.

    It ends with how to run the trial again; --again does so for the stages
    that need no GPU, and exits with 1 if a verdict is another one now.

    With --json: the trial's record, one object with id, schedule, status,
    stage, reason, score_us, stages, errors, measurements and log_path, the
    fingerprint (names to versions) of the job that timed it, and how to run it
    again (run_again: a list of commands, empty where the
    installed operation is another version).
    """
    with open_reading(db) as store:
        record = store.get_trial(trial)
        campaign = store.get_campaign(record.campaign_id)
        if again:
            return _again(record, campaign, as_json=as_json)
        made = _fingerprint(store, record)
        commands = _commands(store, record, campaign, db)
        if as_json:
            print_json(
                {**record.model_dump(mode="json"), "fingerprint": made, "run_again": commands}
            )
            return EXIT_DONE
        _print_head(record, campaign)
        _print_place(store, record)
        if made:
            known = ", ".join(f"{k} {made[k]}" for k in _SHOWN if made.get(k))
            print_note(known, first=f"job {record.job_id}: ", indent="  ")
        _print_logs(record)
        _print_stages(record)
        _print_kernels(record)
        _print_errors(store, record)
        if record.score_us is not None:
            _print_times(store, record)
        click.echo("\nrun it again:" if commands else f"\nnot run again here: {_other(campaign)}")
        for command in commands:
            click.echo(f"  {command}")
    return EXIT_DONE


def _fingerprint(store: Store, record: TrialRecord) -> dict[str, Any] | None:
    """Machine and toolchain of the trial's job."""
    if record.job_id is None:
        return None
    values: dict[str, Any] = store.get_fingerprint(
        store.get_job(record.job_id).fingerprint_id
    ).values
    return values


def _commands(
    store: Store, record: TrialRecord, campaign: CampaignRecord, db: str | None
) -> list[str]:
    """How to see the same again: the stages of a CPU anywhere, those of a GPU where there is one.

    A benched schedule meets the inputs of the job that timed it.  Empty where the trial met
    another operation than the installed one.
    """
    if _other(campaign):
        return []
    where = [] if db is None else ["--db", db]
    found = [shlex.join(["factory", "show", str(record.id), "--again", *where])]
    if record.job_id is not None:
        seed = store.get_job(record.job_id).seed
        seeded = [] if seed is None else ["--seed", str(seed)]
        key = ["--schedule", record.schedule_key]
        found.append(shlex.join(["factory", "bench", campaign.operation, *key, *seeded]))
    return found


def _other(campaign: CampaignRecord) -> str:
    """Why the installed operation is not the one that the campaign met; empty if it is."""
    import operations

    try:
        operation = operations.get(campaign.operation)
    except LookupError as error:
        return str(error)
    if operation.version != campaign.operation_version:
        return (
            f"it met version {campaign.operation_version} of {operation.name}, installed is "
            f"{operation.version}: other inputs or tolerances"
        )
    return ""


def _again(record: TrialRecord, campaign: CampaignRecord, *, as_json: bool) -> int:
    """Run validate, emulate and compile once more, on the campaign's seed."""
    import candidates
    import operations
    from factory.funnel import run_cpu_stage
    from factory.stages.emulate import References

    if why := _other(campaign):
        raise UserError(f"trial {record.id} cannot be run again: {why}")
    operation = operations.get(campaign.operation)
    try:
        family = candidates.get(campaign.operation)
    except LookupError as error:
        raise UserError(str(error)) from error
    try:
        schedule = family.schedule(record.schedule)
    except ValueError as error:
        raise UserError(f"{family.name} has no schedule {record.schedule_key}: {error}") from error
    references = References(operation, seed=campaign.seed)
    then = {s.stage: s.status.value for s in record.stages}
    rows: list[dict[str, Any]] = []
    for stage in ("validate", "emulate", "compile"):
        if stage not in then:
            break
        result = run_cpu_stage(stage, family, schedule, references)
        rows.append(
            {
                "id": stage,
                "then": then[stage],
                "now": result.status.value,
                "reason": result.reason,
            }
        )
        if result.status.value != "passed":
            break
    same = all(r["then"] == r["now"] for r in rows)
    if as_json:
        print_json(rows)
        return EXIT_DONE if same else EXIT_NOTHING_PASSED
    if family.source_hash() != record.source_hash:
        print_note("The source has changed since: this runs the installed one.")
    print_table(
        ["stage", "then", "now"],
        ([r["id"], r["then"], r["now"]] for r in rows),
    )
    for r in rows:
        if r["reason"]:
            print_note(r["reason"], first=f"{r['id']}: ", indent="  ")
    click.echo("the same verdicts" if same else "not the same verdicts")
    return EXIT_DONE if same else EXIT_NOTHING_PASSED


# ---------------------------------------------------------------------------------- parts


def _print_head(record: TrialRecord, campaign: CampaignRecord) -> None:
    click.echo(f"trial {record.id} of {record.campaign_id}")
    print_note(record.schedule_key, first="schedule ", indent="  ")
    if record.score_us is not None and record.clock is not None:
        slow = f", slow gates {us_text(record.slow_us)} us" if record.slow_us else ""
        click.echo(f"passed: {us_text(record.score_us)} us {record.clock.value}{slow}")
    else:
        status = f"{record.status.value} at {record.stage or 'begin'}: "
        print_note(record.reason or "-", first=status, indent="  ")
    bound = "any gate" if record.gate_bound is None else f"gates down to {record.gate_bound:g}"
    click.echo(
        f"declared for {bound}; attempt {record.attempt}; source {record.source_hash[:12]}; "
        f"seed {campaign.seed}"
    )


def _print_place(store: Store, record: TrialRecord) -> None:
    """Among the finalists, whose times are others than those of the scores."""
    from leaderboard import finals

    if not any(s.stage == "finals" for s in record.stages):
        return
    for f in finals(store, record.campaign_id):
        if f.id == record.id and f.rank is not None:
            slow = f", slow gates {us_text(f.slow_us)} us" if f.slow_us else ""
            click.echo(f"finals: rank {f.rank}, {us_text(f.score_us)} us{slow}")


def _print_logs(record: TrialRecord) -> None:
    """Log files that are here: others are on the machine that ran it, or were never begun."""
    named = dict.fromkeys([record.log_path, *(s.details.get("log") for s in record.stages)])
    logs = [log for log in named if log]
    here = [log for log in logs if Path(log).exists()]
    for log in here:
        click.echo(f"log {log}")
    if logs and not here:
        click.echo("no log file of it is here; --json names where one was")


def _print_stages(record: TrialRecord) -> None:
    click.echo()
    print_table(
        ["stage", "verdict", "seconds", "what it saw"],
        (
            [
                s.stage,
                s.status.value,
                f"{s.seconds:.2f}" if s.seconds else "-",  # nobody noted them
                s.reason or _facts(s.details),
            ]
            for s in record.stages
        ),
        right="seconds",
    )


def _facts(details: Mapping[str, Any]) -> str:
    """A stage's details in a few words."""

    def words() -> Iterator[str]:
        if "cases" in details:
            yield f"{details['cases']} cases, worst max error {details['worst_max_rel']:.1e}"
        if "cubin_sha256" in details:
            yield f"machine code {details['cubin_sha256'][:12]}"
        sweep = details.get("sweep") or ()
        if sweep:
            broken = details.get("first_breach")
            yield f"{len(sweep)} steps of the sweep, first breach {broken or 'none'}"
        if "estimate_us" in details:
            yield f"about {us_text(details['estimate_us'])} us"
        launches = details.get("launches") or {}
        if launches:
            names = {k for by in launches.values() for n in by.values() for k in n}
            count = sum(n for by in launches.values() for k in by.values() for n in k.values())
            yield f"{count} launches of {len(names)} kernel{'s' * (len(names) > 1)} counted"

    return "; ".join(words()) or "-"


def _print_kernels(record: TrialRecord) -> None:
    """Resources by the compiler, and the names that were really launched."""
    compiled = [
        k
        for s in record.stages
        if s.stage == "compile"
        for k in s.details.get("kernels") or ()
        if isinstance(k, dict)
    ]
    if compiled:
        click.echo()
        print_table(
            ["kernel", "registers", "stack B", "shared B", "threads"],
            (
                [
                    str(k.get("name")),
                    *(
                        "-" if k.get(n) is None else str(k[n])
                        for n in ("registers", "stack_bytes", "dynamic_smem_bytes", "threads")
                    ),
                ]
                for k in compiled
            ),
            title="kernels, as compiled",
            right="registers,stack B,shared B,threads",
        )
    launched = dict.fromkeys(k for m in record.measurements for k in m.kernels)
    if launched:
        print_note(", ".join(launched), first="launched while timed: ", indent="  ")


def _print_errors(store: Store, record: TrialRecord) -> None:
    from leaderboard import worst_errors

    found = worst_errors(store, record.id)
    errors = [e for e in found if not e.out_of_contract]
    outside = dict.fromkeys(e.regime for e in found if e.out_of_contract)
    if errors:
        click.echo()
        print_table(
            ["regime", "output", "where", "max error", "rms error", "verdict"],
            (
                [
                    e.regime,
                    e.tensor,
                    f"{e.workload} {e.scope}" if e.scope != "all" else e.workload,
                    _error_text(e.max_rel),
                    _error_text(e.rms_rel),
                    "not finite" if not e.finite else "within" if e.within else "beyond",
                ]
                for e in errors
            ),
            title="largest error of each output in each regime",
            right="max error,rms error",
            keep={"regime": 18, "verdict": 10, "output": 11},
        )
    if outside:
        print_note(", ".join(outside), first="out of contract, not run: ", indent="  ")


def _error_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _print_times(store: Store, record: TrialRecord) -> None:
    from leaderboard import shapes

    groups: dict[tuple[Any, ...], list[ShapeRow]] = {}
    for t in shapes(store, record.id):
        cell = (t.job_id, t.regime, t.clock.value, t.cache, t.phase)
        groups.setdefault(cell, []).append(t)
    samples = {
        (m.job_id, m.regime, m.clock.value, m.cache, m.phase, m.workload): len(m.samples_us)
        for m in record.measurements
    }
    for cell, rows in groups.items():
        _print_cell(cell, rows, samples, other_job=cell[0] != record.job_id)
    if not groups:
        _print_modelled(record)


def _print_cell(
    cell: tuple[Any, ...],
    rows: list[ShapeRow],
    samples: Mapping[tuple[Any, ...], int],
    *,
    other_job: bool,
) -> None:
    """One regime, clock, state of the cache and phase; the ratio is over the control's time."""
    job, regime, clock, cache, phase = cell
    means: dict[str, list[float]] = {}
    for t in rows:
        for c in t.controls:
            means.setdefault(c.control, []).append(c.median_us)
    names = sorted(means, key=lambda n: (-len(means[n]), sum(means[n])))[:_BESIDE]
    beside = [{c.control: c for c in t.controls} for t in rows]
    heads = [head for n in names for head in (n, "ratio")]
    where = f", job {job}" if other_job else ""
    click.echo()
    print_table(
        ["workload", "us", "low", "high", "n", *heads],
        (
            [
                f"{t.workload}{' (held out)' * t.held_out}",
                us_text(t.median_us),
                us_text(t.low_us),
                us_text(t.high_us),
                str(samples.get((*cell, t.workload), 0)),
                *(
                    text
                    for n in names
                    for text in (
                        (us_text(by[n].median_us), f"{by[n].ratio:.3f}") if n in by else ("-", "-")
                    )
                ),
            ]
            for t, by in zip(rows, beside, strict=True)
        ),
        title=f"{regime}, {clock}, {cache} cache, {phase}{where}",
        right=",".join(["us", "low", "high", "n", *heads]),
        drop=",".join(["low", "high", "n"]),
    )


def _print_modelled(record: TrialRecord) -> None:
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
