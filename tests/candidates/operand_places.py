"""Where matrix operands stand in shared memory: rows of bytes in the copy engine's swizzle.

Each gives the byte of element (k, n) of an operand from the byte at which its descriptor begins;
see ``ptx_interpreter.Part``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Place = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def swizzled(byte: np.ndarray, mask: int = 7) -> np.ndarray:
    """Rows of 128 bytes (``mask`` 7), 64 (3) or 32 (1) in the copy engine's swizzle."""
    return byte ^ ((byte >> 7 & mask) << 4)


def along_channels(first: int, k: np.ndarray, n: np.ndarray) -> np.ndarray:
    """A row of 128 bytes for each n."""
    return swizzled(first + n * 128 + k * 2)


def channels_as_columns(rows: int) -> Place:
    """A row of 128 bytes for each k, of 64 columns; ``rows`` of them, then the other columns."""
    return lambda first, k, n: swizzled(first + n // 64 * (rows * 128) + k * 128 + n % 64 * 2)
