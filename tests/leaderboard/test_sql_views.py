"""Views for those who write SQL say what the queries say, on SQLite and PostgreSQL alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import board
import pytest
import sqlalchemy as sa

import leaderboard
from leaderboard import Clock, JobStatus, Store, TrialStatus, open_store

VIEWS = ("trials", "ranking", "controls", "times", "shapes", "failures")


def rows(store: Store, view: str, **equal: Any) -> list[dict[str, Any]]:
    where = " AND ".join(f"{name} = :{name}" for name in equal)
    text = f"SELECT * FROM kf_view_{view}" + (f" WHERE {where}" if where else "")
    with store.reading() as session:
        return [dict(row) for row in session.execute(sa.text(text), equal).mappings()]


def columns(store: Store, view: str) -> list[str]:
    with store.reading() as session:
        inspector = sa.inspect(session.connection())
        return [c["name"] for c in inspector.get_columns(f"kf_view_{view}")]


@pytest.fixture
def filled(store: Store) -> Store:
    """Two GPUs, a void job, controls, a trial read twice, a held-out time, a model and failures."""
    for job_id, gpu, us in (("a", "NVIDIA H200", 40.0), ("b", "NVIDIA H100 80GB HBM3", 80.0)):
        store.open_job(board.job(job_id, gpu=gpu))
        store.add_measurements(board.controls(job_id, us))
        store.add_measurements(board.controls(job_id, 1.0, phases=("final",)))
        for n, factor in enumerate((0.9, 1.2)):
            board.passed(store, n + (2 if job_id == "b" else 0), job_id, us * factor, us)
        store.close_job(job_id, JobStatus.VALID)
    board.passed(store, 4, "job-1", 10.0)
    store.close_job("job-1", JobStatus.VOID, note="controls drifted")
    board.modelled(store, 5, 30.0)
    board.failed(store, 6, TrialStatus.REJECTED, "o is off")
    return store


def test_the_ranking_is_that_of_each_job(filled: Store) -> None:
    found = {(r["job_id"] if r["gpu"] else None, r["job_rank"]): r for r in rows(filled, "ranking")}
    want = leaderboard.query(filled)
    assert len(found) == len(want) == 5
    for row in want:
        there = found[row.job_id if row.gpu else None, row.rank]
        assert (there["id"], there["score_us"], there["gpu"]) == (row.id, row.score_us, row.gpu)
    assert {r["id"] for r in rows(filled, "ranking", clock="modelled")} == {
        r.id for r in want if r.clock is Clock.MODELLED
    }


def test_shapes_are_over_controls_of_their_own_job(filled: Store) -> None:
    want = leaderboard.query_shapes(filled, leaderboard.query(filled, clock="gpu"))
    found = rows(filled, "shapes", regime="production", clock="gpu", job_status="valid")
    assert len(found) == len(want) == 8
    by = {(r["trial_id"], r["workload"]): r for r in found}
    for shape in want:
        there = by[shape.id, shape.workload]
        assert (there["us"], there["gpu"], there["control"]) == (shape.us, shape.gpu, shape.control)
        assert there["control_us"] == pytest.approx(shape.control_us)
        assert there["ratio"] == pytest.approx(shape.ratio)
        assert there["lost"] == shape.lost
    jobs = {j.id: j.gpu for j in filled.list_jobs("kda-1")}
    assert all(r["gpu"] == jobs[r["job_id"]] for r in rows(filled, "shapes"))


def test_of_several_readings_the_last_counts(store: Store) -> None:
    trial = board.begin(store, 0)
    first = board.times("job-1", trial.id, 70.0, 70.0)
    last = board.times("job-1", trial.id, 50.0, 50.0)
    held = board.time("job-1", "held/1", 9.0, trial_id=trial.id, held_out=True)
    store.record_stage(trial.id, board.stage("time"), measurements=[*first, *last, held])
    store.finish_trial(
        trial.id, TrialStatus.PASSED, clock=Clock.GPU, score_us=50.0, slow_us=50.0, job_id="job-1"
    )
    found = rows(store, "times", regime="production")
    assert sorted(r["us"] for r in found) == [25.0, 100.0]


def test_failures_and_trials(filled: Store) -> None:
    (failure,) = rows(filled, "failures")
    assert (failure["status"], failure["stage"], failure["reason"]) == (
        *("rejected", "emulate"),
        "o is off",
    )
    assert len(rows(filled, "trials")) == len(filled.list_trials("kda-1"))
    (modelled,) = rows(filled, "trials", clock="modelled")
    assert modelled["gpu"] is None


def test_the_page_has_every_view_and_column(store: Store) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "database.md").read_text("utf-8")
    for view in VIEWS:
        (line,) = [x for x in page.splitlines() if x.startswith(f"| `kf_view_{view}`")]
        listed = line.split("|")[3].replace("`", "").replace(" ", "").split(",")
        assert listed == columns(store, view), view


def test_a_database_of_an_older_version_gets_the_views(tmp_path: Path) -> None:
    from alembic import command

    from leaderboard import migrations

    url = f"sqlite:///{tmp_path}/old.db"
    engine = sa.create_engine(url)
    migrations.upgrade(engine)
    with engine.begin() as connection:
        config = migrations._config()
        config.attributes["connection"] = connection
        command.downgrade(config, "0002")
        assert sa.inspect(connection).get_view_names() == []
    with open_store(url) as store:
        assert all(columns(store, view) for view in VIEWS)
