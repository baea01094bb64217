"""What a CTA has: registers of all lanes, shared memory, barriers, its cluster.

It is read and written by the names that instructions use; what they do is not known here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

SHARED_BASE = 1024
"""Address of dynamic shared memory: 0 and its neighbours stay invalid."""

LANES = 32
WARPGROUP = 128

RANK_SHIFT = 24
"""Addresses of a cluster's shared memory carry 1 + the CTA's number from this bit on; a CTA's own
need not."""

TYPES: dict[str, Any] = {
    "f32": np.float32, "s32": np.int32, "u32": np.uint32, "b32": np.uint32,
    "s64": np.int64, "u64": np.uint64, "b64": np.uint64,
    "s16": np.int16, "u16": np.uint16, "b16": np.uint16, "s8": np.int8,
}  # fmt: skip


@dataclass
class Memory:
    """Global memory: numpy arrays at made-up addresses.  Writes go to the arrays themselves."""

    arrays: list[tuple[int, np.ndarray]] = field(default_factory=list)
    next_address: int = 1 << 32

    def add(self, array: np.ndarray) -> int:
        """Address of a contiguous array."""
        flat = array.view(np.uint8).reshape(-1)
        base = self.next_address
        self.next_address += (flat.size + (1 << 21)) >> 12 << 12
        self.arrays.append((base, flat))
        return base

    def tensor(self, array: np.ndarray, shape: Sequence[int], strides: Sequence[int]) -> bytes:
        """A tensor as a kernel is given it: address, sizes, and strides, as far as it is told."""
        data = struct.pack("<Q", self.add(array)) + struct.pack(f"<{len(shape)}i", *shape)
        return data + bytes(-len(data) % 8) + struct.pack(f"<{len(strides)}q", *strides)

    def at(self, first: int, last: int) -> tuple[int, np.ndarray]:
        """Base and bytes of the array that holds both addresses."""
        for base, flat in self.arrays:
            if base <= first and last < base + flat.size:
                return base, flat
        raise IndexError(f"global addresses {first:#x} to {last:#x} are in no array")


@dataclass
class Barrier:
    """A barrier in shared memory, by its count of arrivals."""

    count: int
    pending: int
    phase: int = 0
    bytes: int = 0

    def turn(self, arrivals: int, bytes_: int) -> None:
        """Some arrivals, and bytes that are expected or, if negative, came."""
        self.pending, self.bytes = self.pending - arrivals, self.bytes + bytes_
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@dataclass(frozen=True)
class Part:
    """How a wgmma operand of n columns stands in a stage of shared memory.

    Parameters
    ----------
    first, size : int
        Its bytes in the stage; n tells parts apart that begin at one place.
    address : callable
        Byte in the stage of element (k, n) of a 16 x n operand, arrays of both, from the byte at
        which the descriptor begins.
    """

    first: int
    size: int
    address: Callable[[int, np.ndarray, np.ndarray], np.ndarray]


class State:
    """All of one CTA but where its threads stand.

    Parameters
    ----------
    threads : int
    memory, parameters, index, count, shared_bytes, stage_bytes, parts
        As for :class:`.Cta`.
    """

    def __init__(
        self,
        threads: int,
        memory: Memory,
        parameters: list[bytes],
        index: int,
        count: int,
        shared_bytes: int,
        stage_bytes: int,
        parts: dict[int, Part],
    ) -> None:
        self.memory, self.parameters = memory, parameters
        self.parts, self.stage_bytes = parts, stage_bytes
        self.n = threads
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)  # NaN in bf16 and in fp32
        thread = np.arange(self.n, dtype=np.uint32)
        whole = partial(np.full, self.n, dtype=np.uint32)
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": thread,
            "%laneid": thread % LANES,
            "%ctaid.x": whole(index),
            "%nctaid.x": whole(count),
            "__dynamic_shmem__0": whole(SHARED_BASE),
        }
        self._constants: dict[tuple[str, int], np.ndarray] = {}
        self.barriers: dict[int, Barrier] = {}
        self.cluster: Sequence[State] = [self]
        self.rank = 0
        self.meetings = np.zeros(self.n, np.int64)
        """How often each thread arrived at the cluster's barrier."""

    def at(self, address: int) -> tuple[State, int]:
        """CTA and own address of an address in the shared memory of the cluster."""
        rank, own = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
        return (self.cluster[rank - 1] if rank else self), own

    def barrier(self, address: int) -> Barrier:
        """The barrier at an address in the shared memory of the cluster."""
        cta, own = self.at(address)
        return cta.barriers[own]

    def get(self, name: str, kind: str = "u32") -> np.ndarray:
        """A register or a constant, for all lanes, as a type of PTX."""
        dtype = TYPES[kind]
        value = self.registers.get(name)
        if value is None:
            value = self._constant(name, np.dtype(dtype).itemsize)
        return value.view(dtype) if value.dtype.itemsize == np.dtype(dtype).itemsize else value

    def _constant(self, text: str, size: int) -> np.ndarray:
        """One of so many bytes, for all lanes; made once."""
        found = self._constants.get((text, size))
        if found is None:
            if text.startswith("0f"):
                found = np.full(self.n, int(text[2:], 16), np.uint32)
            elif re.match(r"^-?(0x[0-9a-fA-F]+|\d+)$", text):
                found = np.full(self.n, int(text, 0) % (1 << size * 8), f"u{size}")
            else:
                raise KeyError(text)
            found.flags.writeable = False
            self._constants[text, size] = found
        return found

    def put(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        """Write a register in the lanes of the mask."""
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
        old = self.registers.get(name)
        # Lanes that never wrote it hold what shows: all ones are NaN.
        fresh = np.full(self.n, -1).astype(value.dtype) if old is None else old.copy()
        fresh[mask] = value[mask]
        self.registers[name] = fresh

    def address(self, text: str) -> tuple[np.ndarray, int]:
        """Base, for all lanes, and offset of an address in brackets."""
        name, _, offset = text[1:-1].partition("+")
        kind = "u64" if name.startswith("%rd") else "u32"
        return self.get(name, kind).astype(np.int64), int(offset or 0)


Execute = Callable[[State, list[str], tuple[str, ...], np.ndarray], None]
"""An instruction: on a CTA, by the parts of its opcode and its arguments, for the lanes of a
mask."""


def names(text: str) -> list[str]:
    """The registers of an argument, be it one or a vector."""
    return [x.strip() for x in text[1:-1].split(",")] if text[0] == "{" else [text]


def bf16(words: np.ndarray) -> np.ndarray:
    """fp32 of bf16 words."""
    return (words.astype(np.uint32) << 16).view(np.float32)
