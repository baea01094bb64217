"""Waiting for what happens, and never for a while: a busy machine may take its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_S = 240.0
"""Only what hangs takes so long; the limit of a whole test, in pyproject.toml, is longer."""


def until(happened: Callable[[], T], what: object = "it") -> T:
    """Wait until ``happened`` returns something true, and return that.

    Raises
    ------
    AssertionError
        It did not happen; says ``what`` did not, evaluated if it is a function.
    """
    end = time.monotonic() + HANG_S
    while not (found := happened()):
        if time.monotonic() > end:
            raise AssertionError(f"{what() if callable(what) else what} did not happen")
        time.sleep(0.01)
    return found
