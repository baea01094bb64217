"""The float64 truth of the gated delta rules: token by token, and a chunked form equal to it.

For one head with state ``S`` [V, K] (value-major, as stored) a token does ::

    S <- S * exp(g)              decay each key channel (column), or all of them alike
    r  = v - S k                 what the memory gets wrong about k
    S <- S + beta * r k^T
    o  = scale * S q             read after the write

A gate ``g`` [T, HV, K] has one value a key channel, a gate [T, HV] one for all of them.  Value
head j reads head ``j // (HV / H)`` of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from operations._base import Inputs

__all__ = ["boundaries", "chunked", "token_by_token"]

_GATE_CLAMP = -745.0
"""exp(-745) is 0 to every digit float64 has; a stronger gate would cost cumulative sums theirs."""

_CHUNK_BY_CHANNEL, _CHUNK_BY_HEAD = 16, 64
"""Tokens of a chunk, where each channel has a gate of its own and where each head has.

Pairwise exponents cost ``16 * 128`` numbers a token and head there, and 64 here.
"""

_SLICE_BYTES = {"cpu": 48 << 20, "cuda": 2 << 30}
"""Largest pairwise tensor held at once; on a CPU small enough to stay near its caches."""


def boundaries(inputs: Inputs) -> list[int]:
    """Sequence boundaries as integers, clamped into 0..T and made monotone.

    Offsets are device data that an implementation cannot refuse without
    waiting for the device, so the operation defines what malformed ones mean.
    Synchronises with the device.
    """
    total = int(inputs["v"].shape[0])
    out: list[int] = []
    for raw in inputs["cu_seqlens"].tolist():
        at = min(max(int(raw), 0), total)
        out.append(max(at, out[-1]) if out else at)
    return out


def _start(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed ``o`` [T, HV, V] and the initial states [N, HV, V, K], both float64."""
    v = inputs["v"]
    _, HV, V = v.shape
    K = inputs["k"].shape[-1]
    N = max(inputs["cu_seqlens"].shape[0] - 1, 0)
    o = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    given = inputs["initial_state"]
    if given is None:
        return o, torch.zeros(N, HV, V, K, dtype=torch.float64, device=v.device)
    return o, given.to(torch.float64, copy=True)


def _group(inputs: Inputs) -> int:
    """Value heads that read one head of q and k."""
    return int(inputs["v"].shape[1]) // int(inputs["k"].shape[1])


def _per_value_head(x: torch.Tensor, group: int) -> torch.Tensor:
    """Rows ``[tokens, H, K]`` of q or k, each head as often as value heads read it."""
    return x.repeat_interleave(group, -2) if group > 1 else x


def _gate(inputs: Inputs) -> torch.Tensor:
    """The gate [T, HV, K], or [T, HV, 1] where one stands for all channels."""
    g: torch.Tensor = inputs["g"]
    return g if g.dim() == 3 else g[..., None]


def token_by_token(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Evaluate the recurrence one token at a time in float64.

    Parameters
    ----------
    inputs : Mapping
        As :meth:`operations.Operation.generate` returns; any device.

    Returns
    -------
    dict
        ``o`` [T, HV, V] and ``final_state`` [N, HV, V, K], float64.  Rows of
        ``o`` that no sequence covers are 0.
    """
    o, state = _start(inputs)
    group = _group(inputs)
    q, k = (_per_value_head(inputs[name], group).double() for name in ("q", "k"))
    v = inputs["v"].double()
    decay = _gate(inputs).double().clamp(min=_GATE_CLAMP).exp_()
    beta = inputs["beta"].double()
    q = q * float(inputs["scale"])
    cu = boundaries(inputs)
    for n in range(len(cu) - 1):
        S = state[n]
        for t in range(cu[n], cu[n + 1]):
            S *= decay[t, :, None, :]
            r = v[t] - torch.matmul(S, k[t, :, :, None])[..., 0]
            S += (beta[t, :, None] * r)[:, :, None] * k[t, :, None, :]
            o[t] = torch.matmul(S, q[t, :, :, None])[..., 0]
    return {"o": o, "final_state": state}


@dataclass(frozen=True)
class _Plan:
    """Chunks of all sequences ordered by (chunk index, sequence).

    Sequences are sorted by length, longest first, so those still running at a
    chunk index are a prefix and one batched product serves them all.

    Parameters
    ----------
    chunk : int
        Tokens of a whole chunk.
    order : list of int
        Position in the sorted order to sequence.
    active : list of int
        Sequences that have a chunk of that index.
    starts, lengths : list of list of int
        First token and valid tokens of each chunk, per chunk index.
    """

    chunk: int
    order: list[int]
    active: list[int]
    starts: list[list[int]]
    lengths: list[list[int]]


def _plan(cu: list[int], chunk: int) -> _Plan:
    sizes = [cu[n + 1] - cu[n] for n in range(len(cu) - 1)]
    order = sorted(range(len(sizes)), key=lambda n: -sizes[n])
    steps = -(-max(sizes, default=0) // chunk)
    active, starts, lengths = [], [], []
    for c in range(steps):
        running = [n for n in order if sizes[n] > c * chunk]
        active.append(len(running))
        starts.append([cu[n] + c * chunk for n in running])
        lengths.append([min(chunk, sizes[n] - c * chunk) for n in running])
    return _Plan(chunk, order, active, starts, lengths)


@dataclass(frozen=True)
class _Factors:
    """What a chunk needs of its own tokens; leading axes [chunks, HV]."""

    W: torch.Tensor  # [BT, K]
    U: torch.Tensor  # [BT, V]
    q_hat: torch.Tensor  # [BT, K]
    k_bar: torch.Tensor  # [BT, K]
    a_qk: torch.Tensor  # [BT, BT]
    decay: torch.Tensor  # [1, K] or [1, 1]


def _scores(q: torch.Tensor, k: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decayed ``k k^T`` and ``q k^T``, [chunks, HV, i, j], right on and below the diagonal."""
    # exp(b_i - b_j) pair by pair: [chunks, HV, i, j, K or 1].  Above the diagonal the exponent is
    # positive and the score is dropped later; clamping it keeps the dropped value finite.
    pair = (b[..., :, None, :] - b[..., None, :, :]).clamp_(max=0.0).exp_()
    if b.shape[-1] == 1:
        pair = pair[..., 0]
        return pair * torch.matmul(k, k.mT), pair * torch.matmul(q, k.mT)
    pair *= k[..., None, :, :]
    scores = torch.matmul(pair, torch.stack([k, q], dim=-1))
    return scores[..., 0], scores[..., 1]


def _factors(tokens: dict[str, torch.Tensor]) -> _Factors:
    """Chunk factors from padded tokens ``[chunks, HV, BT, ...]``; every exponent is <= 0."""
    q, k, v, beta = tokens["q"], tokens["k"], tokens["v"], tokens["beta"][..., None]
    b = tokens["g"].cumsum(-2)
    a_kk, a_qk = _scores(q, k, b)
    into = b.exp()
    rhs = beta * torch.cat([k * into, v], dim=-1)
    # unitriangular: the solver takes the diagonal of I + L as ones without reading it.
    solved = torch.linalg.solve_triangular(
        (beta * a_kk).tril(-1), rhs, upper=False, unitriangular=True
    )
    K = k.shape[-1]
    return _Factors(
        W=solved[..., :K],
        U=solved[..., K:],
        q_hat=q * into,
        k_bar=k * (b[..., -1:, :] - b).exp(),
        a_qk=a_qk.tril(),
        decay=into[..., -1:, :],
    )


def chunked(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The same values as :func:`token_by_token`, in chunks of 16 or 64 tokens.

    Off-diagonal exponents are formed pair by pair, so none is positive and no
    anchor is needed: it is exact for every ``g <= 0``.  Sequences of any
    lengths advance together; the serial part is three batched operations a
    chunk.  Memory beyond inputs and outputs is bounded by working through the
    chunk index in slices.

    Parameters
    ----------
    inputs : Mapping
        As :meth:`operations.Operation.generate` returns; any device.

    Returns
    -------
    dict
        ``o`` [T, HV, V] and ``final_state`` [N, HV, V, K], float64.
    """
    o, state = _start(inputs)
    cu = boundaries(inputs)
    plan = _plan(cu, _CHUNK_BY_CHANNEL if inputs["g"].dim() == 3 else _CHUNK_BY_HEAD)
    if not plan.active:
        return {"o": o, "final_state": state}
    _, HV, V, K = state.shape
    device = o.device
    order = torch.tensor(plan.order, device=device)
    carry = state[order]

    # About four tensors of this size per chunk and head: the pairs, states and operands.
    per_chunk = HV * max(16 * 16, V) * K * 8
    room = max(1, _SLICE_BYTES.get(device.type, _SLICE_BYTES["cpu"]) // per_chunk)
    first = 0
    while first < len(plan.active):
        last, chunks = first + 1, plan.active[first]
        while last < len(plan.active) and chunks + plan.active[last] <= room:
            chunks += plan.active[last]
            last += 1
        _advance(inputs, plan, first, last, carry, o)
        first = last
    state[order] = carry
    return {"o": o, "final_state": state}


def _advance(
    inputs: Inputs, plan: _Plan, first: int, last: int, carry: torch.Tensor, o: torch.Tensor
) -> None:
    """Scan chunk indices ``first..last-1``; updates ``carry`` and writes rows of ``o``."""
    device = o.device
    _, HV, V = o.shape
    group, chunk = _group(inputs), plan.chunk
    starts = torch.tensor([s for row in plan.starts[first:last] for s in row], device=device)
    lengths = torch.tensor([n for row in plan.lengths[first:last] for n in row], device=device)
    lane = torch.arange(chunk, device=device)
    valid = lane < lengths[:, None]  # [chunks, BT]
    index = torch.where(valid, starts[:, None] + lane, starts[:, None])

    def padded(x: torch.Tensor) -> torch.Tensor:
        """Rows [chunks, BT, HV, ...] as [chunks, HV, BT, ...], 0 past a sequence's end."""
        x = x.movedim(2, 1).double()
        keep = valid[:, None, :].reshape(len(starts), 1, chunk, *([1] * (x.dim() - 3)))
        return torch.where(keep, x, x.new_zeros(()))

    tokens = {name: padded(_per_value_head(inputs[name][index], group)) for name in ("q", "k")}
    tokens |= {name: padded(inputs[name][index]) for name in ("v", "beta")}
    tokens["g"] = padded(_gate(inputs)[index]).clamp_(min=_GATE_CLAMP)
    tokens["q"] *= float(inputs["scale"])
    f = _factors(tokens)

    before = carry.new_empty(len(starts), HV, V, carry.shape[-1])
    new_values = torch.empty_like(f.U)
    K = carry.shape[-1]
    at = 0
    for c in range(first, last):
        n = plan.active[c]
        S = carry[:n]
        rows = slice(at, at + n)
        before[rows] = S
        flat = S.reshape(n * HV, V, K)
        vn = torch.baddbmm(
            f.U[rows].reshape(n * HV, chunk, V),
            f.W[rows].reshape(n * HV, chunk, K),
            flat.mT,
            alpha=-1.0,
        )
        new_values[rows] = vn.view(n, HV, chunk, V)
        decayed = flat * f.decay[rows].reshape(n * HV, 1, -1)
        S.copy_(torch.baddbmm(decayed, vn.mT, f.k_bar[rows].reshape(n * HV, chunk, K)).view_as(S))
        at += n
    out = torch.matmul(f.q_hat, before.mT) + torch.matmul(f.a_qk, new_values)
    o[index[valid]] = out.movedim(1, 2)[valid]
