"""The definition, token by token in float64, and how far from it a result may be."""

from __future__ import annotations

import torch

# part: bounds


def oracle(q, k, v, g, beta, cu_seqlens, initial_state=None, scale=None):
    """``o`` [T, any_values, 128] and ``final_state`` [N, any_values, 128, 128] (value-major), both float64.

    # part: oracle_says
    """
    # part: oracle_heads
    scale = D**-0.5 if scale is None else scale
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    decay = g.double().exp()
    offsets: list[int] = []
    for x in cu_seqlens.tolist():
        x = min(max(int(x), 0), T)
        offsets.append(max(x, offsets[-1]) if offsets else x)
    N = len(offsets) - 1
    state = torch.zeros(N, H, D, D, dtype=torch.float64, device=q.device)
    if initial_state is not None:
        state += initial_state.double()
    o = torch.zeros_like(v)
    for n in range(N):
        S = state[n]  # [H, V, K]
        for t in range(offsets[n], offsets[n + 1]):
            S *= decay[t, any_decay_axes]
            r = v[t] - torch.einsum("hvk,hk->hv", S, k[t])
            S += beta[t, :, None, None] * r[:, :, None] * k[t, :, None, :]
            o[t] = scale * torch.einsum("hvk,hk->hv", S, q[t])
    return o, state


def assert_close(got, want, what: str) -> None:
    """Judge one output over all of it and head by head (its second axis)."""
    assert torch.isfinite(got).all(), f"{what}: not finite"
    got = got.double()
    if want.numel() == 0:
        return
    pairs = [("all", got, want)]
    pairs += [(f"head {h}", got[:, h], want[:, h]) for h in range(want.shape[1])]
    for scope, a, b in pairs:
        if float(b.abs().max()) == 0:
            assert float(a.abs().max()) == 0, f"{what}, {scope}: not zero"
            continue
        max_rel = float((a - b).abs().max() / b.abs().max())
        rms_rel = float((a - b).norm() / b.norm())
        assert max_rel <= MAX_REL, f"{what}, {scope}: max error {max_rel:.2e}"
        assert rms_rel <= RMS_REL, f"{what}, {scope}: rms error {rms_rel:.2e}"
