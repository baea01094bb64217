"""A leaderboard of many trials, written in bulk: what takes a campaign days is here in seconds."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import board
import sqlalchemy as sa

from leaderboard import JobStatus, Store
from leaderboard._rows import campaign_row, job_row, measurement_values
from leaderboard.models import MeasurementRow, TrialRow

SHAPES = 10
REGIMES = ("production", "slow")


def fill(store: Store, *, campaigns: int, trials: int, timed: int, seed: int = 0) -> None:
    """Campaigns on one operation, each with a job of its own whose machine is a little slower.

    Parameters
    ----------
    trials : int
        Of each campaign; three of four passed.
    timed : int
        Of each campaign, fastest first, whose times are stored shape by shape.
    """
    rng = random.Random(seed)
    shapes = [f"shape-{n}" for n in range(SHAPES)]
    number = 0
    with store.writing() as session:
        session.execute(sa.text("DELETE FROM kf_jobs"))
        session.execute(sa.text("DELETE FROM kf_campaigns"))
        for c in range(campaigns):
            name, job, slower = f"c{c:03d}", f"job-{c:03d}", 1.0 + c / 1000
            session.add(campaign_row(board.campaign(name, minutes=c, workloads=shapes)))
            session.flush()
            session.add(job_row(board.job(job, name, status=JobStatus.VALID)))
            session.flush()
            rows = []
            for n in range(trials):
                number += 1
                rows.append(_trial(number, n, name, job, rng.uniform(40, 400) * slower))
            session.execute(sa.insert(TrialRow), rows)
            session.execute(
                sa.insert(MeasurementRow),
                [
                    measurement_values(
                        board.time(job, w, 100 * slower, control="peer", regime=r, phase=phase)
                    )
                    for w in shapes
                    for r in REGIMES
                    for phase in ("before", "after")
                ],
            )
            best = session.execute(
                sa.select(TrialRow.id, TrialRow.score_us)
                .where(TrialRow.campaign_id == name, TrialRow.status == "passed")
                .order_by(TrialRow.score_us)
                .limit(timed)
            ).all()
            session.execute(
                sa.insert(MeasurementRow),
                [
                    measurement_values(board.time(job, w, us or 1.0, trial_id=trial, regime=r))
                    for trial, us in best
                    for w in shapes
                    for r in REGIMES
                ],
            )
    with store._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if connection.dialect.name == "postgresql":  # what its autovacuum does sooner or later
            connection.exec_driver_sql("VACUUM ANALYZE")


def _trial(number: int, n: int, campaign: str, job: str, us: float) -> dict[str, Any]:
    passed = n % 4 != 3
    return {
        "uid": f"{number:032x}",
        "campaign_id": campaign,
        "number": n,
        "schedule_key": f"bt=32 anchor=mid segments=1 rows=64 n={n}",
        "schedule": {"bt": 32, "anchor": "mid", "segments": 1, "rows": 64, "n": n},
        "status": "passed" if passed else "rejected",
        "stage": "time" if passed else "gate",
        "reason": "" if passed else "regime constant: o off by 0.2",
        "attempt": 1,
        "finished": True,
        "clock": "gpu" if passed else None,
        "score_us": us if passed else None,
        "slow_us": us * 1.2 if passed else None,
        "method": "cupti" if passed else None,
        "cache": "warm" if passed else None,
        "job_id": job,
        "source_hash": "a" * 64,
        "started_at": board.START,
        "ended_at": board.START + timedelta(seconds=number),
        "log_path": f"factory-runs/{campaign}/trial-{n}.log",
    }
