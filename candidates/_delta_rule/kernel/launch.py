"""How parts of a schedule are compiled and judged, and how a compiled one is bound to tensors.

Compiling needs no GPU.  Parts are compiled apart and kept while the process lives, so that a whole
preset of schedules costs little more than its distinct parts.
"""

from __future__ import annotations

import functools
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candidates._base import Build, BuildError, KernelResources, Schedule, ToolchainError
from candidates._delta_rule.kernel.options import Options
from candidates._delta_rule.kernel.resources import (
    Cubin,
    budget_problems,
    dynamic_smem,
    kernel_resources,
)

if TYPE_CHECKING:
    import torch

    from operations import Inputs, Outputs

__all__ = [
    "PARTS",
    "LoadedSchedule",
    "Part",
    "built",
    "compile_part",
    "compiling",
    "require_gpu",
    "scan_names",
    "scan_part",
]

PARTS = 256
"""Compiled parts of a kind that are remembered: a few hundred bytes each."""


@dataclass(frozen=True)
class Part:
    """Resources of one separately compiled part of a schedule."""

    kernels: tuple[KernelResources, ...]
    code_sha256: str
    seconds: float


def scan_names(segments: int) -> tuple[str, ...]:
    """Prefixes of the scan's kernels, in launch order."""
    inner = {1: (), 2: ("kda_pass1_",)}.get(segments, ("kda_pass1_", "kda_carry_"))
    return (*inner, "kda_scan_")


def built(schedule: Schedule, parts: tuple[Part, ...]) -> Build:
    """What became of a schedule that is made of these parts."""
    kernels = tuple(k for part in parts for k in part.kernels)
    code = "".join(part.code_sha256 for part in parts)
    return Build(
        schedule_key=schedule.key,
        kernels=kernels,
        seconds=sum(part.seconds for part in parts),
        cubin_sha256=hashlib.sha256(code.encode()).hexdigest(),
        problems=tuple(p for kernel in kernels for p in budget_problems(kernel)),
    )


class LoadedSchedule(ABC):
    """A compiled schedule; see :class:`candidates.Runnable`.

    A family's own says by which module of torch functions it is checked and launched, and which
    kernels these are.

    Parameters
    ----------
    config : object
        Configuration of the family's kernels.
    in_place : bool
        Whether the final states may lie over the initial ones: only where no CTA writes a state
        that another one still reads.
    kernel_names : tuple of str
        Prefixes of what is launched, in launch order.
    chunk_tokens : int
        Tokens within which the gate allows later tokens to move earlier outputs by rounding.
    keep : object
        Kept while the schedule is: the modules that its functions came from.
    """

    def __init__(
        self,
        config: Any,
        in_place: bool,
        kernel_names: tuple[str, ...],
        chunk_tokens: int,
        keep: object,
    ) -> None:
        self.config, self._in_place, self._keep = config, in_place, keep
        self.kernel_names, self.chunk_tokens = kernel_names, chunk_tokens

    @abstractmethod
    def _entry(self) -> Any:
        """The module with ``check`` and ``prepare``; imported late, because it imports torch."""

    def _check(self, *arguments: Any) -> Options:
        """Refuse by name what the kernels do not serve; the form of the arguments."""
        options: Options = self._entry().check(*arguments, self._in_place)
        return options

    def bind(self, inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
        """Check fixed tensors once and return the call on them.

        Parameters
        ----------
        inputs : Mapping
            ``q, k, v, g, beta, cu_seqlens``, and ``initial_state`` and ``scale`` or None for
            either; packed tensors on the current GPU.
        outputs : Mapping
            ``o`` and ``final_state``.

        Returns
        -------
        callable
            Launches on the current stream without synchronising; scratch belongs to each call.

        Raises
        ------
        TypeError, ValueError
            Inputs that the kernels do not serve, by name.
        """
        entry = self._entry()
        args = [inputs[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")]
        state, scale = inputs.get("initial_state"), inputs.get("scale")
        if args[-1] is None:
            raise ValueError("cu_seqlens is None; the packed form is bound with its offsets")
        results = {"o": outputs["o"], "final_state": outputs["final_state"]}
        options = self._check(*args, state, *results.values())
        launcher = compiling(
            lambda: entry.prepare(self.config, args[2], args[-1], state, options), str(self.config)
        )
        scale = entry.DEFAULT_SCALE if scale is None else float(scale)
        call = functools.partial(launcher, *args, state, scale, *results.values())

        def run() -> Mapping[str, torch.Tensor]:
            call()
            return results

        return run


@functools.lru_cache(maxsize=PARTS)
def scan_part(bt: int, rows: int, segments: int) -> Part:
    """The scan's, for any family."""

    def job() -> tuple[Any, tuple[Any, ...]]:
        from candidates._delta_rule.kernel import host

        return host.scan_job(bt, rows, segments, True)

    return compile_part("scan", job)


def compile_part(name: str, job: Callable[[], tuple[Any, tuple[Any, ...]]]) -> Part:
    """Compile what ``job`` gives, a host function and its arguments, and read back what it takes.

    Raises
    ------
    BuildError
        It does not compile; the message begins with ``name``.
    ToolchainError
        The DSL is missing or broken.
    """

    def build() -> Part:
        from candidates._delta_rule.kernel import host

        start = time.perf_counter()
        compiled, cubin = host.compile_function(*job(), keep=True)
        seconds = time.perf_counter() - start
        kernels, code = kernel_resources(Cubin(cubin), dynamic_smem(str(compiled.ir_module)))
        return Part(kernels, code, seconds)

    return compiling(build, name)


def compiling(build: Callable[[], Any], what: str) -> Any:
    """Run a compilation; tell a candidate that does not compile from a broken toolchain."""
    try:
        return build()
    except (ToolchainError, BuildError):
        raise
    except (ImportError, OSError) as error:
        raise ToolchainError(f"nvidia-cutlass-dsl cannot compile here: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        if type(error).__name__ == "NoFunctionError":  # of a module that may not be imported
            raise ToolchainError(f"nvidia-cutlass-dsl: {error}") from error
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[0].strip() if lines else "no message"
        raise BuildError(f"{what}: {type(error).__name__}: {reason}") from error


def require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ToolchainError("no CUDA GPU is visible to torch; kernels for sm_90a need one")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        name = torch.cuda.get_device_name()
        raise ToolchainError(
            f"{name} is sm_{major}{minor}; these kernels are machine code for sm_90a alone"
        )
