"""Host functions that launch PREP and SCAN, or the fused kernel, for sm_90a through TVM-FFI.

The order of arguments of the compiled function, stream omitted (it takes torch's current
stream of the tensors' device), is the ABI, stated once here in :data:`ABI`.  T, N, H and the
number of slots are run-time values: one compilation serves every shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel.fixup import Fixup
from candidates._delta_rule.kernel.host import (
    TYPES,
    NoFunctionError,
    bare_function,
    boundaries_of,
    compile_function,
    fake,
    images_of,
    offsets_of,
    strided,
)
from candidates._delta_rule.kernel.host import scan_job as scan_alone
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.scan import Scan

from .config import Config, FusedConfig
from .fused import Fused
from .fused_plan import NEVER
from .prep import Prep

__all__ = [
    "ABI",
    "FUSED_ABI",
    "FusedPrefill",
    "KdaPrefill",
    "NoFunctionError",
    "bare_function",
    "call_job",
    "compile_call",
    "compile_function",
    "fused_job",
    "prep_job",
    "scan_job",
]

ABI = (
    "q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "o", "final_state",
    "images", "boundaries", "scale", "A_log", "dt_bias", "lower_bound",
)  # fmt: skip
"""Positional arguments of a compiled call, in the form of its :class:`.Options`.

q, k: bf16 ``[T, H, 128]``; v, o: bf16 ``[T, HV, 128]``; g: ``[T, HV, 128]``; beta: ``[T, HV]``;
cu_seqlens: ``[N + 1]``; states: ``[N, HV, 128, 128]``, the initial one None where none was compiled
in; images: bf16 ``[slots, H, image elements]``; boundaries: fp32 ``[entries, H, words]``, None with
one segment; scale: a Python float; A_log: fp32 ``[HV]``; dt_bias: fp32 ``[HV, 128]``; lower_bound:
a Python float.  What the options do without is None.
"""

FUSED_ABI = (
    *ABI[: ABI.index("images")], "scratch", "scale", "runs", "how", *ABI[ABI.index("A_log") :],
)  # fmt: skip
"""The same for the fused kernel; runs: a Python int, even and at least 2; how: one of those of
:mod:`.fused_plan`.

scratch: fp32, of :class:`candidates._delta_rule.kernel.pieces.Scratch` if ``how`` is not NEVER.
Where offsets are ``equal``, cu_seqlens is None and q, k, v, g, beta and o begin with ``[B, T]``.
"""


class KdaPrefill:
    """PREP and SCAN of one configuration behind one host function; they say what it takes."""

    def __init__(self, config: Config, options: Options = PLAIN) -> None:
        self.prep = _prep(config, options)
        self.scan = Scan(config.bt, config.rows, config.segments)

    @cute.jit
    def __call__(
        self, Q, K, V, G, B, CU, S0, O, S, X, boundaries, scale, A_log, dt_bias, bound, stream
    ):
        self.prep(Q, K, V, G, B, CU, O, X, scale, A_log, dt_bias, bound, stream)
        if cutlass.const_expr(boundaries is None):
            self.scan(X, CU, S0, O, S, None, stream)
        else:
            self.scan(X, CU, S0, O, S, (boundaries,), stream)


class FusedPrefill:
    """The fused kernel and its fix-up behind one host function; they say what it takes."""

    def __init__(self, config: FusedConfig, options: Options) -> None:
        self.fused = Fused(config.frame, config.builders, options)
        self.fixup = Fixup("kda_fixup")

    @cute.jit
    def __call__(
        self, Q, K, V, G, B, CU, S0, O, S, X, scale, runs, how, A_log, dt_bias, bound, stream
    ):
        self.fused(Q, K, V, G, B, CU, S0, O, S, X, scale, runs, how, A_log, dt_bias, bound, stream)
        if how > NEVER:
            self.fixup(O, S, X, runs, stream)


def _prep(config: Config, options: Options) -> Prep:
    return Prep(config.bt, config.anchor, config.block, config.diagonal, config.unroll, options)


class _Arguments:
    """Fake tensors of one compilation: equal symbols are equal sizes, checked at each call."""

    def __init__(self, with_state: bool, options: Options) -> None:
        N, H = cute.sym_int(), cute.sym_int()
        HV = H if options.compact else cute.sym_int()
        lead: tuple[Any, ...] = (cute.sym_int(),)
        if options.offsets == "equal":
            lead = (N, cute.sym_int())
        self.CU = offsets_of(options)
        view = fake if options.compact else strided
        self.Q, self.K = (view(cutlass.BFloat16, (*lead, H, HEAD)) for _ in range(2))
        self.V = view(cutlass.BFloat16, (*lead, HV, HEAD))
        self.O = fake(cutlass.BFloat16, (*lead, HV, HEAD))
        self.G = view(TYPES[options.gate_dtype], (*lead, HV, HEAD))
        kind = TYPES[options.beta_dtype]
        self.B = view(kind, (*lead, HV), align=kind.width // 8)
        state = (N, HV, HEAD, HEAD)
        self.S0 = fake(TYPES[options.initial_state], state) if with_state else None
        self.S = None
        if options.final_state is not None:
            self.S = fake(TYPES[options.final_state], state)
        self.A_log = fake(cutlass.Float32, (HV,), align=4) if options.raw_gate else None
        self.dt_bias = fake(cutlass.Float32, (HV, HEAD), align=4) if options.bias else None
        self.bound = cutlass.Float32(-1.0) if options.gate == "safe" else None
        self.H = HV
        self.scale = cutlass.Float32(1.0)
        self.stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


class _SplitArguments(_Arguments):
    """With the scratch of the split form."""

    def __init__(self, config: Config, with_state: bool, options: Options) -> None:
        super().__init__(with_state, options)
        self.X = images_of(config.bt, self.H)
        self.boundaries = boundaries_of(config.segments, self.H)


def prep_job(config: Config, options: Options = PLAIN) -> tuple[Any, tuple[Any, ...]]:
    """PREP alone, with the arguments to compile it."""
    a = _SplitArguments(config, True, options)
    return _prep(config, options), (
        a.Q, a.K, a.V, a.G, a.B, a.CU, a.O, a.X, a.scale, a.A_log, a.dt_bias, a.bound, a.stream,
    )  # fmt: skip


def scan_job(
    config: Config, with_state: bool, options: Options = PLAIN
) -> tuple[Any, tuple[Any, ...]]:
    """SCAN alone, with the arguments to compile it."""
    return scan_alone(config.bt, config.rows, config.segments, with_state, options)


def fused_job(
    config: FusedConfig, with_state: bool, options: Options = PLAIN
) -> tuple[Any, tuple[Any, ...]]:
    """The fused kernel and its fix-up, with the arguments to compile them."""
    a = _Arguments(with_state, options)
    scratch = fake(cutlass.Float32, (cute.sym_int(),), align=128)
    return FusedPrefill(config, options), (
        a.Q, a.K, a.V, a.G, a.B, a.CU, a.S0, a.O, a.S, scratch, a.scale,
        cutlass.Int32(2), cutlass.Int32(NEVER), a.A_log, a.dt_bias, a.bound, a.stream,
    )  # fmt: skip


def call_job(
    config: Config | FusedConfig, with_state: bool, options: Options = PLAIN
) -> tuple[Any, tuple[Any, ...]]:
    """The one call that is launched, with the arguments to compile it: all kernels in it."""
    if isinstance(config, FusedConfig):
        return fused_job(config, with_state, options)
    a = _SplitArguments(config, with_state, options)
    return KdaPrefill(config, options), (
        a.Q, a.K, a.V, a.G, a.B, a.CU, a.S0, a.O, a.S, a.X, a.boundaries, a.scale,
        a.A_log, a.dt_bias, a.bound, a.stream,
    )  # fmt: skip


def compile_call(
    config: Config | FusedConfig, with_state: bool, options: Options = PLAIN
) -> Callable[..., None]:
    """Compile a configuration into one call; see :data:`ABI` and :data:`FUSED_ABI`.

    Raises
    ------
    NoFunctionError
        If the DSL returned something else than a TVM-FFI function.
    """
    compiled, _ = compile_function(*call_job(config, with_state, options))
    return bare_function(compiled)
