"""KDA prefill as a function of torch tensors: refuse by name, or compute.

:func:`kda_prefill` judges on the host everything the host can see (types, shapes, strides,
devices, arguments) before anything is launched, without synchronising.  What is device data,
the offsets, is made safe on the device.  This module and the kernels beside it need torch, the
DSL and TVM-FFI, and know nothing of schedule spaces, records or campaigns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from candidates._delta_rule.kernel.calls import on_stream, sms, split_scratch, without_rows
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.known import (
    DEFAULT_SCALE,
    ByShape,
    Kind,
    is_current,
    new,
    recall,
    remember,
)
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.pieces import Scratch

from . import arguments
from .arguments import check
from .config import DEFAULT, Config, FusedConfig, schedule_of, workspace
from .fused_plan import NEVER, SECOND, SHORTER, runs_of

__all__ = [
    "DEFAULT",
    "ByShape",
    "Config",
    "FusedConfig",
    "Options",
    "adopt",
    "check",
    "compiled",
    "is_current",
    "kda_prefill",
    "launch",
    "prepare",
    "recall",
    "workspace",
]

_CACHED = 512  # compiled functions kept in a process


@functools.lru_cache(maxsize=_CACHED)
def compiled(
    config: Config | FusedConfig, with_state: bool, options: Options = PLAIN
) -> Callable[..., None]:
    """Compile a configuration for sm_90a, once a process.

    Parameters
    ----------
    config : Config or FusedConfig
    with_state : bool
        Whether an initial state is given; without one the state starts from zero.
    options : Options
        The form of the arguments.

    Returns
    -------
    callable
        The bare TVM-FFI function; its positional arguments are those of ``host.ABI``, or of
        ``host.FUSED_ABI``.
    """
    if isinstance(config, FusedConfig) and config.waves != 1:
        # A number at the launch: one function serves all.
        return compiled(replace(config, waves=1), with_state, options)
    if (config, with_state, options) in _ADOPTED:
        return _ADOPTED[config, with_state, options]
    from . import host  # imports the DSL: only what launches needs it

    return host.compile_call(config, with_state, options)


_ADOPTED: dict[tuple[Config | FusedConfig, bool, Options], Callable[..., None]] = {}
"""Functions compiled ahead of time, by what :func:`compiled` takes; as many as were adopted."""


def adopt(
    function: Callable[..., None],
    config: Config | FusedConfig,
    with_state: bool,
    options: Options = PLAIN,
) -> None:
    """Let :func:`compiled` give this function, which was compiled ahead of time, for its arguments.

    Only what nothing was compiled for in this process yet; of a :class:`FusedConfig` ``waves``
    does not matter.
    """
    if isinstance(config, FusedConfig):
        config = replace(config, waves=1)
    _ADOPTED[config, with_state, options] = function


def launch(
    config: Config | FusedConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    final_state: torch.Tensor,
) -> None:
    """Launch on the current stream of the current device; checks nothing.

    All tensors packed and in the plain form, as :func:`check` accepts them.
    """
    prepare(config, v, cu_seqlens, initial_state)(
        q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state
    )


def prepare(
    config: Config | FusedConfig,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    options: Options = PLAIN,
    function: Callable[..., None] | None = None,
) -> Callable[..., None]:
    """The call for tensors shaped like these.

    It takes what :func:`launch` takes after ``config``, and for an activation in the kernel
    ``A_log``, ``dt_bias`` and ``lower_bound``.  ``function`` is the compiled one, if it is at hand.
    """
    if cu_seqlens is None:
        N, T, H, _ = v.shape
    else:
        T, H, _ = v.shape
        N = cu_seqlens.shape[0] - 1
    if T == 0 or N == 0 or H == 0:  # a grid of no blocks cannot be launched
        return without_rows
    if function is None:
        function = compiled(config, initial_state is not None, options)
    if isinstance(config, FusedConfig):
        runs, how = runs_of(config.waves, sms(v.device)), SHORTER
        rows = T if cu_seqlens is not None else N * T
        words = Scratch(runs).words(rows, H)
        # Sizes are int32: whole sequences are right, and need no scratch.
        if max(words, H * (rows + 16 * SECOND * N)) > arguments.MAX_ROWS:
            words, how = 1, NEVER
        return _fused_call(function, words, runs, how, v.device)
    scratch = [(shape, getattr(torch, name)) for shape, name in workspace(config, T, N, H)]
    return _split_call(function, scratch, v.device)


def _fused_call(function, words, runs, how, device):
    """What allocates scratch and launches; see :func:`split_scratch`."""

    def call(
        q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state, A_log=None,
        dt_bias=None, lower_bound=None,
    ) -> None:  # fmt: skip
        scratch = torch.empty(words, dtype=torch.float32, device=device)
        function(
            q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, scratch, scale, runs,
            how, A_log, dt_bias, lower_bound,
        )  # fmt: skip

    return call


def _split_call(function, scratch, device):
    """What allocates scratch and launches."""
    allocate = split_scratch(scratch, device)

    def call(
        q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state, A_log=None,
        dt_bias=None, lower_bound=None,
    ) -> None:  # fmt: skip
        images, boundaries = allocate()
        function(
            q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, images, boundaries,
            scale, A_log, dt_bias, lower_bound,
        )  # fmt: skip

    return call


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    schedule: Config | FusedConfig | ByShape | Mapping[str, Any] | None = None,
    scale: float | None = None,
    stream: torch.cuda.Stream | int | None = None,
    validate: bool = False,
    gate: str = "log",
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_logits: bool = False,
    l2norm: bool = False,
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule with a gate per key channel (KDA), forward, over packed sequences.

    Parameters
    ----------
    q, k : torch.Tensor
        bf16 ``[T, H, 128]`` with ``cu_seqlens``, or ``[B, T, H, 128]`` without.  Normalised by the
        caller, or here with ``l2norm``.
    v : torch.Tensor
        bf16 ``[T, HV, 128]``, HV a multiple of H: head h of q and k serves the value heads
        ``h HV / H`` and on.
    g : torch.Tensor
        fp32 or bf16, shaped like v: gate per key channel in natural-log space, at most 0; with
        another ``gate``, what it is made of.
    beta : torch.Tensor
        fp32 or bf16 ``[T, HV]``: write strength in [0, 1], or with ``beta_logits`` its logit.
    cu_seqlens : torch.Tensor, optional
        int32 or int64 ``[N + 1]`` on the same device: sequence n is rows ``[cu[n], cu[n + 1])``.
        Offsets outside ``0..T`` are clamped and made monotone on the device; rows that no
        sequence covers are written 0.
    initial_state : torch.Tensor, optional
        fp32 or bf16 ``[N, HV, 128, 128]``, value-major (``[V, K]``), contiguous; zero if absent.
    schedule : Config, FusedConfig, ByShape or Mapping, optional
        Which kernel; :data:`DEFAULT` if absent.  Split schedules decline ``l2norm``, more value
        heads than heads, and tensors that are not contiguous.
    scale : float, optional
        Factor of the output, any number that fp32 holds, 0 included; ``1 / sqrt(128)`` if absent.
    stream : torch.cuda.Stream or int, optional
        Stream or handle to launch on, 0 (the default stream) included; None is torch's current
        stream of q's device.  New outputs and scratch then belong to that stream, as in
        ``with torch.cuda.stream(stream)``.
    validate : bool
        Synchronise and raise on offsets that are not ``0 = cu[0] <= ... <= cu[N] = T``.
    gate : str
        ``log``: g is the gate.  ``safe``: it is
        ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.  ``softplus``: it is
        ``-exp(A_log) * softplus(g + dt_bias)``.
    lower_bound : float, optional
        Of the safe gate, in [-100, 0).
    A_log : torch.Tensor, optional
        fp32 ``[HV]``, for a gate that is not ``log``.
    dt_bias : torch.Tensor, optional
        fp32 ``[HV, 128]``, for a gate that is not ``log``; zero if absent.
    beta_logits : bool
        Whether beta is a logit, whose sigmoid is meant.
    l2norm : bool
        Whether q and k are to be divided by ``sqrt(|x|^2 + 1e-6)``.
    out : torch.Tensor, optional
        Where to write o: bf16, shaped like v, contiguous.
    final_state : torch.Tensor or False, optional
        Where to write the states, fp32 or bf16; False if they are not wanted.  It may be
        ``initial_state`` itself if ``schedule`` is a split one with one segment.

    Returns
    -------
    o : torch.Tensor
        bf16, shaped like v.
    final_state : torch.Tensor or None
        ``[N, HV, 128, 128]``, value-major; fp32 unless given in bf16.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched; the message names the argument and the fix.

    Notes
    -----
    q, k, v, g and beta may be views, such as slices of one projection: channels must be contiguous
    and tokens and heads a multiple of 16 bytes apart (beta: any steps).  There is no backward pass.
    """
    if validate is not True and validate is not False:
        raise TypeError(f"validate must be True or False, not {validate!r}")
    if torch.compiler.is_compiling():
        from .untraced import prefill as run

        return run(
            q, k, v, g, beta, cu_seqlens, initial_state, schedule=schedule, scale=scale,
            stream=stream, validate=validate, gate=gate, lower_bound=lower_bound, A_log=A_log,
            dt_bias=dt_bias, beta_logits=beta_logits, l2norm=l2norm, out=out,
            final_state=final_state,
        )  # fmt: skip
    if not validate and (stream is None or is_current(stream, v)):
        results = recall(
            DEFAULT if schedule is None else schedule, False, q, k, v, g, beta, cu_seqlens,
            initial_state, scale, gate, lower_bound, A_log, dt_bias, beta_logits, l2norm, out,
            final_state,
        )  # fmt: skip
        if results is not None:
            return results
    return _prefill(
        q, k, v, g, beta, cu_seqlens, initial_state, schedule, scale, stream, validate, gate,
        lower_bound, A_log, dt_bias, beta_logits, l2norm, out, final_state,
    )  # fmt: skip


def _prefill(
    q, k, v, g, beta, cu_seqlens, initial_state, schedule, scale, stream, validate, gate,
    lower_bound, A_log, dt_bias, beta_logits, l2norm, out, final_state,
):  # fmt: skip
    """:func:`kda_prefill`, all arguments given; everything is checked."""
    if isinstance(schedule, ByShape):
        config = schedule.choose(q, v, cu_seqlens)
    else:
        config = schedule_of(schedule)
    in_place = isinstance(config, Config) and config.segments == 1
    options = check(
        q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, in_place,
        gate=gate, lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias,
        beta_logits=beta_logits, l2norm=l2norm,
    )  # fmt: skip
    if isinstance(config, Config):
        arguments.decline_for_split(options)
    scale = DEFAULT_SCALE if scale is None else arguments.finite("scale", scale)
    call = (
        config, options, q, k, v, g, beta, cu_seqlens, initial_state, scale, validate, out,
        final_state, A_log, dt_bias, None if lower_bound is None else float(lower_bound),
    )  # fmt: skip
    context = on_stream(stream, q.device)
    if context is None:
        results = _call(*call)
    else:
        with context:
            results = _call(*call)
    if isinstance(schedule, Mapping) or (cu_seqlens is None and isinstance(config, Config)):
        return results  # a mapping may change, and the others do not reach the kernels as they are
    kind = Kind(options.compact, in_place, _again(config, initial_state is not None, options))
    remember(
        kind, config, config if schedule is None else schedule, False, q, k, v, g, beta, cu_seqlens,
        initial_state, gate, lower_bound, A_log, dt_bias, beta_logits, l2norm, final_state,
    )  # fmt: skip
    return results


def _again(config, with_state, options):
    """:func:`prepare` for calls of one kind, whose function is looked up once."""
    function = functools.lru_cache(maxsize=1)(lambda: compiled(config, with_state, options))
    return lambda v, cu_seqlens: prepare(config, v, cu_seqlens, None, options, function())


def _call(
    config, options, q, k, v, g, beta, cu_seqlens, initial_state, scale, validate, out,
    final_state, A_log, dt_bias, lower_bound,
):  # fmt: skip
    """Allocate results and launch; arguments are checked, stream and device are current."""
    if cu_seqlens is not None and validate:
        arguments.validate(cu_seqlens, q.shape[0])
    if out is None:
        out = new(v.shape, v, torch.bfloat16)
    if final_state is None:
        N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final_state = new((N, v.shape[-2], HEAD, HEAD), v, torch.float32)
    elif final_state is False:
        final_state = None
    o = out
    if cu_seqlens is None and isinstance(config, Config):  # split kernels know offsets only
        B, T = q.shape[:2]
        cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=q.device).mul_(T)
        options = replace(options, offsets="int32")
        q, k, v, g, beta, o = (x.view(B * T, *x.shape[2:]) for x in (q, k, v, g, beta, out))
    prepare(config, v, cu_seqlens, initial_state, options)(
        q, k, v, g, beta, cu_seqlens, initial_state, scale, o, final_state,
        A_log, dt_bias, lower_bound,
    )  # fmt: skip
    return out, final_state
