"""KDA prefill in plain torch, wrong on purpose: 64 tokens share one anchor.

    factory check docs/examples/kda_one_anchor.py

``exp(b_i - b_j)``, with ``b`` the running sum of log gates, is split into
``exp(b_i)`` and ``exp(-b_j)``.  With mild gates that looks right.  Production
gates average -2.5 a token, so ``exp(-b_j)`` overflows fp32 after about 35 tokens
of a chunk and ``0 * inf`` is NaN.  The check names the first regime in which it
breaks.
"""

from itertools import pairwise

import torch

OPERATION = "kda_prefill"
KERNELS = ("at::", "at_cuda_detail::", "cublas", "cutlass", "gemm", "nvjet", "Memcpy", "Memset")
GATE_BOUND = None
DEVICES = ("cpu", "cuda")
CHUNK = 64


def run(inputs, outputs):
    """Fill ``o`` [T, H, 128] bf16 and ``final_state`` [N, H, 128, 128] fp32."""
    offsets = inputs["cu_seqlens"].tolist()
    for n, (begin, end) in enumerate(pairwise(offsets)):
        initial = inputs["initial_state"]
        state = torch.zeros_like(outputs["final_state"][n]) if initial is None else initial[n]
        for start in range(begin, end, CHUNK):
            rows = slice(start, min(start + CHUNK, end))
            o, state = _chunk(inputs, rows, state)
            outputs["o"][rows].copy_(inputs["scale"] * o.transpose(0, 1))
        outputs["final_state"][n].copy_(state)


def _chunk(inputs, rows, state):
    """Outputs [H, C, 128] of one chunk, and the state [H, V, K] behind it."""
    q, k, v, g = (inputs[n][rows].float().transpose(0, 1) for n in ("q", "k", "v", "g"))
    beta = inputs["beta"][rows].transpose(0, 1)[..., None]
    b = g.cumsum(1)
    grown, shrunk = b.exp(), (-b).exp()  # one anchor, at the start of the chunk
    inside = (q * grown) @ (k * shrunk).mT
    lower = (beta * k * grown) @ (k * shrunk).mT
    eye = torch.eye(k.shape[1], device=k.device)
    inverse = torch.linalg.inv(eye + lower.tril(-1))
    new = inverse @ (beta * (v - (k * grown) @ state.mT))
    o = (q * grown) @ state.mT + inside.tril() @ new
    last = b[:, -1:, :]
    return o, state * last.exp() + new.mT @ (k * (last - b).exp())
