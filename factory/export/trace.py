"""An export as a FlashInfer-Bench data set: definition, workloads, solution and traces.

Written as the files that ``flashinfer_bench.data.TraceSet`` reads (0.1), without importing it.
What its schema asks for and the leaderboard does not hold is left at what means "not known"
there: no absolute error (NaN) and no reference time (0).
"""

from __future__ import annotations

import json
import struct
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from factory.errors import UserError
from factory.export.exporter import Exporter, exporter_of
from factory.export.render import FORMAT, MANIFEST, VERSION, export_hash, sha256
from factory.export.select import Row, Selection
from factory.provenance import digest
from leaderboard import MeasurementRecord
from operations import Operation, Regime

__all__ = ["LAYOUT", "input_blobs", "render_traces", "workload_names"]

LAYOUT = "flashinfer-trace"


def render_traces(selection: Selection, folder: Mapping[str, bytes]) -> dict[str, bytes]:
    """The data set of an export.

    Parameters
    ----------
    selection : Selection
    folder : Mapping
        The exported folder (:func:`.render.render`): its sources are the solution.

    Returns
    -------
    dict
        Path relative to the data set's root to contents; sorted.
    """
    s = selection
    exporter = exporter_of(s.operation.name)
    name = s.operation.name
    bound = export_hash(folder)
    solution = f"{name}_{bound[:12]}"
    workloads = {key: _workload(s, exporter, *key) for key in _cells(s)}
    definition = _json(_definition(s, exporter, folder))
    files = {
        f"definitions/{name}/{name}.json": definition,
        f"solutions/{name}/{name}/{solution}.json": _json(_solution(s, exporter, solution, folder)),
        f"workloads/{name}/{name}.jsonl": _lines(
            {"definition": name, "workload": w, "solution": None, "evaluation": None}
            for w in workloads.values()
        ),
        f"traces/{name}/{name}.jsonl": _lines(
            {
                "definition": name,
                "workload": workloads[record.workload, record.regime],
                "solution": solution,
                "evaluation": _evaluation(s, row, record),
            }
            for row, record in _measured(s)
        ),
        "README.md": _readme(s, exporter, solution, bound).encode(),
    }
    told = {
        "format": FORMAT,
        "version": VERSION,
        "layout": LAYOUT,
        "export_hash": bound,
        "files": {path: sha256(data) for path, data in sorted(files.items())},
    }
    files[MANIFEST] = _json(told)
    return dict(sorted(files.items()))


def workload_names(selection: Selection) -> tuple[str, ...]:
    """Shapes that have traces."""
    return tuple(dict.fromkeys(workload for workload, _ in _cells(selection)))


def _measured(selection: Selection) -> list[tuple[Row, MeasurementRecord]]:
    """The measurement behind each shape and regime, with the row that serves the shape."""
    own = {row.workload: row for row in selection.rows if row.workload is not None}
    found = []
    for workload in dict.fromkeys(t.record.workload for t in selection.default.times):
        row = own.get(workload, selection.default)
        found += [(row, t.record) for t in row.times if t.record.workload == workload]
    return found


def _cells(selection: Selection) -> list[tuple[str, str]]:
    return list(dict.fromkeys((m.workload, m.regime) for _, m in _measured(selection)))


# -- definition and solution -------------------------------------------------------------


def _arguments(operation: Operation) -> tuple[str, ...]:
    """Names of the tensors that a call takes."""
    return tuple(t.name for t in operation.tensors if t.role != "output")


def _definition(
    selection: Selection, exporter: Exporter, folder: Mapping[str, bytes]
) -> dict[str, Any]:
    operation, told = selection.operation, exporter.interchange
    file, end = told.oracle
    oracle = folder[file].decode().partition(f"\n{end}")[0].rstrip()

    def tensors(names: Iterable[str]) -> dict[str, Any]:
        known = {t.name: t for t in operation.tensors}
        return {
            name: {
                "shape": [told.named.get(str(d), str(d)) for d in known[name].dims],
                "dtype": known[name].dtype,
                "description": known[name].doc,
            }
            for name in names
        }

    scalars = {
        name: {"shape": None, "dtype": "float32", "description": said}
        for name, said in told.scalars.items()
    }
    return {
        "name": operation.name,
        "op_type": operation.name,
        "axes": told.axes,
        "inputs": {**tensors(_arguments(operation)), **scalars},
        "outputs": tensors(name for name, _ in exporter.outputs),
        "reference": oracle + "\n" + told.run,
        "tags": told.tags,
        "description": (type(operation).__doc__ or operation.name).partition("\n")[0],
        "constraints": told.constraints,
    }


def _solution(
    selection: Selection, exporter: Exporter, name: str, folder: Mapping[str, bytes]
) -> dict[str, Any]:
    own = {
        path: data.decode()
        for path, data in folder.items()
        if path.endswith(".py") and not path.startswith("tests/") and path not in exporter.homes
    }
    package = selection.operation.name
    return {
        "name": name,
        "definition": selection.operation.name,
        "author": "kernel-factory",
        "spec": {
            "language": "python",
            "target_hardware": ["H100", "H200"],
            "entry_point": "main.py::run",
            "dependencies": ["torch", "nvidia-cutlass-dsl", "apache-tvm-ffi"],
            "destination_passing_style": True,
            "binding": None,
        },
        "sources": [
            {"path": "main.py", "content": exporter.interchange.main},
            *({"path": f"{package}/{path}", "content": text} for path, text in own.items()),
        ],
        "description": f"{selection.default.schedule.key}; campaign {selection.campaign.id}",
    }


# -- workloads and traces ----------------------------------------------------------------


def _workload(
    selection: Selection, exporter: Exporter, workload: str, regime: str
) -> dict[str, Any]:
    operation = selection.operation
    found = operation.workloads[workload]
    blob = _blob(selection, workload, regime)
    identity = [operation.name, operation.version, workload, regime]
    drawn = {
        name: {"type": "safetensors", "path": blob, "tensor_key": name}
        for name in _arguments(operation)
    }
    scalars = {
        name: {"type": "scalar", "value": value} for name, value in exporter.scalars(found).items()
    }
    return {
        "axes": exporter.axes(found),
        "inputs": {**drawn, **scalars},
        "uuid": digest([*identity, _seed(selection, workload, regime)])[:32],
    }


def _blob(selection: Selection, workload: str, regime: str) -> str:
    slug = workload.replace("/", "-")
    return f"blob/workloads/{selection.operation.name}/{slug}-{regime}.safetensors"


def _seed(selection: Selection, workload: str, regime: str) -> int:
    """Of the inputs that the gate met on that shape and regime; 0 if it is not recorded."""
    for row in selection.rows:
        for e in row.trial.errors:
            if (e.workload, e.regime) == (workload, regime) and e.stage == "gate":
                return e.seed
    return 0


def _evaluation(selection: Selection, row: Row, record: MeasurementRecord) -> dict[str, Any]:
    values = selection.fingerprint.values
    libraries = ("torch", "cuda", "driver", "dsl", "ptxas", "tvm_ffi", "python", "kernel_factory")
    errors = [
        e
        for e in row.trial.errors
        if (e.workload, e.regime) == (record.workload, record.regime) and e.max_rel is not None
    ]
    rms = [e.rms_rel for e in errors if e.rms_rel is not None]
    return {
        "status": "PASSED",
        "environment": {
            "hardware": selection.job.gpu,
            "libs": {name: str(values[name]) for name in libraries if values.get(name)},
        },
        "timestamp": selection.job.started_at.isoformat(),
        "log": (
            f"{record.clock.value} clock, {record.method}, L2 {record.cache}: median of"
            f" {len(record.samples_us)} samples, kernels {', '.join(record.kernels)}; trial"
            f" {row.trial.uid}, job {record.job_id}, regime {record.regime}"
        ),
        "correctness": {
            "max_relative_error": max((e.max_rel for e in errors if e.max_rel), default="NaN"),
            "max_absolute_error": "NaN",
            "extra": {
                "definition": "max|x - ref| / max|ref| against a float64 oracle",
                "rms_relative_error": max(rms) if rms else None,
                "seed": _seed(selection, record.workload, record.regime),
            },
        },
        "performance": {
            "latency_ms": record.median_us / 1e3,
            "reference_latency_ms": 0.0,
            "speedup_factor": 0.0,
        },
    }


def _readme(selection: Selection, exporter: Exporter, solution: str, bound: str) -> str:
    s = selection
    name = s.operation.name
    inputs = textwrap.fill(
        "The inputs of the workloads are drawn from stated regimes"
        f" ({exporter.interchange.drawn}), so random numbers cannot stand for them. They are not in"
        " here for their size;",
        99,
    )
    return f"""# {name} as a FlashInfer-Bench data set

Definition, workloads, solution and traces of export `{bound[:12]}` (solution `{solution}`),
campaign `{s.campaign.id}`, measured on one {s.job.gpu} in job `{s.job.id}`.

Times are medians of GPU time, L2 warm, of the campaign's trials. No reference was timed beside
them: `reference_latency_ms` and `speedup_factor` are 0, and `max_absolute_error` is NaN. What the
relative error is over stands in `extra`.

{inputs}

    factory export {name} --format {LAYOUT} --to FOLDER --inputs SHAPE

writes those of a shape to `blob/`, from the operation's generator and the seed in `extra`.
"""


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _lines(values: Iterable[object]) -> bytes:
    return "".join(json.dumps(v) + "\n" for v in values).encode()


# -- inputs ------------------------------------------------------------------------------

_TYPES = {"bfloat16": "BF16", "float32": "F32", "int32": "I32"}


def input_blobs(selection: Selection, shapes: Iterable[str], root: Path) -> list[Path]:
    """Write the inputs of shapes, every regime that has traces, as safetensors files.

    Drawn on the CPU, with the seeds of the gate: the same regimes, not the same bytes as on a GPU.

    Raises
    ------
    UserError
        If a shape has no trace, or a file cannot be written.
    """
    known = workload_names(selection)
    names = _arguments(selection.operation)
    written = []
    for shape in shapes:
        if shape not in known:
            raise UserError(f"no traces of shape {shape!r}; there are some of {', '.join(known)}")
        for workload, regime in _cells(selection):
            if workload == shape:
                found: Regime = selection.operation.regimes[regime]
                drawn = selection.operation.generate(
                    selection.operation.workloads[workload],
                    found,
                    seed=_seed(selection, workload, regime),
                )
                path = root / _blob(selection, workload, regime)
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(_safetensors({n: drawn[n] for n in names}))
                except OSError as error:
                    raise UserError(f"cannot write {path}: {error.strerror}") from error
                written.append(path)
    return written


def _safetensors(tensors: Mapping[str, Any]) -> bytes:
    """Tensors in the safetensors layout: length of a JSON header, header, contents."""
    import torch

    header: dict[str, Any] = {}
    contents = []
    at = 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(torch.uint8).reshape(-1)
        size = int(data.numel())
        header[name] = {
            "dtype": _TYPES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        contents.append(data.numpy().tobytes())
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(contents)
