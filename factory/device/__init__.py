"""The GPU half of the funnel: one job on one GPU, a child process for each candidate.

:func:`open_job` is the way in.  Importing this package imports neither torch
nor the DSL; no process that runs foreign code imports :mod:`factory.device.job`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from factory.device.protocol import Limits

if TYPE_CHECKING:
    from factory.device.job import DeviceJob, Finals, Handle, open_job

__all__ = ["DeviceJob", "Finals", "Handle", "Limits", "open_job"]


def __getattr__(name: str) -> Any:
    if name in ("DeviceJob", "Finals", "Handle", "open_job"):
        from factory.device import job

        return getattr(job, name)
    raise AttributeError(name)
