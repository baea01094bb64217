"""The entry point of KDA prefill without a GPU: what it would launch is recorded and checked."""

from __future__ import annotations

import torch

from candidates._delta_rule.kernel import known
from candidates.kda_prefill.kernel import arguments, entry
from candidates.kda_prefill.kernel.entry import Config

CONFIG = Config(bt=32, anchor="mid")


class Launches(list):
    """Configuration, whether there was a state, and arguments of each; ``forms`` their options."""

    def __init__(self):
        super().__init__()
        self.forms = []


def serve(monkeypatch):
    """Serve CPU tensors with a function that records its arguments and fills the outputs."""
    calls = Launches()

    def compiled(config, with_state, options=None):
        def function(*args):
            check_like_a_compiled_function(options, with_state, args)
            calls.append((config, with_state, args))
            calls.forms.append(options)
            args[7].data.fill_(1.0)  # a kernel knows nothing of gradients
            if args[8] is not None:
                args[8].data.fill_(2.0)

        return function

    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
    monkeypatch.setattr(known, "_KNOWN", {})
    monkeypatch.setattr(known, "_PREPARED", {})
    monkeypatch.setattr(known, "current_device", lambda: -1)
    monkeypatch.setattr(entry, "compiled", compiled)
    monkeypatch.setattr(entry, "on_stream", lambda stream, device: None)
    monkeypatch.setattr(entry, "sms", lambda device: 132)
    return calls


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_like_a_compiled_function(options, with_state, args):
    """What TVM-FFI checks before a launch: dtypes, shapes, devices, alignment, constant strides.

    Of a compact tensor a stride that is a product of unknown sizes goes by unseen.
    """
    bf16 = torch.bfloat16
    lead = "BT" if options.offsets == "equal" else "T"
    HV = "H" if options.compact else "V"
    cu = None if options.offsets == "equal" else getattr(torch, options.offsets)
    n = "B" if options.offsets == "equal" else "N"
    want = (
        (bf16, lead + "HD"), (bf16, lead + "HD"), (bf16, lead + HV + "D"),
        (DTYPES[options.gate_dtype], lead + HV + "D"), (DTYPES[options.beta_dtype], lead + HV),
        (cu, "C"), (DTYPES[options.initial_state] if with_state else None, n + HV + "DD"),
        (bf16, lead + HV + "D"), (DTYPES.get(options.final_state), n + HV + "DD"),
    )  # fmt: skip
    f32 = torch.float32
    want = [*zip(args, want, strict=False)]
    want += [(args[-3], (f32 if options.raw_gate else None, HV))]
    want += [(args[-2], (f32 if options.bias else None, HV + "D"))]
    sizes = {"D": 128}
    for i, (x, (dtype, dims)) in enumerate(want):
        if dtype is None:
            if x is not None:
                raise TypeError(f"argument #{i} must be None")
            continue
        if x.dtype is not dtype or x.dim() != len(dims):
            raise TypeError(f"argument #{i}: mismatched type or rank")
        if any(sizes.setdefault(d, size) != size for d, size in zip(dims, x.shape, strict=True)):
            raise ValueError(f"argument #{i}: mismatched shape")
        if x.device.type != "cpu":
            raise ValueError(f"argument #{i}: mismatched device")
        wide = dims[-1] == "D"
        if wide and x.data_ptr() % 16:
            raise ValueError(f"argument #{i}: misaligned")
        if i > 4 or options.compact:
            known = 1
            for size, stride, dim in zip(x.shape[::-1], x.stride()[::-1], dims[::-1], strict=True):
                if size > 1 and stride != known:
                    raise ValueError(f"argument #{i}: mismatched strides")
                if dim != "D":
                    break
                known *= size
        elif wide and (x.stride(-1) != 1 or any(s * x.itemsize % 16 for s in x.stride()[:-1])):
            raise ValueError(f"argument #{i}: mismatched strides")


def tensors(T=37, H=3, N=2, batch=None):
    lead = (T, H) if batch is None else (batch, T, H)
    bf16 = {n: torch.randn(*lead, 128).bfloat16() for n in ("q", "k", "v")}
    out = {**bf16, "g": -torch.rand(*lead, 128), "beta": torch.rand(*lead)}
    if batch is None:
        cu = [T * n // N for n in range(N)] + [T] if N else [0]
        out["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32)
    return out


def states(N=2, H=3):
    return torch.randn(N, H, 128, 128)


def apart(x):
    """Equal values, every other element."""
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    return wide[..., ::2].copy_(x)
