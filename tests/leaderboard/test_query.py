"""``leaderboard.query``: filters, orders, bases, and what is refused."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import board
import pytest

import leaderboard
from leaderboard import Clock, JobStatus, QueryError, Store, TrialStatus, UnknownError
from leaderboard._where import parse_where


def ids(rows):
    return [row.id for row in rows]


@pytest.fixture
def two(store: Store) -> Store:
    """A campaign with a valid job, a control, three passed trials and one rejected."""
    store.open_job(board.job("j"))
    store.add_measurements(board.controls("j", 45.0))
    for number, us, slow in ((0, 50.0, 60.0), (1, 40.0, 90.0), (2, 45.5, 30.0)):
        board.passed(store, number, "j", us, slow)
    board.failed(store, 3, TrialStatus.REJECTED, "o is off")
    store.close_job("j", JobStatus.VALID, drift=0.01)
    return store


# -- conditions ------------------------------------------------------------------------

ROW = {"bt": 32, "anchor": "mid", "us": 12.5, "rank": None, "losses": ("a", "b"), "gone": None}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("bt=32", True),
        ("bt = 32 and anchor = mid", True),
        ("bt=32 and anchor=start", False),
        ("anchor=start or bt=32 and us<13", True),
        ("(anchor=start or bt=32) and us<12", False),
        ("not anchor=start", True),
        ("NOT (bt=32 AND anchor=MID)", False),
        ("us<=12.5 and us>=12.5 and us!=12.4", True),
        ("bt==32.0", True),
        ("anchor in start,mid", True),
        ("anchor in 'start, end'", False),
        ("bt==32", True),
        ("losses=b", True),
        ("losses=c", False),
        # What is not there holds no comparison.
        ("gone=1", False),
        ("gone!=1", False),
        ("gone<1", False),
        ("not gone<1", True),
        ("anchor<1", False),
    ],
)
def test_a_condition_reads_like_a_sentence(text, holds):
    assert parse_where(text, ROW)(ROW) is holds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("bt", "it ends where one of"),
        ("bt=", "it ends where a value should follow"),
        ("bt=32 anchor=mid", "'and' or 'or' is missing before 'anchor'"),
        ("bt<many", "needs a number, not 'many'"),
        ("(bt=32", "')' should follow"),
        ("bt=32 and", "it ends where a comparison should follow"),
        ("=32", "'=' stands where a name should"),
        ("bt=32 'x", "cannot read"),
        ("bt===32", "'=' stands where a value should"),
        ("bt=32;", "'32;' ends in ';'"),
        ("bt=0x20", "write 32"),
        ("bt in ,", "is empty; for example bt in A,B"),
        ("bt=nan", "nothing equals nan"),
        ("not " * 1000 + "bt=32", "nested deeper than 50"),
        ("(" * 1000 + "bt=32", "nested deeper than 50"),
        ("not " * 3000 + "bt=32", "longer than 10000 characters"),
    ],
)
def test_what_is_no_condition_is_refused_in_one_line(text, said):
    with pytest.raises(QueryError, match="condition") as caught:
        parse_where(text, ROW)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_condition_on_an_unknown_name_has_the_nearest():
    with pytest.raises(UnknownError, match="did you mean 'anchor'"):
        parse_where("ancor=mid", ROW)


# -- rows ------------------------------------------------------------------------------


def test_ranked_rows_are_those_of_the_ranking(two: Store) -> None:
    rows = leaderboard.query(two)
    same = leaderboard.ranked(two)
    shared = set(leaderboard.LeaderboardRow.model_fields)
    assert [r.model_dump(include=shared) for r in rows] == [r.model_dump() for r in same]
    assert {r.run for r in rows} == {1}
    assert {r.regime for r in rows} == {"production"}


def test_a_filter_keeps_ranks(two: Store) -> None:
    rows = leaderboard.query(two, where="n>=1 and us<46")
    assert [(r.schedule["n"], r.rank) for r in rows] == [(1, 1), (2, 2)]
    assert [r.rank for r in leaderboard.query(two, where="n=2")] == [2]


def test_order_and_limit_hold_within_each_run(two: Store) -> None:
    assert [r.score_us for r in leaderboard.query(two, sort="-us")] == [50.0, 45.5, 40.0]
    assert [r.slow_us for r in leaderboard.query(two, sort="slow_us", limit=2)] == [30.0, 60.0]
    assert [r.schedule["n"] for r in leaderboard.query(two, sort="-n", limit=1)] == [2]


def test_status_asks_for_what_failed_too(two: Store) -> None:
    (row,) = leaderboard.query(two, status="rejected")
    assert (row.status, row.stage, row.reason) == (TrialStatus.REJECTED, "emulate", "o is off")
    assert (row.rank, row.run, row.score_us, row.clock) == (None, None, None, None)
    assert len(leaderboard.query(two, status="all")) == 4
    assert ids(leaderboard.query(two, status="failed")) == [row.id]
    assert len(leaderboard.query(two, status=TrialStatus.PASSED)) == 3
    assert ids(leaderboard.query(two, status="all", where="status=rejected")) == [row.id]


def test_passed_rows_without_a_place_say_why(store: Store) -> None:
    store.open_job(board.job("j"))
    board.passed(store, 0, "j", 50.0)
    store.close_job("j", JobStatus.VOID, note="controls drifted")
    assert len(leaderboard.query(store)) == 0
    (row,) = leaderboard.query(store, status="passed")
    assert (row.rank, row.run) == (None, None)
    assert row.reason == "job j is void: controls drifted"


def test_another_regime_or_clock_orders_by_its_own_times(two: Store) -> None:
    slow = leaderboard.query(two, regime="slow")
    assert [r.score_us for r in slow] == pytest.approx([30.0, 60.0, 90.0])
    assert {r.regime for r in slow} == {"slow"}
    assert all(r.control is None for r in slow)  # none was timed on slow
    trial = slow[0].id
    two_job = board.job("k")
    two.open_job(two_job)
    assert leaderboard.query(two, clock="per_call").rows == ()
    left = leaderboard.query(two, clock=Clock.PER_CALL, status="passed")
    assert {r.reason for r in left} == {
        "it has no per_call time on every workload of regime production"
    }
    assert trial in ids(left)


def test_ratios_of_another_basis_are_over_the_same_basis(store: Store) -> None:
    store.open_job(board.job("j"))
    store.add_measurements(board.controls("j", 45.0))
    store.add_measurements(board.controls("j", 100.0, regime="slow", phases=("before",)))
    board.passed(store, 0, "j", 50.0, 80.0)
    store.close_job("j", JobStatus.VALID)
    (row,) = leaderboard.query(store, regime="slow")
    assert (row.control_us, row.ratio) == (pytest.approx(100.0), pytest.approx(0.8))
    (row,) = leaderboard.query(store)
    assert row.ratio == pytest.approx(50 / 45)
    assert row.losses == board.WORKLOADS


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"operation": "kda_prefil"}, "no operation 'kda_prefil' in .*did you mean 'kda_prefill'"),
        ({"gpu": "A100"}, "no GPU 'A100' in .*there: NVIDIA H200"),
        ({"control": "flashkd"}, "no control 'flashkd' in .*did you mean 'flashkda'"),
        ({"regime": "slower"}, "no regime 'slower' in .*did you mean 'slow'"),
        ({"campaign": "nobody"}, "no campaign 'nobody'"),
        ({"clock": "sundial"}, "no clock 'sundial'"),
        ({"status": "rejcted"}, "no status 'rejcted'; did you mean 'rejected'"),
        ({"sort": "scor_us"}, "no column or parameter 'scor_us' to sort by; did you mean"),
        ({"where": "scor_us<3"}, "no column or parameter 'scor_us'; did you mean 'score_us'"),
    ],
)
def test_what_is_not_there_is_an_error(two: Store, asked, said) -> None:
    with pytest.raises(UnknownError, match=said):
        leaderboard.query(two, **asked)


def test_a_part_of_a_gpus_name_will_do_where_it_is_no_others(two: Store) -> None:
    assert len(leaderboard.query(two, gpu="h200")) == 3
    two.open_job(board.job("k", gpu="NVIDIA H200 NVL"))
    assert len(leaderboard.query(two, gpu="NVIDIA H200")) == 3  # its whole name is one
    with pytest.raises(UnknownError, match="2 are: NVIDIA H200, NVIDIA H200 NVL"):
        leaderboard.query(two, gpu="h200")


def test_other_sources_come_apart_by_family(two: Store) -> None:
    assert not any(r.superseded for r in leaderboard.query(two, source_hash={"cute": "a" * 64}))
    assert not any(r.superseded for r in leaderboard.query(two, source_hash={"other": "b" * 64}))
    assert all(r.superseded for r in leaderboard.query(two, source_hash={"cute": "b" * 64}))


# -- two GPUs --------------------------------------------------------------------------


@pytest.fixture
def mixed(store: Store) -> Store:
    """One campaign on an H200 and an H100, whose control is half as fast there."""
    number = 0
    for job_id, gpu, us in (("a", "NVIDIA H200", 40.0), ("b", "NVIDIA H100 80GB HBM3", 80.0)):
        store.open_job(board.job(job_id, gpu=gpu))
        store.add_measurements(board.controls(job_id, us))
        for factor in (0.9, 1.2):
            board.passed(store, number, job_id, us * factor, us)
            number += 1
        store.close_job(job_id, JobStatus.VALID)
    return store


def test_an_h100_row_and_an_h200_row_are_never_in_one_ratio(mixed: Store) -> None:
    gpus = {job.id: job.gpu for job in mixed.list_jobs("kda-1")}
    of_control = {"NVIDIA H200": 40.0, "NVIDIA H100 80GB HBM3": 80.0}
    rows = leaderboard.query(mixed)
    runs = rows.runs()
    assert [len({r.gpu for r in run}) for run in runs] == [1, 1]
    assert [r.rank for run in runs for r in run] == [1, 2, 1, 2]
    for row in (*rows, *leaderboard.ranked(mixed)):
        assert row.gpu == gpus[row.job_id]
        assert row.control_us == pytest.approx(of_control[row.gpu])
        assert row.ratio == pytest.approx(row.score_us / of_control[row.gpu])
        assert not row.provisional
        for shape in leaderboard.shapes(mixed, row.id, clock=Clock.GPU):
            for control in shape.controls:
                assert control.ratio == pytest.approx(shape.median_us / control.median_us)
                factor = {board.WORKLOADS[0]: 2.0, board.WORKLOADS[1]: 0.5}[shape.workload]
                assert control.median_us == pytest.approx(of_control[row.gpu] * factor)
        over = leaderboard.ratio(mixed, row.id, "flashkda")
        assert over.control_us == pytest.approx(of_control[row.gpu])
    for shape in leaderboard.query_shapes(mixed, rows):
        factor = {board.WORKLOADS[0]: 2.0, board.WORKLOADS[1]: 0.5}[shape.workload]
        assert shape.control_us == pytest.approx(of_control[shape.gpu] * factor)
    first, other = runs[0][0], runs[1][0]
    with pytest.raises(QueryError, match="different jobs"):
        leaderboard.compare(mixed, first.id, other.id)
    points = leaderboard.best_so_far(mixed, "kda-1")
    assert {p.gpu for p in points} == set(of_control)
    assert not any(p.provisional for p in points)


# -- each shape ------------------------------------------------------------------------


def test_shapes_mark_where_the_control_is_faster(store: Store) -> None:
    store.open_job(board.job("j"))
    # The control is equally fast in all, faster on the second shape.
    for workload, us in zip(board.WORKLOADS, (120.0, 20.0), strict=True):
        store.add_measurements([board.time("j", workload, us, control="flashkda", phase="before")])
    board.passed(store, 0, "j", 50.0)
    store.close_job("j", JobStatus.VALID)
    rows = leaderboard.query_shapes(store, leaderboard.query(store))
    assert [(r.workload, r.us, r.control_us, r.lost) for r in rows] == [
        (board.WORKLOADS[0], 100.0, 120.0, False),
        (board.WORKLOADS[1], 25.0, 20.0, True),
    ]
    assert rows[0].low_us < rows[0].us < rows[0].high_us
    slow = leaderboard.query_shapes(store, leaderboard.query(store, regime="slow"))
    assert [(r.regime, r.us, r.control, r.lost) for r in slow] == [
        ("slow", 100.0, None, False),
        ("slow", 25.0, None, False),
    ]


def test_modelled_shapes_are_what_the_model_said(store: Store) -> None:
    trial = board.begin(store, 0)
    said = {board.WORKLOADS[0]: 3.0, board.WORKLOADS[1]: 12.0}
    store.record_stage(trial.id, board.stage("compile", details={"modelled_us": said}))
    store.finish_trial(trial.id, TrialStatus.PASSED, clock=Clock.MODELLED, score_us=6.0)
    rows = leaderboard.query_shapes(store, leaderboard.query(store, clock="modelled"))
    assert {r.workload: r.us for r in rows} == said


# -- frames ----------------------------------------------------------------------------


def test_flat_rows_have_a_column_for_each_parameter(two: Store) -> None:
    columns, lines = leaderboard.query(two, status="all").flat()
    assert columns[-3:] == ["bt", "anchor", "n"], "those of the space, and those met"
    assert "schedule" not in columns
    assert [line[-1] for line in lines] == [1, 2, 0, 3]
    assert all(len(line) == len(columns) for line in lines)


@pytest.mark.parametrize(
    "asked", [{}, {"limit": 1}, {"where": "us<0"}, {"campaign": "kda-1"}, {"status": "rejected"}]
)
def test_parameters_of_the_space_are_columns_whatever_rows_are_left(
    two: Store, asked: dict[str, Any]
) -> None:
    columns, lines = leaderboard.query(two, **asked).flat()
    assert {"bt", "anchor"} <= set(columns)
    assert all(len(line) == len(columns) for line in lines)


def test_parameters_of_other_operations_are_no_columns(two: Store) -> None:
    other = board.campaign("other", operation="scale", space={"width": [1, 2]})
    two.create_campaign(other)
    assert "width" not in leaderboard.query(two, operation="kda_prefill").flat()[0]
    assert "bt" not in leaderboard.query(two, operation="scale").flat()[0]


def test_a_frame_has_the_rows(two: Store) -> None:
    pandas = pytest.importorskip("pandas")
    frame = leaderboard.query(two, status="all").frame()
    assert list(frame["n"]) == [1, 2, 0, 3]
    assert frame["score_us"].iloc[0] == 40.0
    assert pandas.isna(frame["score_us"].iloc[3])
    assert str(frame["started_at"].dtype).startswith("datetime64")


def test_without_pandas_a_frame_says_what_it_needs(
    two: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent: ModuleType | None = None
    monkeypatch.setitem(sys.modules, "pandas", absent)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        leaderboard.query(two).frame()
