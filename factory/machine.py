"""What this machine is: GPUs seen by the driver, package versions, a place in the process table.

Nothing heavy is imported: versions are read from distribution metadata and
GPUs from ``nvidia-smi``.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = [
    "Gpu",
    "available_bytes",
    "cpu_count",
    "end_marked",
    "gpus",
    "installed",
    "sm90_gpus",
]

_ROUNDS = 4
"""Looks at the process table for what was started while others were killed."""


@dataclass(frozen=True)
class Gpu:
    """One visible GPU.

    Parameters
    ----------
    index : int
        As the driver counts.
    name, uuid, driver : str
    capability : str
        Compute capability, for example ``"9.0"``.
    """

    index: int
    name: str
    uuid: str
    driver: str
    capability: str


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Host memory that may be taken before something else has to give way; None if unknown."""
    try:
        found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(found["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError, IndexError):
        return None


def gpus() -> tuple[Gpu, ...]:
    """GPUs that this process may use, ``CUDA_VISIBLE_DEVICES`` honoured; empty without a driver."""
    query = "index,name,uuid,driver_version,compute_cap"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in answer.splitlines():
        fields = [f.strip() for f in line.split(",")]
        if len(fields) == 5 and fields[0].isdigit():
            found.append(Gpu(int(fields[0]), *fields[1:]))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    chosen = []
    for token in (t.strip() for t in visible.split(",")):
        match = [g for g in found if str(g.index) == token or (token and g.uuid.startswith(token))]
        if not match:  # CUDA ignores everything from the first unknown entry on
            break
        chosen.append(match[0])
    return tuple(chosen)


def sm90_gpus() -> tuple[Gpu, ...]:
    """Visible Hopper GPUs."""
    return tuple(g for g in gpus() if g.capability == "9.0")


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def cpu_count() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def end_marked(name: str, value: str) -> int:
    """Kill every process that was started with an environment variable set so; returns how many.

    It finds those that left their process group and whose parents are gone. One that was
    started with another environment altogether is not found.
    """
    wanted = f"{name}={value}".encode()
    killed: set[int] = set()
    for _ in range(_ROUNDS):  # what it started meanwhile
        found = {pid for pid in _processes() if _has(pid, wanted)} - killed
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    return len(killed)


def _processes() -> list[int]:
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]


def _has(pid: int, wanted: bytes) -> bool:
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it is gone, or somebody else's
        return False
