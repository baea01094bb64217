"""Tiles between shared memory and registers, and the products of a warp and of a warpgroup."""

from __future__ import annotations

import numpy as np

from ptx_interpreter.state import LANES, SHARED_BASE, WARPGROUP, Execute, Part, State, bf16, names

__all__ = ["INSTRUCTIONS"]

# Lane of an accumulator or operand fragment: row and first column in a 16 x 8 tile.
_ROW, _QUAD = np.arange(LANES) // 4, np.arange(LANES) % 4


def _matrix_rows(cta: State, text: str) -> np.ndarray:
    base, offset = cta.address(text)
    rows: np.ndarray = (base + offset - SHARED_BASE).reshape(-1, LANES)
    return rows


def _ldmatrix(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    rows, into = _matrix_rows(cta, a[1]), names(a[0])
    out = [np.zeros(cta.n, np.uint32) for _ in into]
    for w in np.unique(np.nonzero(mask)[0] // LANES):
        assert (rows[w] % 16 == 0).all(), "misaligned"
        tiles = cta.shared[rows[w][:, None] + np.arange(16)].view(np.uint16)
        for i, words in enumerate(out):
            tile = tiles[8 * i : 8 * i + 8]
            tile = np.ascontiguousarray(tile.T if "trans" in parts else tile)
            words[w * LANES : (w + 1) * LANES] = tile.view(np.uint32).reshape(LANES)
    for name, words in zip(into, out, strict=True):
        cta.put(name, words, mask)


def _stmatrix(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    rows = _matrix_rows(cta, a[0])
    values = [cta.get(name).reshape(-1, LANES) for name in names(a[1])]
    for w in np.unique(np.nonzero(mask)[0] // LANES):
        for i, words in enumerate(values):
            tile = np.ascontiguousarray(words[w]).view(np.uint16).reshape(8, 8)
            tile = np.ascontiguousarray(tile.T if "trans" in parts else tile)
            for r in range(8):
                place = rows[w][8 * i + r]
                cta.shared[place : place + 16] = tile[r].view(np.uint8)


def _operand(cta: State, name: str, half: int, kind: str = "bf16") -> np.ndarray:
    words = (cta.get(name) >> np.uint32(16 * half)) & np.uint32(0xFFFF)
    if kind == "f16":
        return words.astype(np.uint16).view(np.float16).astype(np.float32)
    return bf16(words)


def _tf32(cta: State, name: str) -> np.ndarray:
    cut: np.ndarray = (cta.get(name) & np.uint32(0xFFFFE000)).view(np.float32)
    return cut


def _mma(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    d, left, right, c = (names(x) for x in a)
    warps = cta.n // LANES
    A, B = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
    C = np.zeros((warps, 16, 8))
    if "tf32" in parts:  # 8 deep, one element in a register
        assert "m16n8k8" in parts
        for i, name in enumerate(left):
            at = (slice(None), _ROW + 8 * (i % 2), _QUAD + 4 * (i // 2))
            A[at] = _tf32(cta, name).reshape(warps, LANES)
        for i, name in enumerate(right):
            B[:, _QUAD + 4 * i, _ROW] = _tf32(cta, name).reshape(warps, LANES)
    else:
        assert "m16n8k16" in parts
        kind = parts[-2]
        for half in range(2):
            for i, name in enumerate(left):
                at = (slice(None), _ROW + 8 * (i % 2), 2 * _QUAD + half + 8 * (i // 2))
                A[at] = _operand(cta, name, half, kind).reshape(warps, LANES)
            for i, name in enumerate(right):
                at = (slice(None), 2 * _QUAD + half + 8 * i, _ROW)
                B[at] = _operand(cta, name, half, kind).reshape(warps, LANES)
    for i, name in enumerate(c):
        C[:, _ROW + 8 * (i // 2), 2 * _QUAD + i % 2] = cta.get(name, "f32").reshape(warps, LANES)
    result = (A @ B + C).astype(np.float32)
    for i, name in enumerate(d):
        tile = result[:, _ROW + 8 * (i // 2), 2 * _QUAD + i % 2]
        cta.put(name, np.ascontiguousarray(tile).reshape(-1), mask)


def _wgmma(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    if parts[1] != "mma_async":
        return
    columns = int(parts[4].split("n")[1].split("k")[0])
    part = cta.parts[columns]
    d, left = names(a[0]), a[1]
    descriptor = cta.get(a[2], "u64")
    keep = np.full(cta.n, int(a[3]) != 0) if a[3].isdigit() else cta.registers[a[3]]
    thread = np.arange(WARPGROUP)
    row, quad = thread // LANES * 16 + thread % LANES // 4, thread % 4
    k, n, m = np.arange(16)[:, None], np.arange(columns)[None, :], np.arange(64)[None, :]
    for group in range(cta.n // WARPGROUP):
        own = slice(WARPGROUP * group, WARPGROUP * (group + 1))
        if not mask[own].all():
            continue
        right = _in_shared(cta, int(descriptor[own][0]), part, k, n)
        if left[0] == "{":
            A = np.zeros((64, 16))
            for i, name in enumerate(names(left)):
                for half in range(2):
                    A[row + 8 * (i % 2), 2 * quad + half + 8 * (i // 2)] = _operand(
                        cta, name, half
                    )[own]
        else:  # rows of the left operand stand like columns of a right one of 64
            from_ = int(cta.get(left, "u64")[own][0])
            A = _in_shared(cta, from_, cta.parts[64], k, m).T
        result = A @ right.astype(np.float64)
        for i, name in enumerate(d):
            value = np.zeros(cta.n, np.float32)
            value[own] = result[row + 8 * (i // 2 % 2), i // 4 * 8 + 2 * quad + i % 2]
            if name in cta.registers:
                value[own] += np.where(keep[own], cta.get(name, "f32")[own], 0)
            inside = np.zeros(cta.n, bool)
            inside[own] = True
            cta.put(name, value, inside)


def _in_shared(cta: State, descriptor: int, part: Part, k: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Elements (k, n) of an operand of a warpgroup's product."""
    stage, first = divmod(((descriptor & 0x3FFF) << 4) - SHARED_BASE, cta.stage_bytes)
    assert part.first <= first < part.first + part.size, f"no operand at byte {first}"
    words = cta.shared[stage * cta.stage_bytes :].view(np.uint16)
    return bf16(words[part.address(first, k, n) // 2])


INSTRUCTIONS: dict[str, Execute] = {
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "mma": _mma,
    "wgmma": _wgmma,
}
