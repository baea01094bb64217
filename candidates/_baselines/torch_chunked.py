"""Plain torch, chunked: the control that is there on every machine.

fp32 throughout, right for every gate (only exponents <= 0 are formed), and slow:
it shows what the operation costs without a kernel of its own.  It serves every gated delta rule:
a gate of each channel [T, HV, K] or of each head [T, HV], and value heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from candidates._base import Baseline, Runnable
from candidates._baselines.common import Bound, distribution_version
from operations import Inputs, Outputs, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["TorchChunked"]

CHUNK = 32
# A factor below this is 0 in fp32; -inf would turn differences of sums into NaN.
LOWEST_GATE = -88.0


class TorchChunked(Baseline):
    """The chunked form in batched torch operations.

    Parameters
    ----------
    operation : str
        A gated delta rule, by name.
    """

    name = "torch"
    input_form = "activated"

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return distribution_version("torch")

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Runnable:
        def bind(inputs: Inputs, outputs: Outputs) -> Callable[[], Mapping[str, torch.Tensor]]:
            rows, places = _places(inputs["cu_seqlens"])

            def call() -> Mapping[str, torch.Tensor]:
                o, final = _chunked(inputs, rows, places)
                outputs["o"].zero_()  # rows that no sequence covers
                outputs["o"][rows] = o.to(outputs["o"].dtype)
                outputs["final_state"].copy_(final)
                return outputs

            return call

        # Whatever torch launches; it has no kernels of its own to name.
        return Bound(("",), bind)


def _places(cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, int, int]]:
    """Token rows in order, and where each goes in ``[N, chunks * CHUNK]``."""
    import torch

    offsets = cu_seqlens.tolist()
    n = len(offsets) - 1
    longest = max((offsets[i + 1] - offsets[i] for i in range(n)), default=0)
    width = -(-longest // CHUNK) * CHUNK
    rows = [torch.arange(offsets[i], offsets[i + 1]) for i in range(n)]
    flat = [i * width + torch.arange(len(r)) for i, r in enumerate(rows)]
    device = cu_seqlens.device
    none = torch.empty(0, dtype=torch.int64)
    where = torch.cat([none, *flat]).to(device)
    return torch.cat([none, *rows]).to(device), (where, n, width)


def _chunked(
    inputs: Inputs, rows: torch.Tensor, places: tuple[torch.Tensor, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o`` of the covered rows ``[R, HV, 128]`` and ``final_state``, both fp32."""
    import torch

    where, n, width = places
    heads, d = inputs["v"].shape[1:]
    group = heads // inputs["k"].shape[1]
    count = width // CHUNK

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """[T, HV, ...] to fp32 [N, chunks, HV, CHUNK, ...]; rows past an end are 0."""
        padded = x.new_zeros(n * width, *x.shape[1:], dtype=torch.float32)
        padded[where] = x[rows].float()
        return padded.view(n, count, CHUNK, *x.shape[1:]).transpose(2, 3)

    q, k = (chunks(inputs[name].repeat_interleave(group, 1)) for name in ("q", "k"))
    v, beta = chunks(inputs["v"]), chunks(inputs["beta"])
    b = chunks(inputs["g"].clamp(min=LOWEST_GATE)).cumsum(3)
    k_beta = k * beta[..., None]
    if b.dim() == k.dim():
        akk, aqk = _scores_by_channel(q, k, k_beta, b)
    else:
        b = b[..., None]
        decay = (b - b.mT).clamp_(max=0.0).exp_()
        akk, aqk = (k_beta @ k.mT * decay).tril(-1), (q @ k.mT * decay).tril()
    akk += torch.eye(CHUNK, device=akk.device)
    grown = b.exp()
    w, u = torch.linalg.solve_triangular(
        akk, torch.cat([k_beta * grown, v * beta[..., None]], -1), upper=False
    ).split(d, -1)
    q_hat, k_bar = q * grown, k * (b[..., -1:, :] - b).exp()
    kept = grown[..., -1, :]

    initial = inputs["initial_state"]
    state = k.new_zeros(n, heads, d, d) if initial is None else initial.float()
    o = torch.empty_like(v)
    for c in range(count):
        new = u[:, c] - w[:, c] @ state.mT
        o[:, c] = q_hat[:, c] @ state.mT + aqk[:, c] @ new
        state = state * kept[:, c, :, None, :] + new.mT @ k_bar[:, c]
    flat = o.transpose(2, 3).reshape(n * width, heads, d)
    return flat[where] * float(inputs["scale"]), state


def _scores_by_channel(
    q: torch.Tensor, k: torch.Tensor, k_beta: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decayed scores [..., CHUNK, CHUNK]: k with k below the diagonal, q with k up to it."""
    import torch

    akk = k.new_zeros(*k.shape[:-1], CHUNK)
    aqk = torch.zeros_like(akk)
    for i in range(CHUNK):
        # Columns up to the diagonal only: every exponent formed is <= 0.
        decayed = (b[..., i : i + 1, :] - b[..., : i + 1, :]).exp_().mul_(k[..., : i + 1, :])
        akk[..., i, :i] = torch.einsum("...d,...jd->...j", k_beta[..., i, :], decayed[..., :i, :])
        aqk[..., i, : i + 1] = torch.einsum("...d,...jd->...j", q[..., i, :], decayed)
    return akk, aqk
