"""``factory compare``: three answers a shape, and one-line refusals."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

import leaderboard
from factory.cli import _run
from leaderboard import (
    CampaignRecord,
    CampaignStatus,
    Clock,
    Comparison,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageRecord,
    StageStatus,
    TrialStatus,
)

SHAPES = ("one", "two")
NOW = datetime(2026, 11, 30, 8, 0, tzinfo=UTC)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with leaderboard.open_store(leaderboard.DEFAULT_URL) as opened:
        opened.create_campaign(
            CampaignRecord(
                id="c-1",
                name="c",
                operation="toy",
                operation_version="1",
                family="toy",
                source_hash="a",
                config={},
                space_hash="b",
                space={},
                seed=0,
                budget=9,
                status=CampaignStatus.RUNNING,
                clock=Clock.GPU,
                workloads=SHAPES,
                slow_regime=None,
                created_at=NOW,
                updated_at=NOW,
            )
        )
        opened.put_fingerprint(FingerprintRecord(id="f", values={}))
        for id_, gpu in (("h200", "NVIDIA H200"), ("h100", "NVIDIA H100")):
            opened.open_job(
                JobRecord(
                    id=id_,
                    campaign_id="c-1",
                    fingerprint_id="f",
                    gpu=gpu,
                    status=JobStatus.OPEN,
                    started_at=NOW,
                )
            )
        yield opened


def begin(store, number):
    trial = store.begin_trial(
        "c-1",
        number=number,
        schedule_key=f"n={number}",
        schedule={"n": number},
        source_hash="a",
        gate_bound=None,
        log_path=None,
    )
    return trial.id


def timed(store, number, times, job="h200"):
    id_ = begin(store, number)
    measured = [
        MeasurementRecord(
            job_id=job,
            trial_id=id_,
            workload=w,
            regime="production",
            clock=Clock.GPU,
            cache="warm",
            method="cupti",
            median_us=us,
            low_us=us * 0.99,
            high_us=us * 1.01,
            samples_us=tuple(us * (1 + n / 1000) for n in range(-5, 6)),
        )
        for w, us in zip(SHAPES, times, strict=True)
    ]
    store.record_stage(
        id_, StageRecord(stage="time", status=StageStatus.PASSED, seconds=1), measurements=measured
    )
    score = (times[0] * times[1]) ** 0.5
    store.finish_trial(id_, TrialStatus.PASSED, clock=Clock.GPU, score_us=score, job_id=job)
    return id_


@pytest.fixture
def run(store, capsys):
    def run_(*argv):
        for job in store.list_jobs("c-1"):
            if job.status is JobStatus.OPEN:
                store.close_job(job.id, JobStatus.VALID)
        code = _run(["compare", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run_


def verdicts(out):
    return {line.split()[0]: line for line in out.splitlines() if line.startswith(SHAPES)}


def test_says_for_each_shape_how_the_first_stands(store, run):
    a = timed(store, 0, (10.0, 40.0))
    b = timed(store, 1, (12.0, 40.0))
    code, out, _ = run(a, b)
    assert code == 0
    assert f"trial {a} is faster than trial {b}" in out
    assert f"trial {a} is\n" in out, "the head of the last column"
    assert verdicts(out)["one"].rstrip().endswith("faster")
    assert verdicts(out)["two"].rstrip().endswith("not told apart")
    _, turned, _ = run(b, a)
    assert f"trial {b} is slower than trial {a}" in turned
    assert verdicts(turned)["one"].rstrip().endswith("slower")


def test_a_difference_within_the_noise_is_none(store, run):
    a, b = timed(store, 0, (10.0, 40.0)), timed(store, 1, (10.01, 40.0))
    _, out, _ = run(a, b)
    assert f"trials {a} and {b} are not told apart" in out


def test_json_is_the_comparison(store, run):
    a, b = timed(store, 0, (10.0, 40.0)), timed(store, 1, (12.0, 40.0))
    code, out, _ = run(a, b, "--json")
    found = Comparison.model_validate(json.loads(out))
    assert code == 0
    assert (found.first_id, found.second_id, found.job_id) == (a, b, "h200")
    assert [s.verdict for s in found.shapes] == ["faster", "not told apart"]
    assert set(json.loads(out)) == set(Comparison.model_fields)


def test_other_jobs_are_refused_with_what_to_do_instead(store, run):
    a, b = timed(store, 0, (10.0, 40.0)), timed(store, 1, (12.0, 40.0), job="h100")
    code, out, err = run(a, b)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "different jobs (h200 and h100)" in err
    assert "re-time them together" in err


def test_a_trial_without_a_time_is_refused(store, run):
    a, b = timed(store, 0, (10.0, 40.0)), begin(store, 1)
    store.record_stage(
        b, StageRecord(stage="emulate", status=StageStatus.REJECTED, reason="wrong", seconds=1)
    )
    store.finish_trial(b, TrialStatus.REJECTED, reason="wrong")
    code, _, err = run(a, b)
    assert code == 2
    assert f"trial {b} is rejected: it carries no time" in err


def test_modelled_times_get_a_ratio_and_no_verdict(store, run):
    ids = []
    for number, us in enumerate((10.0, 20.0)):
        id_ = begin(store, number)
        store.record_stage(id_, StageRecord(stage="emulate", status=StageStatus.PASSED, seconds=1))
        store.finish_trial(id_, TrialStatus.PASSED, clock=Clock.MODELLED, score_us=us)
        ids.append(id_)
    code, out, _ = run(*ids)
    assert code == 0
    assert "0.500 of the modelled time" in out
    assert "faster" in out.splitlines()[-1]
    assert json.loads(run(*ids, "--json")[1])["verdict"] is None


def test_an_unknown_trial_is_named(run):
    code, _, err = run(1, 99)
    assert code == 2
    assert "no trial 1 " in err
