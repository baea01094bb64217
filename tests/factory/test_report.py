"""``factory report``: one page that opens offline and says what the leaderboard says."""

from __future__ import annotations

import re
from functools import partial

import pytest
import record_makers as make
from answers import ask, one_line
from report_page import (
    NOW,
    SHAPES,
    begin,
    begun,
    error,
    job,
    page_of,
    passed,
    readings,
    rejected,
    shipped_page,
)

import leaderboard
import operations
from factory.report import charts
from factory.report.data import gather
from leaderboard import Clock, JobStatus, TrialStatus


@pytest.fixture(scope="module")
def shipped():
    with shipped_page() as found:
        yield found


@pytest.fixture
def store(tmp_path):
    with begun(tmp_path) as opened:
        yield opened


# -- one file --------------------------------------------------------------------------


def test_the_page_asks_nothing_of_the_network(shipped):
    page = shipped[1]
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        for name in ("src", "href", "action", "srcset", "xlink:href"):
            assert name not in attributes, (tag, attributes)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttpRequest|import\(", page.text)


def test_the_page_forbids_itself_the_network(shipped):
    (policy,) = [a["content"] for _, a in shipped[1].tags if "http-equiv" in a]
    assert "default-src 'none'" in policy
    for allowed in ("script-src", "style-src"):
        assert f"{allowed} 'unsafe-inline'" in policy


def test_colours_follow_dark_mode_and_print_and_the_width_a_phone(shipped):
    page = shipped[1]
    assert "@media (prefers-color-scheme: dark)" in page.text
    assert "@media print" in page.text
    assert any(a.get("name") == "viewport" for _, a in page.tags)


# -- what it says ----------------------------------------------------------------------


def test_the_table_holds_every_trial_in_the_leaderboards_order(shipped):
    store, page = shipped
    campaign_id = store.get_campaign("kda_prefill").id
    rows = page.table
    ranks = leaderboard.ranked(store, campaign_id=campaign_id)
    assert [r["trial"] for r in rows[: len(ranks)]] == [r.id for r in ranks]
    assert [r["us"] for r in rows[: len(ranks)]] == [r.score_us for r in ranks]
    assert len(rows) == len(store.list_trials(campaign_id))
    for r in leaderboard.rejected(store, campaign_id=campaign_id):
        (row,) = [x for x in rows if x["trial"] == r.id]
        assert (row["status"], row["us"]) == (r.status.value, None)
        assert row["note"] == f"{r.stage}: {r.reason}"


def test_the_stairs_are_the_improvements(shipped):
    store, page = shipped
    points = leaderboard.best_so_far(store, store.get_campaign("kda_prefill").id)
    steps = [int(a["data-trial"]) for a in page.of_class("step")]
    assert steps == [p.id for p in points] * 2  # over trials and over time


def test_each_shape_stands_beside_its_controls_and_the_floor(shipped):
    store, page = shipped
    said = page.said()
    first = leaderboard.winner(store, store.get_campaign("kda_prefill").id)
    rows = [
        s
        for s in leaderboard.shapes(store, first.id, clock=Clock.GPU)
        if (s.regime, s.cache, s.phase) == ("production", "warm", "search")
    ]
    assert len(page.of_class("floor")) == len(rows) + 1  # and the legend
    assert len(page.of_class("mine")) == len(rows) + 1
    operation = operations.get("kda_prefill")
    for s in rows:
        assert f"trial {first.id} on {s.workload}: {s.median_us:.4g} us" in said
        floor = operation.floor_bytes(operation.workloads[s.workload]) / 4.8e12 * 1e6
        assert f"floor {floor:.3g} at 4.8 TB/s" in said, "others are at what a copy reaches"
        for c in s.controls:
            # Of another form of inputs it says so; beyond tolerance it has a star.
            told = rf"{c.control}( \(\w+\))?( \*)? on "
            told += re.escape(f"{s.workload}: {c.median_us:.4g} us (")
            assert re.search(told, said), told


def test_a_control_beyond_tolerance_is_marked(store):
    job(store)
    for name in ("exact", "loose"):
        times = [make.time("job-1", w, 50.0, control=name, phase="before") for w in SHAPES]
        store.add_measurements(times)
    passed(store, 0, 40.0)
    said = {
        "exact": [error("production", 0.004)],
        "loose": [error("production", 0.4, within=False)],
    }
    details = {name: [e.model_dump(mode="json") for e in found] for name, found in said.items()}
    store.close_job("job-1", JobStatus.VALID, details={"control_errors": details})
    page = page_of(store)
    assert f"loose * on {SHAPES[0]}: 50 us" in page.said()
    assert f"exact on {SHAPES[0]}: 50 us" in page.said()
    assert "* beyond the tolerances" in page.said()


def test_the_sweep_shows_who_breaks_and_where(shipped):
    page = shipped[1]
    said = page.said()
    assert "anchor=mid bt=64, 1 trial, production: not finite" in said
    assert "anchor=start bt=32, 1 trial, production: not finite" in said
    assert re.search(r"anchor=mid bt=32, 8 trials, sweep_lb1: \d\.\d\de-03", said)
    assert "the gate, 0.015" in said


def test_the_sweep_shows_from_which_severity_on_a_schedule_breaks(store):
    """Right down to -3, not finite from -5 on: the line ends in a cross."""
    errors = [error("production", None, stage="emulate")]
    errors += [error(f"sweep_lb{n}", 0.004, stage="emulate") for n in (1, 2, 3)]
    errors.append(error("sweep_lb5", None, stage="emulate"))
    rejected(store, 0, "o is not finite", errors=errors)
    page = page_of(store)
    said = page.said()
    assert "anchor=mid bt=16, 1 trial, sweep_lb3: 4.00e-03" in said
    assert "anchor=mid bt=16, 1 trial, sweep_lb5: not finite" in said
    (fall,) = page.of_class("fall")
    assert float(fall["y2"]) < float(fall["y1"])
    assert float(fall["x1"]) < float(fall["x2"])


def test_the_fingerprint_is_there(shipped):
    store, page = shipped
    (one,) = store.list_jobs(store.get_campaign("kda_prefill").id)
    for value in (one.id, one.gpu, store.get_fingerprint(one.fingerprint_id).values["driver"]):
        assert value in page.said()


def test_an_error_is_drawn_against_what_its_own_regime_allows(store):
    """0.02 is beyond the operation's bound, and within that of similar keys."""
    job(store)
    bound = operations.get("kda_prefill").regimes["similar_keys"].tolerances["o"]
    passed(store, 0, 40.0, errors=[error("similar_keys", 0.02), error("production", 0.003)])
    rejected(store, 1, "wrong", errors=[error("production", 0.03, within=False)])
    rows = {r["trial"]: r for r in page_of(store).table}
    shares = [r["error"] for r in rows.values()]
    assert shares[0] == pytest.approx(max(0.02 / bound.max_rel, 0.02 / bound.rms_rel, 0.3))
    assert shares[1] == pytest.approx(3.0)


def test_mild_gates_are_not_drawn_as_errors(store):
    job(store)
    passed(store, 0, 40.0, errors=[error("mild", 0.9, within=False), error("production", 0.003)])
    assert page_of(store).table[0]["error"] == pytest.approx(0.3)


def test_kinds_of_rejection_are_counted_whatever_their_numbers(store):
    for number in range(4):
        rejected(store, number, f"o has {number + 7} non-finite of 96")
    rejected(store, 4, "input g changed")
    said = page_of(store).said()
    assert "4 rejected emulate o has 7 non-finite of 96" in said
    assert "1 rejected emulate input g changed" in said


def test_minutes_are_those_of_the_gpu(store):
    """Each trial spent a second at the gate and one at the clock; a rejected one none."""
    job(store)
    rejected(store, 0, "wrong")
    for number, us in ((1, 50.0), (2, 60.0), (3, 40.0)):
        passed(store, number, us)
    store.close_job("job-1", JobStatus.VALID)
    report = gather(store, store.get_campaign(), now=NOW)
    assert report.minutes_are == "GPU minutes"
    assert [round(s.minutes * 60) for s in report.runs[0].steps] == [2, 6]
    assert [s.finished for s in report.runs[0].steps] == [2, 4]
    assert report.minutes == pytest.approx(0.1)
    assert "over GPU minutes" in page_of(store).said()


# -- campaigns as they come ------------------------------------------------------------


def test_a_campaign_that_has_just_begun_has_a_page(store):
    page = page_of(store)
    assert "No trial has passed" in page.said()
    assert "The campaign is running" in page.said()
    assert page.table == []


def test_a_campaign_with_nothing_passed_says_why(store):
    rejected(store, 0, "too wrong", errors=[error("production", None, stage="emulate")])
    page = page_of(store)
    assert "No trial has passed" in page.said()
    assert "too wrong" in page.said()
    assert page.of_class("lost")
    assert not page.of_class("stairs")


def test_times_of_an_open_job_are_shown_and_marked(store):
    job(store)
    id_ = passed(store, 0, 40.0)
    page = page_of(store)
    assert "job that is still open" in page.said()
    assert (page.table[0]["trial"], page.table[0]["rank"]) == (id_, 1)
    assert "job job-1 is open" in page.table[0]["note"]


def test_times_of_a_void_job_are_not_drawn(store):
    job(store)
    passed(store, 0, 40.0)
    store.close_job("job-1", JobStatus.VOID, note="controls drifted")
    page = page_of(store)
    assert not page.of_class("stairs")
    assert "1 trial passed, but none has a place: job job-1 is void" in page.said()


def test_two_gpus_are_two_drawings(store):
    job(store)
    job(store, "job-2", "NVIDIA H100 80GB HBM3")
    a, b = passed(store, 0, 40.0), passed(store, 1, 50.0, "job-2")
    page = page_of(store)
    titles = page.said().split("Clock gpu, on ")[1:]
    assert [t.split(",")[0] for t in titles] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert len(page.of_class("stairs")) == 4
    assert [int(s["data-trial"]) for s in page.of_class("step")] == [b, b, a, a]
    assert {r["rank"] for r in page.table} == {1}


def test_across_jobs_the_order_is_by_ratio_to_the_control(store):
    for id_, us in (("job-1", 50.0), ("job-2", 100.0)):
        job(store, id_)
        store.add_measurements(readings(id_, us, control="flashkda", phase="before"))
    slow, fast = passed(store, 0, 45.0), passed(store, 1, 60.0, "job-2")
    page = page_of(store)
    assert [r["trial"] for r in page.table] == [fast, slow]
    assert "provisional" in page.said()
    assert f"trial {fast}: 0.6 x flashkda" in page.said()


def test_an_operation_that_is_not_installed_leaves_out_the_gate(tmp_path):
    with begun(tmp_path, operation="elsewhere") as store:
        job(store)
        passed(store, 0, 40.0, errors=[error("production", 0.003)])
        page = page_of(store)
    assert "elsewhere" in page.said()
    assert "the gate cannot be drawn" in page.said()
    assert not page.of_class("gate")
    assert page.of_class("dot")
    assert not page.of_class("floor")


def test_another_version_of_the_operation_is_another_gate(tmp_path):
    with begun(tmp_path, operation_version="0") as store:
        rejected(store, 0, "wrong", errors=[error("production", 0.003)])
        assert "the gate cannot be drawn" in page_of(store).said()


def test_names_and_reasons_cannot_become_markup(store):
    hostile = "</script><img src=x onerror=alert(1)>&amp;\"'<b>"
    job(store)
    passed(store, 0, 40.0, schedule_key=hostile, errors=[error("production", 0.003)])
    rejected(store, 1, hostile)
    store.close_job("job-1", JobStatus.VALID)
    page = page_of(store)
    assert sum(t == "img" for t, _ in page.tags) == 0
    assert sum(t == "script" for t, _ in page.tags) == 2
    assert page.table[0]["schedule"] == hostile
    assert page.table[1]["note"] == f"emulate: {hostile}"


def test_the_time_of_the_finals_stands_beside_that_of_the_search(shipped):
    """The first is what the leaderboard ranks by, and what every other number is beside."""
    store, page = shipped
    first = leaderboard.winner(store, store.get_campaign("kda_prefill").id)
    (row,) = [r for r in page.table if r["trial"] == first.id]
    said = page.said()
    assert f"trial {first.id}, gpu {row['us']:.3g} us winner of the finals" in said
    assert f"winner of the finals, {first.score_us:.3g} us there" in said


@pytest.mark.parametrize(
    ("us", "tile", "bold"),
    [
        # Within the 3% that controls may drift by in a valid job.
        (49.0, "against torch = not told apart, same job", ["98", "100", "24.5", "25"]),
        (51.0, "against torch = not told apart, same job", ["102", "100", "25.5", "25"]),
        (40.0, "against torch 1.25\u00d7 speed, same job", ["80", "20"]),
        (60.0, "against torch 0.83\u00d7 speed, same job", ["100", "25"]),
    ],
)
def test_a_lead_over_a_control_is_named_only_where_they_are_told_apart(store, us, tile, bold):
    job(store)
    for phase in ("before", "after"):
        store.add_measurements(readings("job-1", 50.0, control="torch", phase=phase))
    passed(store, 0, us)
    store.close_job("job-1", JobStatus.VALID, drift=0.01)
    page = page_of(store)
    assert tile in page.said()
    assert re.findall(r'class="value fastest"[^>]*>([^<]+)<', page.text) == bold


def test_modelled_times_are_said_to_be_a_models(store, shipped):
    words = "Modelled times are a cost model's"
    assert words not in shipped[1].said()
    id_ = begin(store, 0)
    modelled = {"modelled_us": dict.fromkeys(SHAPES, 40.0)}
    store.record_stage(id_, make.stage("compile", details=modelled))
    store.finish_trial(id_, TrialStatus.PASSED, clock=Clock.MODELLED, score_us=40.0)
    assert words in page_of(store).said()


def test_the_table_leads_with_the_schedule_and_counts_losses(shipped):
    store, page = shipped
    heads = re.findall(r"<th[^>]*><button[^>]*>([^<]+)", page.text)
    assert heads[:3] == ["rank", "trial", "schedule"]
    assert "loses to cudnn_fused on" in heads
    assert "stage" not in heads
    rows = leaderboard.ranked(store, campaign_id=store.get_campaign("kda_prefill").id)
    assert [r["losses"] for r in page.table[: len(rows)]] == [len(r.losses) for r in rows]
    assert [r["note"] for r in page.table[: len(rows)]] == [""] * len(rows)


def test_the_versions_number_is_called_one(shipped):
    store, page = shipped
    version = store.get_campaign("kda_prefill").operation_version
    assert "<h1>kda_prefill on NVIDIA H200</h1>" in page.text
    assert f"version {version} of kda_prefill" in page.said()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "time not noted"), (0.2, "under 1 s"), (42.4, "42 s"), (900.0, "15 min")],
)
def test_time_that_nobody_noted_is_not_under_a_second(seconds, said):
    assert charts._seconds(seconds) == said


# -- the command -----------------------------------------------------------------------


@pytest.fixture
def factory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    return partial(ask, capsys, "report")


def test_the_command_writes_the_newest_campaign_or_the_named_one(factory, store, tmp_path):
    code, out, err = factory()
    assert (code, out) == (0, "")
    assert "wrote report.html" in err
    assert "campaign c-1" in err
    assert factory("mine", "-o", "x.html")[0] == 0
    assert (tmp_path / "x.html").read_text("utf-8").startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.glob("*.html*")) == ["report.html", "x.html"]


def test_without_a_database_the_shipped_results_are_reported(factory, tmp_path):
    assert factory("kda_prefill", "-o", "s.html")[0] == 0
    assert "NVIDIA H200" in (tmp_path / "s.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nobody"], "no campaign 'nobody'"),
        (["-o", "no/such/folder.html"], "cannot write no/such/folder.html: No such file"),
        (["-o", "."], "is a directory"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(factory, store, argv, said):
    code, _, err = factory(*argv)
    assert code == 2
    assert said in one_line(err)
