"""KDA prefill in plain torch, token by token: right for every gate, and slow.

    factory check docs/examples/kda_token_by_token.py

It keeps the whole protocol of a candidate file: what it computes, what it
launches, where it runs, and one function that fills the outputs it is given.
"""

from itertools import pairwise

import torch

OPERATION = "kda_prefill"
# Plain torch launches whatever its version chooses; a kernel of one's own has one prefix.
KERNELS = ("at::", "at_cuda_detail::", "cublas", "cutlass", "gemv", "nvjet", "Memcpy", "Memset")
GATE_BOUND = None  # right for any gate
CHUNK = 1  # nothing of a later token reaches an earlier one
BITWISE_CAUSAL = True
DEVICES = ("cpu", "cuda")


def run(inputs, outputs):
    """Fill ``o`` [T, H, 128] bf16 and ``final_state`` [N, H, 128, 128] fp32."""
    q, k, v, g = (inputs[name].float() for name in ("q", "k", "v", "g"))
    beta, initial = inputs["beta"], inputs["initial_state"]
    offsets = inputs["cu_seqlens"].tolist()
    o = torch.zeros_like(v)
    for n, (begin, end) in enumerate(pairwise(offsets)):
        # Value-major: [H, V, K], so that a key is contracted over the last axis.
        if initial is None:
            state = torch.zeros_like(outputs["final_state"][n])
        else:
            state = initial[n].clone()
        for t in range(begin, end):
            state = state * g[t].exp()[:, None, :]
            recalled = (state @ k[t][:, :, None]).squeeze(-1)
            written = beta[t][:, None] * (v[t] - recalled)
            state = state + written[:, :, None] * k[t][:, None, :]
            o[t] = (state @ q[t][:, :, None]).squeeze(-1)
        outputs["final_state"][n].copy_(state)
    outputs["o"].copy_(inputs["scale"] * o)
