"""Images of random chunk factors and the scan of them in torch, for the tests of the scan."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from candidates._delta_rule.kernel.image import (
    HEAD,
    ImageLayout,
    chunks_of,
    slot_base,
    slots,
    swizzled_offset,
)


def positions(bt: int) -> dict[str, Tensor]:
    """Element positions in an image of each bf16 part, ``[rows, columns]``."""
    layout = ImageLayout(bt)

    def part(byte: int, rows: int, cols: int) -> Tensor:
        return torch.tensor(
            [
                [byte // 2 + swizzled_offset(i, j, rows, cols) for j in range(cols)]
                for i in range(rows)
            ]
        )

    over = part(0, 2 * bt, HEAD)
    halves = [part(layout.common + half * bt * HEAD, bt, 64) for half in (0, 1)]
    return {
        "w": over[:bt],
        "qhat": over[bt:],
        "kbar": part(layout.off_k, bt, HEAD),
        "aqk": part(layout.off_a, bt, bt),
        "u": torch.cat(halves, -1),
    }


def decay_positions(bt: int) -> Tensor:
    """fp32 positions in an image of the decay of each key channel."""
    layout = ImageLayout(bt)
    return layout.off_e // 4 + torch.tensor([layout.decay_position(c) for c in range(HEAD)])


def pack(bt: int, parts: dict[str, Tensor], fill: float = 0.0) -> Tensor:
    """Factors ``[.., BT, columns]`` (w not negated) and decay ``[.., 128]`` to images."""
    decay = parts["decay"]
    shape = (*decay.shape[:-1], ImageLayout(bt).elements)
    x = torch.full(shape, fill, dtype=torch.bfloat16, device=decay.device)
    for name, at in positions(bt).items():
        value = -parts[name] if name == "w" else parts[name]
        x[..., at.flatten().to(x.device)] = value.flatten(-2).bfloat16()
    x.view(torch.float32)[..., decay_positions(bt).to(x.device)] = decay
    return x


def unpack(bt: int, x: Tensor) -> dict[str, Tensor]:
    """Images to factors, the inverse of :func:`pack`, all fp32."""
    parts = {
        name: x[..., at.flatten().to(x.device)].float().unflatten(-1, at.shape)
        for name, at in positions(bt).items()
    }
    parts["w"] = -parts["w"]
    parts["decay"] = x.view(torch.float32)[..., decay_positions(bt).to(x.device)]
    return parts


@dataclass
class Case:
    """One call of the scan: what it is given and what it must give."""

    x: Tensor
    offsets: Tensor
    initial: Tensor | None
    out: Tensor
    covered: Tensor
    final: Tensor


def rows_of(offsets: list[int], T: int) -> list[tuple[int, int]]:
    """Rows of each sequence: offsets clamped to 0..T and made monotone."""
    made, top = [], 0
    for offset in offsets:
        top = max(top, min(offset, T))
        made.append(top)
    return list(pairwise(made))


def random_case(
    bt: int,
    unroll: int,
    offsets: list[int],
    T: int,
    heads: int,
    with_state: bool,
    seed: int,
    device: str = "cuda",
) -> Case:
    """Random factors of a contraction with a memory of tens of chunks, and their scan.

    Slots that belong to no sequence hold NaN, so that reading one shows.
    """
    made = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, device=device)

    N = len(offsets) - 1
    x = torch.full(
        (slots(T, N, bt, unroll), heads, ImageLayout(bt).elements),
        float("nan"),
        dtype=torch.bfloat16,
        device=device,
    )
    initial = normal(N, heads, HEAD, HEAD) if with_state else None
    out = torch.zeros(T, heads, HEAD, device=device)
    covered = torch.zeros(T, dtype=torch.bool, device=device)
    final = torch.zeros(N, heads, HEAD, HEAD, device=device)
    for n, (start, stop) in enumerate(rows_of(offsets, T)):
        length = stop - start
        chunks = chunks_of(length, bt, unroll)
        state = torch.zeros_like(final[n]) if initial is None else initial[n].clone()
        if chunks:
            valid = (torch.arange(chunks * bt, device=device) < length).view(chunks, 1, bt, 1)
            key = torch.nn.functional.normalize(normal(chunks, heads, bt, HEAD), dim=-1)
            fast = torch.rand(chunks, heads, HEAD, generator=made, device=device)
            parts = {
                "w": 0.3 * key * valid,
                "kbar": key * valid,
                "qhat": 0.1 * normal(chunks, heads, bt, HEAD) * valid,
                "aqk": (0.1 * normal(chunks, heads, bt, bt)).tril() * valid,
                "u": normal(chunks, heads, bt, HEAD) * valid,
                # Half of the channels forget fast, half hardly.
                "decay": torch.where(
                    torch.arange(HEAD, device=device) % 2 == 0, fast, 1 - fast / 50
                ),
            }
            parts["decay"] = torch.where(valid.any(2), parts["decay"], 1.0)
            first = slot_base(start, n, bt, unroll)
            x[first : first + chunks] = pack(bt, parts)
            read = unpack(bt, x[first : first + chunks])
            rows = torch.empty(chunks, heads, bt, HEAD, device=device)
            for c in range(chunks):
                # state is [V, K]; bf16 operands, fp32 sums, as the kernel
                old = state.bfloat16().float()
                new = read["u"][c] - read["w"][c] @ old.transpose(-1, -2)
                new = new.bfloat16().float()
                rows[c] = read["qhat"][c] @ old.transpose(-1, -2) + read["aqk"][c] @ new
                state = (
                    state * read["decay"][c, :, None, :] + new.transpose(-1, -2) @ read["kbar"][c]
                )
            out[start:stop] = rows.transpose(1, 2).flatten(0, 1)[:length]
            covered[start:stop] = True
        final[n] = state
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    return Case(x, cu, initial, out, covered, final)
