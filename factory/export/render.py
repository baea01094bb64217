"""An export as file names to bytes: sources, dispatch table, manifest, README, tests, licence.

Equal leaderboards and equal sources give equal bytes: nothing here looks at a clock or at the
machine, and what is of one operation comes from its :class:`.exporter.Exporter`.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from factory.device.verdicts import geomean
from factory.export.contest import Vendored
from factory.export.exporter import Exporter, ExportError, exporter_of
from factory.export.select import Row, Selection
from factory.export.sources import contract_docstring, kernel_sources
from factory.provenance import canonical_json, digest
from leaderboard import ClaimRecord, Clock, MeasurementRecord

__all__ = ["FORMAT", "MANIFEST", "VERSION", "export_hash", "render", "sha256", "table", "vendored"]

FORMAT = "kernel-factory export"
VERSION = 1
"""Of the manifest."""

MANIFEST = "MANIFEST.json"

_UNKNOWN_ID = "0" * 12


def render(
    selection: Selection,
    claim: ClaimRecord | None = None,
    compiled: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """All files of an export.

    Parameters
    ----------
    selection : Selection
    claim : ClaimRecord, optional
        The stored claim of this very export, if there is one.
    compiled : Mapping, optional
        Files of the ahead-of-time form (:func:`.aot.compile_library`).

    Returns
    -------
    dict
        Path relative to the folder, with slashes, to contents; sorted.

    Raises
    ------
    ExportError
        If there is no exporter for the operation, or its source cannot stand alone.
    """
    exporter = exporter_of(selection.operation.name)
    texts = _sources(selection, exporter)
    # The table names the export; its name is made of everything else.
    texts["dispatch.py"] = _dispatch(selection, exporter, _UNKNOWN_ID)
    texts["dispatch.py"] = _dispatch(selection, exporter, export_hash(_bytes(texts))[:12])
    bound = export_hash(_bytes(texts))
    if claim is not None and claim.export_hash != bound:
        raise ExportError(f"claim {claim.id} is of export {claim.export_hash[:12]}, not of this")
    texts["README.md"] = _readme(selection, exporter, texts["README.md"], bound, claim)
    found = {**_bytes(texts), **(compiled or {})}
    found[MANIFEST] = _manifest(selection, exporter, found, bound, claim)
    return dict(sorted(found.items()))


def export_hash(found: Mapping[str, bytes]) -> str:
    """sha256 over name and hash of every source that decides what a call does and how fast.

    Sources and dispatch table are in it; tests, README, manifest and compiled forms are not.  A
    claim binds to it.
    """
    own = {
        name: sha256(data)
        for name, data in found.items()
        if name.endswith(".py") and not name.startswith("tests/")
    }
    return digest(own)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _bytes(texts: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in texts.items()}


# -- sources -----------------------------------------------------------------------------


def _sources(selection: Selection, exporter: Exporter) -> dict[str, str]:
    texts = exporter.files()
    texts |= kernel_sources(exporter.packages, exporter.roots)
    entry = f"{next(iter(exporter.packages.values()))}/{exporter.roots[0]}.py"
    contract = contract_docstring(texts[entry], exporter.operation, exporter.left_out)
    contract = _without_the_left_out(contract, exporter)
    marker = '"""@CONTRACT@"""'
    if texts["api.py"].count(marker) != 1:
        raise ExportError("the template of api.py has no place for the contract")
    heading = "" if re.search(r"^Notes\n-+$", contract, re.M) else "Notes\n-----\n"
    notes = (textwrap.fill(text, 92) for text in exporter.notes(selection.gate_bound))
    written = '"""{}\n\n{}{}\n"""'.format(contract, heading, "\n\n".join(notes))
    texts["api.py"] = texts["api.py"].replace(
        marker, textwrap.indent(written, "    ").removeprefix("    ")
    )
    return texts


def _without_the_left_out(contract: str, exporter: Exporter) -> str:
    """Say otherwise what was said of arguments that the export does not have."""
    for pattern, text in exporter.phrases:
        contract = re.sub(pattern, text, contract)
    if any(f"``{name}``" in contract for name in exporter.left_out):
        raise ExportError("the contract speaks of an argument that the export does not have")
    return contract


# -- the table ---------------------------------------------------------------------------


def _dispatch(selection: Selection, exporter: Exporter, export_id: str) -> str:
    values = selection.fingerprint.values
    configs = [_config(row, exporter) for row in selection.rows]
    shapes = [_shape(selection, exporter, row) for row in selection.rows]
    sizes = len(exporter.shape(next(iter(selection.operation.workloads.values()))))
    classes = sorted({config.partition("(")[0] for config in configs})
    bound = selection.gate_bound
    head = f'''"""Which schedule serves which shape, and the measurements behind each choice.

Written by ``factory export``.  All times behind it were read in one job on one {selection.job.gpu}
(driver {values.get("driver")}, torch {values.get("torch")}); they stand in MANIFEST.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kernel.entry import {", ".join(classes)}

__all__ = ["EXPORT_ID", "GATE_BOUND", "ROWS", "SOURCE_SHA256", "Row"]

EXPORT_ID = "{export_id}"
"""Made of sources and table: other exports have another one."""

SOURCE_SHA256 = "{selection.family.source_hash()}"
"""Of the kernel family that ``kernel/`` was taken from."""

GATE_BOUND: float | None = {bound!r}
"""Most negative log gate per token that every row is right for; None means any."""


@dataclass(frozen=True)
class Row:
    """One choice.

    Parameters
    ----------
    shape : tuple of int or None
        {exporter.shape_words} that it serves; None: all other shapes.
    config : Config or FusedConfig
        The constants that its kernel is compiled with.
    trial, campaign, job : str
        Where it was seen: the trial's uid, and the campaign and the job that timed it.
    measurements : tuple of str
        uids of the measurements that it rests on.
    """

    shape: tuple[{", ".join(["int"] * sizes)}] | None
    config: {" | ".join(classes)}
    trial: str
    campaign: str
    job: str
    measurements: tuple[str, ...]


ROWS = (
'''
    return head + "".join(map(_row_text, selection.rows, shapes, configs)) + ")\n"


def _config(row: Row, exporter: Exporter) -> str:
    """The constants of a schedule as a call of their class."""
    values = row.schedule.as_dict()
    name = exporter.configs[str(values.pop("form"))]
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})".replace("'", '"')


def _shape(selection: Selection, exporter: Exporter, row: Row) -> tuple[int, ...] | None:
    if row.workload is None:
        return None
    return exporter.shape(selection.operation.workloads[row.workload])


def _row_text(row: Row, shape: tuple[int, ...] | None, config: str) -> str:
    uids = "".join(f'            "{t.uid}",\n' for t in row.times)
    note = "all other shapes"
    if row.workload is not None:
        note = ", ".join(f"{name} {over:.3f}" for name, over in row.over_default.items())
        note = f"over the row for the rest: {note}"
    return (
        f"    Row(  # {note}\n"
        f"        shape={shape},\n"
        f"        config={config},\n"
        f'        trial="{row.trial.uid}",\n'
        f'        campaign="{row.trial.campaign_id}",\n'
        f'        job="{row.times[0].record.job_id}",\n'
        f"        measurements=(\n{uids}        ),\n"
        "    ),\n"
    )


def vendored(selection: Selection, folder: Path, bound: str) -> Vendored:
    """How the gate calls a folder of this selection."""
    exporter = exporter_of(selection.operation.name)
    launched = [exporter.launched(row.schedule) for row in selection.rows]
    return Vendored(
        folder=str(folder),
        function=exporter.operation,
        outputs=exporter.outputs,
        kernels=tuple(sorted({name for names, _ in launched for name in names})),
        chunk=max(chunk for _, chunk in launched),
        export_hash=bound,
        foreign=tuple(exporter.packages),
    )


def table(selection: Selection) -> list[dict[str, Any]]:
    """Rows of the dispatch table in short, as a claim holds them."""
    return [
        {
            "shape": row.workload,
            "schedule_key": row.schedule.key,
            "trial": row.trial.uid,
        }
        for row in selection.rows
    ]


# -- manifest ----------------------------------------------------------------------------


def _manifest(
    selection: Selection,
    exporter: Exporter,
    found: Mapping[str, bytes],
    bound: str,
    claim: ClaimRecord | None,
) -> bytes:
    s = selection
    values = s.fingerprint.values
    told = {
        "format": FORMAT,
        "version": VERSION,
        "operation": {"name": s.operation.name, "version": s.campaign.operation_version},
        "export_hash": bound,
        "claim": None if claim is None else _claim_told(claim),
        "campaign": {"id": s.campaign.id, "name": s.campaign.name, "family": s.campaign.family},
        "is_winner_of_campaign": s.is_winner,
        "source": {
            "sha256": s.family.source_hash(),
            "measured_sha256": s.default.trial.source_hash,
            "same_as_measured": s.same_source,
        },
        "job": {
            "id": s.job.id,
            "gpu": s.job.gpu,
            "status": s.job.status.value,
            "started_at": s.job.started_at.isoformat(),
            "drift": s.job.drift,
            "seed": s.job.seed,
            "fingerprint": s.job.fingerprint_id,
        },
        "toolchain": {"compiler": _compiler(values), **values},
        "gate_bound": s.gate_bound,
        "geomean_us": _geomeans(s),
        "largest_errors": _errors(s),
        "rows": [_row_told(s, exporter, row) for row in s.rows],
        "files": {name: sha256(data) for name, data in sorted(found.items())},
    }
    # Through canonical JSON first: what cannot be written the same twice fails here.
    return (json.dumps(json.loads(canonical_json(told)), indent=1, sort_keys=True) + "\n").encode()


def _claim_told(claim: ClaimRecord) -> dict[str, Any]:
    """The claim as it was made; how it stands now is the leaderboard's to say."""
    return claim.model_dump(mode="json", include=set(ClaimRecord.model_fields))


def _compiler(values: Mapping[str, Any]) -> str | None:
    """Version of the DSL's compiler that the times were read with."""
    named = values.get("dsl") or values.get("ptxas")
    return str(named).rpartition(" ")[2] if named else None


def _geomeans(selection: Selection) -> dict[str, float]:
    """Of the row for all other shapes, over the tuned workloads, by regime."""
    by_regime: dict[str, list[float]] = {}
    for time in selection.default.times:
        by_regime.setdefault(time.record.regime, []).append(time.record.median_us)
    return {regime: round(geomean(us), 3) for regime, us in by_regime.items()}


def _errors(selection: Selection) -> dict[str, dict[str, float]]:
    """Largest error of each output that gate and finals saw of the rows' trials."""
    worst: dict[str, dict[str, float]] = {}
    for row in selection.rows:
        for e in row.trial.errors:
            if e.out_of_contract or e.max_rel is None or e.rms_rel is None:
                continue
            mine = worst.setdefault(e.tensor, {"max_rel": 0.0, "rms_rel": 0.0})
            mine["max_rel"] = max(mine["max_rel"], e.max_rel)
            mine["rms_rel"] = max(mine["rms_rel"], e.rms_rel)
    return worst


def _row_told(selection: Selection, exporter: Exporter, row: Row) -> dict[str, Any]:
    build = next((s.details for s in row.trial.stages if s.stage == "compile"), {})
    return {
        "shape": _shape(selection, exporter, row),
        "workload": row.workload,
        "schedule": row.schedule.as_dict(),
        "schedule_key": row.schedule.key,
        "gate_bound": selection.family.gate_bound(row.schedule),
        "trial": row.trial.uid,
        "trial_number": row.trial.number,
        "campaign": row.trial.campaign_id,
        "job": row.times[0].record.job_id,
        "over_default": dict(row.over_default),
        "kernels": build.get("kernels", []),
        "machine_code_sha256": build.get("cubin_sha256"),
        "measurements": [{"uid": t.uid, **_time_told(t.record)} for t in row.times],
    }


def _time_told(record: MeasurementRecord) -> dict[str, Any]:
    assert record.clock is Clock.GPU
    return {
        "workload": record.workload,
        "regime": record.regime,
        "clock": record.clock.value,
        "cache": record.cache,
        "method": record.method,
        "phase": record.phase,
        "median_us": record.median_us,
        "low_us": record.low_us,
        "high_us": record.high_us,
        "samples": len(record.samples_us),
        "kernels": list(record.kernels),
    }


# -- README ------------------------------------------------------------------------------


def _readme(
    selection: Selection, exporter: Exporter, text: str, bound: str, claim: ClaimRecord | None
) -> str:
    s = selection
    values = s.fingerprint.values
    filled = {
        "CAMPAIGN": s.campaign.id,
        "TRIAL": f"`{s.default.trial.uid}` (`{s.default.schedule.key}`)",
        "GPU": s.job.gpu,
        "DATE": f"{s.job.started_at:%Y-%m-%d}",
        "DRIVER": str(values.get("driver")),
        "TORCH": str(values.get("torch")),
        "COMPILER": str(_compiler(values)),
        "HASH": bound,
        "SOURCE": _source_line(s),
        "CLAIM": _claim_line(s, claim),
        "GATES": "any gate at or below 0"
        if s.gate_bound is None
        else f"gates from {s.gate_bound:g} to 0 a token",
        "TABLE": _table(s, exporter),
    }
    for name, value in filled.items():
        text = text.replace(f"@{name}@", value)
    return text


def _source_line(selection: Selection) -> str:
    if selection.same_source:
        return "The kernels are, to the byte but for their imports, those that were timed."
    then, here = selection.default.trial.source_hash, selection.family.source_hash()
    return (
        f"**The kernels have changed since these times were read** (source `{then[:12]}` then,"
        f" `{here[:12]}` here): the table chooses by times of older kernels."
    )


def _claim_line(selection: Selection, claim: ClaimRecord | None) -> str:
    if claim is None:
        return (
            "No claim: this folder itself has not passed the export gate, so it is not called a"
            f" winner. The times above are those of the campaign's trials in {_part(selection)}."
        )
    return (
        f"Claim `{claim.id}`: this folder itself passed the export gate on {claim.gpu} in job"
        f" `{claim.job_id}`: {claim.score_us:.1f} us over the tuned shapes, {claim.ratio:.3f} of"
        " the campaign's candidate timed in turns with it."
    )


def _part(selection: Selection) -> str:
    """Whose times a table has: finalists were timed twice, and not alike."""
    phases = {t.record.phase for row in selection.rows for t in row.times}
    named = {"final": "its finals", "search": "its search"}
    return " and ".join(words for phase, words in named.items() if phase in phases)


def _table(selection: Selection, exporter: Exporter) -> str:
    regimes = list(dict.fromkeys(t.record.regime for t in selection.default.times))
    own = {row.workload: row for row in selection.rows if row.workload is not None}
    lines = [
        f"| {exporter.shape_head} | schedule | {' | '.join(f'{r}, us' for r in regimes)} |",
        "|---|---|" + "---|" * len(regimes),
    ]
    for workload in dict.fromkeys(t.record.workload for t in selection.default.times):
        row = own.get(workload, selection.default)
        us = {t.record.regime: t.record.median_us for t in row.times if _of(t.record, workload)}
        cells = " | ".join(f"{us[r]:.1f}" if r in us else "-" for r in regimes)
        lines.append(f"| {workload} | `{row.schedule.key}` | {cells} |")
    return "\n".join(lines)


def _of(record: MeasurementRecord, workload: str) -> bool:
    return record.workload == workload
