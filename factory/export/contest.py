"""The exported folder and the campaign's candidate, as two schedules of one family.

So the job gates and times both as it does any candidate: each in a process of its own, the folder
through its own entry point.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candidates import Build, BuildError, Family, Parameter, Runnable, Schedule
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["CANDIDATE", "EXPORT", "Contest", "Vendored"]

_PARAMETERS = (Parameter("contestant", ("export", "candidate"), "the folder, or what it is of"),)
EXPORT = Schedule.of(_PARAMETERS, {"contestant": "export"})
CANDIDATE = Schedule.of(_PARAMETERS, {"contestant": "candidate"})


@dataclass(frozen=True)
class Vendored:
    """How to call an exported folder.

    Parameters
    ----------
    folder : str
        Absolute.
    function : str
        Its entry point, a name of the package; called with the operation's inputs by name.
    outputs : tuple of (str, str)
        Output name to the argument that takes its tensor.
    kernels : tuple of str
        Prefixes of the names that it may launch.
    chunk : int or None
        Rows that it computes together.
    export_hash : str
        What the folder must still be when it is loaded.
    foreign : tuple of str
        Prefixes of modules that it must not bring in: it stands alone.
    """

    folder: str
    function: str
    outputs: tuple[tuple[str, str], ...]
    kernels: tuple[str, ...]
    chunk: int | None
    export_hash: str
    foreign: tuple[str, ...] = ()

    def load(self) -> Runnable:
        """Import the folder in this process, as a package of its own name.

        Raises
        ------
        BuildError
            If its files are not those of the export, or it brings in a module that it must not.
        """
        from factory.errors import UserError
        from factory.export.folder import check

        folder = Path(self.folder)
        try:
            found = check(folder)
        except UserError as error:
            raise BuildError(str(error)) from error
        if found.status != "unaltered" or found.export_hash != self.export_hash:
            raise BuildError(f"{folder.name} is not the export that is put to the gate any more")
        before = set(sys.modules)
        sys.path.insert(0, str(folder.parent))
        try:
            package = importlib.import_module(folder.name)
        finally:
            sys.path.remove(str(folder.parent))
        if Path(str(package.__file__)).parent != folder:
            raise BuildError(f"{folder.name} is the name of another module; export to another name")
        return _Loaded(self, getattr(package, self.function), before)


@dataclass(frozen=True)
class _Loaded:
    """A :class:`candidates.Runnable` of an exported folder."""

    vendored: Vendored
    function: Callable[..., Any]
    before: set[str]

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return self.vendored.kernels

    @property
    def chunk_tokens(self) -> int | None:
        return self.vendored.chunk

    def bind(self, inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, Any]]:
        """The folder's entry point on these tensors: nothing of a call is done beforehand."""
        function, arguments = self.function, dict(inputs)
        for name, argument in self.vendored.outputs:
            arguments[argument] = outputs[name]
        known = [False]

        def call() -> Mapping[str, Any]:
            function(**arguments)
            if not known[0]:
                known[0] = True
                self._stands_alone()
            return outputs

        return call

    def _stands_alone(self) -> None:
        for name in set(sys.modules) - self.before:
            for prefix in self.vendored.foreign:
                if name == prefix or name.startswith(prefix + "."):
                    raise BuildError(f"the folder brings in {name}: it does not stand alone")


@dataclass(frozen=True)
class Contest(Family):
    """The family of the two.

    Parameters
    ----------
    vendored : Vendored
    family : Family
        Of the candidate.
    candidate : Schedule
    bound : float or None
        Most negative gate that the folder is right for.
    """

    vendored: Vendored
    family: Family
    candidate: Schedule
    bound: float | None

    name = "export"
    parameters = _PARAMETERS

    @property
    def operation(self) -> str:  # type: ignore[override]
        return self.family.operation

    def presets(self) -> tuple[str, ...]:
        return ("all",)

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        return (EXPORT, CANDIDATE)

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        return ()

    def gate_bound(self, schedule: Schedule) -> float | None:
        return self.bound if schedule == EXPORT else self.family.gate_bound(self.candidate)

    def emulate(self, schedule: Schedule, inputs: Inputs) -> dict[str, torch.Tensor]:
        return self.family.emulate(self.candidate, inputs)

    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        return self.family.modelled_us(self.candidate, workload)

    def source_hash(self) -> str:
        return self.family.source_hash()

    def compile(self, schedule: Schedule) -> Build:
        return self.family.compile(self.candidate)

    def load(self, schedule: Schedule) -> Runnable:
        return self.vendored.load() if schedule == EXPORT else self.family.load(self.candidate)
