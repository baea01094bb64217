"""A whole measured campaign: worker processes, device job and children, on a simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

import candidates
import operations
from factory import device
from factory.campaign import launch
from factory.config import CampaignConfig
from factory.device.simulated import SimulatedDevice
from factory.executors.inline import InlineExecutor
from factory.plan import make_plan
from factory.progress import Silent
from leaderboard import Clock, TrialStatus, finals, open_store, ranked, trial_seconds, winner


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The campaign's last state and its open leaderboard."""
    folder = tmp_path_factory.mktemp("measured")
    config = CampaignConfig(
        name="toy", operation="toy_scale", space="measured", clock="gpu", sampler="grid"
    )

    def make(context, plan, view):
        def open_job():
            return device.open_job(
                operations.get("toy_scale"),
                candidates.get("toy_scale"),
                seed=context.seed,
                limits=device.Limits(load_s=60, gate_s=30, screen_s=30, time_s=30),
                log_dir=context.log_dir,
                baselines=(),
                device=SimulatedDevice(),
            )

        return InlineExecutor(context, workers=1, open_job=open_job)

    with open_store(f"sqlite:///{folder}/t.db") as store:
        done = launch(
            make_plan(config, need_gpu_here=False),
            store,
            stored=None,
            make_executor=make,
            view=Silent(),
            log_root=folder / "runs",
        )
        yield done, store


def test_what_the_emulation_cannot_see_is_rejected_at_the_gate(measured):
    done, store = measured
    trials = {t.schedule_key: t for t in store.load_trials(done.campaign.id)}
    assert trials["kind=offset"].stage == "emulate"
    wrong = trials["kind=miscompiled"]
    assert (wrong.status, wrong.stage) == (TrialStatus.REJECTED, "gate")
    assert "y is off by max 1.00e-01" in wrong.reason
    log = wrong.stages[-1].details["log"]
    assert "job-" in log
    assert Path(log).exists()
    assert wrong.score_us is None


def test_the_hopeless_are_not_timed(measured):
    done, store = measured
    trials = {t.schedule_key: t for t in store.load_trials(done.campaign.id)}
    slow = trials["kind=exact block=40"]
    assert (slow.status, slow.stage) == (TrialStatus.SLOW, "screen")
    assert not [m for m in slow.measurements if m.clock is Clock.GPU and m.phase == "final"]


def test_measured_times_rank_and_every_tuned_workload_has_one(measured):
    done, store = measured
    rows = ranked(store, campaign_id=done.campaign.id, clock=Clock.GPU)
    assert [r.schedule["block"] for r in rows] == [1, 2, 3, 4]
    assert [r.score_us for r in rows] == pytest.approx([11, 12, 13, 14])
    best = store.get_trial(rows[0].id)
    timed = {(m.workload, m.regime) for m in best.measurements if m.phase == "search"}
    assert timed == {(w, r) for w in ("64", "256") for r in ("production", "slow")}


def test_the_winner_met_the_held_out_shapes(measured):
    done, store = measured
    assert [f.schedule_key for f in finals(store, done.campaign.id)] == [
        f"kind=exact block={b}" for b in (1, 2, 3)
    ]
    first = winner(store, done.campaign.id)
    assert first.schedule_key == "kind=exact block=1"
    assert first.held_out_us == pytest.approx(11)


def test_the_time_of_the_finals_is_shared_among_the_finalists(measured):
    done, store = measured
    spent = trial_seconds(store, done.campaign.id)
    seconds = [s["finals"] for s in spent.values() if "finals" in s]
    assert len(seconds) == 3
    assert len(set(seconds)) == 1
    assert seconds[0] > 0
