"""Replay: what samplers need on a recorded campaign whose best is known."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
import recorded
from recorded import BEST, FAMILY
from test_campaign import FakeJob, InProcess

import candidates
from factory.campaign import launch
from factory.cli import _run
from factory.config import CampaignConfig
from factory.errors import UserError
from factory.plan import make_plan
from factory.progress import Silent
from factory.replay import load_recording, replay, run_once
from factory.report.searches import course
from leaderboard import TrialStatus, open_store, shipped_store


@pytest.fixture(scope="module")
def recording():
    return recorded.recording()


@pytest.fixture
def store(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/r.db") as opened:
        yield opened


SOME = FAMILY.offered("all")[50:80]
"""Ten of one form, twenty of the other, a third of those wrong."""


def test_a_recording_has_every_verdict_of_its_campaign(store):
    found = load_recording(store, FAMILY, [recorded.record(store, schedules=SOME)])
    assert {s: (o.status, o.score_us) for s, o in found.outcomes.items()} == {
        s: (o.status, o.score_us) for s, o in zip(SOME, map(recorded.outcome, SOME), strict=True)
    }
    assert found.best_us == min(recorded.score(s) for s in SOME if s.get("order") != "c")
    assert (found.whole, found.missing, found.exhaustive) == (168, 138, False)


def test_a_recording_of_all_that_is_offered_is_exhaustive(store, monkeypatch):
    monkeypatch.setattr(type(FAMILY), "offered", lambda self, preset: SOME)
    campaign = recorded.record(store, schedules=SOME)
    assert load_recording(store, FAMILY, [campaign]).exhaustive
    gap = recorded.record(store, "gap", schedules=SOME[:-1])
    found = load_recording(store, FAMILY, [gap])
    assert (found.exhaustive, found.missing) == (False, 1)


def test_two_campaigns_make_one_recording(store):
    halves = [recorded.record(store, "left", SOME[:16]), recorded.record(store, "right", SOME[9:])]
    found = load_recording(store, FAMILY, halves)
    assert found.campaigns == ("left-1", "right-1")
    assert found.offered == SOME


def test_the_default_sampler_needs_a_third_of_the_space_and_less_than_random_and_grid(recording):
    needed = {s: replay(recording, sampler=s) for s in ("tpe", "random", "grid")}
    assert needed["tpe"].share <= 0.30
    assert needed["tpe"].needed < 0.6 * needed["random"].needed
    assert needed["tpe"].needed < 0.6 * needed["grid"].needed
    assert len({r.needed for r in needed["grid"].runs}) == 1


def test_the_gaussian_process_needs_less_than_random(recording):
    seeds = range(2)
    gp = replay(recording, sampler="gp", seeds=seeds)
    assert gp.needed < 0.6 * replay(recording, sampler="random", seeds=seeds).needed


def test_tpe_bears_trials_under_way(recording):
    assert replay(recording, sampler="tpe", batch=8, seeds=range(5)).share <= 0.30


def test_the_cost_model_saves_trials(recording):
    alone = replay(recording, sampler="tpe", seeds=range(6))
    guided = replay(recording, sampler="tpe", seeds=range(6), first=8)
    assert guided.needed < alone.needed
    assert recording.modelled.index(BEST) > 0  # it is no oracle
    assert len(recording.top_by_model) == 5


def test_a_run_is_answered_by_the_recording_and_nothing_else(recording):
    run = run_once(recording, sampler="random", seed=4)
    assert run.best_us[-1] <= 103.0 < run.best_us[-2]
    assert run.needed == len(run.best_us)
    assert list(run.best_us) == sorted(run.best_us, reverse=True)
    assert run == run_once(recording, sampler="random", seed=4)
    assert 0 < run.measured < run.needed  # those that emulation rejected met no GPU


def test_a_run_that_gives_up_has_no_count(recording):
    run = run_once(recording, sampler="grid", seed=0, limit=5)
    assert (run.needed, len(run.best_us)) == (None, 5)
    given_up = replay(recording, sampler="grid", seeds=[0], limit=5)
    assert given_up.needed == float("inf")


def measured(store, tmp_path, number, **values):
    """A campaign on a fake device with a job of its own."""
    config = CampaignConfig(
        name=f"m{number}",
        operation="toy_scale",
        space="many",
        clock="gpu",
        sampler="grid",
        **values,
    )
    plan = make_plan(config, need_gpu_here=False)
    job = FakeJob(number=number)
    done = launch(
        plan,
        store,
        stored=None,
        make_executor=lambda context, plan, view: InProcess(context, plan, view, job=job),
        view=Silent(),
        log_root=tmp_path / "runs",
    )
    return done.campaign


def test_jobs_are_joined_by_their_control(store, tmp_path, monkeypatch):
    family = candidates.get("toy_scale")
    first = measured(store, tmp_path, 0, budget=6)
    # The second GPU is slower by half, for candidates and controls alike.
    monkeypatch.setattr("fake_device.WORKLOADS", {"64": 15.0, "256": 60.0})
    monkeypatch.setattr(FakeJob, "time", slower(FakeJob.time, 1.5))
    second = measured(store, tmp_path, 1, budget=9)
    joined = load_recording(store, family, [first, second])
    alone = load_recording(store, family, [second])
    by_block = {int(s["block"]): o.score_us for s, o in joined.outcomes.items()}
    assert by_block[9] == pytest.approx(180.0)
    assert by_block[5] == pytest.approx(100.0)
    assert alone.outcomes[family.schedule({"kind": "exact", "block": 9})].score_us == 270.0
    assert len(joined.measured) == 9


def slower(time, factor):
    def scaled(self, handle):
        from dataclasses import replace

        result = time(self, handle)
        return replace(result, score_us=result.score_us * factor, slow_us=result.slow_us * factor)

    return scaled


def test_one_campaign_records_its_space_in_several_jobs(
    new_database, tmp_path, monkeypatch, capsys
):
    """``launch --sampler grid`` with a small budget, then resumed with larger ones."""
    launches = iter(range(3))

    def on_a_fake_gpu(context, plan, view):
        return InProcess(context, plan, view, job=FakeJob(number=next(launches)))

    monkeypatch.setattr("factory.cli.launch._make_executor", on_a_fake_gpu)
    monkeypatch.setattr("factory.plan.sm90_gpus", lambda: ("one",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.toml").write_text('name = "all"\noperation = "toy_scale"\nspace = "many"\n')
    url = new_database()
    command = ["launch", "all.toml", "--clock", "gpu", "--sampler", "grid", "--db", url]
    assert _run([*command, "--budget", "15"]) == 0
    capsys.readouterr()
    assert _run(["replay", "all", "--sampler", "grid", "--seeds", "1", "--db", url]) == 0
    assert re.search(r"^not exhaustive: \d+ of the \d+ schedules", capsys.readouterr().out, re.M)
    assert _run([*command, "--budget", "30", "--resume"]) == 0
    assert _run([*command[:4], "--db", url, "--budget", "40", "--resume"]) == 2  # another sampler
    assert _run([*command, "--budget", "40", "--resume"]) == 0
    with open_store(url, read_only=True) as store:
        (campaign,) = store.list_campaigns()
        assert [j.status.value for j in store.list_jobs(campaign.id)] == ["valid"] * 3
        found = load_recording(store, candidates.get("toy_scale"), [campaign])
    tried = {s for s in found.outcomes if s["kind"] == "exact"}
    assert tried == set(candidates.get("toy_scale").offered("many"))
    assert len(found.ranked) == 37  # blocks 1 to 3 are wrong, hopeless, or wrong in the finals


def test_campaigns_of_another_kind_are_not_joined(store, tmp_path):
    synthetic = recorded.record(store, schedules=SOME[:2])
    toy = measured(store, tmp_path, 0, budget=4)
    with pytest.raises(UserError, match="differ in source_hash: replay them one at a time"):
        load_recording(store, FAMILY, [synthetic, toy])


@pytest.fixture(scope="module")
def shipped():
    """The whole space of KDA prefill as an H200 measured it."""
    with shipped_store() as store:
        campaign = store.get_campaign("kda_prefill")
        return load_recording(store, candidates.get("kda_prefill"), [campaign])


def test_the_shipped_campaign_is_of_the_whole_space(shipped):
    assert shipped.exhaustive
    assert set(shipped.offered) == set(candidates.get("kda_prefill").offered("kda_prefill"))
    assert len(shipped.offered) == 121
    assert [o.score_us <= 1.03 * shipped.best_us for o in shipped.ranked[:2]] == [True, False]
    assert all(o.schedule["form"] == "fused" for o in shipped.ranked[:9])
    assert shipped.offered[0] == shipped.ranked[0].schedule


def test_on_the_shipped_space_the_default_sampler_needs_at_most_three_tenths_of_it(shipped):
    default = replay(shipped, sampler=CampaignConfig.model_fields["sampler"].default)
    chance = replay(shipped, sampler="random")
    assert len(default.runs) == 20
    assert default.share <= 0.30
    assert default.spread[1] <= 0.30 * default.space  # and no seed needs more
    assert default.needed < 0.3 * chance.needed
    at_once = replay(shipped, sampler=default.sampler, batch=8)
    assert at_once.share <= 0.30


def test_emulation_and_the_cost_model_save_gpu_trials_and_lose_none_of_the_five_fastest(shipped):
    fastest = shipped.ranked[:5]
    spared = [o for s, o in shipped.outcomes.items() if s not in shipped.measured]
    assert len(spared) == 4
    assert {o.status for o in spared} == {TrialStatus.REJECTED}
    assert {o.violation for o in spared} == {2.0}  # wrong by all of it: no near miss was lost
    screened = [o for o in shipped.outcomes.values() if o.status is TrialStatus.SLOW]
    gated = [o for s, o in shipped.outcomes.items() if s in shipped.measured and o.score_us is None]
    assert {o.status for o in gated} <= {TrialStatus.REJECTED}
    parts = (spared, gated, screened, shipped.ranked)
    assert sum(len(part) for part in parts) == len(shipped.outcomes)
    assert min(o.score_us for o in screened) > 2 * fastest[-1].score_us
    assert len(shipped.top_by_model) == 5
    assert max(shipped.top_by_model) <= 8
    alone = replay(shipped, sampler="tpe")
    guided = replay(shipped, sampler="tpe", first=1)
    assert guided.measured == guided.spread[1] == 1
    assert alone.measured == 8


def test_the_command_prints_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # no database here: the shipped results
    few = ["--sampler", "tpe", "--sampler", "random", "--seeds", "5"]
    assert _run(["replay", "kda_prefill", *few]) == 0
    text = capsys.readouterr().out
    assert "exhaustive: all 121 schedules that the family offers" in text
    assert "emulation and compilation spared it 4" in text
    assert "median of 5 seeds" in text


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder whose ``factory.db`` holds a small campaign ``m0``."""
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///factory.db") as small:
        measured(small, tmp_path, 0, budget=12)
    return tmp_path


def test_the_command_prints_json(toy, capsys):
    few = ["replay", "m0", "--sampler", "tpe", "--sampler", "random", "--seeds", "5"]
    assert _run([*few, "--first", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(s["sampler"], s["first"]) for s in found["samplers"]] == [("tpe", 4), ("random", 4)]
    assert found["recording"]["exhaustive"] is False
    assert [len(s["runs"]) for s in found["samplers"]] == [5, 5]


def test_samplers_stand_side_by_side_in_one_drawing(toy, capsys):
    chosen = [word for s in ("tpe", "random", "grid") for word in ("--sampler", s)]
    for name in ("searches.svg", "searches.html"):
        assert _run(["replay", "m0", *chosen, "--seeds", "3", "--plot", name]) == 0
        assert capsys.readouterr().err == f"wrote {name}\n"
        drawn = (toy / name).read_text()
        for sampler in ("tpe: ", "random: ", "grid: "):
            assert sampler in drawn
        assert drawn.count("<polyline") == 3
        assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")  # opens offline
    ElementTree.fromstring((toy / "searches.svg").read_text())
    assert _run(["replay", "m0", "--plot", "x.png"]) == 2
    assert "--plot x.png: the file is an .svg or an .html" in capsys.readouterr().err
    assert _run(["replay", "m0", *chosen, "--seeds", "1", "--plot", "no/where.svg"]) == 2


def test_an_operation_that_is_not_here_is_one_line(toy, capsys, monkeypatch):
    """A campaign may be imported where its plugin is not installed."""

    def unknown(name):
        raise candidates.UnknownFamilyError(f"no candidates for {name!r}")

    monkeypatch.setattr(candidates, "get", unknown)
    assert _run(["replay", "m0"]) == 2
    said = capsys.readouterr().err
    assert "no candidates for 'toy_scale'" in said
    assert said.count("\n") == 1


def test_the_course_is_a_median_that_only_falls(recording):
    few = replay(recording, sampler="random", seeds=range(3))
    middle = course(few, recording.best_us)
    assert middle == sorted(middle, reverse=True)
    assert middle[-1] <= 1.03
    reached = sorted(r.needed for r in few.runs)
    assert middle[reached[1] - 2] > 1.03 >= middle[reached[1] - 1]


def test_a_schedule_of_another_space_is_named(store, monkeypatch):
    campaign = recorded.record(store, schedules=SOME[:2])
    monkeypatch.setattr(type(FAMILY), "parameters", FAMILY.parameters[:-1])
    with pytest.raises(UserError, match="recorded with another schedule space"):
        load_recording(store, FAMILY, [campaign])


def test_a_campaign_in_which_nothing_ranks_is_refused(store):
    wrong = [s for s in SOME if s.get("order") == "c"]
    campaign = recorded.record(store, schedules=wrong)
    with pytest.raises(UserError, match="nothing to replay: no trial of recorded-1 ranks"):
        load_recording(store, FAMILY, [campaign])


def test_status_counts_the_gpu_trials_that_were_spared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert _run(["status", "kda_prefill", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spared"] == {"emulate": 4}
    assert _run(["status", "kda_prefill"]) == 0
    assert "GPU trials spared: 4 (4 by emulate)" in capsys.readouterr().out
