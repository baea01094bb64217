"""``factory operations``: what can be computed, and how right it has to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from factory.cli.common import json_option, print_json, print_note, print_table
from factory.errors import UserError

if TYPE_CHECKING:
    from operations import Operation

__all__ = ["operations_"]


@click.command("operations")
@click.argument("operation", required=False)
@json_option
def operations_(operation: str | None, as_json: bool) -> None:
    """List operations, or show OPERATION: regimes, workloads, tolerances, contract.

    With --json: a list of objects with id, version, tensors, regimes, workloads,
    tolerances, contract and spaces; one such object if OPERATION is given.
    """
    import operations

    if operation is None:
        found = []
        for name in operations.names():
            try:
                found.append(_described(operations.get(name)))
            except operations.PluginError as error:
                click.echo(f"factory: left out: {error}", err=True)
        if as_json:
            print_json(found)
            return
        print_table(
            ["operation", "version", "regimes", "tuned", "held out", "spaces (offered)"],
            (
                [
                    o["id"],
                    o["version"],
                    str(len(o["regimes"])),
                    str(sum(not w["held_out"] for w in o["workloads"])),
                    str(sum(w["held_out"] for w in o["workloads"])),
                    ", ".join(f"{s['id']} ({s['offered']})" for s in o["spaces"]) or "-",
                ]
                for o in found
            ),
            right="regimes,tuned,held out",
            spill="spaces (offered)",
        )
        return
    try:
        one = _described(operations.get(operation))
    except LookupError as error:
        raise UserError(str(error)) from error
    if as_json:
        print_json(one)
        return
    _print_one(one)


def _described(operation: Operation) -> dict[str, Any]:
    import math

    import candidates

    try:
        family = candidates.get(operation.name)
        spaces = [{"id": s, "offered": len(family.offered(s))} for s in family.presets()]
    except candidates.UnknownFamilyError:
        spaces = []
    return {
        "id": operation.name,
        "version": operation.version,
        "tensors": [
            {
                "id": t.name,
                "dims": list(t.dims),
                "dtype": t.dtype,
                "role": t.role,
                "doc": t.doc,
            }
            for t in operation.tensors
        ],
        "regimes": [
            {
                "id": r.name,
                "role": r.role,
                # JSON has no infinity.
                "gate_floor": r.gate_floor if math.isfinite(r.gate_floor) else str(r.gate_floor),
                "severity": r.severity,
                "statistics": {
                    k: v if math.isfinite(v) else str(v) for k, v in r.statistics.items()
                },
                "source": r.source,
            }
            for r in operation.regimes.values()
        ],
        "workloads": [{"id": w.name, "held_out": w.held_out} for w in operation.workloads.values()],
        "tolerances": [
            {"id": name, "max_rel": t.max_rel, "rms_rel": t.rms_rel, "source": t.source}
            for name, t in operation.tolerances.items()
        ],
        "contract": {
            "served": list(operation.contract.served),
            "declined": list(operation.contract.declined),
        },
        "spaces": spaces,
    }


def _print_one(one: dict[str, Any]) -> None:
    click.echo(f"operation {one['id']}, version {one['version']}\n")
    print_table(
        ["tensor", "shape", "dtype", "role", "meaning"],
        (
            [t["id"], "[" + ", ".join(map(str, t["dims"])) + "]", t["dtype"], t["role"], t["doc"]]
            for t in one["tensors"]
        ),
        spill="meaning",
    )
    click.echo()
    print_table(
        ["regime", "role", "steepest gate", "source"],
        ([r["id"], r["role"], f"{float(r['gate_floor']):g}", r["source"]] for r in one["regimes"]),
        right="steepest gate",
        spill="source",
    )
    click.echo()
    for label, held_out in (("tuned", False), ("held out", True)):
        names = [w["id"] for w in one["workloads"] if w["held_out"] is held_out]
        print_note(", ".join(names), first=f"{label} workloads: ", indent="  ")
    for t in one["tolerances"]:
        click.echo(f"tolerance of {t['id']}: max {t['max_rel']:g}, rms {t['rms_rel']:g}")
    for line in one["contract"]["served"]:
        print_note(line, first="served: ", indent="  ")
    for line in one["contract"]["declined"]:
        print_note(line, first="declined: ", indent="  ")
    for space in one["spaces"]:
        click.echo(f"space {space['id']}: {space['offered']} schedules offered")
