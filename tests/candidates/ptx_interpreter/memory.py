"""Loads and stores, and addresses in the shared memory of a cluster."""

from __future__ import annotations

import re

import numpy as np

from ptx_interpreter.state import RANK_SHIFT, SHARED_BASE, Execute, State, names

__all__ = ["INSTRUCTIONS"]


def _mapa(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    own = cta.get(a[1]) & np.uint32((1 << RANK_SHIFT) - 1)
    cta.put(a[0], own + ((cta.get(a[2]) + np.uint32(1)) << np.uint32(RANK_SHIFT)), mask)


def _bytes(cta: State, space: str, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    assert (address % size == 0).all(), "misaligned"
    if space == "shared":
        return cta.shared, address - SHARED_BASE
    if space == "shared::cluster":
        target = cta.at(int(address[0]))[0]
        return target.shared, (address & ((1 << RANK_SHIFT) - 1)) - SHARED_BASE
    base, flat = cta.memory.at(int(address.min()), int(address.max()) + size - 1)
    return flat, address - base


def _ld(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    into = names(a[0])
    size = {"b64": 8, "b16": 2}.get(parts[-1], 4)
    if parts[1] == "param":
        match = re.match(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", a[1])
        assert match is not None
        for i, name in enumerate(into):
            first = int(match[2] or 0) + i * size
            word = cta.parameters[int(match[1])][first : first + size]
            cta.put(name, np.full(cta.n, int.from_bytes(word, "little"), f"u{size}"), mask)
        return
    base, offset = cta.address(a[1])
    flat, place = _bytes(cta, parts[1], base[mask] + offset, size * len(into))
    words = flat[place[:, None] + np.arange(size * len(into))].view(f"u{size}")
    for i, name in enumerate(into):
        value = np.zeros(cta.n, f"u{size}")
        value[mask] = words[:, i]
        cta.put(name, value, mask)


def _st(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    base, offset = cta.address(a[0])
    size = 2 if parts[-1] == "b16" else 4
    if parts[1] == "async":
        parts = ["st", "shared::cluster"]
        (barrier, at), bytes_ = cta.address(a[2]), size * len(names(a[1]))
        for i in np.nonzero(mask)[0]:
            cta.barrier(int(barrier[i]) + at).turn(0, -bytes_)
    words = [cta.get(n, f"u{8 * size}")[mask].astype(f"u{size}") for n in names(a[1])]
    flat, place = _bytes(cta, parts[1], base[mask] + offset, size * len(words))
    data = np.stack(words, 1).view(np.uint8)
    flat[place[:, None] + np.arange(data.shape[1])] = data


def _prefetch(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    for address in cta.address(a[0])[0][mask]:
        cta.memory.at(int(address), int(address))


INSTRUCTIONS: dict[str, Execute] = {
    "mapa": _mapa,
    "ld": _ld,
    "st": _st,
    "prefetch": _prefetch,
}
