"""Host functions that launch PREP and SCAN, or the fused kernel, for sm_90a through TVM-FFI.

The order of arguments of the compiled function, stream omitted (it takes torch's current
stream of the tensors' device), is the ABI, stated once here in :data:`ABI`.  T, N, H, HV and the
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
from candidates.gdn_prefill.kernel.config import Config, FusedConfig
from candidates.gdn_prefill.kernel.fused import Fused
from candidates.gdn_prefill.kernel.prep import Prep

__all__ = [
    "ABI",
    "FUSED_ABI",
    "FusedPrefill",
    "GdnPrefill",
    "bare_function",
    "call_job",
    "compile_call",
    "compile_function",
    "fused_job",
    "prep_job",
    "scan_job",
]

ABI = (
    "q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "o", "final_state", "images",
    "boundaries", "scale", "A_log", "dt_bias",
)  # fmt: skip
"""Positional arguments of a compiled call, in the form of its options.

q, k: bf16 ``[T, H, 128]``; v, o: bf16 ``[T, HV, 128]``; g, beta: ``[T, HV]``; cu_seqlens:
``[N + 1]``; states: ``[N, HV, 128, 128]``, the initial one None where none was compiled in, the
final one where it is not wanted; images: bf16 ``[slots, HV, image elements]``; boundaries: fp32
``[entries, HV, words]``, None with one segment; scale: a Python float; A_log: fp32 ``[HV]``;
dt_bias: fp32 ``[HV, 1]``.  What the options do without is None.
"""


FUSED_ABI = (*ABI[: ABI.index("images")], "scratch", "scale", "pieces", "A_log", "dt_bias")
"""The same for the fused kernel.

pieces: a Python int, of a head, at least half as many as sequences; scratch: fp32, of
:class:`candidates._delta_rule.kernel.pieces.Scratch`.
"""


class GdnPrefill:
    """PREP and SCAN of one configuration behind one host function; they say what it takes."""

    def __init__(self, config: Config, options: Options = PLAIN) -> None:
        self.prep = Prep(config.bt, config.unroll, options)
        self.scan = Scan(config.bt, config.rows, config.segments)

    @cute.jit
    def __call__(self, Q, K, V, G, B, CU, S0, O, S, X, boundaries, scale, A_log, dt_bias, stream):
        self.prep(Q, K, V, G, B, CU, O, X, scale, A_log, dt_bias, stream)
        if cutlass.const_expr(boundaries is None):
            self.scan(X, CU, S0, O, S, None, stream)
        else:
            self.scan(X, CU, S0, O, S, (boundaries,), stream)


class FusedPrefill:
    """The fused kernel and, if it cuts sequences, its fix-up behind one host function, which takes
    what the kernel does."""

    def __init__(self, config: FusedConfig, options: Options) -> None:
        self.fused = Fused(config.bt, config.rows, config.builders, options)
        self.fixup = Fixup("gdn_fixup")

    @cute.jit
    def __call__(self, Q, K, V, G, B, CU, S0, O, S, X, scale, pieces, A_log, dt_bias, stream):
        self.fused(Q, K, V, G, B, CU, S0, O, S, X, scale, pieces, A_log, dt_bias, stream)
        if cutlass.const_expr(self.fused.plan.cuts):
            if pieces > CU.shape[0] - 1:
                self.fixup(O, S, X, pieces * O.shape[1], stream)


class _Arguments:
    """Fake tensors of one compilation: equal symbols are equal sizes, checked at each call."""

    def __init__(self, with_state: bool, options: Options) -> None:
        T, N, H, HV = (cute.sym_int() for _ in range(4))
        view = fake if options.compact else strided
        self.Q, self.K = (view(cutlass.BFloat16, (T, H, HEAD)) for _ in range(2))
        self.V = view(cutlass.BFloat16, (T, HV, HEAD))
        self.O = fake(cutlass.BFloat16, (T, HV, HEAD))
        self.G, self.B = (
            view(TYPES[name], (T, HV), align=TYPES[name].width // 8)
            for name in (options.gate_dtype, options.beta_dtype)
        )
        self.CU = offsets_of(options)
        state = (N, HV, HEAD, HEAD)
        self.S0 = fake(TYPES[options.initial_state], state) if with_state else None
        self.S = None
        if options.final_state is not None:
            self.S = fake(TYPES[options.final_state], state)
        self.HV = HV
        self.scale = cutlass.Float32(1.0)
        self.A_log = fake(cutlass.Float32, (HV,), align=4) if options.raw_gate else None
        self.dt_bias = fake(cutlass.Float32, (HV, 1), align=4) if options.bias else None
        self.stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


class _SplitArguments(_Arguments):
    """With the scratch of the split form."""

    def __init__(self, config: Config, with_state: bool, options: Options) -> None:
        super().__init__(with_state, options)
        self.X = images_of(config.bt, self.HV)
        self.boundaries = boundaries_of(config.segments, self.HV)


def prep_job(config: Config, options: Options = PLAIN) -> tuple[Any, tuple[Any, ...]]:
    """PREP alone, with the arguments to compile it."""
    a = _SplitArguments(config, True, options)
    return Prep(config.bt, config.unroll, options), (
        a.Q, a.K, a.V, a.G, a.B, a.CU, a.O, a.X, a.scale, a.A_log, a.dt_bias, a.stream,
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
        a.Q, a.K, a.V, a.G, a.B, a.CU, a.S0, a.O, a.S, scratch, a.scale, cutlass.Int32(1),
        a.A_log, a.dt_bias, a.stream,
    )  # fmt: skip


def call_job(
    config: Config | FusedConfig, with_state: bool, options: Options = PLAIN
) -> tuple[Any, tuple[Any, ...]]:
    """The one call that is launched, with the arguments to compile it: all kernels in it."""
    if isinstance(config, FusedConfig):
        return fused_job(config, with_state, options)
    a = _SplitArguments(config, with_state, options)
    return GdnPrefill(config, options), (
        a.Q, a.K, a.V, a.G, a.B, a.CU, a.S0, a.O, a.S, a.X, a.boundaries, a.scale, a.A_log,
        a.dt_bias, a.stream,
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
