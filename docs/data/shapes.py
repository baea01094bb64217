"""Shapes of what reading commands print with ``--json``, for docs/json.md and its test."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

from pydantic import BaseModel, ConfigDict

from docs.data.meanings import MEANINGS
from docs.data.pages import table
from leaderboard import (
    ClaimView,
    Comparison,
    ErrorRecord,
    FinalRow,
    ImportResult,
    MeasurementRecord,
    RejectedRow,
    ResultRow,
    ShapeResult,
    StageRecord,
    TrialRecord,
)
from leaderboard.views import BestPoint, ShapeRatio, StageCount, WorstError

__all__ = ["SHAPES", "Shape", "blocks"]


_ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc|obj):`~?([^`]+)`")
"""Sphinx's roles in docstrings."""


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Status(_Shape):
    id: str
    name: str
    operation: str
    status: str
    """`running`, `interrupted`, `finished` or `failed`."""
    clock: str
    """The clock that ranks it."""
    budget: int
    finished: int
    """Trials that count against the budget."""
    statuses: dict[str, int]
    """How many trials have each verdict."""
    stages: list[StageCount]
    spared: dict[str, int] | None
    """Trials that never met the GPU, by the stage that stopped them."""
    best: BestPoint | None
    """The best so far."""
    winner: FinalRow | None
    """Of the finals."""
    driver: str | None
    """Who holds it: `host:pid`."""
    heartbeat_at: str | None
    created_at: str
    updated_at: str


class Show(TrialRecord):
    model_config = ConfigDict(extra="forbid", frozen=True)

    fingerprint: dict[str, Any] | None
    """Machine and toolchain of its job, names to versions."""
    run_again: list[str]
    """Commands."""


class Again(_Shape):
    id: str
    """The stage."""
    then: str
    now: str
    reason: str


class Finding(_Shape):
    id: str
    status: str
    """`ok`, `note` or `fault`."""
    found: str
    needed_for: str
    fix: str


class Tensor(_Shape):
    id: str
    dims: list[str | int]
    dtype: str
    role: str
    doc: str


class RegimeShape(_Shape):
    id: str
    role: str
    gate_floor: float | str
    severity: float | None
    statistics: dict[str, float | str]
    source: str


class WorkloadShape(_Shape):
    id: str
    held_out: bool


class ToleranceShape(_Shape):
    id: str
    max_rel: float
    rms_rel: float
    source: str


class Contract(_Shape):
    served: list[str]
    declined: list[str]


class Space(_Shape):
    id: str
    offered: int


class OperationShape(_Shape):
    id: str
    version: str
    tensors: list[Tensor]
    """`id`, `dims`, `dtype`, `role`, `doc`."""
    regimes: list[RegimeShape]
    """`id`, `role`, `gate_floor` (text where not finite), `severity`, `statistics`, `source`."""
    workloads: list[WorkloadShape]
    """`id`, `held_out`."""
    tolerances: list[ToleranceShape]
    """`id`, `max_rel`, `rms_rel`, `source`."""
    contract: Contract
    """`served` and `declined`, lists of lines."""
    spaces: list[Space]
    """`id`, `offered`."""


class Collected(_Shape):
    store: str
    """Folder of the artefact store."""
    dry_run: bool
    kept: int
    kept_bytes: int
    freed: int
    """Entries removed, or with `--dry-run` those that would be."""
    freed_bytes: int


Shape = type[BaseModel]

SHAPES: dict[str, tuple[str, Shape]] = {
    "factory leaderboard --json": ("a list of objects", ResultRow),
    "factory leaderboard --shapes --json": ("a list of objects", ShapeResult),
    "factory leaderboard --rejected --json": ("a list of objects", RejectedRow),
    "factory leaderboard claims --json": ("a list of objects", ClaimView),
    "factory leaderboard import FILE --json": ("one object", ImportResult),
    "factory status --json": ("a list of objects; with CAMPAIGN one of them", Status),
    "factory show TRIAL --json": ("one object", Show),
    "factory show TRIAL --again --json": ("a list of objects, one for each stage", Again),
    "factory compare A B --json": ("one object", Comparison),
    "factory operations --json": ("a list of objects; with OPERATION one of them", OperationShape),
    "factory doctor --json": ("a list of objects", Finding),
    "factory gc --json": ("one object", Collected),
}
"""Command to what it prints."""

_PARTS: tuple[Shape, ...] = (
    BestPoint,
    ErrorRecord,
    FinalRow,
    MeasurementRecord,
    ShapeRatio,
    StageCount,
    StageRecord,
    WorstError,
)
"""Objects inside those."""


def blocks() -> dict[str, str]:
    """One block: every command with the keys of its objects."""
    parts = []
    for command, (what, shape) in SHAPES.items():
        parts.append(f"## {command.removesuffix(' --json')}\n\n`{command}`: {what}.\n")
        parts.append(_keys(shape) + "\n")
    parts.append("## Parts\n")
    for shape in _PARTS:
        parts.append(f"### {shape.__name__}\n\n{_keys(shape)}\n")
    return {"shapes": "\n".join(parts)}


def _keys(shape: Shape) -> str:
    docs = _docs(shape)
    return table(
        "key | type | meaning",
        (
            [
                f"`{name}`",
                f"`{_type(field.annotation)}`",
                docs.get(name) or _meaning(name, field.annotation),
            ]
            for name, field in shape.model_fields.items()
        ),
    )


def _meaning(name: str, annotation: Any) -> str:
    """What a key means that its class has no words for.

    Raises
    ------
    KeyError
        If nobody has.
    """
    if name == "id":
        return "Number of the trial in this database." if annotation is int else "Its name."
    return MEANINGS[name]


def _type(annotation: Any) -> str:
    """An annotation in words of JSON."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if getattr(annotation, "__args__", None):
        text = str(annotation)
    for module in ("leaderboard.records.", "leaderboard._verdicts.", "leaderboard.views."):
        text = text.replace(module, "")
    text = text.replace("docs.data.shapes.", "").replace("typing.", "").replace("datetime.", "")
    words = {
        "Clock": "text",
        "TrialStatus": "text",
        "StageStatus": "text",
        "Verdict": "text",
        "str": "text",
        "datetime": "moment",
        "float": "number",
        "int": "integer",
        "bool": "true or false",
        "None": "null",
        "NoneType": "null",
        "Any": "any",
    }
    found, word = "", ""
    for c in text + " ":
        if c.isidentifier() or (word and c.isalnum()):
            word += c
            continue
        found, word = found + words.get(word, word) + c, ""
    found = found.strip().replace("tuple[", "list[").replace(", ...]", "]")
    return found.replace(" | ", " or ")  # a table takes "|" for its own


def _docs(shape: Shape) -> dict[str, str]:
    """Texts under the fields of a class and of its bases."""
    found: dict[str, str] = {}
    for cls in reversed(shape.__mro__):
        if not (isinstance(cls, type) and issubclass(cls, BaseModel)) or cls is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        for here, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(here, ast.AnnAssign)
                and isinstance(here.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                text = _ROLE.sub(r"`\1`", " ".join(after.value.value.split()))
                text = text.replace("``", "`").replace("|", "\\|")
                found[here.target.id] = re.sub(r"\bNone\b", "null", text)
    return found
