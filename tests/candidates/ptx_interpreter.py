"""Runs the PTX of a kernel on the CPU, warp by warp, with barriers and wgmma; for tests.

All threads of a CTA are numpy lanes; the warps that stand at one instruction go through it
together, so that a random choice of the next warp gives another legal interleaving.  Barriers in
shared memory, named barriers and a warpgroup's products block like on the machine: what can
never go on raises :class:`Deadlock`.  Asynchronous copies and products take effect when they are
issued, which is one of the orders that the machine may choose.

Only what the fused kernel and PREP are made of is known; anything else raises
``NotImplementedError``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

SHARED_BASE = 1024
"""Address of dynamic shared memory: 0 and its neighbours stay invalid."""

LANES = 32
WARPGROUP = 128

_WAIT = re.compile(
    r"\{ \.reg \.pred p; LAB_WAIT: mbarrier\.try_wait\.parity\.shared::cta"
    r"\.b64 p, (.*?); @!p bra LAB_WAIT; \}"
)
_TOGETHER = ("wgmma.mma", "shfl.sync", "vote.sync", "redux.sync", "bar.warp.sync", "elect.sync")
"""Instructions at which the lanes of a warp, or of a warpgroup, wait for one another."""

RANK_SHIFT = 24
"""Addresses of a cluster's shared memory carry 1 + the CTA's number from this bit on; a CTA's own
need not."""

# Lane of an accumulator or operand fragment: row and first column in a 16 x 8 tile.
_ROW, _QUAD = np.arange(LANES) // 4, np.arange(LANES) % 4


class Deadlock(Exception):
    """No warp can go on."""


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

    def at(self, first: int, last: int) -> tuple[int, np.ndarray]:
        """Base and bytes of the array that holds both addresses."""
        for base, flat in self.arrays:
            if base <= first and last < base + flat.size:
                return base, flat
        raise IndexError(f"global addresses {first:#x} to {last:#x} are in no array")


@dataclass(frozen=True)
class _Instruction:
    predicate: tuple[str, bool] | None
    opcode: str
    arguments: tuple[str, ...]
    text: str

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


class Program:
    """A parsed kernel.

    Parameters
    ----------
    text : str
        PTX.
    entry : str
        How the kernel's name begins.
    """

    def __init__(self, text: str, entry: str = "") -> None:
        body = text[text.index(f".visible .entry {entry}") :]
        body = body[: (body + ".visible .entry").index(".visible .entry", 1)]
        found = re.search(r"\.reqntid (\d+)", body)
        assert found is not None
        self.threads = int(found[1])
        body = re.sub(r"//.*", "", body[body.index("\n{") :])
        self.instructions: list[_Instruction] = []
        self.labels: dict[str, int] = {}
        for line in _WAIT.sub(r"wait \1;", body).splitlines():
            label = re.match(r"^\s*(\$\w+):$", line)
            if label:
                self.labels[label[1]] = len(self.instructions)
                continue
            for statement in re.sub(r"^\s*\{(?!%)|\}\s*$", "", line).split(";"):
                bare = statement.strip()
                if bare and bare not in "{}" and not bare.startswith((".reg", ".pragma")):
                    self.instructions.append(_parse(bare))


def _parse(text: str) -> _Instruction:
    predicate = None
    match = re.match(r"^@(!?)(%?\w+)\s+(.*)$", text, re.DOTALL)
    if match:
        predicate, text = (match[2], bool(match[1])), match[3]
    opcode, _, rest = text.partition(" ") if "\t" not in text else text.partition("\t")
    arguments, depth, current = [], 0, ""
    for char in rest:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            arguments.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        arguments.append(current.strip())
    return _Instruction(predicate, opcode.strip(), tuple(arguments), text)


@dataclass
class _Barrier:
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


def _bf16(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _round_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32) & 0xFFFF
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)


def _round_f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


_TYPES: dict[str, Any] = {
    "f32": np.float32, "s32": np.int32, "u32": np.uint32, "b32": np.uint32,
    "s64": np.int64, "u64": np.uint64, "b64": np.uint64,
    "s16": np.int16, "u16": np.uint16, "b16": np.uint16, "s8": np.int8,
}  # fmt: skip


class Cta:
    """One CTA.

    Parameters
    ----------
    program : Program
    memory : Memory
    parameters : list of bytes
        Of the kernel, as the driver passes them.
    index, count : int
        Number of this block and of all.
    shared_bytes, stage_bytes : int
        Dynamic shared memory, and one stage of the ring at its beginning.
    parts : dict of int to Part
        wgmma operands by their number of columns.
    order : random.Random or None
        Picks the warp that goes on; None is the lowest instruction first.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        parameters: list[bytes],
        index: int,
        count: int,
        shared_bytes: int,
        stage_bytes: int,
        parts: dict[int, Part],
        order: random.Random | None = None,
    ) -> None:
        self.program, self.memory, self.parameters = program, memory, parameters
        self.order, self.parts, self.stage_bytes = order, parts, stage_bytes
        self.n = program.threads
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
        self.barriers: dict[int, _Barrier] = {}
        self.cluster, self.rank = [self], 0
        self.meetings = np.zeros(self.n, np.int64)
        self.executed = 0

    # -------------------------------------------------------------------------- scheduling

    def run(self) -> None:
        """Until all threads have returned.

        Raises
        ------
        Deadlock
            If none can go on before that.
        """
        for stuck in self.steps():
            if stuck:
                raise Deadlock(stuck)

    def steps(self) -> Iterator[str]:
        """Go on; now and then, and when nothing can, let others have a turn.

        Yields
        ------
        str
            Where all threads stand, if none can go on.
        """
        taken = 0
        n, warp = self.n, np.arange(self.n) // LANES
        at = np.zeros(n, np.int64)
        done, held, waiting = (np.zeros(n, bool) for _ in range(3))
        barrier = np.full(n, -1)
        progress = False
        while not done.all():
            ready = ~(done | held | waiting)
            if not ready.any():
                if not progress or not waiting.any():
                    places = sorted({int(p) for p in at[~done]})
                    code = self.program.instructions
                    yield "; ".join(code[min(p, len(code) - 1)].text for p in places)
                waiting[:], progress = False, False
                continue
            taken += 1
            if taken % 256 == 0:
                yield ""
            chosen = ready
            if self.order is not None:
                chosen = ready & (warp == self.order.choice(list(np.unique(warp[ready]))))
            here = int(at[chosen].min())
            # Lanes that have left a branch wait for those of their warp that are still inside.
            last = np.where(ready, at, here + 1).reshape(-1, LANES).min(1).repeat(LANES)
            mask = ready & (at == here) & (last == here)
            if here >= len(self.program.instructions):
                done |= mask
                progress = True
                continue
            instruction = self.program.instructions[here]
            live = mask
            if instruction.predicate is not None:
                name, negated = instruction.predicate
                live = mask & (self.registers[name] != negated)
            opcode, a = instruction.opcode, instruction.arguments
            if opcode == "wait":
                passed = self._passed(a, mask)
                at[passed] = here + 1
                waiting |= mask & ~passed
                progress |= bool(passed.any())
                self.executed += int(passed.sum())
                continue
            if opcode.startswith("barrier.cluster.wait"):
                least = min(int(cta.meetings.min()) for cta in self.cluster)
                passed = mask & (self.meetings <= least)
                at[passed] = here + 1
                waiting |= mask & ~passed
                progress |= bool(passed.any())
                self.executed += int(passed.sum())
                continue
            if opcode.startswith(_TOGETHER):
                size = WARPGROUP if opcode.startswith("wgmma") else LANES
                together = np.repeat(mask.reshape(-1, size).all(1), size)
                waiting |= mask & ~together
                if not together.any():
                    continue
                mask = live = together
            at[mask] = here + 1
            progress = True
            self.executed += 1
            if opcode.startswith("bra"):
                at[live] = self.program.labels[a[0]]
            elif opcode == "ret":
                done |= live
            elif opcode in ("bar.sync", "bar.red.or.pred"):
                if opcode != "bar.sync":  # as bar.sync, with a vote: result, ..., own predicate
                    result, vote, a = a[0], self.registers[a[3]], a[1:]
                number, size = self._get(a[0]), int(a[1]) if len(a) > 1 else n
                held |= live
                barrier[live] = number[live]
                for i in np.unique(number[live]):
                    arrived = held & (barrier == i)
                    if arrived.sum() == size:
                        held[arrived] = False
                        if opcode != "bar.sync":  # nobody has gone on: votes are still there
                            self._put(result, np.full(n, vote[arrived].any()), arrived)
            elif live.any():
                self._execute(instruction, live)

    def _passed(self, a: tuple[str, ...], mask: np.ndarray) -> np.ndarray:
        base, offset = self._address(a[0])
        parity, passed = self._get(a[1]), np.zeros(self.n, bool)
        for i in np.nonzero(mask)[0]:
            passed[i] = self._barrier(int(base[i]) + offset).phase % 2 != parity[i] % 2
        return passed

    def _at(self, address: int) -> tuple[Cta, int]:
        """CTA and own address of an address in the shared memory of the cluster."""
        rank, own = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
        return (self.cluster[rank - 1] if rank else self), own

    def _barrier(self, address: int) -> _Barrier:
        cta, own = self._at(address)
        return cta.barriers[own]

    # --------------------------------------------------------------------------- registers

    def _get(self, name: str, kind: str = "u32") -> np.ndarray:
        dtype = _TYPES[kind]
        if name.startswith("0f"):
            value = np.full(self.n, int(name[2:], 16), np.uint32)
        elif re.match(r"^-?(0x[0-9a-fA-F]+|\d+)$", name):
            bits = np.dtype(dtype).itemsize * 8
            value = np.full(self.n, int(name, 0) % (1 << bits), f"u{bits // 8}")
        else:
            value = self.registers[name]
        return value.view(dtype) if value.dtype.itemsize == np.dtype(dtype).itemsize else value

    def _put(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if value.dtype != bool:
            value = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")
        old = self.registers.get(name)
        # Lanes that never wrote it hold what shows: all ones are NaN.
        fresh = np.full(self.n, -1).astype(value.dtype) if old is None else old.copy()
        fresh[mask] = value[mask]
        self.registers[name] = fresh

    @staticmethod
    def _names(text: str) -> list[str]:
        return [x.strip() for x in text[1:-1].split(",")] if text[0] == "{" else [text]

    def _address(self, text: str) -> tuple[np.ndarray, int]:
        name, _, offset = text[1:-1].partition("+")
        kind = "u64" if name.startswith("%rd") else "u32"
        return self._get(name, kind).astype(np.int64), int(offset or 0)

    # ------------------------------------------------------------------------- instructions

    def _execute(self, instruction: _Instruction, mask: np.ndarray) -> None:
        parts, a = instruction.parts, instruction.arguments
        name = {"and": "and_", "or": "or_", "not": "not_", "barrier": "barrier_"}.get(
            parts[0], parts[0]
        )
        method = getattr(self, f"_{name}", None)
        if method is None:
            raise NotImplementedError(instruction.text)
        try:
            # Infinities are part of the arithmetic: what they spoil is replaced by selection.
            with np.errstate(over="ignore", invalid="ignore"):
                method(parts, a, mask)
        except (AssertionError, IndexError, KeyError, ValueError) as error:
            raise type(error)(f"{instruction.text}: {error}") from error

    def _nothing(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        """Orders what is in order here anyway."""

    _fence = _setmaxnreg = _bar = _griddepcontrol = _nothing

    def _barrier_(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        assert parts[:3] == ["barrier", "cluster", "arrive"]
        self.meetings[mask] += 1

    def _mapa(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        own = self._get(a[1]) & np.uint32((1 << RANK_SHIFT) - 1)
        self._put(a[0], own + ((self._get(a[2]) + np.uint32(1)) << np.uint32(RANK_SHIFT)), mask)

    def _bytes(self, space: str, address: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        assert (address % size == 0).all(), "misaligned"
        if space == "shared":
            return self.shared, address - SHARED_BASE
        if space == "shared::cluster":
            target = self._at(int(address[0]))[0]
            return target.shared, (address & ((1 << RANK_SHIFT) - 1)) - SHARED_BASE
        base, flat = self.memory.at(int(address.min()), int(address.max()) + size - 1)
        return flat, address - base

    def _ld(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        names = self._names(a[0])
        size = {"b64": 8, "b16": 2}.get(parts[-1], 4)
        if parts[1] == "param":
            match = re.match(r"\[\w+_param_(\d+)(?:\+(\d+))?\]", a[1])
            assert match is not None
            for i, name in enumerate(names):
                first = int(match[2] or 0) + i * size
                word = self.parameters[int(match[1])][first : first + size]
                self._put(name, np.full(self.n, int.from_bytes(word, "little"), f"u{size}"), mask)
            return
        base, offset = self._address(a[1])
        flat, place = self._bytes(parts[1], base[mask] + offset, size * len(names))
        words = flat[place[:, None] + np.arange(size * len(names))].view(f"u{size}")
        for i, name in enumerate(names):
            value = np.zeros(self.n, f"u{size}")
            value[mask] = words[:, i]
            self._put(name, value, mask)

    def _st(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        base, offset = self._address(a[0])
        size = 2 if parts[-1] == "b16" else 4
        if parts[1] == "async":
            parts = ["st", "shared::cluster"]
            (barrier, at), bytes_ = self._address(a[2]), size * len(self._names(a[1]))
            for i in np.nonzero(mask)[0]:
                self._barrier(int(barrier[i]) + at).turn(0, -bytes_)
        words = [self._get(n, f"u{8 * size}")[mask].astype(f"u{size}") for n in self._names(a[1])]
        flat, place = self._bytes(parts[1], base[mask] + offset, size * len(words))
        data = np.stack(words, 1).view(np.uint8)
        flat[place[:, None] + np.arange(data.shape[1])] = data

    def _prefetch(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        for address in self._address(a[0])[0][mask]:
            self.memory.at(int(address), int(address))

    def _cp(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        if parts[2:4] == ["bulk", "global"]:
            self._store_bulk(a, mask)
            return
        if parts[2] == "bulk" and len(a) > 3:
            self._bulk(a, mask)
            return
        if parts[2] not in ("ca", "cg"):  # commit and wait: the copies are done
            return
        whole = int(a[2])
        (target, offset), (source, _) = self._address(a[0]), self._address(a[1])
        sizes = self._get(a[3]) if len(a) > 3 else np.full(self.n, whole)
        for i in np.nonzero(mask)[0]:
            place, size = int(target[i]) + offset - SHARED_BASE, int(sizes[i])
            self.shared[place : place + whole] = 0
            if size:
                base, flat = self.memory.at(int(source[i]), int(source[i]) + size - 1)
                first = int(source[i]) - base
                self.shared[place : place + size] = flat[first : first + size]

    def _bulk(self, a: tuple[str, ...], mask: np.ndarray) -> None:
        """To shared memory, from global memory or from that of this CTA."""
        (target, offset), (source, from_), (barrier, at) = (self._address(a[i]) for i in (0, 1, 3))
        size = self._get(a[2])
        for i in np.nonzero(mask)[0]:
            first, count = int(source[i]) + from_, int(size[i])
            cta, place = self._at(int(target[i]) + offset)
            if a[1].startswith("[%rd"):
                base, flat = self.memory.at(first, first + count - 1)
            else:
                base, flat = SHARED_BASE, self.shared
            place -= SHARED_BASE
            cta.shared[place : place + count] = flat[first - base : first - base + count]
            self._barrier(int(barrier[i]) + at).turn(0, -count)

    def _store_bulk(self, a: tuple[str, ...], mask: np.ndarray) -> None:
        (target, _), (source, offset) = self._address(a[0]), self._address(a[1])
        for i in np.nonzero(mask)[0]:
            place, size = int(source[i]) + offset - SHARED_BASE, int(self._get(a[2])[i])
            base, flat = self.memory.at(int(target[i]), int(target[i]) + size - 1)
            first = int(target[i]) - base
            flat[first : first + size] = self.shared[place : place + size]

    def _mbarrier(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        if parts[1] == "init":
            base, offset = self._address(a[0])
            first = int(np.nonzero(mask)[0][0])
            count = int(self._get(a[1])[first])
            self.barriers[int(base[first]) + offset] = _Barrier(count, count)
            return
        if parts[1] == "inval":
            base, offset = self._address(a[0])
            del self.barriers[int(base[mask][0]) + offset]
            return
        base, offset = self._address(a[1])
        expected = self._get(a[2]) if "expect_tx" in parts else np.zeros(self.n, np.int64)
        for i in np.nonzero(mask)[0]:
            self._barrier(int(base[i]) + offset).turn(1, int(expected[i]))

    def _matrix_rows(self, text: str) -> np.ndarray:
        base, offset = self._address(text)
        rows: np.ndarray = (base + offset - SHARED_BASE).reshape(-1, LANES)
        return rows

    def _ldmatrix(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        rows, names = self._matrix_rows(a[1]), self._names(a[0])
        out = [np.zeros(self.n, np.uint32) for _ in names]
        for w in np.unique(np.nonzero(mask)[0] // LANES):
            assert (rows[w] % 16 == 0).all(), "misaligned"
            tiles = self.shared[rows[w][:, None] + np.arange(16)].view(np.uint16)
            for i, words in enumerate(out):
                tile = tiles[8 * i : 8 * i + 8]
                tile = np.ascontiguousarray(tile.T if "trans" in parts else tile)
                words[w * LANES : (w + 1) * LANES] = tile.view(np.uint32).reshape(LANES)
        for name, words in zip(names, out, strict=True):
            self._put(name, words, mask)

    def _stmatrix(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        rows = self._matrix_rows(a[0])
        values = [self._get(name).reshape(-1, LANES) for name in self._names(a[1])]
        for w in np.unique(np.nonzero(mask)[0] // LANES):
            for i, words in enumerate(values):
                tile = np.ascontiguousarray(words[w]).view(np.uint16).reshape(8, 8)
                tile = np.ascontiguousarray(tile.T if "trans" in parts else tile)
                for r in range(8):
                    place = rows[w][8 * i + r]
                    self.shared[place : place + 16] = tile[r].view(np.uint8)

    def _operand(self, name: str, half: int, kind: str = "bf16") -> np.ndarray:
        words = (self._get(name) >> np.uint32(16 * half)) & np.uint32(0xFFFF)
        if kind == "f16":
            return words.astype(np.uint16).view(np.float16).astype(np.float32)
        return _bf16(words)

    def _tf32(self, name: str) -> np.ndarray:
        cut: np.ndarray = (self._get(name) & np.uint32(0xFFFFE000)).view(np.float32)
        return cut

    def _mma(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        d, left, right, c = (self._names(x) for x in a)
        warps = self.n // LANES
        A, B = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        C = np.zeros((warps, 16, 8))
        if "tf32" in parts:  # 8 deep, one element in a register
            assert "m16n8k8" in parts
            for i, name in enumerate(left):
                at = (slice(None), _ROW + 8 * (i % 2), _QUAD + 4 * (i // 2))
                A[at] = self._tf32(name).reshape(warps, LANES)
            for i, name in enumerate(right):
                B[:, _QUAD + 4 * i, _ROW] = self._tf32(name).reshape(warps, LANES)
        else:
            assert "m16n8k16" in parts
            kind = parts[-2]
            for half in range(2):
                for i, name in enumerate(left):
                    at = (slice(None), _ROW + 8 * (i % 2), 2 * _QUAD + half + 8 * (i // 2))
                    A[at] = self._operand(name, half, kind).reshape(warps, LANES)
                for i, name in enumerate(right):
                    at = (slice(None), 2 * _QUAD + half + 8 * i, _ROW)
                    B[at] = self._operand(name, half, kind).reshape(warps, LANES)
        for i, name in enumerate(c):
            C[:, _ROW + 8 * (i // 2), 2 * _QUAD + i % 2] = self._get(name, "f32").reshape(
                warps, LANES
            )
        result = (A @ B + C).astype(np.float32)
        for i, name in enumerate(d):
            tile = result[:, _ROW + 8 * (i // 2), 2 * _QUAD + i % 2]
            self._put(name, np.ascontiguousarray(tile).reshape(-1), mask)

    def _wgmma(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        if parts[1] != "mma_async":
            return
        columns = int(parts[4].split("n")[1].split("k")[0])
        part = self.parts[columns]
        d, left = self._names(a[0]), a[1]
        descriptor = self._get(a[2], "u64")
        keep = np.full(self.n, int(a[3]) != 0) if a[3].isdigit() else self.registers[a[3]]
        thread = np.arange(WARPGROUP)
        row, quad = thread // LANES * 16 + thread % LANES // 4, thread % 4
        k, n, m = np.arange(16)[:, None], np.arange(columns)[None, :], np.arange(64)[None, :]
        for group in range(self.n // WARPGROUP):
            own = slice(WARPGROUP * group, WARPGROUP * (group + 1))
            if not mask[own].all():
                continue
            right = self._in_shared(int(descriptor[own][0]), part, k, n)
            if left[0] == "{":
                A = np.zeros((64, 16))
                for i, name in enumerate(self._names(left)):
                    for half in range(2):
                        A[row + 8 * (i % 2), 2 * quad + half + 8 * (i // 2)] = self._operand(
                            name, half
                        )[own]
            else:  # rows of the left operand stand like columns of a right one of 64
                from_ = int(self._get(left, "u64")[own][0])
                A = self._in_shared(from_, self.parts[64], k, m).T
            result = A @ right.astype(np.float64)
            for i, name in enumerate(d):
                value = np.zeros(self.n, np.float32)
                value[own] = result[row + 8 * (i // 2 % 2), i // 4 * 8 + 2 * quad + i % 2]
                if name in self.registers:
                    value[own] += np.where(keep[own], self._get(name, "f32")[own], 0)
                inside = np.zeros(self.n, bool)
                inside[own] = True
                self._put(name, value, inside)

    def _in_shared(self, descriptor: int, part: Part, k: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Elements (k, n) of an operand of a warpgroup's product."""
        stage, first = divmod(((descriptor & 0x3FFF) << 4) - SHARED_BASE, self.stage_bytes)
        assert part.first <= first < part.first + part.size, f"no operand at byte {first}"
        words = self.shared[stage * self.stage_bytes :].view(np.uint16)
        return _bf16(words[part.address(first, k, n) // 2])

    # ----------------------------------------------------------------- between the lanes

    def _shfl(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        value, distance = (self._get(x).reshape(-1, LANES).astype(np.int64) for x in a[1:3])
        lane = np.arange(LANES)
        source = {
            "idx": distance % LANES,
            "up": np.where(lane >= distance, lane - distance, lane),
            "bfly": lane ^ distance,
        }[parts[2]]
        found = np.take_along_axis(value, source, 1).astype(np.uint32)
        self._put(a[0], found.reshape(-1), mask)

    def _redux(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        value = self._get(a[1], parts[-1]).reshape(-1, LANES)
        best = value.max(1) if parts[2] == "max" else value.min(1)
        self._put(a[0], np.repeat(best, LANES), mask)

    def _vote(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        assert parts == ["vote", "sync", "ballot", "b32"]
        votes = self.registers[a[1]].reshape(-1, LANES).astype(np.uint32)
        word = (votes << np.arange(LANES, dtype=np.uint32)).sum(1, dtype=np.uint32)
        self._put(a[0], np.repeat(word, LANES), mask)

    def _elect(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        self._put(a[0].split("|")[1], np.arange(self.n) % LANES == 0, mask)

    # -------------------------------------------------------------------------- arithmetic

    def _mov(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        kind = parts[-1]
        if kind == "pred":
            whole = a[1] not in self.registers
            value = np.full(self.n, a[1] != "0") if whole else self.registers[a[1]]
            self._put(a[0], value, mask)
            return
        wide, half = ("u64", "u32") if kind == "b64" else ("u32", "u16")
        bits = 32 if kind == "b64" else 16
        if a[0][0] == "{":
            value, low = self._get(a[1], wide), (1 << bits) - 1
            for i, name in enumerate(self._names(a[0])):
                part = (value >> _TYPES[wide](bits * i)) & _TYPES[wide](low)
                self._put(name, part.astype(_TYPES[half]), mask)
        elif a[1][0] == "{":
            low_word, high_word = (
                self._get(x, half).astype(_TYPES[wide]) for x in self._names(a[1])
            )
            self._put(a[0], low_word | high_word << _TYPES[wide](bits), mask)
        else:
            self._put(a[0], self._get(a[1], kind), mask)

    def _setp(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        test, kind = parts[1], parts[-1]
        if kind == "f32" and len(test) == 3:  # unordered
            opposite = {"gtu": "le", "ltu": "ge", "geu": "lt", "leu": "gt", "neu": "eq"}[test]
            x, y = self._get(a[1], kind), self._get(a[2], kind)
            self._put(a[0], ~_COMPARE[opposite](x, y), mask)
            return
        test = {"lo": "lt", "hi": "gt"}.get(test, test)
        self._put(a[0], _COMPARE[test](self._get(a[1], kind), self._get(a[2], kind)), mask)

    def _selp(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        x, y = self._get(a[1], parts[-1]), self._get(a[2], parts[-1])
        self._put(a[0], np.where(self.registers[a[3]], x, y), mask)

    def _cvt(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        if "bf16x2" in parts or "f16x2" in parts:
            kind = _round_bf16 if "bf16x2" in parts else _round_f16
            high, low = (kind(self._get(x, "f32")) for x in a[1:])
            self._put(a[0], high << np.uint32(16) | low, mask)
        elif parts[-1] == "bf16":
            self._put(a[0], _bf16(self._get(a[1], "u16")), mask)
        elif "bf16" in parts:
            self._put(a[0], _round_bf16(self._get(a[1], "f32")).astype(np.uint16), mask)
        else:
            value = self._get(a[1], parts[2]).astype(_TYPES[parts[2]]).astype(_TYPES[parts[1]])
            if parts[1] == "s8":  # its registers have 16 bits
                value = value.astype(np.int16)
            self._put(a[0], value, mask)

    def _unary(self, function: Callable[[np.ndarray], np.ndarray]) -> Any:
        def run(parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
            x = self._get(a[1], parts[-1])
            self._put(a[0], function(x).astype(x.dtype), mask)

        return run

    def __getattr__(self, name: str) -> Any:
        if name.removeprefix("_") in _UNARY:
            return self._unary(_UNARY[name.removeprefix("_")])
        if name.removeprefix("_") in _BINARY:
            return self._binary(_BINARY[name.removeprefix("_")])
        raise AttributeError(name)

    def _binary(self, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Any:
        def run(parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
            kind = parts[-1]
            if kind == "pred":
                x, y = self.registers[a[1]], self.registers[a[2]]
            else:
                x, y = self._get(a[1], kind), self._get(a[2], kind)
            value = function(x, y)
            if "relu" in parts:
                value = np.maximum(value, 0)
            self._put(a[0], value if kind == "pred" else value.astype(x.dtype), mask)

        return run

    def _not_(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        x = self.registers[a[1]] if parts[-1] == "pred" else self._get(a[1], parts[-1])
        self._put(a[0], ~x, mask)

    def _shift(self, a: tuple[str, ...], kind: str, mask: np.ndarray, left: bool) -> None:
        x = self._get(a[1], kind)
        by = self._get(a[2]).astype(x.dtype)
        large = by >= x.dtype.itemsize * 8
        by = np.where(large, 0, by).astype(x.dtype)
        value = x << by if left else x >> by
        self._put(a[0], np.where(large, 0, value).astype(x.dtype), mask)

    def _shl(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        self._shift(a, parts[-1], mask, True)

    def _shr(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        self._shift(a, parts[-1], mask, False)

    def _mul(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        kind = parts[-1]
        x, y = self._get(a[1], kind), self._get(a[2], kind)
        if parts[1] in ("wide", "hi"):
            wide = np.uint64 if kind == "u32" else np.int64
            value = x.astype(wide) * y.astype(wide)
            if parts[1] == "hi":
                value = (value >> wide(32)).astype(_TYPES[kind])
        else:
            value = x * y
        self._put(a[0], value, mask)

    def _mad(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        kind = parts[-1]
        x, y = self._get(a[1], kind), self._get(a[2], kind)
        if parts[1] == "wide":
            value = x.astype(np.int64) * y.astype(np.int64) + self._get(a[3], "s64")
        else:
            value = x * y + self._get(a[3], kind)
        self._put(a[0], value, mask)

    def _fma(self, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        x, y, z = (self._get(name, "f32").astype(np.float64) for name in a[1:])
        self._put(a[0], (x * y + z).astype(np.float32), mask)


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    wide = x.astype(np.int64)
    by = np.where(y == 0, 1, y).astype(np.int64)
    return np.sign(wide) * np.sign(by) * (np.abs(wide) // np.abs(by))


_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNARY: dict[str, Any] = {
    "abs": np.abs,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rcp": lambda x: np.divide(1, x, where=x != 0, out=np.full_like(x, np.inf)),
    "rsqrt": lambda x: np.divide(1, np.sqrt(x), where=x != 0, out=np.full_like(x, np.inf)),
    "lg2": lambda x: np.log2(x, where=x != 0, out=np.full_like(x, -np.inf)),
    "ex2": lambda x: _flushed(np.exp2(x.astype(np.float64)).astype(np.float32)),
}
_BINARY: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.fmin,
    "max": np.fmax,
    "div": _divide,
    "rem": lambda x, y: x - y * _divide(x, y),
}


def run_cluster(ctas: list[Cta]) -> None:
    """Run CTAs that see each other's shared memory, in turns.

    Raises
    ------
    Deadlock
        If no thread of any can go on.
    """
    for rank, cta in enumerate(ctas):
        cta.cluster, cta.rank = ctas, rank
    running = {cta.rank: cta.steps() for cta in ctas}
    while running:
        before, stuck = [cta.executed for cta in ctas], []
        for rank in list(running):
            said = next(running[rank], None)
            if said is None:
                del running[rank]
            elif said:
                stuck.append(said)
        if running and len(stuck) == len(running) and before == [c.executed for c in ctas]:
            raise Deadlock(" | ".join(stuck))
