"""``factory bench``: controls and ours in turns on a simulated device, and what is said of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_fakes
import device_fakes as fakes
import pytest
import record_makers as make
from answers import Answer, ask

import candidates
import operations
from candidates import Schedule
from factory.bench import LIMITS, Benched, bench, floor_of
from factory.bench_entries import WINNER, Entry, choose
from factory.bench_rows import Row, geomeans, rows
from factory.cli.bench import _print_contestants, _record
from factory.device.rounds import PHASE, pooled, run_rounds
from factory.device.simulated import SimulatedDevice
from factory.errors import UserError
from leaderboard import Clock, Store, Verdict, control_spans, open_store, shapes, winner
from leaderboard.records import (
    FingerprintRecord,
    JobStatus,
    MeasurementRecord,
    TrialStatus,
)

TOY = operations.get("toy_scale")
FAMILY = candidates.get("toy_scale")
SHAPES = ("16", "64")
ALL_CLOCKS = {("gpu", "warm"), ("gpu", "cold"), ("per_call", "warm"), ("pipelined", "warm")}


def named(kind: str) -> Entry:
    return Entry(fakes.FAMILY.schedule({"kind": kind}), "named")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """Two right schedules and two wrong ones beside four controls, two of which run."""
    return bench(
        fakes.OPERATION,
        fakes.FAMILY,
        [named(k) for k in ("good", "better", "wrong", "library")],
        device=SimulatedDevice(),
        baselines=(
            fakes.FakeBaseline(),
            fakes.FakeBaseline("fed_raw", us=9.0, form="raw"),
            fakes.FakeBaseline("absent", absent="absent is not installed; pip install absent"),
            fakes.FakeBaseline("broken", broken=True),
        ),
        log_dir=tmp_path_factory.mktemp("bench"),
        seed=1,
        rounds=2,
        workloads=SHAPES,
    )


@pytest.fixture(scope="module")
def times(found: Benched) -> tuple[Row, ...]:
    return rows(found)


def of(times: tuple[Row, ...], contestant: str) -> list[Row]:
    return [r for r in times if r.contestant == contestant]


# -- one bench ---------------------------------------------------------------------------


def test_ours_and_controls_stand_side_by_side_in_one_valid_job(found: Benched) -> None:
    assert [c.id for c in found.contestants] == ["ours", "ours_2", "steady", "fed_raw"]
    assert [c.what for c in found.contestants[:3]] == ["kind=good", "kind=better", "steady 1"]
    assert found.reference == "ours"
    assert found.job.status is JobStatus.VALID
    every = [m for times in found.measurements.values() for m in times]
    assert {(m.job_id, m.phase) for m in every} == {(found.job.id, PHASE)}


@pytest.mark.parametrize("contestant", ["ours", "ours_2", "steady"])
def test_everybody_is_timed_on_every_shape_clock_cache_and_regime(
    times: tuple[Row, ...], contestant: str
) -> None:
    mine = of(times, contestant)
    assert {(r.workload, r.regime, r.clock, r.cache) for r in mine} == {
        (w, regime, *clock)
        for w in SHAPES
        for regime in ("production", "slow")
        for clock in ALL_CLOCKS
    }


def test_samples_of_all_rounds_are_pooled(times: tuple[Row, ...]) -> None:
    for contestant in ("ours", "steady"):
        counts = {(r.clock, r.cache): r.samples for r in of(times, contestant)}
        assert counts == {
            ("gpu", "warm"): 30,
            ("gpu", "cold"): 12,
            ("per_call", "warm"): 24,
            ("pipelined", "warm"): 8,
        }


def test_losses_are_marked_on_each_shape_and_clock(times: tuple[Row, ...]) -> None:
    raw = {(r.workload, r.clock, r.cache): r for r in of(times, "fed_raw")}
    lost = raw["64", "gpu", "warm"]
    assert lost.us == pytest.approx(9.64)
    assert lost.against is not None
    assert lost.against.ratio == pytest.approx(10.64 / 9.64, rel=1e-3)
    assert lost.against.verdict is Verdict.SLOWER
    assert lost.beats_ours
    # Its host path is longer.
    assert not raw["64", "per_call", "warm"].beats_ours
    assert not any(r.beats_ours for r in of(times, "steady"))
    assert all(r.against is None for r in of(times, "ours"))


def test_geomeans_are_over_all_shapes_and_name_those_lost(
    found: Benched, times: tuple[Row, ...]
) -> None:
    means = {(g.contestant, g.regime, g.clock, g.cache): g for g in geomeans(found, times)}
    raw = means["fed_raw", "production", "gpu", "warm"]
    assert raw.us == pytest.approx((9.16 * 9.64) ** 0.5)
    assert raw.losses == SHAPES
    assert raw.against is not None
    assert raw.against.ratio == pytest.approx((10.16 * 10.64 / 9.16 / 9.64) ** 0.5, rel=1e-3)
    assert means["steady", "slow", "pipelined", "warm"].losses == ()
    assert ("fed_raw", "slow", "gpu", "warm") not in means


def test_the_form_of_inputs_is_stated(found: Benched, times: tuple[Row, ...]) -> None:
    assert {c.id: c.input_form for c in found.contestants}["fed_raw"] == "raw"
    assert {r.input_form for r in of(times, "fed_raw")} == {"raw"}
    assert {r.input_form for r in of(times, "ours")} == {"activated"}


def test_what_is_missing_is_named_with_its_reason(found: Benched) -> None:
    told: dict[str, str] = {}
    for m in found.missing:
        assert m.id not in told, "once"
        told[m.id] = m.reason
    assert told["absent"] == "absent is not installed; pip install absent"
    assert "SIGABRT" in told["broken"]
    assert told["fed_raw"] == "slow: fed_raw takes raw inputs only"
    assert told["ours, raw inputs"] == (
        "nothing feeds schedules of fakes raw inputs; ours is fed activated ones"
    )


def test_a_wrong_schedule_is_refused_and_has_no_time(found: Benched) -> None:
    assert found.refused == ("kind=wrong", "kind=library")
    told = {m.id: m.reason for m in found.missing}
    assert "o is off by max" in told["kind=wrong"]
    # Its outputs are right; what it launches is seen when it is timed.
    assert "launched 'library_gemm', undeclared" in told["kind=library"]
    assert not {"ours_3", "ours_4"} & set(found.measurements)


def test_errors_are_those_on_shared_inputs(found: Benched) -> None:
    worst = {c.id: c.largest_error for c in found.contestants}
    assert set(worst["ours"]) == {"production", "slow"}
    assert worst["ours"]["production"] == worst["steady"]["production"], "the same arithmetic"


def test_the_floor_is_bytes_over_what_a_copy_reaches() -> None:
    device = SimulatedDevice()
    measured = floor_of(fakes.OPERATION, ["64"], device, "NVIDIA H200")
    assert measured.us == {"64": 64 * 8 * 12 / 4.25e12 * 1e6}
    assert measured.raw_us == {"64": 64 * 8 * 10 / 4.25e12 * 1e6}
    assert "measured" in measured.source
    unknown = floor_of(fakes.OPERATION, ["64"], device, "NVIDIA H100 PCIe")
    assert unknown.bytes_per_s == device.peak_bytes_per_s
    assert "data sheet" in unknown.source


def test_every_time_is_stated_over_the_floor_of_its_inputs(
    found: Benched, times: tuple[Row, ...]
) -> None:
    for r in times:
        floor = found.floor.raw_us if r.input_form == "raw" else found.floor.us
        assert r.over_floor == r.us / floor[r.workload]
    assert all(found.floor.raw_us[w] < us for w, us in found.floor.us.items())


# -- ours on raw inputs ------------------------------------------------------------------------


class Ours(fakes.FakeBaseline):
    """A schedule of ours on raw inputs: 2 us more than on activated ones."""

    def __init__(self, schedule: Schedule, name: str, **how: Any) -> None:
        us = {"good": 12.0, "better": 10.0}.get(str(schedule["kind"]), 20.0)
        super().__init__(name, us=us, form="raw", **how)
        self._key = schedule.key

    def version(self) -> str:
        return self._key


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """Three schedules on both forms of inputs, one of them wrong on activated ones."""
    return bench(
        fakes.OPERATION,
        fakes.FAMILY,
        [named(k) for k in ("good", "wrong", "better")],
        device=SimulatedDevice(),
        baselines=(fakes.FakeBaseline(), fakes.FakeBaseline("fed_raw", us=9.0, form="raw")),
        log_dir=tmp_path_factory.mktemp("both"),
        seed=1,
        rounds=2,
        workloads=SHAPES,
        fed_raw=Ours,
    )


def test_ours_on_raw_inputs_stands_beside_ours(both: Benched) -> None:
    found = [(c.id, c.what, c.input_form) for c in both.contestants]
    assert found == [
        ("ours", "kind=good", "activated"),
        ("ours_raw", "kind=good", "raw"),
        ("ours_3", "kind=better", "activated"),
        ("ours_3_raw", "kind=better", "raw"),
        ("steady", "steady 1", "activated"),
        ("fed_raw", "fed_raw 1", "raw"),
    ]
    assert {c.origin for c in both.contestants[:4]} == {"named"}
    assert both.refused == ("kind=wrong",), "whose time on raw inputs is not shown either"
    assert not [m for m in both.missing if m.id == "ours, raw inputs"]


def test_ours_on_raw_inputs_is_timed_and_checked_like_everybody(both: Benched) -> None:
    mine = of(rows(both), "ours_raw")
    assert {(r.workload, r.regime, r.clock, r.cache) for r in mine} == {
        (w, "production", *clock) for w in SHAPES for clock in ALL_CLOCKS
    }, "slow gates of the fake operation have no raw form"
    assert {(m.id, m.reason) for m in both.missing} >= {
        ("ours_raw", "slow: ours_raw takes raw inputs only")
    }
    (errors,) = (c.largest_error for c in both.contestants if c.id == "ours_raw")
    assert set(errors) == {"production"}
    kernels = {k for r in mine if r.clock == "gpu" for k in r.kernels}
    assert kernels == {"control_main"}


def test_each_is_held_to_ours_on_the_same_inputs(both: Benched) -> None:
    times = rows(both)
    assert (both.reference, both.raw_reference) == ("ours", "ours_raw")
    held = {r.contestant: r.held_to for r in times}
    assert held == {
        "ours": None,
        "ours_raw": "ours",
        "ours_3": "ours",
        "ours_3_raw": "ours_raw",
        "steady": "ours",
        "fed_raw": "ours_raw",
    }
    means = {(g.contestant, g.clock, g.cache): g for g in geomeans(both, times)}
    mean = means["fed_raw", "gpu", "warm"]
    assert mean.held_to == "ours_raw"
    assert mean.against is not None
    assert mean.against.ratio == pytest.approx((12.16 * 12.64 / 9.16 / 9.64) ** 0.5, rel=1e-3)
    (row,) = (
        r for r in of(times, "ours_raw") if (r.workload, r.clock, r.cache) == ("64", "gpu", "warm")
    )
    assert row.against is not None
    assert row.against.ratio == pytest.approx(10.64 / 12.64, rel=1e-3)
    assert not row.beats_ours


def test_no_time_below_the_floor_of_its_own_inputs_is_believed(tmp_path: Path) -> None:
    heavy = type("Heavy", (fakes.FakeOperation,), {"floor_bytes": lambda self, workload: 10**9})
    found = bench(
        heavy(),
        fakes.FAMILY,
        (),
        device=SimulatedDevice(),
        baselines=(fakes.FakeBaseline(), fakes.FakeBaseline("fed_raw", form="raw")),
        log_dir=tmp_path,
        rounds=1,
        workloads=["64"],
    )
    assert [c.id for c in found.contestants] == ["fed_raw"]
    assert [m.id for m in found.missing if "us that its bytes take" in m.reason] == ["steady"]


def in_three_rounds(log_dir: Path, fed_raw: Callable[..., Any]) -> Benched:
    """One schedule without any control."""
    return bench(
        fakes.OPERATION,
        fakes.FAMILY,
        [named("good")],
        device=SimulatedDevice(),
        baselines=(),
        log_dir=log_dir,
        rounds=3,
        fed_raw=fed_raw,
    )


@pytest.mark.parametrize("how", [{"later_factor": 1.05}, {"broken": True}])
def test_ours_is_refused_where_it_is_wrong_on_raw_inputs_in_any_round(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    found = in_three_rounds(tmp_path, partial(Ours, **how))
    assert [c.id for c in found.contestants] == ["ours"]
    assert found.refused == ("kind=good",)
    (reason,) = (m.reason for m in found.missing if m.id == "ours_raw" and "slow:" not in m.reason)
    assert ("SIGABRT" if "broken" in how else "beyond tolerance: production") in reason


class Dying(Ours):
    """Its first turns are right, and a later one ends its process."""

    def load(self, workload: Any, raw: Any) -> Any:
        if self._loads > 24:
            os.abort()
        return super().load(workload, raw)


def test_ours_is_refused_where_it_fails_a_later_turn_on_raw_inputs(tmp_path: Path) -> None:
    found = in_three_rounds(tmp_path, Dying)
    assert [c.id for c in found.contestants] == ["ours"]
    assert found.refused == ("kind=good",)
    assert any("SIGABRT" in m.reason for m in found.missing if m.id == "ours_raw")


def test_a_schedule_that_takes_no_raw_inputs_is_missing_and_not_refused(tmp_path: Path) -> None:
    found = bench(
        fakes.OPERATION,
        fakes.FAMILY,
        [named("good")],
        device=SimulatedDevice(),
        baselines=(fakes.FakeBaseline("fed_raw", form="raw"),),
        log_dir=tmp_path,
        rounds=1,
        workloads=["64"],
        fed_raw=partial(Ours, absent="not served"),
    )
    assert [c.id for c in found.contestants] == ["ours", "fed_raw"]
    assert [m.reason for m in found.missing if m.id == "ours_raw"] == ["not served"]
    assert found.refused == ()
    assert {r.held_to for r in of(rows(found), "fed_raw")} == {"ours"}


def test_times_on_raw_inputs_are_recorded_neither_as_a_trials_nor_as_a_controls(
    both: Benched, tmp_path: Path
) -> None:
    with open_store(f"sqlite:///{tmp_path}/t.db") as store:
        said = _record(store, both)
        assert {c.control for c in control_spans(store, both.job.id)} == {"steady", "fed_raw"}
    assert "without ours, which has no trial there; ours_raw, whose inputs are no trial's" in said


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """A control alone, which slows down after its first round and is off by 5%."""
    return bench(
        fakes.OPERATION,
        fakes.FAMILY,
        (),
        device=SimulatedDevice(),
        baselines=(fakes.FakeBaseline(later_us=30.0, factor=1.05),),
        log_dir=tmp_path_factory.mktemp("drifted"),
        rounds=2,
    )


def test_times_of_a_machine_that_did_not_hold_still_are_void(drifted: Benched) -> None:
    assert "controls drifted by" in drifted.void


def test_without_a_schedule_of_ours_controls_stand_alone(drifted: Benched) -> None:
    assert drifted.reference is None
    times = rows(drifted)
    assert times
    assert all(r.against is None for r in times)
    assert all(g.us and g.against is None for g in geomeans(drifted, times))


def test_a_control_beyond_tolerance_is_timed_and_flagged(
    drifted: Benched, found: Benched, capsys: pytest.CaptureFixture[str]
) -> None:
    (control,) = drifted.contestants
    assert control.inexact == ("production", "slow")
    assert control.largest_error["production"] > 0.04
    assert not any(c.inexact for c in found.contestants)
    _print_contestants(drifted)
    said = capsys.readouterr().out
    assert f"!{control.largest_error['slow']:.1e}" in said
    assert "! beyond the tolerance that ours meets" in said


def test_nothing_to_time_is_said_before_a_device_is_taken(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to time: absent: not there"):
        bench(
            fakes.OPERATION,
            fakes.FAMILY,
            (),
            device=SimulatedDevice(),
            baselines=(fakes.FakeBaseline("absent", absent="not there"),),
            log_dir=tmp_path,
        )


def test_every_round_gives_everybody_one_turn() -> None:
    seen: list[str] = []
    first, second = (fakes.FAMILY.schedule({"kind": k}) for k in ("good", "better"))
    measurer = SimpleNamespace(
        regimes=lambda schedule: (), production=fakes.OPERATION.regimes["production"]
    )

    def stage(schedule, work):
        seen.append(str(schedule["kind"]))
        return work(None)

    def controls():
        seen.append("controls")
        return ()

    done = run_rounds([first, second], measurer, rounds=2, stage=stage, controls=controls)
    assert seen == ["good", "better", "controls"] * 2
    assert set(done.results) == {first, second}


def a_time(workload: str, us: float, **changes: Any) -> MeasurementRecord:
    values = {"trial_id": 0, "low_us": us, "high_us": us, "samples_us": (us,)}
    found = {**values, "job_id": "job-0", "kernels": ("toy_main",), **changes}
    return make.time(found.pop("job_id"), workload, us, **found)


def test_pooling_keeps_owners_shapes_clocks_and_caches_apart() -> None:
    other = {"trial_id": None, "control": "steady"}
    made = pooled(
        [
            a_time("64", 10.0),
            a_time("64", 12.0, kernels=("toy_tail",)),
            a_time("64", 50.0, cache="cold"),
            a_time("64", 20.0, **other),
            a_time("256", 30.0),
        ]
    )
    assert [(m.workload, m.cache, m.control, m.samples_us) for m in made] == [
        ("64", "warm", None, (10.0, 12.0)),
        ("64", "cold", None, (50.0,)),
        ("64", "warm", "steady", (20.0,)),
        ("256", "warm", None, (30.0,)),
    ]
    assert made[0].median_us == 11.0
    assert made[0].kernels == ("toy_main", "toy_tail")


# -- which schedule is ours ----------------------------------------------------------------


def fill(
    store: Store,
    campaign: str = "toy-1",
    *,
    source: str = FAMILY.source_hash(),
    gpu: str = "NVIDIA H200",
) -> dict[int, int]:
    """A measured campaign: block 1 leads its ranking, block 2 its finals; block to trial."""
    machine = FingerprintRecord.of({**make.FINGERPRINT.values, "gpu": gpu})
    store.put_fingerprint(machine)
    toy = {"operation": "toy_scale", "family": "toy", "workloads": ("64", "256")}
    store.create_campaign(make.campaign(campaign, name="toy", source_hash=source, **toy))
    store.acquire(campaign)
    job = f"job-of-{campaign}"
    store.open_job(make.job(job, campaign, gpu=gpu, fingerprint_id=machine.id))
    trials = {}
    for block, us, final_us in ((1, 11.0, 13.0), (2, 12.0, 12.0)):
        schedule = FAMILY.schedule({"kind": "exact", "block": block})
        ours = {"schedule_key": schedule.key, "schedule": schedule.as_dict()}
        trial = make.begin(store, block, campaign, source_hash=source, gate_bound=-5.5, **ours)
        trials[block] = trial.id

        def on(us: float, phase: str, trial_id: int = trial.id) -> list[MeasurementRecord]:
            return [
                a_time(w, us, trial_id=trial_id, regime=r, phase=phase, job_id=job)
                for r in ("production", "slow")
                for w in ("64", "256")
            ]

        store.record_stage(trial.id, make.stage("time"), measurements=on(us, "search"))
        done = {"clock": Clock.GPU, "score_us": us, "slow_us": us, "job_id": job}
        store.finish_trial(trial.id, TrialStatus.PASSED, **done)
        store.add_measurements(on(final_us, "final"))
    store.close_job(job, JobStatus.VALID)
    store.release(campaign)
    return trials


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with open_store(f"sqlite:///{tmp_path}/t.db") as opened:
        yield opened


def test_the_winner_is_the_first_of_the_finals_not_of_the_ranking(store: Store) -> None:
    trials = fill(store)
    (entry,), missing = choose(TOY, FAMILY, [WINNER], [store])
    assert (entry.schedule["block"], entry.trial_id) == (2, trials[2])
    assert f"trial {trials[2]} of toy-1" in entry.origin
    assert not missing


def test_the_winner_is_that_of_the_gpu_at_hand(store: Store) -> None:
    """Times of two GPUs are not compared; that of another is better than none."""
    there = fill(store, "toy-h100", gpu="NVIDIA H100 80GB HBM3")
    here = fill(store, "toy-h200")
    for gpu, trial in (
        ("NVIDIA H200", here[2]),
        ("NVIDIA H100 80GB HBM3", there[2]),
        ("NVIDIA GH200", here[2]),
    ):
        (entry,), _ = choose(TOY, FAMILY, [WINNER], [store], gpu)
        assert entry.trial_id == trial, gpu


def test_a_winner_is_looked_for_where_the_first_leaderboard_has_none(
    store: Store, tmp_path: Path
) -> None:
    fill(store)
    with open_store(f"sqlite:///{tmp_path}/empty.db") as empty:
        (entry,), _ = choose(TOY, FAMILY, [WINNER], [empty, store])
        assert entry.schedule["block"] == 2
        none, (told,) = choose(TOY, FAMILY, [WINNER], [empty])
    assert none == ()
    assert told.id == "winner"
    assert "no measured trial of toy_scale 1" in told.reason


def test_a_winner_of_other_source_is_timed_and_says_so(store: Store) -> None:
    fill(store, source="1" * 64)
    (entry,), _ = choose(TOY, FAMILY, [WINNER], [store])
    assert entry.trial_id is None, "new times are none of that trial"
    assert "measured with other source" in entry.origin


def test_a_winner_that_the_family_no_longer_has_is_missing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    monkeypatch.setattr(type(FAMILY), "parameters", FAMILY.parameters[:1])
    none, (told,) = choose(TOY, FAMILY, [WINNER], [store])
    assert none == ()
    assert "cannot be built any more: unknown parameter 'block'" in told.reason


def test_schedules_are_named_by_key_and_found_in_the_leaderboard(store: Store) -> None:
    trials = fill(store)
    keys = ["kind=exact block=1", WINNER, "kind=exact block=7", "kind=exact block=2"]
    entries, _ = choose(TOY, FAMILY, keys, [store])
    assert [e.schedule["block"] for e in entries] == [1, 2, 7], "each once"
    assert [e.trial_id for e in entries] == [trials[1], trials[2], None]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("kind=exakt", "kind='exakt' is not one of"),
        ("kind=exact", "block is missing"),
        ("fast please", "kind is missing"),
        ("kind=greedy", "cannot be built: wants 300 KiB of 227"),
    ],
)
def test_a_key_that_is_no_schedule_is_refused(key: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        choose(TOY, FAMILY, [key], [])


# -- the command ---------------------------------------------------------------------------


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """``factory bench`` in an empty folder; the toy has one control."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("candidates.baselines", lambda name: (check_fakes.Control(),))

    return partial(ask, capsys, "bench")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factory.cli.bench._gpu", lambda: SimulatedDevice(gpu="SIM GPU"))


def test_without_an_sm90_gpu_it_is_one_line_and_exit_code_3(
    command: Callable[..., Answer], tmp_path: Path
) -> None:
    for operation in ("toy_scale", "kda_prefill"):
        done = command(operation)
        assert done.code == 3
        assert done.err.splitlines() == [
            "factory: no sm90 GPU is visible; measured clocks need one (H100, H200)"
        ]
        assert not done.out
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["toy_scalee"], "did you mean 'toy_scale'?"),
        (["toy_scale", "--workload", "265"], "unknown workload '265'; did you mean '256'?"),
        (["toy_scale", "--workload", "17"], "unknown workload '17'"),
        (["toy_scale", "--control", "steddy"], "did you mean 'steady'?"),
        (["toy_scale", "--schedule", "kind=fast"], "kind='fast' is not one of"),
        (["toy_scale", "--rounds", "0"], "--rounds"),
        (["toy_scale", "--db", "sqlite:///absent.db"], "there is no database at absent.db"),
        (["toy_scale", "--record"], "--record needs a leaderboard"),
        (["toy_scale", "--record", "--db", "sqlite://"], "keeps nothing"),
        (["toy_scale", "--record", "--db", "sqlite:///:memory:"], "name a file: sqlite:///FILE"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    command: Callable[..., Answer], arguments: list[str], said: str
) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1
    assert not done.out


@pytest.mark.usefixtures("simulated")
def test_the_winner_of_the_leaderboard_here_is_timed_and_recorded(
    command: Callable[..., Answer], tmp_path: Path
) -> None:
    with open_store(f"sqlite:///{tmp_path}/factory.db") as store:
        trials = fill(store)
    done = command("toy_scale", "--record", "--json", "--rounds", "2", "--seed", "5")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert answer["seed"] == 5
    assert [c["id"] for c in answer["contestants"]] == ["ours", "steady"]
    assert answer["contestants"][0]["what"] == "kind=exact block=2"
    assert answer["missing"] == [], "the toy has no raw form to miss"
    ids = [r["id"] for r in answer["rows"]]
    assert len(ids) == len(set(ids)) == 2 * 2 * 2 * 4
    assert ids[0] == "ours 64 production gpu warm"
    assert answer["rows"][0]["kernels"] == ["toy_main"]
    assert [s["id"] for s in answer["floor"]["shapes"]] == ["64", "256"]
    mean = next(g for g in answer["geomeans"] if g["id"] == "steady production gpu warm")
    assert mean["against"]["ratio"] == pytest.approx(12.0 / 20.0, rel=1e-3)
    assert mean["losses"] == []
    assert f"stored: job {answer['id']}, 32 times" in done.err
    with open_store(f"sqlite:///{tmp_path}/factory.db", read_only=True) as store:
        assert store.get_job(answer["id"]).status is JobStatus.VALID
        mine = [s for s in shapes(store, trials[2]) if s.job_id == answer["id"]]
        assert {s.phase for s in mine} == {PHASE}
        assert {c.control for s in mine for c in s.controls} == {"steady"}
        won = winner(store, "toy-1")
        assert won is not None
        assert won.job_id == "job-of-toy-1", "finals stay what they were"


@pytest.mark.usefixtures("simulated")
def test_the_tables_fit_a_terminal_and_name_what_is_missing(command: Callable[..., Answer]) -> None:
    done = command("toy_scale", "--workload", "64", "--rounds", "1")
    assert done.code == 0, done.err
    assert "winner: no measured trial of toy_scale 1 in the shipped results" in done.out
    assert "production: geomean us over 1 shapes" in done.out
    assert "slow, per_call: median us" in done.out
    assert "production, gpu cold: median us" in done.out
    tables = done.out.partition("slow: geomean")[2]
    assert max(map(len, tables.splitlines())) <= 80


def test_losses_are_marked_in_the_tables(
    command: Callable[..., Answer], found: Benched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factory.cli.bench._gpu", SimulatedDevice)
    monkeypatch.setattr("factory.bench.bench", lambda *_, **__: found)
    done = command("toy_scale")
    assert done.code == 1, "a schedule of ours was refused"
    table = done.out.partition("production, gpu: median us")[2].partition("median us")[0]
    cells = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    assert cells["16"][1:] == ["0.00032", "10.16", "*8.16", "20.16", "*9.16", "1.11"]
    assert cells["faster"] == ["faster", "on", "-", "2/2", "0/2", "2/2"]
    assert "kind=wrong: rejected: production 16: o is off" in done.out


def test_tables_say_whom_raw_columns_are_held_to_and_drop_slow_controls_first(
    command: Callable[..., Answer], both: Benched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factory.cli.bench._gpu", SimulatedDevice)
    monkeypatch.setattr("factory.bench.bench", lambda *_, **__: both)
    monkeypatch.setattr("factory.cli.table.line_width", lambda: 64)
    done = command("toy_scale")
    floors = "geomean us: 0.00064 on activated inputs, as in the tables, 0.0005333 on raw ones"
    assert floors in done.out
    assert [line for line in done.out.splitlines() if line.endswith(": named")] == [
        "ours: named",
        "ours_3: named",
    ]
    assert "columns fed raw inputs are held to ours_raw" in done.out
    table = done.out.partition("production, gpu: median us")[2].partition("median us")[0]
    assert "(steady left out: a wider terminal or a pipe shows all)" in table
    cells = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    assert cells["16"][2:] == ["10.16", "12.16", "*8.16", "*10.16", "*9.16", "1.11"]
    assert cells["faster"] == ["faster", "on", "-", "0/2", "2/2", "2/2", "2/2"]


def test_void_times_are_exit_code_3(
    command: Callable[..., Answer], drifted: Benched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factory.cli.bench._gpu", SimulatedDevice)
    monkeypatch.setattr("factory.bench.bench", lambda *_, **__: drifted)
    done = command("toy_scale")
    assert done.code == 3
    assert "these times do not count: controls drifted by" in done.out
    assert json.loads(command("toy_scale", "--json").out)["void"]


def test_a_control_that_tunes_itself_has_the_time_for_it() -> None:
    heads = {w.heads for w in operations.get("kda_prefill").tuned()}
    assert LIMITS.control_s >= 2 * 60 * len(heads), "a minute for each head count, and more"
