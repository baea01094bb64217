"""Signals of this process, taken while something runs and given back after it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["taken"]


@contextmanager
def taken(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Let ``handler`` take these signals; does nothing outside the main thread, which has them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)
