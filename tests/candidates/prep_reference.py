"""Float64 evaluation of every field of PREP's images, chunk by chunk as the definition says.

Exponents are formed as differences of two cumulative gates, pair by pair, without any anchor;
the inverse is a triangular solve.  Knows the image's layout and nothing of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from candidates._delta_rule.kernel.image import (
    HEAD,
    ImageLayout,
    chunks_of,
    slot_base,
    slots,
    swizzled_offset,
)

FIELDS = ("w", "qhat", "kbar", "aqk", "u", "decay")


@dataclass(frozen=True)
class Batch:
    """Offsets made safe, and the chunk of each slot.

    ``tokens`` and ``valid`` are ``[owned, BT]``; ``owned`` lists slots, ``covered`` marks the
    rows of sequences.
    """

    slots: int
    owned: torch.Tensor
    tokens: torch.Tensor
    valid: torch.Tensor
    covered: torch.Tensor


def batch_of(offsets: list[int], T: int, bt: int, unroll: int) -> Batch:
    N, m, safe = len(offsets) - 1, 0, []
    for x in offsets:
        m = max(m, min(max(x, 0), T))
        safe.append(m)
    owned, starts, ends = [], [], []
    covered = torch.zeros(T, dtype=torch.bool)
    for n in range(N):
        covered[safe[n] : safe[n + 1]] = True
        for c in range(chunks_of(safe[n + 1] - safe[n], bt, unroll)):
            owned.append(slot_base(safe[n], n, bt, unroll) + c)
            starts.append(safe[n] + c * bt)
            ends.append(safe[n + 1])
    tokens = torch.tensor(starts, dtype=torch.long).view(-1, 1) + torch.arange(bt)
    valid = tokens < torch.tensor(ends, dtype=torch.long).view(-1, 1)
    return Batch(slots(T, N, bt, unroll), torch.tensor(owned), tokens, valid, covered)


def reference(
    inputs: dict[str, torch.Tensor], batch: Batch, scale: float
) -> dict[str, torch.Tensor]:
    """Fields ``[owned, H, rows, columns]`` in float64; W negated, the scale in Qhat and Aqk."""
    device = inputs["q"].device
    rows, valid = batch.tokens.to(device), batch.valid.to(device)

    def take(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x.new_zeros((*rows.shape, *x.shape[1:])).double().transpose(1, 2)
        gathered = x[rows.clamp(max=x.shape[0] - 1)].double()
        inside = valid.view(*valid.shape, *[1] * (x.dim() - 1))
        return torch.where(inside, gathered, 0.0).transpose(1, 2)

    q, k, v, beta = (take(inputs[name]) for name in ("q", "k", "v", "beta"))
    # e^-200 is nothing in any format; sums of larger gates would lose the digits of the others.
    b = take(inputs["g"]).clamp(min=-200.0).cumsum(-2)
    bt = b.shape[-2]
    akk = torch.zeros(*b.shape[:2], bt, bt, dtype=torch.float64, device=device)
    aqk = akk.clone()
    for i in range(bt):
        weight = torch.exp(b[:, :, i : i + 1] - b[:, :, : i + 1]) * k[:, :, : i + 1]
        akk[:, :, i, :i] = (weight[:, :, :i] * k[:, :, i : i + 1]).sum(-1)
        aqk[:, :, i, : i + 1] = (weight * q[:, :, i : i + 1]).sum(-1)
    unit = torch.eye(bt, dtype=torch.float64, device=device)
    lower = unit + beta.unsqueeze(-1) * akk
    x = torch.linalg.solve_triangular(lower, unit.expand_as(lower), upper=False)
    x = x * beta.unsqueeze(-2)
    end = b[:, :, -1:]
    return {
        "w": -(x @ (k * b.exp())),
        "qhat": scale * q * b.exp(),
        "kbar": k * (end - b).exp(),
        "aqk": scale * aqk,
        "u": x @ v,
        "decay": end.exp(),
    }


def unpack(images: torch.Tensor, bt: int) -> dict[str, torch.Tensor]:
    """The fields of images ``[owned, H, elements]`` bf16, and the ``pad`` between them."""
    layout = ImageLayout(bt)

    def part(first: int, rows: int, cols: int) -> torch.Tensor:
        index = [
            [first // 2 + swizzled_offset(r, c, rows, cols) for c in range(cols)]
            for r in range(rows)
        ]
        return images[..., torch.tensor(index, device=images.device)].double()

    wq = part(0, 2 * bt, HEAD)
    fp32 = images[..., layout.off_e // 2 : layout.off_e // 2 + 2 * HEAD].contiguous()
    order = torch.tensor([ImageLayout.decay_position(c) for c in range(HEAD)])
    return {
        "w": wq[..., :bt, :],
        "qhat": wq[..., bt:, :],
        "kbar": part(layout.off_k, bt, HEAD),
        "aqk": part(layout.off_a, bt, bt),
        "u": part(layout.common, bt, HEAD),
        "decay": fp32.view(torch.float32)[..., order.to(images.device)].double().unsqueeze(-2),
        "pad": images[..., layout.off_e // 2 + 2 * HEAD : layout.common // 2],
    }
