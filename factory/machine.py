"""What this machine is: GPUs seen by the driver, package versions, a place in the process table.

Nothing heavy is imported: versions are read from distribution metadata and
GPUs from ``nvidia-smi``.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

__all__ = ["Gpu", "cpu_count", "gpus", "installed", "sm90_gpus"]


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
