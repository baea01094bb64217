"""Somebody's own kernel as a candidate: one Python file, a declaration and one function.

A *user file* declares, as literals at its top level,

``OPERATION : str``
    What it computes, for example ``"kda_prefill"``.
``KERNELS : tuple of str``
    Prefixes of the names of all kernels, copies and fills that it launches, as
    the profiler shows them (a leading ``void`` is ignored).  A launched name
    that matches none is undeclared and makes its time invalid.
``GATE_BOUND : float or None``
    Most negative per-token log gate it is right for; None, the default, means any.
``DEVICES : tuple of str``
    Where it runs: ``"cuda"``, ``"cpu"`` or both; default ``("cuda",)``.
``CHUNK : int or None``
    Rows (tokens) that it computes together, where causality may hold to a
    rounding only; None, the default, leaves that to the operation.
``BITWISE_CAUSAL : bool``
    Whether later rows never change a bit of earlier ones; it is held to that.

and defines exactly one of

``bind(inputs, outputs)``
    Prepare a call on fixed tensors and return a function of no arguments that
    makes it; see :meth:`candidates.Runnable.bind`.
``run(inputs, outputs)``
    The call itself, where there is nothing to prepare.

Both get argument name to tensor, scalar or None, and output name to tensor.
The call launches on the current stream, does not synchronise, and fills
``outputs``; it may return output name to tensor instead, a ``dict`` of
``torch.Tensor`` on the device of the inputs and no subclass of either, which is
copied.
``emulate(inputs)`` is optional: the kernel's arithmetic on CPU tensors, as
output name to tensor.

The declaration is read from the syntax tree: nothing of the file runs in the
process that judges it.  It is imported in a process of its own, so importing it
must work, and must not need a GPU.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from candidates._base import (
    Build,
    BuildError,
    Family,
    Parameter,
    Runnable,
    Schedule,
    ToolchainError,
)
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["Declaration", "UserFamily", "UserFileError", "read_user_file"]

_DEVICES = ("cuda", "cpu")
_ENTRIES = {"bind": ("inputs", "outputs"), "run": ("inputs", "outputs"), "emulate": ("inputs",)}
"""Functions of the protocol and the arguments that they are called with."""
_DECLARED = ("OPERATION", "KERNELS", "GATE_BOUND", "DEVICES", "CHUNK", "BITWISE_CAUSAL")
_LARGEST_BYTES = 4 << 20

Call = Callable[[], Mapping[str, Any]]


class UserFileError(ValueError):
    """The file cannot be read or does not keep the protocol; one line with the fix."""


@dataclass(frozen=True)
class Declaration:
    """What a user file says of itself.

    Parameters
    ----------
    operation : str
    kernels : tuple of str
        Prefixes of launched names.
    gate_bound : float or None
    devices : tuple of str
        Of ``"cuda"`` and ``"cpu"``.
    chunk : int or None
        Rows computed together.
    bitwise_causal : bool
    entry : str
        ``"bind"`` or ``"run"``.
    emulates : bool
        Whether it defines ``emulate``.
    """

    operation: str
    kernels: tuple[str, ...]
    gate_bound: float | None
    devices: tuple[str, ...]
    chunk: int | None
    bitwise_causal: bool
    entry: str
    emulates: bool


def read_user_file(path: Path | str, *, operation: str | None = None) -> UserFamily:
    """Read a user file without running any of it.

    Parameters
    ----------
    path : Path or str
    operation : str, optional
        For a file that declares none; one that declares another is refused.

    Raises
    ------
    UserFileError
        Naming the file, what is wrong and the fix.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserFileError(f"{path} is no file of source")  # a pipe would be waited for
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserFileError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _LARGEST_BYTES:
        raise UserFileError(
            f"{path.name} has {len(data) / 2**20:.1f} MiB; a candidate is one file of source,"
            f" at most {_LARGEST_BYTES >> 20} MiB"
        )
    try:
        tree = ast.parse(data, filename=str(path))
    except SyntaxError as error:
        where = f" line {error.lineno}" if error.lineno else ""
        raise UserFileError(f"{path.name}{where} is not Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserFileError(f"{path.name} is not Python: {type(error).__name__}") from error
    try:
        found = _declaration(tree, operation)
    except UserFileError as error:
        raise UserFileError(f"{path.name}: {error}") from error
    return UserFamily(str(path), data, found)


class UserFamily(Family):
    """A family of one kernel, from one file.

    Its schedules are ``form=kernel`` and, where the file defines ``emulate``,
    ``form=emulation``.  The latter is loaded and gated like a kernel, on CPU
    tensors and in a process of its own, because it is foreign code too.

    Parameters
    ----------
    path : str
        Absolute.
    source : bytes
        As it was read; loading refuses a file that has changed since.
    declaration : Declaration
    """

    name = "user"
    parameters: tuple[Parameter, ...] = (
        Parameter("form", ("kernel", "emulation"), "the kernel, or its arithmetic on the CPU"),
    )

    def __init__(self, path: str, source: bytes, declaration: Declaration) -> None:
        self.path = path
        self.source = source
        self.declaration = declaration
        self.operation = declaration.operation

    @property
    def kernel(self) -> Schedule:
        return self.schedule({"form": "kernel"})

    @property
    def emulation(self) -> Schedule:
        return self.schedule({"form": "emulation"})

    def presets(self) -> tuple[str, ...]:
        return ("all",)

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        if preset != "all":
            raise ValueError(f"unknown preset {preset!r}; a user file has 'all'")
        return (self.kernel, self.emulation) if self.declaration.emulates else (self.kernel,)

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        if schedule == self.emulation and not self.declaration.emulates:
            return (f"{Path(self.path).name} defines no emulate(inputs)",)
        return ()

    def gate_bound(self, schedule: Schedule) -> float | None:
        return self.declaration.gate_bound

    def emulate(self, schedule: Schedule, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Import the file and emulate, in this process: call it only where foreign code may run."""
        return _mapping(self._function("emulate")(inputs), "emulate")

    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        """Refuse: nothing is known of a user's kernel but what is measured.

        Raises
        ------
        ValueError
        """
        raise ValueError(f"{Path(self.path).name} has no cost model; its time can only be measured")

    def source_hash(self) -> str:
        """sha256 of the file."""
        return hashlib.sha256(self.source).hexdigest()

    def compile(self, schedule: Schedule) -> Build:
        """Refuse: a user file compiles what it needs when it is loaded and bound.

        Raises
        ------
        BuildError
        """
        raise BuildError(f"{Path(self.path).name} is compiled by itself, when it is loaded")

    def load(self, schedule: Schedule) -> Runnable:
        """Import the file in this process.

        Raises
        ------
        BuildError
            If the file has changed, or does not define what it was read to define.
        ToolchainError
            If it imports a distribution that is not installed.
        """
        if schedule == self.emulation:
            bind = _emulating(self._function("emulate"))
        elif self.declaration.entry == "bind":
            bind = _binding(self._function("bind"))
        else:
            bind = _running(self._function("run"))
        said = self.declaration
        return _Runnable(said.kernels, said.chunk, said.bitwise_causal, bind)

    def _function(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module(), name, None)
        if not callable(function):
            raise BuildError(f"{Path(self.path).name}: {name} is not a function after import")
        found: Callable[..., Any] = function
        return found

    def _module(self) -> ModuleType:
        """The file as a module, run once in a process."""
        identity = hashlib.sha256(self.path.encode() + b"\0" + self.source).hexdigest()
        name = f"kernel_factory_user_{identity[:16]}"
        if name in sys.modules:
            return sys.modules[name]
        file = Path(self.path)
        # Compilers of kernels read their source again through the file's name.
        if not file.is_file() or file.read_bytes() != self.source:
            raise BuildError(f"{file.name} changed while it was being checked")
        spec = spec_from_file_location(name, self.path)
        assert spec is not None
        module = module_from_spec(spec)
        linecache.checkcache(self.path)
        sys.modules[name] = module
        try:
            # Not through the loader: it would trust, and leave behind, a cached bytecode file.
            exec(compile(self.source, self.path, "exec", dont_inherit=True), module.__dict__)
        except ModuleNotFoundError as error:
            del sys.modules[name]
            raise self._missing(error) from error
        except BaseException:
            del sys.modules[name]
            raise
        return module

    def _missing(self, error: ModuleNotFoundError) -> Exception:
        file, top = Path(self.path), (error.name or str(error)).partition(".")[0]
        if (file.parent / top).is_dir() or (file.parent / f"{top}.py").is_file():
            return BuildError(
                f"{file.name} imports {top!r} from beside it; a candidate is one file, or imports"
                " installed distributions"
            )
        return ToolchainError(f"{file.name} imports {top!r}, which is not installed; install it")


@dataclass(frozen=True)
class _Runnable:
    kernel_names: tuple[str, ...]
    chunk_tokens: int | None
    bitwise_causal: bool
    binder: Callable[[Inputs, Outputs], Call]

    def bind(self, inputs: Inputs, outputs: Outputs) -> Call:
        return self.binder(inputs, outputs)


def _binding(function: Callable[..., Any]) -> Callable[[Inputs, Outputs], Call]:
    def bind(inputs: Inputs, outputs: Outputs) -> Call:
        made = function(inputs, outputs)
        if not callable(made):
            raise TypeError(f"bind returns {type(made).__name__}, not a function of no arguments")

        def call() -> Mapping[str, Any]:
            returned = made()
            return outputs if returned is None else returned

        return call

    return bind


def _running(function: Callable[..., Any]) -> Callable[[Inputs, Outputs], Call]:
    def bind(inputs: Inputs, outputs: Outputs) -> Call:
        def call() -> Mapping[str, Any]:
            returned = function(inputs, outputs)
            return outputs if returned is None else returned

        return call

    return bind


def _emulating(function: Callable[..., Any]) -> Callable[[Inputs, Outputs], Call]:
    def bind(inputs: Inputs, outputs: Outputs) -> Call:
        return lambda: _mapping(function(inputs), "emulate")

    return bind


def _mapping(returned: Any, name: str) -> dict[str, Any]:
    if not isinstance(returned, Mapping):
        raise TypeError(f"{name} returns {type(returned).__name__}, not output name to tensor")
    return dict(returned)


# -- reading the declaration -------------------------------------------------------------


def _declaration(tree: ast.Module, operation: str | None) -> Declaration:
    values: dict[str, Any] = {}
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in _ENTRIES:
            functions[node.name] = _checked(node, functions)
        for name, value in _assigned(node):
            if name in values:
                raise UserFileError(f"{name} is assigned twice (line {node.lineno}); keep one")
            values[name] = _literal(name, value)
    entries = [name for name in ("bind", "run") if name in functions]
    if len(entries) != 1:
        found = "both bind and run" if entries else "neither bind nor run"
        raise UserFileError(
            f"defines {found}; define one of bind(inputs, outputs) and run(inputs, outputs)"
        )
    declared = values.get("OPERATION", operation)
    if not isinstance(declared, str) or not declared:
        raise UserFileError('declare what it computes, for example OPERATION = "kda_prefill"')
    if operation is not None and declared != operation:
        raise UserFileError(f"declares OPERATION = {declared!r}, but {operation!r} was asked for")
    return Declaration(
        operation=declared,
        kernels=_kernels(values.get("KERNELS")),
        gate_bound=_bound(values.get("GATE_BOUND")),
        devices=_devices(values.get("DEVICES", ("cuda",))),
        chunk=_chunk(values.get("CHUNK")),
        bitwise_causal=_flag("BITWISE_CAUSAL", values.get("BITWISE_CAUSAL", False)),
        entry=entries[0],
        emulates="emulate" in functions,
    )


def _assigned(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    """Declared names that a top-level statement assigns, with their expressions."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = node.targets
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    else:
        return []
    assert node.value is not None
    names = [t.id for t in targets if isinstance(t, ast.Name) and t.id in _DECLARED]
    return [(name, node.value) for name in names]


def _literal(name: str, value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise UserFileError(
            f"{name} (line {value.lineno}) must be a literal: it is read without running the file"
        ) from None


def _checked(
    node: ast.FunctionDef | ast.AsyncFunctionDef, known: Mapping[str, Any]
) -> ast.FunctionDef | ast.AsyncFunctionDef:
    wanted = _ENTRIES[node.name]
    shown = f"{node.name}({', '.join(wanted)})"
    if node.name in known:
        raise UserFileError(f"{node.name} is defined twice (line {node.lineno}); keep one")
    if isinstance(node, ast.AsyncFunctionDef):
        raise UserFileError(f"{node.name} (line {node.lineno}) is async; define {shown}")
    most = len(node.args.posonlyargs) + len(node.args.args)
    least = most - len(node.args.defaults)
    required = [d for d in node.args.kw_defaults if d is None]
    fits = least <= len(wanted) and (most >= len(wanted) or node.args.vararg is not None)
    if not fits or required:
        raise UserFileError(
            f"{node.name} (line {node.lineno}) is called as {shown} and does not take that"
        )
    return node


def _kernels(value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(isinstance(n, str) and n.removeprefix("void ").strip() for n in names):
        raise UserFileError(
            "declare the prefixes of all kernel names that it launches, not empty, for example"
            ' KERNELS = ("my_kernel_",)'
        )
    return names


def _bound(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value <= 0:
        raise UserFileError(
            f"GATE_BOUND is {value!r}; give the most negative log gate it is right for, for example"
            " -5.0, or None for any"
        )
    return float(value)


def _devices(value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, list | tuple) else ()
    if not names or not all(n in _DEVICES for n in names):
        raise UserFileError(f'DEVICES is {value!r}; give ("cuda",), ("cpu",) or ("cuda", "cpu")')
    return names


def _chunk(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise UserFileError(
            f"CHUNK is {value!r}; give the rows that it computes together, for example 64, or None"
        )
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserFileError(f"{name} is {value!r}; give True or False")
    return value
