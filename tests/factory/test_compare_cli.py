"""``factory compare``: three answers a shape, and one-line refusals."""

from __future__ import annotations

import json

import pytest
import record_makers as make
from answers import ask

import leaderboard
from leaderboard import Clock, Comparison, JobStatus, StageStatus, TrialStatus

SHAPES = ("one", "two")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with leaderboard.open_store(leaderboard.DEFAULT_URL) as opened:
        opened.create_campaign(make.campaign("c-1", workloads=SHAPES, slow_regime=None))
        opened.put_fingerprint(make.FINGERPRINT)
        for id_, gpu in (("h200", "NVIDIA H200"), ("h100", "NVIDIA H100")):
            opened.open_job(make.job(id_, "c-1", gpu=gpu))
        yield opened


def begin(store, number):
    return make.begin(store, number, "c-1").id


def timed(store, number, times, job="h200"):
    id_ = begin(store, number)
    measured = [
        make.time(job, w, us, trial_id=id_, samples_us=[us * (1 + n / 1000) for n in range(-5, 6)])
        for w, us in zip(SHAPES, times, strict=True)
    ]
    store.record_stage(id_, make.stage("time"), measurements=measured)
    score = (times[0] * times[1]) ** 0.5
    store.finish_trial(id_, TrialStatus.PASSED, clock=Clock.GPU, score_us=score, job_id=job)
    return id_


@pytest.fixture
def run(store, capsys):
    def run_(*argv):
        for job in store.list_jobs("c-1"):
            if job.status is JobStatus.OPEN:
                store.close_job(job.id, JobStatus.VALID)
        return ask(capsys, "compare", *argv)

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
    store.record_stage(b, make.stage("emulate", StageStatus.REJECTED, reason="wrong"))
    store.finish_trial(b, TrialStatus.REJECTED, reason="wrong")
    code, _, err = run(a, b)
    assert code == 2
    assert f"trial {b} is rejected: it carries no time" in err


def test_modelled_times_get_a_ratio_and_no_verdict(store, run):
    ids = []
    for number, us in enumerate((10.0, 20.0)):
        id_ = begin(store, number)
        store.record_stage(id_, make.stage("emulate"))
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
