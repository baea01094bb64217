"""Asynchronous copies, done when they are issued; the bulk ones to shared memory tell a barrier."""

from __future__ import annotations

import numpy as np

from ptx_interpreter.state import SHARED_BASE, Execute, State

__all__ = ["INSTRUCTIONS"]


def _cp(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    if parts[2:4] == ["bulk", "global"]:
        _store_bulk(cta, a, mask)
        return
    if parts[2] == "bulk" and len(a) > 3:
        _load_bulk(cta, a, mask)
        return
    if parts[2] not in ("ca", "cg"):  # commit and wait: the copies are done
        return
    if "cache_hint" in parts[-1]:  # which changes no value
        a = a[:-1]
    whole = int(a[2])
    (target, offset), (source, _) = cta.address(a[0]), cta.address(a[1])
    sizes = cta.get(a[3]) if len(a) > 3 else np.full(cta.n, whole)
    for i in np.nonzero(mask)[0]:
        place, size = int(target[i]) + offset - SHARED_BASE, int(sizes[i])
        cta.shared[place : place + whole] = 0
        if size:
            base, flat = cta.memory.at(int(source[i]), int(source[i]) + size - 1)
            first = int(source[i]) - base
            cta.shared[place : place + size] = flat[first : first + size]


def _load_bulk(cta: State, a: tuple[str, ...], mask: np.ndarray) -> None:
    """To shared memory, from global memory or from that of this CTA."""
    (target, offset), (source, from_), (barrier, at) = (cta.address(a[i]) for i in (0, 1, 3))
    size = cta.get(a[2])
    for i in np.nonzero(mask)[0]:
        first, count = int(source[i]) + from_, int(size[i])
        holder, place = cta.at(int(target[i]) + offset)
        if a[1].startswith("[%rd"):
            base, flat = cta.memory.at(first, first + count - 1)
        else:
            base, flat = SHARED_BASE, cta.shared
        place -= SHARED_BASE
        holder.shared[place : place + count] = flat[first - base : first - base + count]
        cta.barrier(int(barrier[i]) + at).turn(0, -count)


def _store_bulk(cta: State, a: tuple[str, ...], mask: np.ndarray) -> None:
    (target, _), (source, offset) = cta.address(a[0]), cta.address(a[1])
    for i in np.nonzero(mask)[0]:
        place, size = int(source[i]) + offset - SHARED_BASE, int(cta.get(a[2])[i])
        base, flat = cta.memory.at(int(target[i]), int(target[i]) + size - 1)
        first = int(target[i]) - base
        flat[first : first + size] = cta.shared[place : place + size]


INSTRUCTIONS: dict[str, Execute] = {
    "cp": _cp,
}
