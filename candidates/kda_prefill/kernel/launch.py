"""Compile schedules of the kernels, judge what the compiler made, and load them on a GPU.

:func:`compile_schedule` needs no GPU.  PREP and SCAN are compiled apart for it and kept while
the process lives, so that a whole preset of schedules costs little more than its distinct
parts; :func:`load_schedule` compiles both into the one call that is launched.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from candidates._base import Build, BuildError, KernelResources, Schedule, ToolchainError
from candidates._delta_rule.kernel.resources import (
    Cubin,
    budget_problems,
    dynamic_smem,
    kernel_resources,
)
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.kda_prefill.kernel.config import Config, FusedConfig
from candidates.kda_prefill.kernel.fused_plan import BT

if TYPE_CHECKING:
    import torch

    from operations import Inputs, Outputs

__all__ = [
    "LoadedSchedule",
    "compile_schedule",
    "compiling",
    "config_of",
    "kernel_names",
    "load_schedule",
    "require_gpu",
]

_PARTS = 256  # compiled parts remembered: a few hundred bytes each


@dataclass(frozen=True)
class _Part:
    """Resources of one separately compiled part of a schedule."""

    kernels: tuple[KernelResources, ...]
    code_sha256: str
    seconds: float


def kernel_names(segments: int) -> tuple[str, ...]:
    """Prefixes of the kernels a schedule launches, in launch order."""
    inner = {1: (), 2: ("kda_pass1_",)}.get(segments, ("kda_pass1_", "kda_carry_"))
    return ("kda_prep_", *inner, "kda_scan_")


_FUSED_NAMES = ("kda_fused_", "kda_fixup")


def compile_schedule(schedule: Schedule) -> Build:
    """Compile one schedule to sm_90a machine code and judge it; needs no GPU.

    Parameters
    ----------
    schedule : Schedule
        Choices of the space: of ``form=split``, ``bt``, ``anchor``, ``rows``, ``segments`` and,
        for sub-block pairs, ``block`` and ``diagonal``; of ``form=fused``, ``frame``,
        ``builders`` and ``waves``.

    Returns
    -------
    Build
        ``problems`` holds broken budgets: spills, shared memory, threads, registers.  ``seconds``
        is what its parts took when they were compiled; a part that another schedule of this
        process brought along counts in both.

    Raises
    ------
    BuildError
        The schedule does not compile.
    ToolchainError
        The DSL is missing or broken.
    """
    config = config_of(schedule)
    require_dsl()
    if isinstance(config, FusedConfig):
        parts: tuple[_Part, ...] = (_fused_part(replace(config, waves=1)),)
    else:
        parts = (
            _prep_part(_without_scan(config)),
            _scan_part(config.bt, config.rows, config.segments),
        )
    kernels = tuple(k for part in parts for k in part.kernels)
    return Build(
        schedule_key=schedule.key,
        kernels=kernels,
        seconds=sum(part.seconds for part in parts),
        cubin_sha256=hashlib.sha256(
            "".join(part.code_sha256 for part in parts).encode()
        ).hexdigest(),
        problems=tuple(p for kernel in kernels for p in budget_problems(kernel)),
    )


def load_schedule(schedule: Schedule) -> LoadedSchedule:
    """Compile one schedule and make it launchable on the current GPU.

    The variant that takes an initial state is compiled here; the other one when a call without
    a state is first bound.

    Raises
    ------
    BuildError
        The schedule does not compile.
    ToolchainError
        The DSL is missing or broken, or the current GPU is no sm90.
    """
    config = config_of(schedule)
    require_dsl()
    require_gpu()
    compiling(lambda: _entry().compiled(config, True), schedule.key)
    return LoadedSchedule(config)


class LoadedSchedule:
    """A compiled schedule; see :class:`candidates.Runnable`.

    Parameters
    ----------
    config : Config or FusedConfig
    keep : object
        Kept while the schedule is: the modules that its functions came from.

    Attributes
    ----------
    kernel_names : tuple of str
    chunk_tokens : int
        Tokens within which the gate allows later tokens to move earlier outputs by rounding.
    """

    def __init__(self, config: Config | FusedConfig, keep: object = None) -> None:
        self.config = config
        self._keep = keep
        # In place only where no CTA writes a state that another one still reads.
        self._in_place = False
        self.kernel_names: tuple[str, ...] = _FUSED_NAMES
        self.chunk_tokens = BT
        if isinstance(config, Config):
            self._in_place = config.segments == 1
            self.kernel_names = kernel_names(config.segments)
            self.chunk_tokens = config.bt

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
        entry = _entry()
        args = [inputs[name] for name in ("q", "k", "v", "g", "beta", "cu_seqlens")]
        state, scale = inputs.get("initial_state"), inputs.get("scale")
        if args[-1] is None:
            raise ValueError("cu_seqlens is None; the packed form is bound with its offsets")
        options = entry.check(*args, state, outputs["o"], outputs["final_state"], self._in_place)
        if isinstance(self.config, Config):
            entry.arguments.decline_for_split(options)
        launcher = compiling(
            lambda: entry.prepare(self.config, args[2], args[-1], state, options), str(self.config)
        )
        call = functools.partial(
            launcher,
            *args,
            state,
            entry.DEFAULT_SCALE if scale is None else float(scale),
            outputs["o"],
            outputs["final_state"],
        )
        results = {"o": outputs["o"], "final_state": outputs["final_state"]}

        def run() -> Mapping[str, torch.Tensor]:
            call()
            return results

        return run


def _entry() -> Any:
    """The module of torch functions; imported late, because it imports torch."""
    from candidates.kda_prefill.kernel import entry

    return entry


def config_of(schedule: Schedule) -> Config | FusedConfig:
    """The :class:`Config` or :class:`FusedConfig` of a schedule."""
    values = schedule.as_dict()
    try:
        if values.pop("form", "split") == "fused":
            return FusedConfig.of(values)
        return Config.of(values)
    except ValueError as error:
        raise BuildError(f"{schedule.key}: {error}") from error


def _without_scan(config: Config) -> Config:
    """The configuration with what PREP does not depend on at its default, if it can be."""
    plain = replace(config, rows=64, segments=1)
    return plain if plain.unroll == config.unroll else replace(config, segments=1)


@functools.lru_cache(maxsize=_PARTS)
def _prep_part(config: Config) -> _Part:
    return _compile_part("prep", lambda host: host.prep_job(config))


@functools.lru_cache(maxsize=_PARTS)
def _scan_part(bt: int, rows: int, segments: int) -> _Part:
    config = Config(bt, "start", rows, segments)
    return _compile_part("scan", lambda host: host.scan_job(config, True))


@functools.lru_cache(maxsize=_PARTS)
def _fused_part(config: FusedConfig) -> _Part:
    return _compile_part("fused", lambda host: host.fused_job(config, True))


def _compile_part(name: str, job: Callable[[Any], tuple[Any, tuple[Any, ...]]]) -> _Part:
    def build() -> _Part:
        from candidates.kda_prefill.kernel import host

        start = time.perf_counter()
        compiled, cubin = host.compile_function(*job(host), keep=True)
        seconds = time.perf_counter() - start
        kernels, code = kernel_resources(Cubin(cubin), dynamic_smem(str(compiled.ir_module)))
        return _Part(kernels, code, seconds)

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
