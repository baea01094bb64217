"""What the export of an operation is made of, declared once for each operation.

:class:`Exporter` is all that rendering, compiling ahead of time and interchange ask of it: which
templates, which kernel sources, which shape a row of the dispatch table serves.  Other
distributions add one through the entry-point group ``kernel_factory.exporters`` (operation name to
an instance).  Importing this module loads neither torch nor the DSL.
"""

from __future__ import annotations

import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from candidates import Schedule
from factory.errors import CommandError
from operations import Workload
from operations.plugins import load

__all__ = ["SHIPPED", "ExportError", "Exporter", "Form", "Interchange", "exporter_of"]

_ENTRY_POINTS = "kernel_factory.exporters"
SHIPPED = {"kda_prefill": "factory.export.kda", "gdn_prefill": "factory.export.gdn"}
"""Operation to the module of its exporter."""

_PARTS = "parts.txt"
_PART = re.compile(r"^( *)# part: (\w+)\n", re.M)
_HEADING = re.compile(r"^=== (\w+)\n", re.M)


class ExportError(CommandError):
    """Nothing can be exported, or an export is not what it was: exit code 1."""


@dataclass(frozen=True)
class Form:
    """One function of the library that is compiled ahead of time.

    Parameters
    ----------
    config : object
        Constants of the kernel, of a class that the kernel package defines.
    with_state : bool
    options : object
        The form of the arguments, likewise.
    """

    config: Any
    with_state: bool
    options: Any

    @property
    def key(self) -> str:
        """In words, as the loader of the folder looks it up."""
        return repr((self.config, self.with_state, self.options))


@dataclass(frozen=True)
class Interchange:
    """An operation in the words of a FlashInfer-Bench definition, and its solution.

    Parameters
    ----------
    axes : Mapping[str, dict]
        As a definition has them: ``type``, ``description`` and, where it is fixed, ``value``.
    named : Mapping[str, str]
        Size as the operation's tensors write it to its axis, where the names differ.
    constraints, tags : tuple of str
        Of the definition.
    scalars : Mapping[str, str]
        Arguments that are numbers, each fp32, with what they mean.
    drawn : str
        What of the inputs random numbers would miss, in words.
    oracle : tuple of (str, str)
        File of the folder that holds the reference, and the line before which it ends.
    run : str
        What makes the reference a ``run`` of the definition's arguments.
    main : str
        The solution's entry point: ``run`` of arguments and outputs, which calls the folder.
    """

    axes: Mapping[str, Mapping[str, Any]]
    named: Mapping[str, str]
    constraints: tuple[str, ...]
    tags: tuple[str, ...]
    scalars: Mapping[str, str]
    drawn: str
    oracle: tuple[str, str]
    run: str
    main: str


class Exporter(ABC):
    """How the winner of one operation becomes a folder that stands alone.

    Attributes
    ----------
    operation : str
        Also the name of the exported function.
    templates : tuple of (str, str)
        Package and folder in it: where the files of an export lie that no campaign decides.  Of
        one name the first is taken.  A line ``# part: NAME`` of a template stands for what follows
        the line ``=== NAME`` in the ``parts.txt`` of the first folder that has it there.
    words : Mapping[str, str]
        What is put for what in templates, their parts and their file names.
    packages : Mapping[str, str]
        Package of kernel modules to its folder in the export; the first one holds ``roots``.
    roots : tuple of str
        Modules of the first package that the export calls; what they import comes along.
    left_out : tuple of str
        Parameters of the kernel's entry point that the exported function does not have.
    phrases : tuple of (str, str)
        Pattern and replacement for what the contract says of these.
    configs : Mapping[str, str]
        Form of a schedule to the class of the entry point that holds its constants.
    shape_words, shape_head : str
        What a shape of the dispatch table is made of: as the start of a sentence, and as the names
        of the operation's workloads are.
    outputs : tuple of (str, str)
        Output of the operation to the argument of the exported function that takes its tensor.
    homes : tuple of str
        Files of the folder that are for other packages, and no part of a solution.
    """

    operation: str
    templates: tuple[tuple[str, str], ...]
    words: Mapping[str, str]
    packages: Mapping[str, str]
    roots: tuple[str, ...] = ("entry", "host")
    left_out: tuple[str, ...] = ("schedule",)
    phrases: tuple[tuple[str, str], ...] = ()
    configs: Mapping[str, str]
    shape_words: str
    shape_head: str
    outputs: tuple[tuple[str, str], ...]
    homes: tuple[str, ...] = ()

    @property
    @abstractmethod
    def interchange(self) -> Interchange:
        """What an interchange format asks for."""

    @abstractmethod
    def shape(self, workload: Workload) -> tuple[int, ...]:
        """By which the exported function chooses a row of the dispatch table."""

    @abstractmethod
    def axes(self, workload: Workload) -> dict[str, int]:
        """Size on a workload of every axis of :attr:`interchange` that varies."""

    @abstractmethod
    def scalars(self, workload: Workload) -> dict[str, float]:
        """Arguments that are numbers, on a workload."""

    @abstractmethod
    def launched(self, schedule: Schedule) -> tuple[tuple[str, ...], int]:
        """Prefixes of the kernel names of a schedule, and tokens that it computes together."""

    @abstractmethod
    def notes(self, bound: float | None) -> tuple[str, ...]:
        """What the contract of the exported function adds to that of the entry point.

        ``bound`` is the most negative gate that its table is right for; None means any.
        """

    @abstractmethod
    def require_dsl(self) -> str:
        """Version of the DSL.

        Raises
        ------
        ToolchainError
            If it is missing or broken.
        """

    @abstractmethod
    def forms(self, schedules: Sequence[Schedule]) -> tuple[Form, ...]:
        """What is compiled ahead of time for the schedules of a dispatch table."""

    @abstractmethod
    def compile(self, form: Form) -> Any:
        """The DSL's compiled object of the call that the entry point would make for a form."""

    # -- templates -----------------------------------------------------------------------

    def files(self) -> dict[str, str]:
        """Path in the export to text, of everything that comes from templates."""
        found: dict[str, Traversable] = {}
        parts: dict[str, str] = {}
        for package, name in self.templates:
            folder = files(package) / name
            for path, file in _walk(folder, ""):
                found.setdefault(path, file)
            parts = _parts(folder) | parts
        return {
            self.filled(path): self.filled(_whole(file.read_text("utf-8"), parts))
            for path, file in sorted(found.items())
        }

    def filled(self, text: str) -> str:
        """``text`` with the words of this operation, longer ones first."""
        for word in sorted(self.words, key=lambda w: (-len(w), w)):
            text = text.replace(word, self.words[word])
        return text


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _walk(entry, f"{prefix}{entry.name}/")
        elif prefix or entry.name != _PARTS:
            yield prefix + entry.name, entry


def _parts(folder: Traversable) -> dict[str, str]:
    """Parts of a folder of templates by name; empty if it has none."""
    file = folder / _PARTS
    if not file.is_file():
        return {}
    _, *named = _HEADING.split(file.read_text("utf-8"))
    return dict(zip(named[::2], named[1::2], strict=True))


def _whole(text: str, parts: Mapping[str, str]) -> str:
    """A template with its parts in place, indented as the lines that stand for them."""

    def put(found: re.Match[str]) -> str:
        if found[2] not in parts:
            raise ExportError(f"a template asks for part {found[2]}, and there is none")
        return textwrap.indent(parts[found[2]], found[1])

    return _PART.sub(put, text)


def exporter_of(operation: str) -> Exporter:
    """The exporter of an operation.

    Raises
    ------
    ExportError
        If none is shipped or plugged in.
    """
    if operation in SHIPPED:
        found: Exporter = import_module(SHIPPED[operation]).EXPORTER
        return found
    plugged = {entry.name: entry for entry in entry_points(group=_ENTRY_POINTS)}
    if operation in plugged:
        return load(plugged[operation], Exporter)  # type: ignore[type-abstract]
    known = ", ".join([*SHIPPED, *plugged])
    raise ExportError(f"there is no exporter for {operation}; there is one for {known}")
