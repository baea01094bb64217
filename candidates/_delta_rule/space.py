"""Budgets of the scan, whatever makes its chunks.

Import-light on purpose (neither torch nor the DSL): judging a schedule by its budgets must cost
nothing.
"""

from __future__ import annotations

from candidates._delta_rule.kernel.config import Split
from candidates._delta_rule.kernel.image import HEAD, ImageLayout

__all__ = ["SHARED_MEMORY_BYTES", "consumer_registers", "ring_stages", "scan_problems"]

SHARED_MEMORY_BYTES = 227 * 1024
"""Shared memory one block may use on sm_90."""

_SLAB_PITCH = 24
"""Elements per row of the scan's output slab (16 values and padding against bank conflicts)."""


def ring_stages(view: Split) -> int:
    """Chunk images that the scan's ring holds in shared memory.

    A stage is the image's common part and the CTA's own rows of U; the ring shares the
    block's 227 KiB with the slab through which outputs leave and with the barriers.
    """
    stage = ImageLayout(view.bt).common + 2 * view.bt * view.rows
    slab = 2 * _SLAB_PITCH * view.bt * view.rows // 16
    return (SHARED_MEMORY_BYTES - 512 - slab) // stage


def consumer_registers(view: Split) -> int:
    """Estimated registers per thread of a warpgroup that owns 64 rows of the state.

    Counted from its fragments, per thread: the fp32 state and its bf16 operand copy
    (64 + 32), two fp32 accumulators of BT columns (one of 2 BT where W and Qhat share a
    product, BT = 16, and then the other's sum), U, Vn and O in bf16, 32 decays; and 10 for
    addresses.  Within 16 of what ptxas gave the plain scan (166, 202, 250 at BT = 16, 32, 64).
    """
    accumulators = view.bt // 2 * (4 if view.bt == 16 else 2)
    return HEAD // 2 + HEAD // 4 + accumulators + 3 * view.bt // 4 + 32 + 10


def _register_limit(rows: int) -> int:
    """Registers a consumer thread may have: 255, or its share beside a second consumer.

    Two consumer warpgroups and the producer's share 65,536 registers: 232, 232 and 40.
    """
    return 255 if rows == 64 else 232


def scan_problems(view: Split) -> tuple[str, ...]:
    """Budgets that the scan of a schedule breaks, each in one line; empty if it can be built."""
    found = []
    stages = ring_stages(view)
    if stages < 2:
        found.append(
            f"bt={view.bt} rows={view.rows}: {stages} chunk images fit {SHARED_MEMORY_BYTES} "
            "bytes of shared memory, the scan needs 2 (it looks one ahead)"
        )
    registers, limit = consumer_registers(view), _register_limit(view.rows)
    if registers > limit:
        found.append(
            f"bt={view.bt} rows={view.rows}: about {registers} registers per consumer thread, "
            f"{limit} are there; the state would spill"
        )
    return tuple(found)
