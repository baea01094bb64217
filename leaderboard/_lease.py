"""Who may write for a campaign: one driver at a time.

Only decides whether a holder is still alive; the store keeps the lease.
"""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from leaderboard.records import CampaignRecord

__all__ = ["LEASE_SECONDS", "driver_name", "is_held", "is_stale"]

LEASE_SECONDS = 300.0
"""A driver silent for longer has lost its campaign; every write renews the lease."""


_FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the process namespace that a machine boots into, on Linux."""


def driver_name() -> str:
    """``host:pid`` of this process; in a container the host's name has its namespace behind it."""
    return f"{_host()}:{os.getpid()}"


def _host() -> str:
    """Whose processes can be seen from here.

    Containers may share a host's name, and each numbers its processes itself: a
    number of one says nothing in another.
    """
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return socket.gethostname()
    tag = "" if namespace == _FIRST_NAMESPACE else f"/{boot}-{namespace}"
    return socket.gethostname() + tag


def is_stale(driver: str, heartbeat_at: datetime | None, now: datetime) -> bool:
    """Whether the holder ``driver`` is gone.

    It is when its process is dead (seen only from its own host) or when it
    last gave a sign more than :data:`LEASE_SECONDS` before ``now``.
    """
    if heartbeat_at is None or (now - heartbeat_at).total_seconds() > LEASE_SECONDS:
        return True
    host, _, pid = driver.rpartition(":")
    return host == _host() and pid.isdigit() and not _alive(int(pid))


def is_held(campaign: CampaignRecord, now: datetime | None = None) -> bool:
    """Whether a driver that may still write holds the campaign."""
    if campaign.driver is None:
        return False
    return not is_stale(campaign.driver, campaign.heartbeat_at, now or datetime.now(UTC))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    try:
        # A zombie answers signals but will never write again.
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
