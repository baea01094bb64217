"""``factory check``: one user-supplied candidate through the funnel, with a verdict table."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from factory.cli.common import (
    json_option,
    log_folder,
    print_json,
    print_table,
    refuse_unknown,
    us_text,
)
from factory.errors import EXIT_DONE, EXIT_MACHINE, EXIT_NOTHING_PASSED, UserError
from factory.signals import taken

if TYPE_CHECKING:
    from candidates.user import UserFamily
    from factory.check import Against, Checked
    from factory.device.hardware import Device
    from leaderboard import Contrast
    from leaderboard.records import ErrorRecord, MeasurementRecord
    from operations import Operation

__all__ = ["check"]

_ACCEPTED = "accepted\nmax, rms"

_SHARED = ("gate", "time")
"""Stages whose inputs the controls met too."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--operation", metavar="NAME", help="For a file that declares no OPERATION.")
@click.option(
    "--regime",
    "regimes",
    multiple=True,
    metavar="NAME",
    help="Meet this regime and production only; may be repeated.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    metavar="NAME",
    help="Meet this workload only; may be repeated.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), help="Replay the inputs of an earlier check."
)
@json_option
def check(
    file: Path,
    operation: str | None,
    regimes: tuple[str, ...],
    workloads: tuple[str, ...],
    seed: int | None,
    as_json: bool,
) -> int:
    """Take the candidate in FILE (Python) through all stages this machine can run.

    FILE declares OPERATION and KERNELS and defines bind(inputs, outputs) or
    run(inputs, outputs).  It runs in a process of its own, under limits.
    Exit code 0: everything that could run passed; 1: rejected; 2: not a
    candidate file; 3: the machine failed, or did not hold still while timing;
    130: interrupted by Ctrl-C or SIGTERM.

    With --json: one object with id, verdict, declaration, seed, stages (each
    with id, verdict, reason, seconds), errors, measurements, controls, against
    (contrasts with each control), job and fingerprint.
    """
    from factory.check import check as run

    candidate, known = _read(file, operation)
    device = _gpu()
    small = device is None or "cuda" not in candidate.declaration.devices
    refuse_unknown("regime", regimes, known.regimes)
    met = [w.name for w in (known.reduced() if small else known.tuned())]
    refuse_unknown("workload", workloads, met, " without a GPU" if small else "")
    if small:
        _compute_alone()
    with _ended_by_sigterm():
        found = run(
            candidate,
            known,
            device=device,
            seed=secrets.randbelow(2**31) if seed is None else seed,
            log_dir=log_folder("check", file.stem),
            workloads=workloads or None,
            regimes=regimes or None,
            on_event=lambda kind, line: click.echo(f"{kind}: {line}", err=True),
        )
    if as_json:
        print_json(_object(candidate, known, found))
    else:
        _print(candidate, known, found)
    if not found.passed:
        return EXIT_NOTHING_PASSED
    return EXIT_MACHINE if found.void else EXIT_DONE


def _ended_by_sigterm() -> AbstractContextManager[None]:
    """SIGTERM ends a check as Ctrl-C does, whoever sends it: no verdict, its processes ended."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough: what follows cleans up
        click.echo("SIGTERM: stopping; there is no verdict", err=True)
        raise KeyboardInterrupt

    return taken((signal.SIGTERM,), stop)


def _compute_alone() -> None:
    """One thread for the oracle too, unless the user says otherwise; as its candidate has."""
    import os

    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)


def _read(file: Path, operation: str | None) -> tuple[UserFamily, Operation]:
    import operations
    from candidates.user import UserFileError, read_user_file

    try:
        candidate = read_user_file(file, operation=operation)
        return candidate, operations.get(candidate.operation)
    except UserFileError as error:
        raise UserError(str(error)) from error
    except operations.UnknownOperationError as error:
        raise UserError(f"{file.name}: {error}") from error


def _gpu() -> Device | None:
    from factory.machine import sm90_gpus

    if not sm90_gpus():
        return None
    from factory.device.cuda import CudaDevice

    return CudaDevice.find()


def _verdict(found: Checked) -> str:
    if not found.passed:
        return "rejected"
    return "void" if found.void else "passed"


# -- JSON --------------------------------------------------------------------------------


def _object(candidate: UserFamily, operation: Operation, found: Checked) -> dict[str, Any]:
    from factory.check import against

    said = candidate.declaration
    return {
        "id": candidate.path,
        "verdict": _verdict(found),
        "operation": operation.name,
        "operation_version": operation.version,
        "source_sha256": candidate.source_hash(),
        "declaration": {
            "kernels": list(said.kernels),
            "gate_bound": said.gate_bound,
            "devices": list(said.devices),
            "chunk": said.chunk,
            "bitwise_causal": said.bitwise_causal,
            "entry": said.entry,
            "emulates": said.emulates,
        },
        "seed": found.seed,
        "stages": [
            {
                "id": s.stage,
                "verdict": s.verdict,
                "status": None if s.status is None else s.status.value,
                "reason": s.reason,
                "seconds": round(s.seconds, 3),
                "where": s.where or None,
                "details": s.details,
                "log": s.log or None,
            }
            for s in found.stages
        ],
        "score_us": found.score_us,
        "slow_us": found.slow_us,
        "errors": list(found.errors),
        "measurements": list(found.measurements),
        "controls": list(found.controls),
        "against": [_against(a) for a in against(found)],
        "job": found.job,
        "fingerprint": None if found.fingerprint is None else found.fingerprint.values,
    }


def _against(seen: Against) -> dict[str, Any]:
    return {
        "id": seen.control,
        "regime": seen.regime,
        "all_shapes": None if seen.all_shapes is None else asdict(seen.all_shapes),
        "shapes": [{"id": workload, **asdict(c)} for workload, c in seen.shapes.items()],
    }


# -- tables ------------------------------------------------------------------------------


def _print(candidate: UserFamily, operation: Operation, found: Checked) -> None:
    click.echo(f"{candidate.path}")
    click.echo(
        f"{operation.name} version {operation.version}, source {candidate.source_hash()[:12]},"
        f" seed {found.seed}\n"
    )
    print_table(
        ["stage", "verdict", "where", "seconds", "what was seen"],
        (
            [
                s.stage,
                s.verdict if s.status is None or s.verdict == "passed" else s.status.value,
                s.where or "-",
                f"{s.seconds:.1f}" if s.status is not None else "-",
                s.reason or "-",
            ]
            for s in found.stages
        ),
        right="seconds",
        spill="what was seen",
    )
    _print_errors(operation, found)
    _print_times(found)
    failed = next((s for s in found.stages if s.verdict == "failed"), None)
    click.echo()
    if failed is not None:
        log = f"; log {failed.log}" if failed.log else ""
        word = "rejected" if failed.status is None else failed.status.value
        click.echo(f"{word} at {failed.stage}{log}")
    elif found.void:
        click.echo(f"right, but its times do not count: {found.void}; check again")
    else:
        left = [s.stage for s in found.stages if s.verdict == "not run"]
        click.echo(f"passed; not run: {', '.join(left)}" if left else "passed every stage")


def _print_errors(operation: Operation, found: Checked) -> None:
    worst: dict[tuple[str, str, str], ErrorRecord] = {}
    for e in found.errors:
        key = (e.stage, e.regime, e.tensor)
        if key not in worst or _weight(e) > _weight(worst[key]):
            worst[key] = e
    if not worst:
        return
    beside = _control_errors(found)
    click.echo()
    print_table(
        [
            *("stage", "regime", "output", "workload", "max error", "rms error", _ACCEPTED),
            *("verdict", *beside),
        ],
        (
            [
                e.stage,
                e.regime,
                e.tensor,
                f"{e.workload} {e.scope}" if e.scope != "all" else e.workload,
                _number(e.max_rel),
                _number(e.rms_rel),
                _accepted(operation, e),
                _within(e),
                # Elsewhere the inputs were others.
                *(
                    _number(known.get((e.regime, e.tensor)) if e.stage in _SHARED else None)
                    for known in beside.values()
                ),
            ]
            for e in worst.values()
        ),
        title="largest error of each output in each regime"
        + ("; max error of the controls beside it" if beside else ""),
        right=",".join(["max error", "rms error", *beside]),
        drop=",".join(["stage", "rms error", *beside]),
        keep={"workload": 18, "regime": 18},
    )


def _control_errors(found: Checked) -> dict[str, dict[tuple[str, str], float]]:
    """Control to its largest max error by regime and output, on inputs of the same gate."""
    seen: dict[str, dict[tuple[str, str], float]] = {}
    told = {} if found.job is None else found.job.details.get("control_errors", {})
    for name, errors in told.items():
        worst = seen.setdefault(name, {})
        for e in errors:
            key = (e["regime"], e["tensor"])
            if e["max_rel"] is not None:
                worst[key] = max(worst.get(key, 0.0), e["max_rel"])
    return seen


def _weight(error: ErrorRecord) -> tuple[bool, bool, float]:
    return (not error.within, not error.finite, max(error.max_rel or 0.0, error.rms_rel or 0.0))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _accepted(operation: Operation, error: ErrorRecord) -> str:
    regime = operation.regimes.get(error.regime)
    own = None if regime is None else regime.tolerances
    bound = (own or operation.tolerances).get(error.tensor)
    return "-" if bound is None else f"{bound.max_rel:.1e} {bound.rms_rel:.1e}"


def _within(error: ErrorRecord) -> str:
    if error.out_of_contract:
        return "out of contract"
    if not error.finite:
        return "not finite"
    return "within" if error.within else "beyond"


def _print_times(found: Checked) -> None:
    if not found.measurements:
        return
    from factory.check import against

    production = found.measurements[0].regime
    rows = _grouped(found.measurements)
    clocks = list(dict.fromkeys((m.regime, m.clock.value) for m in found.measurements))
    compared = against(found)
    heads = [clock if regime == production else f"{clock}, {regime}" for regime, clock in clocks]
    click.echo()
    print_table(
        ["workload", "cache", *heads, *(a.control for a in compared)],
        (
            [
                f"{workload}{' (held out)' if held_out else ''}",
                cache,
                *(_time(mine.get(key)) for key in clocks),
                *(_contrast(a.shapes.get(workload) if cache == "warm" else None) for a in compared),
            ]
            for (workload, held_out, cache), mine in rows.items()
        ),
        title=f"us on {production}: median (95% interval); warm gpu time over that of each control",
    )
    for a in compared:
        click.echo(f"over {a.control}'s time on all shapes: {_contrast(a.all_shapes)}")
    launched = dict.fromkeys(k for m in found.measurements for k in m.kernels)
    click.echo(f"launched: {', '.join(launched)}")


_Row = dict[tuple[str, str], "MeasurementRecord"]


def _grouped(
    measurements: Sequence[MeasurementRecord],
) -> dict[tuple[str, bool, str], _Row]:
    """Times by workload and cache, then by regime and clock; a re-timing replaces the first."""
    rows: dict[tuple[str, bool, str], _Row] = {}
    for m in measurements:
        mine = rows.setdefault((m.workload, m.held_out, m.cache), {})
        mine[m.regime, m.clock.value] = m
    return rows


def _time(m: MeasurementRecord | None) -> str:
    if m is None:
        return "-"
    return f"{us_text(m.median_us)} ({us_text(m.low_us)} to {us_text(m.high_us)})"


def _contrast(seen: Contrast | None) -> str:
    if seen is None:
        return "-"
    return f"{seen.ratio:.3f} ({seen.low:.3f} to {seen.high:.3f}): {seen.verdict.value}"
