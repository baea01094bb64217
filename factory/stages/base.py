"""What every stage of the funnel takes and gives.

A stage is a plain function from a trial to a :class:`StageResult`; it keeps no
state, writes no database and can be run alone (``factory check``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from leaderboard.records import ErrorRecord, MeasurementRecord, StageStatus

__all__ = ["HarnessError", "StageResult"]


class HarnessError(Exception):
    """The harness, the machine or the toolchain failed: never a verdict on a candidate.

    It stops or pauses the campaign (exit code 3); the trial in flight is abandoned.
    """


@dataclass(frozen=True)
class StageResult:
    """Verdict of one stage on one trial.

    Parameters
    ----------
    status : StageStatus
    reason : str
        One line with the numbers; empty when passed.
    details : Mapping[str, Any]
        JSON-serialisable facts worth keeping, for example kernel resources.
    errors : tuple of ErrorRecord
    measurements : tuple of MeasurementRecord
        ``trial_id`` is filled in by the caller (use 0).
    score_us, slow_us : float or None
        Geomeans in microseconds; only the last stage of a funnel sets them.
    """

    status: StageStatus
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[ErrorRecord, ...] = ()
    measurements: tuple[MeasurementRecord, ...] = ()
    score_us: float | None = None
    slow_us: float | None = None
