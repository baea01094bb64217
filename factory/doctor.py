"""Is this machine and its toolchain fit, and for what?

Each finding names package, version found and the fix.  Works with any of them
missing: nothing is imported that is looked for.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Literal

from factory.machine import cpu_count, gpus, installed

__all__ = ["Finding", "examine"]

_DSL_RANGE = ((4, 8, 1), (4, 9))
_CUDA_MAJOR = 13


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Parameters
    ----------
    id : str
    status : {"ok", "note", "fault"}
        A note limits what this machine can do; a fault is something broken.
    found : str
    needed_for : str
    fix : str
        Empty where nothing is to be done.
    """

    id: str
    status: Literal["ok", "note", "fault"]
    found: str
    needed_for: str
    fix: str = ""


def examine() -> list[Finding]:
    """Look at everything a campaign may need."""
    return [
        _python(),
        *_packages(),
        _dsl(),
        _dsl_flavour(),
        _gpu(),
        _torch_cuda(),
        _shared_memory(),
        Finding("cpus", "ok", str(cpu_count()), "emulate and compile workers"),
    ]


def _python() -> Finding:
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", found, "everything")
    return Finding("python", "fault", found, "everything", "use Python 3.11, 3.12 or 3.13")


def _packages() -> list[Finding]:
    wanted = (
        ("torch", "oracle, emulation, gate", "pip install 'torch>=2.11'"),
        ("apache-tvm-ffi", "compile", "pip install 'apache-tvm-ffi>=0.1.15'"),
        ("optuna", "search", "pip install 'optuna>=5'"),
        ("sqlalchemy", "leaderboard", "pip install 'sqlalchemy>=2.0.40,<3'"),
        ("alembic", "leaderboard", "pip install 'alembic>=1.16'"),
    )
    found = []
    for name, purpose, fix in wanted:
        version = installed(name)
        if version is None:
            found.append(Finding(name, "fault", "not installed", purpose, fix))
        else:
            found.append(Finding(name, "ok", version, purpose))
    ray = installed("ray")
    if ray is None:
        fix = "pip install 'ray>=2.50' (only for --executor ray)"
        found.append(Finding("ray", "note", "not installed", "--executor ray", fix))
    else:
        found.append(Finding("ray", "ok", ray, "--executor ray"))
    return found


def _find(module: str) -> ModuleSpec | None:
    """Where a top-level module would be imported from; None if it would not."""
    try:
        return find_spec(module)
    except (ImportError, ValueError):
        return None


def _dsl() -> Finding:
    name, purpose = "nvidia-cutlass-dsl", "compile"
    fix = "pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'"
    version = installed(name)
    if version is None:
        return Finding(name, "fault", "not installed", purpose, fix)
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if not _DSL_RANGE[0] <= numbers < _DSL_RANGE[1]:
        return Finding(name, "fault", f"{version} is not in >=4.8.1,<4.9", purpose, fix)
    if _find("cutlass") is None:
        return Finding(name, "fault", f"{version}, but 'cutlass' is not importable", purpose, fix)
    return Finding(name, "ok", version, purpose)


def _dsl_flavour() -> Finding:
    name, purpose = "nvidia-cutlass-dsl CUDA flavour", "compile"
    fix = "pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]>=4.8.1,<4.9'"
    here = {
        major: version
        for major in (12, 13)
        if (version := installed(f"nvidia-cutlass-dsl-libs-cu{major}"))
    }
    if _CUDA_MAJOR in here:
        return Finding(name, "ok", f"cu{_CUDA_MAJOR} {here[_CUDA_MAJOR]}", purpose)
    if here:
        return Finding(name, "fault", f"cu{next(iter(here))} only", purpose, fix)
    return Finding(name, "fault", f"no cu{_CUDA_MAJOR} libraries", purpose, fix)


def _gpu() -> Finding:
    purpose = "gate, screen and time"
    visible = gpus()
    sm90 = [g for g in visible if g.capability == "9.0"]
    if sm90:
        first = sm90[0]
        count = f"{len(sm90)} x " if len(sm90) > 1 else ""
        return Finding("gpu", "ok", f"{count}{first.name}, driver {first.driver}", purpose)
    if visible:
        other = f"{visible[0].name} (compute capability {visible[0].capability})"
        return Finding("gpu", "note", other, purpose, "campaigns end at 'modelled' without sm90")
    return Finding("gpu", "note", "none visible", purpose, "campaigns end at 'modelled' here")


def _torch_cuda() -> Finding:
    """Whether torch is a CUDA build, read from its version file without importing it."""
    name, purpose = "torch CUDA build", "gate, screen and time"
    spec = _find("torch")
    cuda = None
    if spec is not None and spec.submodule_search_locations:
        path = os.path.join(spec.submodule_search_locations[0], "version.py")
        try:
            with open(path, encoding="utf-8") as source:
                for line in source:
                    if line.startswith("cuda"):
                        value = line.partition("=")[2].strip().strip("'\"")
                        cuda = None if value == "None" else value
        except OSError:
            cuda = None
    if cuda is not None:
        return Finding(name, "ok", f"CUDA {cuda}", purpose)
    if any(g.capability == "9.0" for g in gpus()):
        return Finding(name, "fault", "CPU build", purpose, "install a CUDA 13 build of torch")
    return Finding(name, "note", "CPU build", purpose, "enough without a GPU")


def _shared_memory() -> Finding:
    name, purpose = "/dev/shm", "--executor ray"
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return Finding(name, "note", "absent", purpose, "mount a tmpfs there for --executor ray")
    mib = stat.f_bavail * stat.f_frsize // 2**20
    if mib < 1024:
        return Finding(name, "note", f"{mib} MiB free", purpose, "ray wants 1 GiB or more")
    return Finding(name, "ok", f"{mib} MiB free", purpose)
