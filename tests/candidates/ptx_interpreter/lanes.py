"""What the lanes of a warp tell one another."""

from __future__ import annotations

import numpy as np

from ptx_interpreter.state import LANES, Execute, State

__all__ = ["INSTRUCTIONS"]


def _shfl(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    value, distance = (cta.get(x).reshape(-1, LANES).astype(np.int64) for x in a[1:3])
    lane = np.arange(LANES)
    source = {
        "idx": distance % LANES,
        "up": np.where(lane >= distance, lane - distance, lane),
        "bfly": lane ^ distance,
    }[parts[2]]
    found = np.take_along_axis(value, source, 1).astype(np.uint32)
    into, *inside = a[0].split("|")  # and whether the lane that was asked for is there
    cta.put(into, found.reshape(-1), mask)
    for name in inside:
        assert parts[2] == "up"
        cta.put(name, (lane >= distance).reshape(-1), mask)


def _redux(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    value = cta.get(a[1], parts[-1]).reshape(-1, LANES)
    best = value.max(1) if parts[2] == "max" else value.min(1)
    cta.put(a[0], np.repeat(best, LANES), mask)


def _vote(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    assert parts == ["vote", "sync", "ballot", "b32"]
    votes = cta.registers[a[1]].reshape(-1, LANES).astype(np.uint32)
    word = (votes << np.arange(LANES, dtype=np.uint32)).sum(1, dtype=np.uint32)
    cta.put(a[0], np.repeat(word, LANES), mask)


def _elect(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    cta.put(a[0].split("|")[1], np.arange(cta.n) % LANES == 0, mask)


INSTRUCTIONS: dict[str, Execute] = {
    "shfl": _shfl,
    "redux": _redux,
    "vote": _vote,
    "elect": _elect,
}
