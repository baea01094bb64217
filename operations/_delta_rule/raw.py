"""What raw inputs mean: the plain operands of the same call, in float64.

Callers may leave to the kernel what a model does in front of it: activate the gate, take the
sigmoid of write strengths, normalise q and k, serve several value heads with one head of q and k.
An oracle is fed what :func:`plain` makes of such a call.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["L2NORM_EPS", "activated_gate", "plain"]

L2NORM_EPS = 1e-6
"""Added to a sum of squares before its root, as other kernels do; keeps zero keys zero."""


def activated_gate(
    gate: str,
    g: torch.Tensor,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The log gate, in float64.

    Parameters
    ----------
    gate : str
        ``log``: g itself.  ``safe``: ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        ``softplus``: ``-exp(A_log) * softplus(g + dt_bias)``.
    g : Tensor [..., HV, 128] or [..., HV]
    lower_bound : float, optional
    A_log : Tensor [HV, 1] or [HV], optional
        Of as many dimensions as a token's gate has.
    dt_bias : Tensor [HV, 128] or [HV], optional
        Zero if absent.

    Raises
    ------
    ValueError
        If the gate is unknown, or something that it takes is missing.
    """
    x = g.double()
    if gate == "log":
        return x
    if A_log is None or (gate == "safe" and lower_bound is None):
        raise ValueError(f"gate={gate!r} needs {'lower_bound' if A_log is not None else 'A_log'}")
    slope = A_log.double().exp()
    if dt_bias is not None:
        x = x + dt_bias.double()
    if gate == "safe":
        return torch.sigmoid(slope * x) * float(lower_bound or 0.0)
    if gate == "softplus":
        # torch.nn.functional.softplus is linear from 20 on, which float64 can tell.
        return -slope * (x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs())))
    raise ValueError(f"gate={gate!r} is not one of ['log', 'safe', 'softplus']")


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    gate: str = "log",
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    beta_logits: bool = False,
    l2norm: bool = False,
) -> dict[str, Any]:
    """Arguments of the operation, packed and in float64, that mean what a raw call does.

    Parameters
    ----------
    q, k : Tensor [T, H, 128] or [B, T, H, 128]
        The latter without ``cu_seqlens``.
    v : Tensor [..., HV, 128]
        HV a multiple of H.
    g : Tensor [..., HV, 128] or [..., HV]
    beta : Tensor [..., HV]
    cu_seqlens : Tensor [N + 1], optional
    initial_state : Tensor [N, HV, 128, 128], optional
        Of any dtype.
    scale : float, optional
        ``1 / sqrt(128)`` if absent.
    gate, lower_bound, A_log, dt_bias
        See :func:`activated_gate`; ``A_log`` is [HV].
    beta_logits : bool
        Whether the sigmoid of beta is meant.
    l2norm : bool
        Whether q and k are divided by ``sqrt(|x|^2 + L2NORM_EPS)``.

    Returns
    -------
    dict
        ``q, k, v`` [T, HV, 128], ``g`` [T, HV, 128] or [T, HV] and ``beta`` [T, HV], float64;
        ``cu_seqlens``, ``initial_state``, ``scale``.
    """
    if A_log is not None and g.dim() == v.dim():
        A_log = A_log[:, None]
    if cu_seqlens is None:
        B, T = q.shape[:2]
        cu_seqlens = torch.arange(B + 1, device=q.device) * T
        q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    q, k = (x.double().repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + L2NORM_EPS).sqrt() for x in (q, k))
    return {
        "q": q,
        "k": k,
        "v": v.double(),
        "g": activated_gate(gate, g, lower_bound, A_log, dt_bias),
        "beta": beta.double().sigmoid() if beta_logits else beta.double(),
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
    }
