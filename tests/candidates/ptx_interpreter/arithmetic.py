"""Arithmetic, comparisons, conversions and moves between registers; a lane at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_interpreter.state import TYPES, Execute, State, bf16, names

__all__ = ["INSTRUCTIONS"]


def _round_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint32) & 0xFFFF
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded)


def _round_f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def _mov(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    kind = parts[-1]
    if kind == "pred":
        whole = a[1] not in cta.registers
        value = np.full(cta.n, a[1] != "0") if whole else cta.registers[a[1]]
        cta.put(a[0], value, mask)
        return
    wide, half = ("u64", "u32") if kind == "b64" else ("u32", "u16")
    bits = 32 if kind == "b64" else 16
    if a[0][0] == "{":
        value, low = cta.get(a[1], wide), (1 << bits) - 1
        for i, name in enumerate(names(a[0])):
            part = (value >> TYPES[wide](bits * i)) & TYPES[wide](low)
            cta.put(name, part.astype(TYPES[half]), mask)
    elif a[1][0] == "{":
        low_word, high_word = (cta.get(x, half).astype(TYPES[wide]) for x in names(a[1]))
        cta.put(a[0], low_word | high_word << TYPES[wide](bits), mask)
    else:
        cta.put(a[0], cta.get(a[1], kind), mask)


def _setp(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    test, kind = parts[1], parts[-1]
    if kind == "bf16":
        x, y = (bf16(cta.get(name, "u16")) for name in a[1:3])
    else:
        x, y = cta.get(a[1], kind), cta.get(a[2], kind)
    if kind in ("f32", "bf16") and len(test) == 3:  # unordered
        opposite = {"gtu": "le", "ltu": "ge", "geu": "lt", "leu": "gt", "neu": "eq"}[test]
        cta.put(a[0], ~_COMPARE[opposite](x, y), mask)
        return
    test = {"lo": "lt", "hi": "gt"}.get(test, test)
    cta.put(a[0], _COMPARE[test](x, y), mask)


def _selp(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    x, y = cta.get(a[1], parts[-1]), cta.get(a[2], parts[-1])
    cta.put(a[0], np.where(cta.registers[a[3]], x, y), mask)


def _cvt(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    if "bf16x2" in parts or "f16x2" in parts:
        kind = _round_bf16 if "bf16x2" in parts else _round_f16
        high, low = (kind(cta.get(x, "f32")) for x in a[1:])
        cta.put(a[0], high << np.uint32(16) | low, mask)
    elif parts[-1] == "bf16":
        cta.put(a[0], bf16(cta.get(a[1], "u16")), mask)
    elif "bf16" in parts:
        cta.put(a[0], _round_bf16(cta.get(a[1], "f32")).astype(np.uint16), mask)
    else:
        value = cta.get(a[1], parts[2]).astype(TYPES[parts[2]]).astype(TYPES[parts[1]])
        if parts[1] == "s8":  # its registers have 16 bits
            value = value.astype(np.int16)
        cta.put(a[0], value, mask)


def _not(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    x = cta.registers[a[1]] if parts[-1] == "pred" else cta.get(a[1], parts[-1])
    cta.put(a[0], ~x, mask)


def _shift(cta: State, a: tuple[str, ...], kind: str, mask: np.ndarray, left: bool) -> None:
    x = cta.get(a[1], kind)
    by = cta.get(a[2]).astype(x.dtype)
    large = by >= x.dtype.itemsize * 8
    by = np.where(large, 0, by).astype(x.dtype)
    value = x << by if left else x >> by
    cta.put(a[0], np.where(large, 0, value).astype(x.dtype), mask)


def _shl(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    _shift(cta, a, parts[-1], mask, True)


def _shr(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    _shift(cta, a, parts[-1], mask, False)


def _mul(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    kind = parts[-1]
    if kind == "bf16x2":
        cta.put(a[0], _mul_bf16x2(cta.get(a[1]), cta.get(a[2])), mask)
        return
    x, y = cta.get(a[1], kind), cta.get(a[2], kind)
    if parts[1] in ("wide", "hi"):
        wide = np.uint64 if kind == "u32" else np.int64
        value = x.astype(wide) * y.astype(wide)
        if parts[1] == "hi":
            value = (value >> wide(32)).astype(TYPES[kind])
    else:
        value = x * y
    cta.put(a[0], value, mask)


def _mul_bf16x2(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    high = np.uint32(0xFFFF0000)
    halves = [
        _round_bf16(a.view(np.float32) * b.view(np.float32)).astype(np.uint32)
        for a, b in ((x << np.uint32(16), y << np.uint32(16)), (x & high, y & high))
    ]
    return halves[1] << np.uint32(16) | halves[0]


def _mad(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    kind = parts[-1]
    x, y = cta.get(a[1], kind), cta.get(a[2], kind)
    if parts[1] == "wide":
        value = x.astype(np.int64) * y.astype(np.int64) + cta.get(a[3], "s64")
    else:
        value = x * y + cta.get(a[3], kind)
    cta.put(a[0], value, mask)


def _fma(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
    x, y, z = (cta.get(name, "f32").astype(np.float64) for name in a[1:])
    cta.put(a[0], (x * y + z).astype(np.float32), mask)


def _unary(function: Callable[[np.ndarray], np.ndarray]) -> Execute:
    def run(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        x = cta.get(a[1], parts[-1])
        cta.put(a[0], function(x).astype(x.dtype), mask)

    return run


def _binary(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Execute:
    def run(cta: State, parts: list[str], a: tuple[str, ...], mask: np.ndarray) -> None:
        kind = parts[-1]
        if kind == "pred":
            x, y = cta.registers[a[1]], cta.registers[a[2]]
        else:
            x, y = cta.get(a[1], kind), cta.get(a[2], kind)
        value = function(x, y)
        if "relu" in parts:
            value = np.maximum(value, 0)
        cta.put(a[0], value if kind == "pred" else value.astype(x.dtype), mask)

    return run


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    wide = x.astype(np.int64)
    by = np.where(y == 0, 1, y).astype(np.int64)
    quotient: np.ndarray = np.sign(wide) * np.sign(by) * (np.abs(wide) // np.abs(by))
    return quotient


_COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "abs": np.abs,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rcp": lambda x: np.divide(1, x, where=x != 0, out=np.full_like(x, np.inf)),
    "rsqrt": lambda x: np.divide(1, np.sqrt(x), where=x != 0, out=np.full_like(x, np.inf)),
    "lg2": lambda x: np.log2(x, where=x != 0, out=np.full_like(x, -np.inf)),
    "ex2": lambda x: _flushed(np.exp2(x.astype(np.float64)).astype(np.float32)),
}
_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.fmin,
    "max": np.fmax,
    "div": _divide,
    "rem": lambda x, y: x - y * _divide(x, y),
}


INSTRUCTIONS: dict[str, Execute] = {
    "mov": _mov,
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "not": _not,
    "shl": _shl,
    "shr": _shr,
    "mul": _mul,
    "mad": _mad,
    "fma": _fma,
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _binary(function) for name, function in _BINARY.items()},
}
