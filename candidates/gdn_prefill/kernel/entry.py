"""GDN prefill as a function of torch tensors: refuse by name, or compute.

:func:`gdn_prefill` judges on the host everything the host can see (types, shapes, strides,
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
from candidates.gdn_prefill.kernel import arguments
from candidates.gdn_prefill.kernel.arguments import check
from candidates.gdn_prefill.kernel.config import (
    DEFAULT,
    Config,
    FusedConfig,
    schedule_of,
    workspace,
)

__all__ = [
    "DEFAULT",
    "DEFAULT_SCALE",
    "ByShape",
    "Config",
    "FusedConfig",
    "Options",
    "adopt",
    "check",
    "compiled",
    "gdn_prefill",
    "is_current",
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
        The bare TVM-FFI function; its positional arguments are those of ``host.ABI`` or
        ``host.FUSED_ABI``.
    """
    if isinstance(config, FusedConfig) and config.waves != 1:
        # How sequences are cut is a number at the launch: one function serves all.
        return compiled(replace(config, waves=1), with_state, options)
    if (config, with_state, options) in _ADOPTED:
        return _ADOPTED[config, with_state, options]
    # Imports the DSL: only what launches needs it.
    from candidates.gdn_prefill.kernel import host

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

    Only what nothing was compiled for in this process yet.
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
    cu_seqlens: torch.Tensor,
    initial_state: torch.Tensor | None,
    options: Options = PLAIN,
    function: Callable[..., None] | None = None,
) -> Callable[..., None]:
    """The call for packed tensors shaped like these.

    It takes what :func:`launch` takes after ``config``, and for an activation in the kernel
    ``A_log`` and ``dt_bias`` ``[HV, 1]``.  ``function`` is the compiled one, if it is at hand.
    """
    T, HV, _ = v.shape
    N = cu_seqlens.shape[0] - 1
    if T == 0 or N == 0 or HV == 0:  # a grid of no blocks cannot be launched
        return without_rows
    if function is None:
        function = compiled(config, initial_state is not None, options)
    if isinstance(config, FusedConfig):
        pieces = config.pieces(T, N, HV, sms(v.device))
        words = Scratch(HV * pieces).words(T, HV) if pieces > N else 1
        if words > arguments.MAX_ROWS:  # sizes are int32: not to cut is right, and needs none
            words, pieces = 1, N
        return _fused_call(function, words, pieces, v.device)
    scratch = [(shape, getattr(torch, name)) for shape, name in workspace(config, T, N, HV)]
    return _split_call(function, scratch, v.device)


def _split_call(function, scratch, device):
    """What allocates scratch and launches."""
    allocate = split_scratch(scratch, device)

    def call(
        q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state, A_log=None,
        dt_bias=None,
    ) -> None:  # fmt: skip
        images, boundaries = allocate()
        function(
            q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, images, boundaries,
            scale, A_log, dt_bias,
        )  # fmt: skip

    return call


def _fused_call(function, words, pieces, device):
    """The same for the fused kernel; its scratch, too, belongs to one call."""

    def call(
        q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state, A_log=None,
        dt_bias=None,
    ) -> None:  # fmt: skip
        scratch = torch.empty(words, dtype=torch.float32, device=device)
        function(
            q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, scratch, scale, pieces,
            A_log, dt_bias,
        )  # fmt: skip

    return call


def gdn_prefill(
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
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_logits: bool = False,
    l2norm: bool = False,
    out: torch.Tensor | None = None,
    final_state: torch.Tensor | bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gated delta rule with one gate a token and head (Gated DeltaNet), forward, packed sequences.

    Parameters
    ----------
    q, k : torch.Tensor
        bf16 ``[T, H, 128]`` with ``cu_seqlens``, or ``[B, T, H, 128]`` without.  Normalised by the
        caller, or here with ``l2norm``.
    v : torch.Tensor
        bf16 ``[T, HV, 128]``, HV a multiple of H: head h of q and k serves the value heads
        ``h HV / H`` and on.
    g : torch.Tensor
        fp32 or bf16 ``[T, HV]``: gate in natural-log space, at most 0, minus infinity included;
        with ``gate="softplus"`` what it is made of.
    beta : torch.Tensor
        fp32 or bf16 ``[T, HV]``: write strength in [0, 1], or with ``beta_logits`` its logit.
    cu_seqlens : torch.Tensor, optional
        int32 or int64 ``[N + 1]`` on the same device: sequence n is rows ``[cu[n], cu[n + 1])``.
        Offsets outside ``0..T`` are clamped and made monotone on the device; rows that no
        sequence covers are written 0.
    initial_state : torch.Tensor, optional
        fp32 or bf16 ``[N, HV, 128, 128]``, value-major (``[V, K]``), contiguous; zero if absent.
    schedule : Config, FusedConfig, ByShape or Mapping, optional
        Which kernel; :data:`DEFAULT` if absent.
    scale : float, optional
        Factor of the output, any number that fp32 holds, 0 included; ``1 / sqrt(128)`` if absent.
    stream : torch.cuda.Stream or int, optional
        Stream to launch on, or its handle, of which 0 is the default stream; the current stream of
        the tensors' device if absent.
    validate : bool
        Whether to wait for ``cu_seqlens`` and raise where it is malformed; not under capture.
    gate : str
        ``"log"``: g is the gate.  ``"softplus"``: it is ``-exp(A_log) softplus(g + dt_bias)``.
    A_log, dt_bias : torch.Tensor, optional
        fp32 ``[HV]``; with ``gate="softplus"``, of which ``dt_bias`` may be absent.
    beta_logits : bool
        Whether beta is a logit.
    l2norm : bool
        Whether q and k are divided by ``sqrt(|x|^2 + 1e-6)`` here.
    out : torch.Tensor, optional
        Where to write ``o``.
    final_state : torch.Tensor or bool, optional
        Where to write the final states, fp32 or bf16; False if they are not wanted.  It may be
        ``initial_state`` itself if ``schedule`` has one segment, or is fused with 64 rows.

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
    and tokens and heads of q, k and v a multiple of 16 bytes apart.  There is no backward pass.
    """
    if validate is not True and validate is not False:
        raise TypeError(f"validate must be True or False, not {validate!r}")
    if torch.compiler.is_compiling():
        from candidates.gdn_prefill.kernel.untraced import prefill as run

        return run(
            q, k, v, g, beta, cu_seqlens, initial_state, schedule=schedule, scale=scale,
            stream=stream, validate=validate, gate=gate, A_log=A_log, dt_bias=dt_bias,
            beta_logits=beta_logits, l2norm=l2norm, out=out, final_state=final_state,
        )  # fmt: skip
    if not validate and (stream is None or is_current(stream, v)):
        results = recall(
            DEFAULT if schedule is None else schedule, True, q, k, v, g, beta, cu_seqlens,
            initial_state, scale, gate, None, A_log, dt_bias, beta_logits, l2norm, out, final_state,
        )  # fmt: skip
        if results is not None:
            return results
    return _prefill(
        q, k, v, g, beta, cu_seqlens, initial_state, schedule, scale, stream, validate, gate,
        A_log, dt_bias, beta_logits, l2norm, out, final_state,
    )  # fmt: skip


def _prefill(
    q, k, v, g, beta, cu_seqlens, initial_state, schedule, scale, stream, validate, gate,
    A_log, dt_bias, beta_logits, l2norm, out, final_state,
):  # fmt: skip
    """:func:`gdn_prefill`, all arguments given; everything is checked."""
    if isinstance(schedule, ByShape):
        config = schedule.choose(q, v, cu_seqlens)
    else:
        config = schedule_of(schedule)
    options = check(
        q, k, v, g, beta, cu_seqlens, initial_state, out, final_state, config.in_place,
        gate=gate, A_log=A_log, dt_bias=dt_bias, beta_logits=beta_logits, l2norm=l2norm,
    )  # fmt: skip
    scale = DEFAULT_SCALE if scale is None else arguments.finite("scale", scale)
    call = (
        config, options, q, k, v, g, beta, cu_seqlens, initial_state, scale, validate, out,
        final_state, A_log, dt_bias,
    )  # fmt: skip
    context = on_stream(stream, q.device)
    if context is None:
        results = _call(*call)
    else:
        with context:
            results = _call(*call)
    if cu_seqlens is None or isinstance(schedule, Mapping):
        return results  # of what does not reach the kernels as it is, or may change
    with_state = initial_state is not None
    kind = Kind(options.compact, config.in_place, _again(config, with_state, options))
    remember(
        kind, config, config if schedule is None else schedule, True, q, k, v, g, beta, cu_seqlens,
        initial_state, gate, None, A_log, dt_bias, beta_logits, l2norm, final_state,
    )  # fmt: skip
    return results


def _again(config, with_state, options):
    """:func:`prepare` for calls of one kind as KDA makes them, with a ``lower_bound``, which is
    None; their function is looked up once."""
    function = functools.lru_cache(maxsize=1)(lambda: compiled(config, with_state, options))

    def prepare_again(v, cu_seqlens):
        call = prepare(config, v, cu_seqlens, None, options, function())

        def run(
            q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state, A_log, dt_bias, _
        ) -> None:  # fmt: skip
            if dt_bias is not None:
                dt_bias = dt_bias.unsqueeze(-1)
            call(
                q, k, v, g, beta, cu_seqlens, initial_state, scale, out, final_state, A_log, dt_bias
            )

        return run

    return prepare_again


def _call(
    config, options, q, k, v, g, beta, cu_seqlens, initial_state, scale, validate, out,
    final_state, A_log, dt_bias,
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
    if cu_seqlens is None:  # the kernels know offsets only
        B, T = q.shape[:2]
        cu_seqlens = torch.arange(B + 1, dtype=torch.int32, device=q.device).mul_(T)
        options = replace(options, offsets="int32")
        q, k, v, g, beta, o = (x.view(B * T, *x.shape[2:]) for x in (q, k, v, g, beta, out))
    if dt_bias is not None:
        dt_bias = dt_bias.unsqueeze(-1)
    prepare(config, v, cu_seqlens, initial_state, options)(
        q, k, v, g, beta, cu_seqlens, initial_state, scale, o, final_state, A_log, dt_bias,
    )  # fmt: skip
    return out, final_state
