"""Compile GDN's split kernels and run them on the CPU, for the tests that interpret them."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from kept import compile_kept, once
from operand_places import along_channels, channels_as_columns, swizzled
from ptx_interpreter import Cta, Memory, Part, parsed

import operations
from candidates._delta_rule.kernel.image import HEAD, ImageLayout
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.toolchain import require_dsl
from candidates.gdn_prefill.kernel.config import Config, workspace
from candidates.gdn_prefill.kernel.prep_plan import Plan
from operations.gdn_prefill import GdnWorkload
from operations.gdn_prefill.raw import plain

STATE = HEAD * HEAD

_WAIT = re.compile(
    r"LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared\.b64 P1, (\[.*?\], \S+), \d+;"
    r"\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;\s*DONE:"
)
"""How the DSL's pipelines wait; the interpreter's own word for it is ``wait``."""


@once
def compiled_call(config: Config, with_state: bool, options: Options = PLAIN) -> Any:
    """PTX and dynamic shared memory by kernel, in launch order, of one configuration."""
    require_dsl()
    from candidates.gdn_prefill.kernel import host

    kept = compile_kept(*host.call_job(config, with_state, options))
    return _WAIT.sub(r"wait \1;", kept.ptx), kept.smem


def scan_parts(bt: int) -> dict[int, Part]:
    """Where the scan's products find their operands in a stage, by number of columns."""
    layout = ImageLayout(bt)

    def rows(first: int, k: np.ndarray, n: np.ndarray) -> np.ndarray:
        if first < layout.off_k:  # W, or Qhat, or both
            return along_channels(first, k, n)
        assert first >= layout.off_a
        return swizzled(first + n * 2 * bt + k * 2, bt // 8 - 1)

    parts = {bt: Part(0, layout.off_e, rows)}
    if bt == 16:
        parts[32] = Part(0, layout.off_k, rows)
    return parts | {128: Part(layout.off_k, layout.off_a, channels_as_columns(bt))}


def pass_parts(bt: int) -> dict[int, Part]:
    """The same for pass 1, whose stage is W, Kbar, decay and U."""
    size = 2 * bt * HEAD
    return {
        bt: Part(0, size, along_channels),
        128: Part(size, size, channels_as_columns(bt)),
    }


def carry_parts(segments: int) -> dict[int, Part]:
    """The same for the carry, in all of its shared memory: maps alone."""
    return {128: Part(0, (segments - 2) * 2 * STATE, channels_as_columns(HEAD))}


def _nan(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=getattr(torch, dtype))


class Call:
    """One call on the CPU: its tensors in the interpreter's memory.

    Parameters
    ----------
    config : Config
    inputs : Mapping
        As the operation generates them, in the form of ``options``.
    offsets : list of int, optional
        Passed instead of the inputs' own.
    options : Options
    order : int, optional
        Seed of a random order of warps.
    given : tuple, optional
        o, final states or None, and scratch to write instead of tensors of its own.
    """

    def __init__(
        self,
        config: Config,
        inputs: Mapping[str, Any],
        offsets: list[int] | None = None,
        options: Options = PLAIN,
        order: int | None = None,
        given: tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]] | None = None,
    ) -> None:
        self.config, self.options, self.memory = config, options, Memory()
        self.order = None if order is None else random.Random(order)
        state = inputs["initial_state"]
        self.ptx, self.smem = compiled_call(config, state is not None, options)
        T, HV, _ = inputs["v"].shape
        raw = inputs["cu_seqlens"].tolist() if offsets is None else offsets
        self.T, self.N, self.HV = T, len(raw) - 1, HV
        self.scale = struct.pack("<f", inputs["scale"])
        self.group = struct.pack("<i", HV // inputs["q"].shape[1])
        self.given = {
            name: self.tensor(inputs[name], not options.compact)
            for name in ("q", "k", "v", "g", "beta")
        }
        kind = torch.int64 if options.offsets == "int64" else torch.int32
        self.cu = self.tensor(torch.tensor(raw, dtype=kind))
        self.state = None if state is None else self.tensor(state)
        self.activation = [
            self.tensor(inputs[name].reshape(shape))
            for name, shape, given in (
                ("A_log", (HV,), options.raw_gate), ("dt_bias", (HV, 1), options.bias)
            )
            if given
        ]  # fmt: skip
        # Whatever is not written stays NaN, and scratch is NaN where nothing was written.
        self.o, self.final, self.scratch = given or (None, None, [])
        if self.o is None:
            self.o = _nan((T, HV, HEAD), "bfloat16")
            if options.final_state is not None:
                self.final = _nan((self.N, HV, HEAD, HEAD), options.final_state)
            self.scratch = [_nan(*what) for what in workspace(config, T, self.N, HV)]
        self.written = [self.tensor(x) for x in (self.o, *self.scratch)]

    def tensor(self, x: torch.Tensor, strided: bool = False) -> bytes:
        """A tensor as a kernel is given it; what the kernel writes is seen in ``x``.

        Where it is ``strided``, channels alone are known to be contiguous.
        """
        assert strided or x.is_contiguous()
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        bits = x.as_strided((size,), (1,)).view(kind).numpy()
        channels = {3: 1, 4: 2}.get(x.dim(), 0)
        shape = x.shape[: x.dim() - channels]
        strides = x.stride()[: len(shape) - (not strided)]
        return self.memory.tensor(bits, shape, strides)

    def kernel(
        self,
        name: str,
        parameters: list[bytes],
        grid: tuple[int, int],
        stage: int | None = None,
        parts: dict[int, Part] | None = None,
    ) -> None:
        program = parsed(self.ptx, name)
        size = next(bytes_ for kernel, bytes_ in self.smem.items() if kernel.startswith(name))
        for y in range(grid[1]):
            for x in range(grid[0]):
                cta = Cta(
                    program, self.memory, parameters, x, grid[0], size, stage or size,
                    parts or {}, self.order,
                )  # fmt: skip
                cta.registers["%ctaid.y"] = np.full(cta.n, y, np.uint32)
                cta.registers["%cluster_ctarank"] = np.zeros(cta.n, np.uint32)
                cta.run()

    def prep(self) -> torch.Tensor:
        """Images ``[slots, HV, elements]``."""
        o, images = self.written[:2]
        given = [self.given[name] for name in ("q", "k", "v", "g", "beta")]
        slots = self.scratch[0].shape[0]
        self.kernel(
            "gdn_prep_",
            [*given, self.cu, o, images, self.scale, self.group, *self.activation],
            (max(slots, 1) * self.HV, 1),
        )
        return self.scratch[0]

    def scan(self) -> None:
        """Every kernel behind PREP."""
        config, flag = self.config, b"\0"
        o, images, *boundaries = self.written
        state = [] if self.state is None else [self.state]
        final = [] if self.final is None else [self.tensor(self.final)]
        layout, split = ImageLayout(config.bt), HEAD // config.rows
        size = [struct.pack("<i", x) for x in (self.T, self.N)]
        if config.segments > 1:
            stage = 4 * config.bt * HEAD + 1024 + 2 * config.bt * config.rows
            self.kernel(
                "kda_pass1_",
                [images, self.cu, *state, *boundaries, *size, flag, flag],
                (split * (2 * config.segments - 3) * self.N, self.HV),
                stage,
                pass_parts(config.bt),
            )
        if config.segments > 2:
            self.kernel(
                "kda_carry_",
                [self.cu, *boundaries, *size, flag],
                (2 * self.N, self.HV),
                None,
                carry_parts(config.segments),
            )
        self.kernel(
            "kda_scan_",
            [images, self.cu, *state, o, *final, *boundaries, flag, flag, flag, flag],
            (split * config.segments * self.N, self.HV),
            layout.common + 2 * config.bt * config.rows,
            scan_parts(config.bt),
        )


def run_prep(config: Config, inputs: Mapping[str, Any], **more: Any) -> tuple[torch.Tensor, Any]:
    """Images that PREP leaves, and the outputs as it leaves them."""
    call = Call(config, inputs, **more)
    assert call.prep().data_ptr() == call.scratch[0].data_ptr()
    assert Plan(config.bt).smem_bytes == next(iter(call.smem.values()))
    return call.scratch[0], call.o


def run_call(config: Config, inputs: Mapping[str, Any], **more: Any) -> dict[str, torch.Tensor]:
    """What the compiled call returns for inputs on the CPU."""
    call = Call(config, inputs, **more)
    call.prep()
    call.scan()
    out = {"o": call.o}
    return out if call.final is None else {**out, "final_state": call.final}


def interpreted(config: Config, with_state: bool, options: Options = PLAIN) -> Any:
    """A stand-in for a compiled function, by the order of its ABI."""
    from candidates.gdn_prefill.kernel.host import ABI

    def function(*args: Any) -> None:
        x = dict(zip(ABI, args, strict=True))
        assert (x["initial_state"] is not None) == with_state
        scratch = [x[name] for name in ("images", "boundaries") if x[name] is not None]
        for tensor in scratch:
            tensor.fill_(torch.nan)
        call = Call(config, x, options=options, given=(x["o"], x["final_state"], scratch))
        call.prep()
        call.scan()

    return function


def shape(
    name: str, heads: int, value_heads: int, lengths: Iterable[int], **more: Any
) -> GdnWorkload:
    """A workload, in few words."""
    return GdnWorkload(name, heads=heads, value_heads=value_heads, lengths=tuple(lengths), **more)


def asked(options: Options, raw: Mapping[str, Any]) -> dict[str, Any]:
    """How a call says in which form its arguments come."""
    how: dict[str, Any] = {"beta_logits": options.beta_logits, "l2norm": options.l2norm}
    if options.raw_gate:
        how |= {"gate": options.gate, "A_log": raw["A_log"]}
    if options.bias:
        how["dt_bias"] = raw["dt_bias"]
    return how


def raw_call(options: Options, lengths: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs in the form of ``options``, and what they mean as the operation takes them."""
    operation = operations.get("gdn_prefill")
    workload = shape("raw", 1, 2, lengths)
    drawn = operation.raw_form(workload, operation.regimes["production"], seed=0)
    assert drawn is not None
    floats = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    raw = dict(drawn)
    if options.l2norm:
        raw |= {"q": drawn["q_raw"], "k": drawn["k_raw"]}
    raw["g"] = (drawn["g_raw"] if options.raw_gate else drawn["g"]).to(floats[options.gate_dtype])
    beta = drawn["beta_logits"] if options.beta_logits else drawn["beta"]
    raw["beta"] = beta.to(floats[options.beta_dtype])
    raw["initial_state"] = drawn["initial_state"].to(floats[options.initial_state])
    how = asked(options, raw)
    if not options.compact:
        both = torch.cat([raw["q"], raw["k"]], -1)
        raw |= {"q": both[..., :128], "k": both[..., 128:]}
        raw["v"] = torch.cat([raw["v"], raw["v"].flip(0)], 1)[:, : raw["v"].shape[1]]
        raw |= {n: torch.stack([raw[n], raw[n].flip(0)], -1)[..., 0] for n in ("g", "beta")}
    names = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "scale")
    tensors = {name: raw[name] for name in names}
    return raw, plain(**tensors, **how)
