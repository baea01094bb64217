"""Campaigns: what is recorded, in which order, and how they end and go on."""

from __future__ import annotations

from collections import Counter, deque

import pytest
import record_makers as make
from fake_device import FakeJob
from waiting import until

from factory.campaign import find_resumable, launch, unfinished
from factory.config import CampaignConfig
from factory.errors import MachineError, UserError
from factory.executors.base import HarnessFault, StageFinished, TaskLost
from factory.executors.lane import DeviceLane
from factory.funnel import Funnel, run_cpu_stage
from factory.leader import finalists
from factory.plan import make_plan
from factory.progress import Silent
from factory.stages.base import HarnessError
from factory.stages.emulate import References
from leaderboard import (
    CampaignStatus,
    Clock,
    HeldError,
    JobStatus,
    TrialStatus,
    finals,
    open_store,
    ranked,
    rejected,
    winner,
)


class InProcess:
    """Runs CPU stages in this process, and a lane over a fake job where there is one."""

    def __init__(self, context, plan, view, *, job=None, deaths=None, cut_at=None):
        self.cpu_slots, self.gpu_slots = 2, 4 if job is not None else 0
        self._plan = plan
        self._references = References(plan.operation, seed=context.seed)
        self._tasks = deque()
        self._events = deque()
        self._deaths = Counter(deaths or {})
        self._lane = DeviceLane(lambda: job, self._events.append) if job is not None else None
        self.ran = []
        self.submitted = 0
        """To the device."""
        self._cut_at = cut_at

    def submit(self, task):
        if task.stage == "measure":
            self.submitted += 1
            self._lane.submit(task)
        else:
            self._tasks.append(task)

    def finals(self, finalists):
        self._lane.finals(finalists)

    def poll(self, timeout_s):
        events = [self._events.popleft() for _ in range(len(self._events))]
        if self._tasks:
            task = self._tasks.popleft()
            events.append(self._run(task))
        return events

    def _run(self, task):
        self.ran.append((task.stage, task.schedule.key))
        if self._cut_at is not None and len(self.ran) >= self._cut_at:
            raise KeyboardInterrupt
        if self._deaths[task.schedule.key] > 0:
            self._deaths[task.schedule.key] -= 1
            return TaskLost(task.trial_id, task.stage, "crashed", "worker died of SIGSEGV", 0.1)
        try:
            result = run_cpu_stage(task.stage, self._plan.family, task.schedule, self._references)
        except HarnessError as error:
            return HarnessFault(str(error), task.trial_id, task.stage)
        return StageFinished(task.trial_id, task.stage, result, 0.1)

    def close(self, *, cancel=False):
        if self._lane is not None:
            self._lane.close(cancel=cancel)
        events, self._events = list(self._events), deque()
        return events


@pytest.fixture
def store(new_database):
    with open_store(new_database()) as opened:
        yield opened


@pytest.fixture
def go(store, tmp_path):
    """Launch or resume; the executor used is kept as ``go.executor``."""

    def run(*, resume=False, job=None, deaths=None, cut_at=None, **values):
        base = {"name": "toy", "operation": "toy_scale", "space": "six"}
        config = CampaignConfig(**{**base, **values})
        plan = make_plan(config, need_gpu_here=config.clock != "gpu")
        stored = find_resumable(store, config.name) if resume else None

        def make(context, plan, view):
            run.executor = InProcess(context, plan, view, job=job, deaths=deaths, cut_at=cut_at)
            return run.executor

        return launch(
            plan,
            store,
            stored=stored,
            make_executor=make,
            view=Silent(),
            log_root=tmp_path / "runs",
        )

    return run


def by_schedule(store, campaign_id):
    return {t.schedule_key: t for t in store.load_trials(campaign_id) if t.status.finished}


def test_every_trial_ends_with_its_verdict(go, store):
    done = go()
    trials = by_schedule(store, done.campaign.id)
    assert {k: t.status.value for k, t in trials.items()} == {
        "kind=exact block=1": "passed",
        "kind=exact block=2": "passed",
        "kind=exact block=3": "passed",
        "kind=offset": "rejected",
        "kind=overflow": "rejected",
        "kind=greedy": "infeasible",
    }
    assert (done.finished, done.passed, done.interrupted) == (6, 3, False)
    assert done.campaign.status is CampaignStatus.FINISHED
    assert store.get_campaign(done.campaign.id).driver is None


def test_a_driver_gives_signs_of_life_while_its_executor_closes(go, store, monkeypatch):
    """The last reading of slow controls can take longer than a lease holds."""
    close, beats = InProcess.close, []

    def slow(executor, *, cancel=False):
        (campaign,) = store.list_campaigns()
        beats.append(
            until(lambda: store.get_campaign(campaign.id).heartbeat_at > campaign.heartbeat_at)
        )
        return close(executor, cancel=cancel)

    monkeypatch.setattr(InProcess, "close", slow)
    monkeypatch.setattr("factory.driver._HEARTBEAT_S", 0.05)
    assert go().finished == 6
    assert beats == [True]


def test_finalists_of_two_kinds_of_gpu_take_turns_and_those_of_void_jobs_stay(store):
    store.create_campaign(make.campaign())
    store.put_fingerprint(make.FINGERPRINT)
    for job, gpu in (("h200", "NVIDIA H200"), ("cut", "NVIDIA H200"), ("h100", "NVIDIA H100")):
        store.open_job(make.job(job, gpu=gpu))
    found = {}
    measured = [("h200", 12.0), ("h200", 11.0), ("h100", 40.0), ("cut", 10.0), ("h100", 30.0)]
    for number, (job, us) in enumerate(measured):
        trial = make.begin(store, number)
        made = [
            make.time(job, w, us, trial_id=trial.id, regime=regime)
            for regime in ("production", "slow")
            for w in make.WORKLOADS
        ]
        store.record_stage(trial.id, make.stage("time"), measurements=made)
        told = {"clock": Clock.GPU, "score_us": us, "slow_us": us, "job_id": job}
        store.finish_trial(trial.id, TrialStatus.PASSED, **told)
        found[trial.id] = (job, us)
    store.close_job("cut", JobStatus.VOID)

    def chosen(most):
        return [found[t.id] for t in finalists(store, "kda-1", most)]

    in_turn = [("cut", 10.0), ("h100", 30.0), ("h200", 11.0), ("h100", 40.0), ("h200", 12.0)]
    assert chosen(5) == chosen(9) == in_turn
    assert chosen(2) == in_turn[:2]


def test_ranking_is_by_the_model_and_holds_only_what_passed(go, store):
    done = go()
    rows = ranked(store, campaign_id=done.campaign.id)
    assert [r.schedule_key for r in rows] == [f"kind=exact block={b}" for b in (3, 2, 1)]
    assert {r.clock for r in rows} == {Clock.MODELLED}


def test_nothing_that_failed_a_stage_went_further_or_has_a_time(go, store):
    done = go()
    for trial in by_schedule(store, done.campaign.id).values():
        statuses = [s.status.value for s in trial.stages]
        assert set(statuses[:-1]) <= {"passed"}
        assert (trial.score_us is None) == (trial.status is not TrialStatus.PASSED)
    assert ("emulate", "kind=greedy") not in go.executor.ran
    assert ("compile", "kind=offset") not in go.executor.ran


def test_modelled_times_are_kept_with_the_last_stage(go, store):
    done = go()
    trial = by_schedule(store, done.campaign.id)["kind=exact block=3"]
    assert trial.stages[-1].details["modelled_us"] == {"64": 10.4, "256": 29.6}


def test_stop_after_emulate_compiles_nothing(go, store):
    done = go(stop_after="emulate")
    assert done.passed == 3
    assert {stage for stage, _ in go.executor.ran} == {"emulate"}


def test_the_budget_is_a_total_of_finished_trials(go, store):
    first = go(budget=2)
    assert first.finished == 2
    again = go(budget=5, resume=True)
    assert (again.finished, again.campaign.id) == (5, first.campaign.id)
    assert len(store.list_trials(first.campaign.id)) == 5


def test_all_offered_is_the_most_that_is_tried(go):
    assert go(budget=999).campaign.budget == 6


def test_a_finished_campaign_has_nothing_to_resume(go):
    go(budget=2)
    with pytest.raises(UserError, match="finished after 2 trials: its trials are used up"):
        go(budget=2, resume=True)
    go(budget=6, resume=True)
    with pytest.raises(UserError, match="all offered schedules were tried"):
        go(budget=60, resume=True)


def test_resuming_nothing_is_refused(go):
    with pytest.raises(UserError, match=r"nothing to resume: .* no campaign named 'toy'"):
        go(resume=True)


def test_an_interrupted_campaign_goes_on_without_repeating(go, store):
    with pytest.raises(KeyboardInterrupt):
        go(cut_at=4)
    stored = unfinished(store, "toy")
    assert stored.status is CampaignStatus.INTERRUPTED
    assert stored.driver is None
    assert not store.list_trials(stored.id, [TrialStatus.RUNNING])
    done_before = {t.id for t in store.list_trials(stored.id) if t.status.finished}
    done = go(resume=True)
    trials = store.list_trials(stored.id)
    finished = [t for t in trials if t.status.finished]
    assert done.finished == len(finished) == 6
    assert len({t.schedule_key for t in finished}) == 6
    assert done_before <= {t.id for t in finished}
    abandoned = [t for t in trials if t.status is TrialStatus.ABANDONED]
    assert abandoned
    for trial in abandoned:
        again = [t for t in trials if t.schedule_key == trial.schedule_key]
        assert [t.attempt for t in again] == [1, 2]
        assert {t.number for t in again} == {trial.number}


def test_a_resumed_campaign_proposes_what_an_uninterrupted_one_does(go, store):
    whole = go(name="whole", space="many", budget=20)
    with pytest.raises(KeyboardInterrupt):
        go(name="cut", space="many", budget=20, cut_at=21)
    cut = go(name="cut", space="many", budget=20, resume=True)
    keys = [
        {t.schedule_key for t in store.list_trials(c.campaign.id) if t.status.finished}
        for c in (whole, cut)
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"space": "many"}, "space was 'six' and is now 'many'"),
        ({"sampler": "grid"}, "sampler was 'tpe' and is now 'grid'"),
    ],
)
def test_a_changed_key_stops_the_resume_by_name(go, values, said):
    go(budget=2)
    with pytest.raises(UserError, match=said):
        go(budget=6, resume=True, **values)


def test_a_changed_space_stops_the_resume_and_leaves_the_rows(go, store, monkeypatch):
    import candidates
    from candidates import Parameter

    first = go(budget=2)
    before = store.load_trials(first.campaign.id)
    family = candidates.get("toy_scale")
    kind, block = family.parameters
    wider = Parameter("block", (*block.choices, 41), block.doc, block.active_when)
    monkeypatch.setattr(type(family), "parameters", (kind, wider))
    with pytest.raises(UserError, match="parameter 'block' had choices"):
        go(budget=6, resume=True)
    assert store.load_trials(first.campaign.id) == before


def test_a_changed_source_stops_the_resume(go, monkeypatch):
    go(budget=2)
    monkeypatch.setenv("TOY_SOURCE", "1" * 64)
    with pytest.raises(UserError, match="the source of family 'toy' changed"):
        go(budget=6, resume=True)


def test_a_dead_worker_is_forgiven_once(go, store):
    done = go(deaths={"kind=exact block=1": 1})
    trial = by_schedule(store, done.campaign.id)["kind=exact block=1"]
    assert trial.status is TrialStatus.PASSED
    assert go.executor.ran.count(("emulate", "kind=exact block=1")) == 2


def test_a_candidate_that_kills_two_workers_crashed(go, store):
    done = go(deaths={"kind=exact block=1": 2})
    trial = by_schedule(store, done.campaign.id)["kind=exact block=1"]
    assert trial.status is TrialStatus.CRASHED
    assert trial.reason == "worker died of SIGSEGV, twice"
    assert done.finished == 6


def test_a_broken_toolchain_fails_the_campaign_and_judges_nobody(go, store):
    with pytest.raises(MachineError, match="nvidia-cutlass-dsl is not installed"):
        go(space="no_dsl", sampler="grid")
    stored = unfinished(store, "toy")
    assert stored.status is CampaignStatus.FAILED
    kept = {t.schedule_key: t.status for t in store.list_trials(stored.id)}
    assert kept["kind=no_dsl"] is TrialStatus.ABANDONED


def test_a_campaign_finished_while_we_waited_for_it_is_not_run_again(go, store):
    go(budget=2)
    seen = find_resumable(store, "toy").model_copy(update={"status": CampaignStatus.RUNNING})
    plan = make_plan(CampaignConfig(name="toy", operation="toy_scale", space="six", budget=2))
    with pytest.raises(UserError, match="nothing to resume"):
        launch(plan, store, stored=seen, make_executor=None, view=Silent())
    kept = store.get_campaign(seen.id)
    assert (kept.status, kept.driver) == (CampaignStatus.FINISHED, None)


def test_a_held_campaign_is_not_resumed(go, store):
    go(budget=2)
    campaign = unfinished(store, "toy") or find_resumable(store, "toy")
    store.acquire(campaign.id, "elsewhere:1")
    with pytest.raises(HeldError, match="held by elsewhere:1"):
        go(budget=6, resume=True)


# -- with a device -------------------------------------------------------------------


def test_a_measured_campaign_goes_on_through_gate_screen_and_time(go, store):
    job = FakeJob()
    done = go(space="many", budget=8, clock="gpu", sampler="grid", job=job)
    trials = by_schedule(store, done.campaign.id)
    assert trials["kind=exact block=1"].status is TrialStatus.REJECTED
    assert trials["kind=exact block=2"].status is TrialStatus.SLOW
    fifth = trials["kind=exact block=5"]  # a finalist
    stages = [*Funnel.of(Clock.GPU, "compile").stages, "finals"]
    assert [s.stage for s in fifth.stages] == stages
    assert (fifth.score_us, fifth.slow_us, fifth.job_id) == (100.0, 200.0, "job-0")
    assert {m.trial_id for m in fifth.measurements} == {fifth.id}
    rows = ranked(store, campaign_id=done.campaign.id, clock=Clock.GPU)
    assert [r.schedule["block"] for r in rows] == [4, 5, 6, 7, 8]  # 3 failed in the finals
    assert {r.gpu for r in rows} == {"FAKE H200"}
    assert {r.control for r in rows} == {"torch"}
    assert len(rejected(store, campaign_id=done.campaign.id)) == 3


def test_candidates_are_prepared_ahead_and_all_released(go):
    def while_others_queue(what):
        if what == "gate kind=exact block=1":
            until(lambda: go.executor.submitted >= go.executor.gpu_slots)

    job = FakeJob(during=while_others_queue)
    go(space="many", budget=8, clock="gpu", sampler="grid", job=job)
    assert 2 <= job.most_prepared <= 3
    first_time = job.calls.index("time kind=exact block=3")
    assert "prepare kind=exact block=4" in job.calls[:first_time]


def test_finals_meet_the_best_three_and_name_a_winner(go, store):
    job = FakeJob()
    done = go(space="many", budget=8, clock="gpu", sampler="grid", job=job)
    placed = finals(store, done.campaign.id)
    # Block 3 is the fastest of the search and wrong on a held-out shape.
    assert [f.schedule_key for f in placed] == ["kind=exact block=4", "kind=exact block=5"]
    assert winner(store, done.campaign.id).schedule_key == "kind=exact block=4"
    wrong = next(
        t for t in store.load_trials(done.campaign.id) if t.schedule_key == "kind=exact block=3"
    )
    assert (wrong.status, wrong.stage) == (TrialStatus.REJECTED, "finals")
    assert (wrong.reason, wrong.score_us) == ("held out 17: y off", None)


def test_the_job_is_closed_with_its_drift_and_controls(go, store):
    job = FakeJob()
    done = go(space="many", budget=4, clock="gpu", sampler="grid", job=job)
    (kept,) = store.list_jobs(done.campaign.id)
    assert (kept.status, kept.drift, kept.campaign_id) == (
        JobStatus.VALID,
        0.01,
        done.campaign.id,
    )
    assert job.calls[-2:] == ["controls", "close"]


@pytest.mark.parametrize("where", ["open", "prepare", "gate", "time", "finals", "controls"])
def test_a_machine_fault_stops_the_campaign_and_judges_nobody(go, store, where):
    with pytest.raises(MachineError, match=f"fell off the bus at {where}"):
        go(space="many", budget=5, clock="gpu", sampler="grid", job=FakeJob(where))
    stored = unfinished(store, "toy")
    assert stored.status is CampaignStatus.FAILED
    assert not store.list_trials(stored.id, [TrialStatus.RUNNING])
    assert not store.list_trials(stored.id, [TrialStatus.CRASHED])
    assert all(j.status is not JobStatus.OPEN for j in store.list_jobs(stored.id))
    done = go(
        space="many", budget=5, clock="gpu", sampler="grid", job=FakeJob(number=1), resume=True
    )
    assert (done.finished, done.campaign.id) == (5, stored.id)
    assert winner(store, stored.id) is not None


def test_an_interrupted_measured_campaign_goes_on_in_a_new_job(go, store):
    with pytest.raises(KeyboardInterrupt):
        go(
            space="many",
            budget=6,
            clock="gpu",
            sampler="grid",
            job=FakeJob(),
            cut_at=9,
        )
    stored = unfinished(store, "toy")
    done = go(
        space="many", budget=6, clock="gpu", sampler="grid", job=FakeJob(number=1), resume=True
    )
    finished = [t for t in store.list_trials(stored.id) if t.status.finished]
    assert done.finished == len(finished) == len({t.schedule_key for t in finished}) == 6
