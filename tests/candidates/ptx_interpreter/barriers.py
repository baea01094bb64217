"""Arrivals at barriers in shared memory and of the cluster, and waits for them."""

from __future__ import annotations

import numpy as np

from ptx_interpreter.program import Instruction
from ptx_interpreter.state import Barrier, Execute, State

__all__ = ["INSTRUCTIONS", "over"]


def over(cta: State, instruction: Instruction, mask: np.ndarray) -> np.ndarray | None:
    """Lanes of the mask whose wait is over; None if the instruction is no wait."""
    if instruction.opcode == "wait":
        a = instruction.arguments
        base, offset = cta.address(a[0])
        parity, passed = cta.get(a[1]), np.zeros(cta.n, bool)
        for i in np.nonzero(mask)[0]:
            passed[i] = cta.barrier(int(base[i]) + offset).phase % 2 != parity[i] % 2
        return passed
    if instruction.opcode.startswith("barrier.cluster.wait"):
        least = min(int(other.meetings.min()) for other in cta.cluster)
        return mask & (cta.meetings <= least)
    return None


def _nothing(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    """Orders what is in order here anyway."""


def _arrive_at_cluster(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    assert parts[:3] == ["barrier", "cluster", "arrive"]
    cta.meetings[mask] += 1


def _mbarrier(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    if parts[1] == "init":
        base, offset = cta.address(a[0])
        counts = cta.get(a[1])
        for i in np.nonzero(mask)[0]:
            cta.barriers[int(base[i]) + offset] = Barrier(int(counts[i]), int(counts[i]))
        return
    if parts[1] == "inval":
        base, offset = cta.address(a[0])
        for address in base[mask]:
            del cta.barriers[int(address) + offset]
        return
    base, offset = cta.address(a[1])
    expected = cta.get(a[2]) if "expect_tx" in parts else np.zeros(cta.n, np.int64)
    for i in np.nonzero(mask)[0]:
        cta.barrier(int(base[i]) + offset).turn(1, int(expected[i]))


INSTRUCTIONS: dict[str, Execute] = {
    "barrier": _arrive_at_cluster,
    "mbarrier": _mbarrier,
    "bar": _nothing,
    "fence": _nothing,
    "griddepcontrol": _nothing,
    "setmaxnreg": _nothing,
}
