"""What a record that comes from elsewhere must agree with itself on.

A campaign's own writer cannot break these; a hand that edits an export can.  Each
function raises one line that names the record and the field.  They know records
only, nothing of the database.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from leaderboard._errors import TransferError
from leaderboard._scores import SAME, geomean, interval
from leaderboard.records import (
    Clock,
    ErrorRecord,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageStatus,
    TrialRecord,
    TrialStatus,
)

__all__ = [
    "check_fingerprint",
    "check_job",
    "check_measurement",
    "check_trial",
    "drift_bound",
]

_ROUNDED_US = 0.00051
"""Samples are stored to a nanosecond, their median and interval were taken before that."""

_DRIFT = 0.03
"""Bound of a job whose campaign states none: the configuration's default."""


def check_fingerprint(record: FingerprintRecord) -> None:
    """The id is the digest of the contents."""
    found = FingerprintRecord.of(record.values).id
    if record.id != found:
        raise TransferError(
            f"fingerprint {record.id}: id is not the sha256 of its values, {found[:12]}..."
        )


def drift_bound(config: Mapping[str, Any] | None) -> float:
    """How much controls may change within a valid job of a campaign, relative.

    Raises
    ------
    ValueError
        If its configuration says something that is no number.
    """
    device = (config or {}).get("device")
    bound = device.get("drift", _DRIFT) if isinstance(device, Mapping) else _DRIFT
    if not isinstance(bound, int | float) or isinstance(bound, bool):
        raise ValueError(f"device.drift is {bound!r}, no number")
    return float(bound)


def check_job(
    record: JobRecord, fingerprint: Mapping[str, Any] | None, config: Mapping[str, Any] | None
) -> None:
    """A job is on the GPU of its fingerprint, and valid only within the bound on drift.

    Parameters
    ----------
    fingerprint : Mapping or None
        Contents of the job's fingerprint; None if it is not there.
    config : Mapping or None
        Configuration of the job's campaign; None for a job of none.
    """
    gpu = (fingerprint or {}).get("gpu")
    if gpu is not None and gpu != record.gpu:
        raise TransferError(f"job {record.id}: gpu is {record.gpu!r}, its fingerprint's {gpu!r}")
    try:
        bound = drift_bound(config)
    except ValueError as error:
        raise TransferError(f"job {record.id}: its campaign's {error}") from None
    if record.status is JobStatus.VALID and record.drift is not None and record.drift > bound:
        raise TransferError(
            f"job {record.id}: status is valid with a drift of {record.drift:g}, beyond {bound:g}"
        )


def check_measurement(record: MeasurementRecord, uid: str) -> None:
    """Median and interval are those of the samples, where samples are stored."""
    if not record.samples_us:
        return
    if not all(0 < us < math.inf for us in record.samples_us):
        raise TransferError(f"measurement {uid}: samples_us holds what is no time")
    stated = (record.median_us, record.low_us, record.high_us)
    names = ("median_us", "low_us", "high_us")
    for name, said, found in zip(names, stated, interval(record.samples_us), strict=True):
        if not math.isclose(said, found, rel_tol=SAME, abs_tol=_ROUNDED_US):
            raise TransferError(
                f"measurement {uid}: {name} is {said:.6g}, by its samples_us {found:.6g}"
            )


def check_trial(record: TrialRecord) -> None:
    """Key and schedule are one; errors agree with themselves and with the status.

    Times of a passed measured trial are checked beside its measurements
    (:func:`leaderboard._scores.score_basis`), a modelled one's here.
    """
    label = f"trial {record.uid}"
    words = " ".join(f"{name}={value}" for name, value in record.schedule.items())
    # In any order: JSON objects have none.
    if sorted(words.split()) != sorted(record.schedule_key.split()):
        raise TransferError(f"{label}: schedule_key {record.schedule_key!r} is not its schedule")
    passed = record.status is TrialStatus.PASSED
    for error in record.errors:
        _check_error(label, error, passed=passed)
    if passed:
        _check_stages(label, record)
    if passed and record.clock is Clock.MODELLED:
        _check_modelled(label, record)


def _check_stages(label: str, record: TrialRecord) -> None:
    for stage in record.stages:
        if stage.status is not StageStatus.PASSED:
            raise TransferError(
                f"{label}: stage {stage.stage} is {stage.status}, and the trial's status is passed"
            )
    if record.clock is not Clock.MODELLED and not any(s.stage == "gate" for s in record.stages):
        raise TransferError(f"{label}: it is measured and passed, and no gate let it pass")


def _check_error(label: str, e: ErrorRecord, *, passed: bool) -> None:
    if e.out_of_contract:  # recorded, not run
        return
    where = f"{label}: error of {e.tensor} ({e.stage}, {e.regime}, {e.workload}, {e.scope})"
    if e.within and not e.finite:
        raise TransferError(f"{where} is within and not finite")
    for name, value in (("max_rel", e.max_rel), ("rms_rel", e.rms_rel)):
        if e.within and (value is None or not 0 <= value < math.inf):
            raise TransferError(f"{where} is within with {name} {value}")
    if passed and not e.within:
        raise TransferError(f"{where} is not within, and the trial's status is passed")


def _check_modelled(label: str, record: TrialRecord) -> None:
    for times in _modelled(record):
        found = geomean(times)
        if record.score_us is not None and not math.isclose(record.score_us, found, rel_tol=SAME):
            raise TransferError(
                f"{label}: score_us is {record.score_us:.6g}, the geomean of its modelled_us "
                f"{found:.6g}"
            )


def _modelled(record: TrialRecord) -> Iterable[list[float]]:
    for stage in record.stages:
        times = stage.details.get("modelled_us")
        if isinstance(times, Mapping) and times:
            values = list(times.values())
            if not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
                raise TransferError(f"trial {record.uid}: modelled_us holds what is no time")
            yield values
