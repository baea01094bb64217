"""What a campaign begins with and when it ends: first proposals, warm start, budgets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_device import FakeJob
from test_campaign import InProcess

from factory.budget import used_up
from factory.campaign import find_resumable, launch
from factory.config import CampaignConfig
from factory.errors import UserError
from factory.machine import Gpu
from factory.plan import make_plan
from factory.progress import Silent
from factory.tally import Tally
from factory.warm import earlier_outcomes
from leaderboard import CampaignStatus, TrialStatus, open_store
from leaderboard.records import StageStatus


class Notes(Silent):
    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


@pytest.fixture
def store(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/t.db") as opened:
        yield opened


@pytest.fixture
def go(store, tmp_path):
    def run(*, resume=False, job=None, **values):
        base = {"name": "toy", "operation": "toy_scale", "space": "many", "stop_after": "emulate"}
        config = CampaignConfig(**{**base, **values})
        plan = make_plan(config, need_gpu_here=config.clock != "gpu")
        run.view = Notes()
        return launch(
            plan,
            store,
            stored=find_resumable(store, config.name) if resume else None,
            make_executor=lambda context, plan, view: InProcess(context, plan, view, job=job),
            view=run.view,
            log_root=tmp_path / "runs",
        )

    return run


def blocks(store, done):
    """Blocks of finished trials, in order of proposal."""
    trials = [t for t in store.list_trials(done.campaign.id) if t.status.finished]
    return [t.schedule.get("block") for t in sorted(trials, key=lambda t: t.number)]


# -- first proposals ------------------------------------------------------------------


def test_the_best_by_the_cost_model_are_proposed_first(go, store):
    done = go(first=3, budget=3)
    assert sorted(blocks(store, done)) == [6, 7, 8]  # the model is best at 7
    assert blocks(store, done)[0] == 7


def test_what_breaks_a_budget_is_not_among_the_first(go, store):
    done = go(space="six", first=6, budget=6)
    kinds = [t.schedule["kind"] for t in store.list_trials(done.campaign.id)]
    assert kinds[-1] == "greedy"


# -- warm start -----------------------------------------------------------------------


def plan_of(**values):
    base = {"name": "next", "operation": "toy_scale", "space": "many", "clock": "modelled"}
    config = CampaignConfig(**{**base, "warm_start": True, **values})
    return make_plan(config, need_gpu_here=False)


def test_earlier_trials_are_known_and_do_not_count(go, store):
    go(name="earlier", budget=5, sampler="grid")
    done = go(name="next", budget=4, warm_start=True)
    assert done.finished == 4
    assert "warm start: the sampler knows 5 earlier trials" in go.view.said


def test_a_resume_knows_what_its_launch_knew(go, store):
    go(name="earlier", budget=5, sampler="grid")
    first = go(name="next", budget=2, warm_start=True)
    go(name="later", budget=3)
    go(name="next", budget=4, warm_start=True, resume=True)
    assert "warm start: the sampler knows 5 earlier trials" in go.view.said
    known = earlier_outcomes(plan_of(), store, before=first.campaign.created_at)
    assert [int(o.schedule["block"]) for o in known] == [1, 2, 3, 4, 5]


def test_only_the_campaigns_that_are_named_are_known(go, store):
    go(name="one", budget=2, sampler="grid")
    go(name="two", budget=3, sampler="grid")
    last = go(name="mark", budget=1)
    known = earlier_outcomes(plan_of(warm_start=["two"]), store, before=last.campaign.created_at)
    assert len(known) == 3


def test_a_campaign_that_is_not_there_is_named_and_nothing_begins(go, store):
    with pytest.raises(UserError, match="warm_start: no campaign 'nobody'"):
        go(warm_start=["nobody"])
    assert store.list_campaigns() == []


def test_a_campaign_of_another_source_says_nothing_here(go, store, monkeypatch):
    go(name="earlier", budget=2)
    monkeypatch.setenv("TOY_SOURCE", "1" * 64)
    with pytest.raises(UserError, match=r"earlier-.* has another source"):
        go(name="next", warm_start=["earlier"])
    go(name="next", warm_start=True, budget=1)
    assert "warm start: the sampler knows 0 earlier trials" in go.view.said


def test_times_of_void_jobs_and_other_gpus_are_not_known(go, store, monkeypatch):
    values = {"space": "many", "clock": "gpu", "sampler": "grid", "stop_after": "compile"}
    measured = go(name="earlier", budget=5, job=FakeJob(), **values)
    mark = go(name="mark", budget=1)

    def known():
        outcomes = earlier_outcomes(plan_of(clock="gpu"), store, before=mark.campaign.created_at)
        return {int(o.schedule["block"]): o for o in outcomes}

    assert known()[4].score_us == 80.0
    assert known()[2].score_us == 900.0  # slow: what the screen estimated
    assert known()[1].status is TrialStatus.REJECTED
    assert known()[1].violation == 1.5  # off by half
    monkeypatch.setattr("factory.warm.sm90_gpus", lambda: (Gpu(0, "OTHER", "u", "d", "9.0"),))
    # A verdict holds on any GPU: block 1 failed the gate, block 3 a held-out shape.
    assert sorted(known()) == [1, 3]
    monkeypatch.setattr("factory.warm.sm90_gpus", lambda: (Gpu(0, "FAKE H200", "u", "d", "9.0"),))
    assert len(known()) == 5
    assert measured.campaign.status is CampaignStatus.FINISHED


# -- budgets --------------------------------------------------------------------------


def test_it_ends_after_so_many_trials_without_a_new_best(go, store):
    done = go(sampler="grid", patience=4, budget=40)
    # The model falls to block 7 and rises after it; two trials may be under way.
    assert 11 <= done.finished <= 13
    assert done.campaign.status is CampaignStatus.FINISHED
    assert any("brought no new best" in said for said in go.view.said)


def test_a_campaign_that_ran_out_of_patience_goes_on_with_more(go, store):
    first = go(sampler="grid", patience=4, budget=40)
    with pytest.raises(UserError, match=r"brought no new best \(--patience\)"):
        go(sampler="grid", patience=4, budget=40, resume=True)
    more = go(sampler="grid", patience=8, budget=40, resume=True)
    assert 15 <= more.finished <= 17
    assert more.campaign.id == first.campaign.id
    assert store.get_campaign(first.campaign.id).config["patience"] == 8


def test_it_begins_nothing_after_its_gpu_minutes(go, store, monkeypatch):
    gpu_s = 0.0

    def stage(what):
        nonlocal gpu_s
        gpu_s += 0.05  # three stages a trial

    monkeypatch.setattr("factory.executors.lane.time", SimpleNamespace(perf_counter=lambda: gpu_s))
    job = FakeJob(during=stage)
    values = {"clock": "gpu", "sampler": "grid", "stop_after": "compile"}
    done = go(job=job, gpu_minutes=0.6 / 60, budget=40, **values)
    assert 4 <= done.finished <= 14
    assert any("GPU minutes are used up" in said for said in go.view.said)
    assert "finals" in job.calls
    with pytest.raises(UserError, match="GPU minutes are used up"):
        go(job=FakeJob(number=1), gpu_minutes=0.6 / 60, budget=40, resume=True, **values)


def test_limits_count_what_earlier_launches_used():
    config = CampaignConfig(name="a", operation="toy_scale", gpu_minutes=1.0)
    tally = Tally("c", "gpu", 9, ("gate",))
    tally.leave(1, "emulate", StageStatus.PASSED, 100.0)
    assert used_up(config, tally) is None
    tally.leave(1, "gate", StageStatus.PASSED, 60.0)
    assert used_up(config, tally) == "1.0 of 1 GPU minutes are used up (--gpu-minutes)"
    tally.finished = 9
    assert used_up(config, tally) == "its 9 trials are used up (--budget)"


def test_the_gaussian_process_without_scipy_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("factory.plan.installed", lambda name: None)
    with pytest.raises(UserError, match="sampler 'gp' needs scipy; pip install scipy") as refused:
        plan_of(sampler="gp")
    assert "\n" not in str(refused.value)
