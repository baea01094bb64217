"""What a child may say, and how far it is believed: frames, their schema, its own words.

A process that ran foreign code can write any bytes at any time.  Nothing here
waits, allocates without bound, or hands on a value of another type than said.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from factory.device.protocol import Load, Run, Time

__all__ = ["Answer", "Nonsense", "Reader", "checked", "safe"]

MOST_BYTES = 8 << 20
"""Longest frame: a Time answer with all samples of all workloads is far below."""
_READ_BYTES = 1 << 16
_HEADER = struct.Struct("!i")
_FAULTS = frozenset({"candidate", "rejected", "build", "toolchain", "harness"})
_LONGEST_TEXT = 400
_LONGEST_NAME = 8192
_LONGEST_US = 1e12
_MOST_COUNT = 1 << 53
_CLOCKS = ("gpu", "cold", "per_call", "pipelined")


class Nonsense(Exception):
    """Bytes that no honest process of this program writes."""


def safe(text: str, most: int = _LONGEST_TEXT) -> str:
    """A child's own words for a reason: one line of printable ASCII, of bounded length."""
    line = " ".join(text[: 4 * most].split())
    kept = "".join(
        c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in line
    )
    return kept if len(kept) <= most else kept[: most - 3] + "..."


@dataclass(frozen=True)
class Answer:
    """One frame that ends a wait: what was asked for, or a fault (kind and message)."""

    ok: Mapping[str, Any] | None = None
    fault: tuple[str, str] | None = None


class Reader:
    """Takes frames from a socket that does not block.

    Parameters
    ----------
    link : socket
        In non-blocking mode.

    Attributes
    ----------
    at : str
        Where the child last said that it is.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._bytes = bytearray()
        self._answers: deque[Answer] = deque()
        self.at = ""

    def pump(self) -> bool:
        """Read once, 64 KiB at most; whether there was anything.

        Raises
        ------
        EOFError
            If the other side hung up.
        Nonsense
        """
        try:
            got = self._link.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            raise EOFError from None
        if not got:
            raise EOFError
        self._bytes += got
        start = 0
        while len(self._bytes) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._bytes, start)
            if not 0 <= length <= MOST_BYTES:
                raise Nonsense(f"a frame of {length} bytes")
            end = start + _HEADER.size + length
            if len(self._bytes) < end:
                break
            self._frame(bytes(self._bytes[start + _HEADER.size : end]))
            start = end
        del self._bytes[:start]
        return True

    @property
    def answered(self) -> bool:
        """Whether a whole answer waits; being somewhere is none."""
        return bool(self._answers)

    def take(self) -> Answer:
        """The first answer that waits; what else it wrote nobody asked for.

        Raises
        ------
        Nonsense
        """
        answer = self._answers.popleft()
        if self._answers:
            raise Nonsense("two answers to one message")
        return answer

    def _frame(self, frame: bytes) -> None:
        try:
            said = json.loads(frame, parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            raise Nonsense(f"no JSON: {type(error).__name__}") from None
        if not isinstance(said, dict) or len(said) != 1:
            raise Nonsense("no object of one member")
        kind, value = next(iter(said.items()))
        if kind == "at" and isinstance(value, str):
            self.at = safe(value)
        elif kind == "ok" and isinstance(value, dict):
            self._answers.append(Answer(ok=value))
        elif kind == "fault" and isinstance(value, dict):
            whose, message = value.get("kind"), value.get("message")
            if not isinstance(whose, str) or whose not in _FAULTS or not isinstance(message, str):
                raise Nonsense("a fault without kind or message")
            self._answers.append(Answer(fault=(whose, safe(message))))
        else:
            raise Nonsense("neither place, answer nor fault")


def checked(said: Mapping[str, Any], message: Any, *, baseline: bool) -> dict[str, Any]:
    """An answer as the message it answers has it, and nothing else.

    Parameters
    ----------
    said : mapping
    message : Load, Run or Time
    baseline : bool
        A baseline may skip workloads, and names its kernels with each.

    Raises
    ------
    Nonsense
    """
    if isinstance(message, Load):
        chunk = said.get("chunk")
        return {
            "kernel_names": _names(said.get("kernel_names")),
            "chunk": None if chunk is None else int(_number(chunk, whole=True)),
            "bitwise_causal": _flag(said.get("bitwise_causal", False)),
        }
    if isinstance(message, Run):
        return {}
    assert isinstance(message, Time)
    readings, skipped, names = (
        _object(said.get(k)) for k in ("readings", "skipped", "kernel_names")
    )
    found: dict[str, Any] = {"readings": {}, "skipped": {}, "kernel_names": {}}
    sampling = message.sampling
    wanted = {c for c in _CLOCKS[:1] + _CLOCKS[2:] if getattr(sampling, c)}
    for case in message.cases:
        if baseline and case.label in skipped:
            found["skipped"][case.label] = safe(_text(skipped[case.label]))
            continue
        found["readings"][case.label] = _reading(readings.get(case.label), wanted)
        found["kernel_names"][case.label] = _names(names.get(case.label))
    found["took_s"] = float(_number(said.get("took_s")))
    return found


def _reading(value: Any, wanted: set[str]) -> dict[str, Any]:
    said = _object(value)
    found: dict[str, Any] = {}
    for clock in _CLOCKS:
        samples = said.get(clock)
        if not isinstance(samples, list) or (clock in wanted and not samples):
            raise Nonsense(f"no samples of {clock}")
        found[clock] = [float(_number(s)) for s in samples]
    kernels = _object(said.get("kernels"))
    _names(list(kernels))
    found["kernels"] = {n: int(_number(k, whole=True)) for n, k in kernels.items()}
    for count in ("empty", "burst", "thrown_away"):
        found[count] = int(_number(said.get(count), whole=True))
    share = said.get("sm_share")
    found["sm_share"] = None if share is None else float(_number(share))
    found["throttled"] = _flag(said.get("throttled"))
    return found


def _refused(constant: str) -> Any:
    raise ValueError(constant)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Nonsense("no object where one belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Nonsense("no text where one belongs")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Nonsense("neither true nor false")
    return value


def _names(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise Nonsense("no list of names")
    for name in value:
        if not isinstance(name, str) or len(name) > _LONGEST_NAME or not name.isprintable():
            raise Nonsense("a name that is no printable text")
    return value


def _number(value: Any, *, whole: bool = False) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise Nonsense("no number where one belongs")
    number: int | float = value
    if not 0 <= number <= (_MOST_COUNT if whole else _LONGEST_US):
        raise Nonsense("a number out of range")
    return number
