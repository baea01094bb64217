"""The fingerprint: which machine and toolchain a result came from."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

from factory import __version__
from factory.machine import gpus, installed
from leaderboard.records import FingerprintRecord

__all__ = ["canonical_json", "digest", "fingerprint", "toolchain"]

_DISTRIBUTIONS = {
    "torch": "torch",
    "dsl": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "optuna": "optuna",
    "triton": "triton",
}


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: object) -> str:
    """sha256 over :func:`canonical_json`, in hex."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def toolchain() -> dict[str, Any]:
    """Versions of everything that shapes a result, without importing any of it."""
    values: dict[str, Any] = {
        "kernel_factory": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
    }
    for key, distribution in _DISTRIBUTIONS.items():
        values[key] = installed(distribution)
    # The DSL's own distribution only pulls its parts in; a host may have these alone.
    values["dsl"] = values["dsl"] or installed("nvidia-cutlass-dsl-libs-base")
    visible = gpus()
    values["gpu"] = visible[0].name if visible else None
    values["driver"] = visible[0].driver if visible else None
    return values


def fingerprint(source_hash: str, extra: Mapping[str, Any] | None = None) -> FingerprintRecord:
    """Fingerprint of this process.

    Parameters
    ----------
    source_hash : str
        sha256 of the family's source.
    extra : Mapping, optional
        More names to values, for example ``gpu_uuid``.
    """
    values = {**toolchain(), "source": source_hash, **(extra or {})}
    return FingerprintRecord.of(values)
