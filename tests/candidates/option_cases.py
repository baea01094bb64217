"""Calls in every form that the kernels serve, for tests on the CPU and on the GPU."""

from __future__ import annotations

from typing import Any

import torch

import operations
from candidates._delta_rule.kernel.options import Options
from operations.kda_prefill import KdaWorkload, raw

OPERATION = operations.get("kda_prefill")

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def call_of(
    options: Options,
    lengths: tuple[int, ...] = (15, 0, 49, 1),
    heads: int = 1,
    group: int = 1,
    regime: str = "production",
    state: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of ``kda_prefill`` in the form of ``options``.

    Parameters
    ----------
    lengths : tuple of int
        Of the sequences; equal ones where the options say so.
    heads, group : int
        Of q and k, and value heads for each.
    regime : str
        A safe-gate regime of the operation.  With ``gate="softplus"`` its slopes are such that the
        gates are about as strong.

    Returns
    -------
    tensors : dict
        Positional arguments by name.
    how : dict
        Keyword arguments that say what they are.
    """
    workload = KdaWorkload("options", heads=heads * group, lengths=lengths, initial_state=state)
    drawn = OPERATION.raw_form(workload, OPERATION.regimes[regime], seed=seed, device=device)
    assert drawn is not None
    names = ("q_raw", "k_raw") if options.l2norm else ("q", "k")
    x: dict[str, Any] = {"q": drawn[names[0]][:, ::group], "k": drawn[names[1]][:, ::group]}
    x["v"] = drawn["v"]
    x["g"] = drawn["g_raw"].float() if options.raw_gate else drawn["g"]
    x["g"] = x["g"].to(_FLOATS[options.gate_dtype])
    x["beta"] = drawn["beta_logits"] if options.beta_logits else drawn["beta"]
    x["beta"] = x["beta"].to(_FLOATS[options.beta_dtype])
    x = {n: t.contiguous() for n, t in x.items()} if options.compact else sliced(x)
    x["cu_seqlens"] = drawn["cu_seqlens"]
    if options.offsets == "equal":
        x["cu_seqlens"] = None
        shape = (len(lengths), lengths[0])
        x |= {n: x[n].unflatten(0, shape) for n in ("q", "k", "v", "g", "beta")}
    elif options.offsets == "int64":
        x["cu_seqlens"] = drawn["cu_seqlens"].long()
    x["initial_state"] = drawn["initial_state"]
    if state:
        x["initial_state"] = drawn["initial_state"].to(_FLOATS[options.initial_state])
    how: dict[str, Any] = {}
    if options.raw_gate:
        how |= {"gate": options.gate, "A_log": drawn["A_log"]}
        if options.gate == "safe":
            how["lower_bound"] = drawn["lower_bound"]
        if options.bias:
            how["dt_bias"] = drawn["dt_bias"]
    how |= {n: True for n in ("beta_logits", "l2norm") if getattr(options, n)}
    return x, how


def sliced(x: dict[str, Any]) -> dict[str, Any]:
    """The same values as slices of wider tensors: q, k and v of one projection, head by head."""
    names = [n for n in ("q", "k", "v") if x[n].shape == x["v"].shape]
    whole = torch.cat([x[n] for n in names], -1)
    out = dict(zip(names, whole.split(128, -1), strict=True))
    for name in ("q", "k", "g"):
        if name in x and name not in out:
            wide = torch.cat([x[name], x[name].flip(0)], 1)
            out[name] = wide[:, : x[name].shape[1]]
    out["beta"] = torch.stack([x["beta"], x["beta"].flip(0)], -1)[..., 0]
    return {name: out[name] for name in x}


def expected(x: dict[str, Any], how: dict[str, Any], scale: float | None = None) -> Any:
    """The float64 answer to a call, packed."""
    return OPERATION.fast_oracle(raw.plain(**x, **how, scale=scale))


def errors(got: dict[str, Any], want: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Largest and rms error of each output, over the largest and the rms of the reference."""
    table = {}
    for name, x in got.items():
        d, ref = x.reshape(want[name].shape).double() - want[name], want[name]
        table[name] = (
            float(d.abs().max() / ref.abs().max()),
            float(d.norm() / ref.norm()),
        )
    return table
