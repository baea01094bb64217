"""Compile schedules of the kernels, judge what the compiler made, and load them on a GPU.

:func:`compile_schedule` needs no GPU.  PREP and SCAN are compiled apart for it and kept while
the process lives, SCAN together with KDA's own, so that a whole preset of schedules costs little
more than its distinct parts; :func:`load_schedule` compiles both into the one call that is
launched.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from candidates._base import Build, BuildError, Schedule
from candidates._delta_rule.kernel.options import PLAIN
from candidates._delta_rule.kernel.resources import budget_problems
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.gdn_prefill.kernel.config import Config, FusedConfig, schedule_of
from candidates.gdn_prefill.kernel.fused_plan import BT as FUSED_BT
from candidates.gdn_prefill.kernel.fused_plan import FusedPlan
from candidates.kda_prefill.kernel.launch import (
    _compile_part,
    _Part,
    _scan_part,
    compiling,
    require_gpu,
)
from candidates.kda_prefill.kernel.launch import kernel_names as kda_kernel_names

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


def kernel_names(segments: int) -> tuple[str, ...]:
    """Prefixes of the kernels a schedule launches, in launch order; the scan's are KDA's."""
    _, *behind = kda_kernel_names(segments)
    return ("gdn_prep_", *behind)


def fused_names(config: FusedConfig) -> tuple[str, ...]:
    """The same of a fused schedule."""
    return ("gdn_fused_", "gdn_fixup") if FusedPlan(config.rows).cuts else ("gdn_fused_",)


def compile_schedule(schedule: Schedule) -> Build:
    """Compile one schedule to sm_90a machine code and judge it; needs no GPU.

    Parameters
    ----------
    schedule : Schedule
        Choices of the space: ``bt``, ``rows`` and ``segments``; of ``form=fused``, ``rows`` and
        ``waves``.

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
    parts: tuple[_Part, ...]
    if isinstance(config, FusedConfig):
        parts = (_fused_part(config.rows),)
    else:
        parts = (
            _prep_part(config.bt, config.unroll),
            _scan_part(config.bt, config.rows, config.segments),
        )
    kernels = tuple(k for part in parts for k in part.kernels)
    code = "".join(part.code_sha256 for part in parts)
    return Build(
        schedule_key=schedule.key,
        kernels=kernels,
        seconds=sum(part.seconds for part in parts),
        cubin_sha256=hashlib.sha256(code.encode()).hexdigest(),
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
    compiling(lambda: _entry().compiled(config, True, PLAIN), schedule.key)  # as bind asks for it
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
        self._in_place = config.in_place
        if isinstance(config, FusedConfig):
            self.kernel_names, self.chunk_tokens = fused_names(config), FUSED_BT
        else:
            self.kernel_names, self.chunk_tokens = kernel_names(config.segments), config.bt

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
        results = {"o": outputs["o"], "final_state": outputs["final_state"]}
        options = entry.check(*args, state, *results.values(), self._in_place)
        launcher = compiling(
            lambda: entry.prepare(self.config, args[2], args[-1], state, options), str(self.config)
        )
        scale = entry.DEFAULT_SCALE if scale is None else float(scale)
        call = functools.partial(launcher, *args, state, scale, *results.values())

        def run() -> Mapping[str, torch.Tensor]:
            call()
            return results

        return run


def _entry() -> Any:
    """The module of torch functions; imported late, because it imports torch."""
    from candidates.gdn_prefill.kernel import entry

    return entry


def config_of(schedule: Schedule) -> Config | FusedConfig:
    """The :class:`Config` or :class:`FusedConfig` of a schedule."""
    try:
        return schedule_of(schedule.as_dict())
    except ValueError as error:
        raise BuildError(f"{schedule.key}: {error}") from error


@functools.lru_cache(maxsize=64)  # a few hundred bytes each
def _prep_part(bt: int, unroll: int) -> _Part:
    from candidates.gdn_prefill.kernel import host

    config = next(c for c in (Config(bt, 64), Config(bt, 128)) if c.unroll == unroll)
    return _compile_part("prep", lambda _: host.prep_job(config))


@functools.lru_cache(maxsize=4)
def _fused_part(rows: int) -> _Part:
    from candidates.gdn_prefill.kernel import host

    return _compile_part("fused", lambda _: host.fused_job(FusedConfig(rows), True))
