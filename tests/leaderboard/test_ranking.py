from __future__ import annotations

import board
import pytest
import sqlalchemy as sa

from leaderboard import (
    Clock,
    JobStatus,
    LeaderboardRow,
    QueryError,
    StageStatus,
    Store,
    TrialStatus,
    UnknownError,
    Verdict,
    best_so_far,
    compare,
    finals,
    funnel,
    ranked,
    ratio,
    rejected,
    shapes,
    unranked,
    winner,
    worst_errors,
)


def job(store: Store, id_: str, control_us: float | None, *, gpu: str = "NVIDIA H200") -> None:
    store.open_job(board.job(id_, gpu=gpu))
    if control_us is not None:
        store.add_measurements(board.controls(id_, control_us))


def close(store: Store, *ids: str, status: JobStatus = JobStatus.VALID) -> None:
    for id_ in ids:
        store.close_job(id_, status, drift=0.01)


def places(rows: list[LeaderboardRow]) -> list[tuple[int, int]]:
    return [(row.rank, row.number) for row in rows]


def test_within_one_job_score_orders(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    for number, us in enumerate((12.0, 8.0, 10.0)):
        board.passed(store, number, "job-1", us)
    close(store, "job-1")
    rows = ranked(store)
    assert places(rows) == [(1, 1), (2, 2), (3, 0)]
    best = rows[0]
    assert not best.provisional
    assert (best.control, best.gpu, best.job_id) == ("flashkda", "NVIDIA H200", "job-1")
    assert best.control_us == pytest.approx(20.0)
    assert best.ratio == pytest.approx(0.4)
    assert (best.slow_us, best.method, best.cache) == (50.0, "cupti", "warm")
    assert len(ranked(store, limit=2)) == 2


def test_a_job_without_controls_still_orders_within_itself(store: Store) -> None:
    board.passed(store, 0, "job-1", 12.0)
    board.passed(store, 1, "job-1", 8.0)
    close(store, "job-1")
    rows = ranked(store)
    assert places(rows) == [(1, 1), (2, 0)]
    assert {(r.control, r.ratio) for r in rows} == {(None, None)}


def test_across_jobs_the_ratio_to_the_own_control_orders_provisionally(store: Store) -> None:
    # The second job ran on a slow day: its control took twice as long.
    store.add_measurements(board.controls("job-1", 20.0))
    job(store, "job-2", 40.0)
    board.passed(store, 0, "job-1", 10.0)
    board.passed(store, 1, "job-2", 12.0)
    close(store, "job-1", "job-2")
    rows = ranked(store)
    assert places(rows) == [(1, 1), (2, 0)]
    assert all(r.provisional for r in rows)
    assert [r.ratio for r in rows] == pytest.approx([0.3, 0.5])


def test_a_trial_whose_job_lacks_the_control_has_no_place_among_jobs(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    job(store, "job-2", None)
    board.passed(store, 0, "job-1", 10.0)
    alone = board.passed(store, 1, "job-2", 1.0)
    close(store, "job-1", "job-2")
    assert places(ranked(store)) == [(1, 0)]
    (left,) = unranked(store)
    assert left.id == alone.id
    assert left.reason == "job job-2 did not time flashkda, so it has no place among jobs"


def test_a_control_that_misses_a_workload_is_no_control(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 1.0, "cudnn")[:1])
    store.add_measurements(board.controls("job-1", 20.0))
    board.passed(store, 0, "job-1", 10.0)
    close(store, "job-1")
    assert ranked(store)[0].control == "flashkda"
    with pytest.raises(QueryError, match=r"did not time control 'cudnn'.*there: flashkda"):
        ratio(store, ranked(store)[0].id, "cudnn")


def test_the_fastest_complete_control_is_the_default_and_another_may_be_asked(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0, "torch"))
    store.add_measurements(board.controls("job-1", 9.0, "cudnn", input_form="raw"))
    store.add_measurements(board.controls("job-1", 3.0, "cold-one", cache="cold"))
    store.add_measurements(board.controls("job-1", 2.0, "late", phases=("final",)))
    board.passed(store, 0, "job-1", 10.0)
    close(store, "job-1")
    (row,) = ranked(store)
    assert (row.control, row.control_form) == ("cudnn", "raw")
    assert ranked(store, control="torch")[0].ratio == pytest.approx(0.5)


def test_losing_shapes_stand_beside_the_geomean(store: Store) -> None:
    lopsided = [
        board.time("job-1", workload, us, control="flashkda")
        for workload, us in zip(board.WORKLOADS, (30.0, 4.0), strict=True)
    ]
    store.add_measurements(lopsided)
    board.passed(store, 0, "job-1", 10.0)  # 20 and 5 us
    close(store, "job-1")
    assert ranked(store)[0].losses == (board.WORKLOADS[1],)


@pytest.mark.parametrize("status", [JobStatus.VOID, JobStatus.OPEN])
def test_times_of_void_and_open_jobs_never_rank(store: Store, status: JobStatus) -> None:
    trial = board.passed(store, 0, "job-1", 10.0)
    if status is JobStatus.VOID:
        store.close_job("job-1", status, note="drift 9%")
    assert ranked(store) == []
    (left,) = unranked(store)
    assert (left.id, left.reason.startswith(f"job job-1 is {status}")) == (trial.id, True)
    with pytest.raises(QueryError, match=f"is {status}: its times do not count"):
        ratio(store, trial.id, "flashkda")


@pytest.mark.parametrize("status", [s for s in TrialStatus if s not in ("passed", "running")])
def test_only_passed_trials_rank(store: Store, status: TrialStatus) -> None:
    trial = board.begin(store, 0)
    store.finish_trial(trial.id, status)
    close(store, "job-1")
    assert ranked(store) == []


def test_modelled_is_never_ranked_beside_measured(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    board.passed(store, 0, "job-1", 10.0)
    board.modelled(store, 1, 1.0)
    board.modelled(store, 2, 0.5)
    close(store, "job-1")
    rows = ranked(store)
    assert [(r.clock, r.rank, r.number) for r in rows] == [
        (Clock.GPU, 1, 0),
        (Clock.MODELLED, 1, 2),
        (Clock.MODELLED, 2, 1),
    ]
    assert places(ranked(store, clock=Clock.MODELLED)) == [(1, 2), (2, 1)]
    assert places(ranked(store, gpu="NVIDIA H200")) == [(1, 0)]
    with pytest.raises(QueryError, match="other clocks"):
        compare(store, rows[0].id, rows[1].id)
    with pytest.raises(QueryError, match="modelled"):
        ratio(store, rows[1].id, "flashkda")


def test_another_gpu_is_not_chosen_nor_ranked_beside(store: Store) -> None:
    job(store, "job-pcie", 20.0, gpu="NVIDIA H100 PCIe")
    store.add_measurements(board.controls("job-1", 20.0))
    board.passed(store, 0, "job-1", 10.0)
    board.passed(store, 1, "job-pcie", 1.0)
    close(store, "job-1", "job-pcie")
    assert [(r.gpu, r.rank) for r in ranked(store)] == [
        ("NVIDIA H100 PCIe", 1),
        ("NVIDIA H200", 1),
    ]
    (best,) = ranked(store, gpu="NVIDIA H200")
    assert (best.number, best.provisional) == (0, False)


@pytest.mark.parametrize(
    "other",
    [
        {"operation": "kda_decode"},
        {"operation_version": "2"},
        {"workloads": board.WORKLOADS[::-1]},
        {"ranking_regime": "slow", "slow_regime": "production"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_scores_of_another_meaning_rank_apart(store: Store, other: dict[str, object]) -> None:
    store.create_campaign(board.campaign("kda-2", **other))
    store.open_job(board.job("job-2", "kda-2"))
    board.passed(store, 0, "job-1", 10.0)
    us = (50.0, 4.0) if "ranking_regime" in other else (4.0, 50.0)
    trial = board.begin(store, 0, "kda-2")
    store.record_stage(
        trial.id, board.stage("time"), measurements=board.times("job-2", trial.id, 4.0, 50.0)
    )
    store.finish_trial(
        trial.id,
        TrialStatus.PASSED,
        clock=Clock.GPU,
        score_us=us[0],
        slow_us=us[1],
        job_id="job-2",
    )
    close(store, "job-1", "job-2")
    assert [r.rank for r in ranked(store)] == [1, 1]
    assert [r.campaign_id for r in ranked(store, campaign_id="kda-2")] == ["kda-2"]
    if "operation" in other:
        assert [r.operation for r in ranked(store, operation="kda_decode")] == ["kda_decode"]
    if "operation_version" in other:
        assert len(ranked(store, operation_version="2")) == 1


@pytest.mark.parametrize(
    "other", [{"method": "events"}, {"cache": "cold"}, {"clock": Clock.PER_CALL}], ids=str
)
def test_clocks_methods_and_cache_states_rank_apart(store: Store, other: dict[str, str]) -> None:
    first = board.passed(store, 0, "job-1", 10.0)
    trial = board.begin(store, 1)
    store.record_stage(
        trial.id,
        board.stage("time"),
        measurements=board.times("job-1", trial.id, 4.0, 50.0, **other),
    )
    store.finish_trial(
        trial.id,
        TrialStatus.PASSED,
        clock=Clock(other.get("clock", Clock.GPU)),
        score_us=4.0,
        slow_us=50.0,
        job_id="job-1",
    )
    close(store, "job-1")
    assert [r.rank for r in ranked(store)] == [1, 1]
    with pytest.raises(QueryError, match="cannot be compared"):
        compare(store, first.id, trial.id)


def test_superseded_sources_are_marked_and_come_last(store: Store) -> None:
    board.passed(store, 0, "job-1", 4.0, source_hash="old")
    board.passed(store, 1, "job-1", 10.0, source_hash="new")
    close(store, "job-1")
    rows = ranked(store, source_hash="new")
    assert [(r.number, r.rank, r.superseded) for r in rows] == [(1, 1, False), (0, 1, True)]
    assert [r.superseded for r in ranked(store)] == [False, False]


def test_ratio_uses_the_control_of_the_trials_own_job(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    job(store, "job-2", 40.0)
    trial = board.passed(store, 0, "job-1", 10.0)
    close(store, "job-1", "job-2")
    answer = ratio(store, trial.id, "flashkda")
    assert answer.control_us == pytest.approx(20.0)
    assert answer.ratio == pytest.approx(0.5)
    assert [(s.workload, s.first_us, s.second_us) for s in answer.shapes] == [
        (board.WORKLOADS[0], 20.0, 40.0),
        (board.WORKLOADS[1], 5.0, 10.0),
    ]


def test_compare_is_refused_across_jobs(store: Store) -> None:
    job(store, "job-2", None)
    a = board.passed(store, 0, "job-1", 10.0)
    b = board.passed(store, 1, "job-1", 5.0)
    c = board.passed(store, 2, "job-2", 5.0)
    close(store, "job-1", "job-2")
    assert compare(store, a.id, b.id).ratio == pytest.approx(2.0)
    assert compare(store, a.id, b.id).verdict is Verdict.SLOWER
    assert compare(store, b.id, a.id).verdict is Verdict.FASTER
    assert [s.ratio for s in compare(store, a.id, b.id).shapes] == pytest.approx([2.0, 2.0])
    with pytest.raises(
        QueryError, match=r"different jobs \(job-1 and job-2\): re-time them together"
    ):
        compare(store, a.id, c.id)


def test_modelled_trials_compare_with_each_other(store: Store) -> None:
    a, b = board.modelled(store, 0, 3.0), board.modelled(store, 1, 2.0)
    assert compare(store, a.id, b.id).ratio == pytest.approx(1.5)
    assert compare(store, a.id, b.id).verdict is None


def test_shapes_show_each_time_beside_its_jobs_controls(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    trial = board.passed(store, 0, "job-1", 10.0)
    store.add_measurements(
        [board.time("job-1", "held/1", 7.0, trial_id=trial.id, phase="final", held_out=True)]
    )
    store.add_measurements(
        [board.time("job-1", "held/1", 14.0, control="flashkda", phase="final", held_out=True)]
    )
    rows = shapes(store, trial.id)
    assert [(r.workload, r.regime, r.median_us) for r in rows] == [
        ("2048/12/1", "production", 20.0),
        ("1024/4/1", "production", 5.0),
        ("2048/12/1", "slow", 100.0),
        ("1024/4/1", "slow", 25.0),
        ("held/1", "production", 7.0),
    ]
    assert [[(c.control, round(c.ratio, 9)) for c in r.controls] for r in rows] == [
        [("flashkda", 0.5)],
        [("flashkda", 0.5)],
        [],
        [],
        [("flashkda", 0.5)],
    ]
    assert rows[0].kernels == ("prep", "scan")
    assert shapes(store, trial.id, clock=Clock.PER_CALL) == []


def test_a_failed_trial_shows_no_time(store: Store) -> None:
    trial = board.failed(store, 0, TrialStatus.REJECTED, "nan")
    with pytest.raises(QueryError, match="is rejected: it carries no time"):
        shapes(store, trial.id)
    with pytest.raises(UnknownError, match="no trial 404"):
        shapes(store, 404)


def test_the_rejected_come_with_reason_and_first_breach(store: Store) -> None:
    trial = board.begin(store, 0)
    far = board.error(regime="sweep-5", max_rel=None, rms_rel=None, finite=False, within=False)
    beyond = board.error(regime="beyond", within=False, out_of_contract=True)
    store.record_stage(
        trial.id,
        board.stage("gate", StageStatus.REJECTED),
        errors=[board.error(), beyond, board.error(regime="sweep-3", within=False), far],
    )
    store.finish_trial(trial.id, TrialStatus.REJECTED, reason="o: 0.31 > 0.02 at -3")
    board.failed(store, 1, TrialStatus.INFEASIBLE, "shared memory")
    board.modelled(store, 2, 1.0)
    board.begin(store, 3)
    rows = rejected(store, campaign_id="kda-1", operation="kda_prefill")
    assert [(r.number, r.status, r.stage, r.reason) for r in rows] == [
        (0, TrialStatus.REJECTED, "gate", "o: 0.31 > 0.02 at -3"),
        (1, TrialStatus.INFEASIBLE, "emulate", "shared memory"),
    ]
    assert rows[0].breach is not None
    assert (rows[0].breach.regime, rows[0].breach.scope) == ("sweep-3", "head 3")
    assert rows[1].breach is None
    assert [r.number for r in rejected(store, statuses=[TrialStatus.INFEASIBLE])] == [1]
    assert rejected(store, operation="other") == []


def test_worst_errors_keep_the_largest_of_each_regime_and_tensor(store: Store) -> None:
    trial = board.begin(store, 0)
    store.record_stage(
        trial.id,
        board.stage("gate"),
        errors=[
            board.error(max_rel=0.001),
            board.error(max_rel=0.003, scope="head 7"),
            board.error(regime="slow", max_rel=0.5, within=False),
            board.error(regime="slow", max_rel=None, finite=False, within=False),
            board.error(tensor="final_state"),
        ],
    )
    rows = worst_errors(store, trial.id)
    assert [(e.regime, e.tensor, e.scope, e.max_rel) for e in rows] == [
        ("production", "o", "head 7", 0.003),
        ("slow", "o", "head 3", None),
        ("production", "final_state", "head 3", 0.004),
    ]


def test_funnel_counts_by_stage_and_status(store: Store) -> None:
    board.modelled(store, 0, 3.0)
    board.failed(store, 1, TrialStatus.REJECTED, "nan")
    board.failed(store, 2, TrialStatus.TIMEOUT, "60 s")
    board.begin(store, 3)
    store.abandon_open_trials("kda-1")
    board.begin(store, 4)
    counts = funnel(store, "kda-1")
    assert (counts.budget, counts.finished) == (10, 3)
    assert counts.statuses == {
        TrialStatus.PASSED: 1,
        TrialStatus.REJECTED: 1,
        TrialStatus.TIMEOUT: 1,
        TrialStatus.ABANDONED: 1,
        TrialStatus.RUNNING: 1,
    }
    by_stage = {s.stage: s for s in counts.stages}
    assert by_stage["validate"].passed == 2
    emulate = by_stage["emulate"]
    assert (emulate.entered, emulate.passed, emulate.seconds) == (3, 1, 0.75)
    assert emulate.failed == {StageStatus.REJECTED: 1, StageStatus.TIMEOUT: 1}
    with pytest.raises(UnknownError, match="no campaign 'nope'"):
        funnel(store, "nope")


def test_best_so_far_follows_a_job_that_is_still_open(store: Store) -> None:
    for number, us in enumerate((12.0, 14.0, 8.0)):
        board.passed(store, number, "job-1", us)
    points = best_so_far(store, "kda-1")
    assert [(p.number, p.score_us, p.provisional) for p in points] == [
        (0, 12.0, False),
        (2, 8.0, False),
    ]


def test_best_so_far_across_jobs_goes_by_ratio(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    job(store, "job-2", 40.0)
    board.passed(store, 0, "job-1", 10.0)
    board.passed(store, 1, "job-2", 12.0)
    points = best_so_far(store, "kda-1")
    assert [(p.number, p.provisional) for p in points] == [(0, True), (1, True)]


def final_times(store: Store, id_: int, us: float, held_us: float | None = 5.0) -> None:
    store.add_measurements(board.times("job-f", id_, us, 50.0, phase="final"))
    if held_us is not None:
        held = board.time("job-f", "held/1", held_us, trial_id=id_, phase="final", held_out=True)
        store.add_measurements([held])


def test_a_winner_is_named_among_finalists_of_one_valid_job_only(store: Store) -> None:
    a = board.passed(store, 0, "job-1", 8.0)
    b = board.passed(store, 1, "job-1", 9.0)
    c = board.passed(store, 2, "job-1", 7.0)
    close(store, "job-1")
    assert winner(store, "kda-1") is None
    job(store, "job-f", None)
    final_times(store, a.id, 8.5)
    final_times(store, b.id, 8.2)
    final_times(store, c.id, 7.5, held_us=None)  # failed the held-out shape
    assert finals(store, "kda-1") == []
    close(store, "job-f")
    rows = finals(store, "kda-1")
    assert [(r.rank, r.id) for r in rows] == [(1, b.id), (2, a.id), (None, c.id)]
    assert [r.group for r in rows] == [1, 2, None]
    assert rows[0].score_us == pytest.approx(8.2)
    assert (rows[0].slow_us, rows[0].held_out_us) == (pytest.approx(50.0), pytest.approx(5.0))
    assert rows[2].missing == ("held/1 on production",)
    assert winner(store, "kda-1") == rows[0]


def test_ten_names_for_one_kernel_are_a_ten_way_tie(store: Store) -> None:
    trials = [board.passed(store, n, "job-1", 8.0 + n) for n in range(10)]
    close(store, "job-1")
    job(store, "job-f", None)
    for n, trial in enumerate(trials):
        final_times(store, trial.id, 8.0 * (1.0 + 1e-4 * (n * 7 % 10)))
    close(store, "job-f")
    rows = finals(store, "kda-1")
    assert [r.rank for r in rows] == list(range(1, 11))
    assert {r.group for r in rows} == {1}


def test_a_leaderboard_of_many_trials_is_a_few_statements(store: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    for number in range(40):
        board.passed(store, number, "job-1", 10.0 + number)
        board.failed(store, 100 + number, TrialStatus.REJECTED, "nan")
    close(store, "job-1")
    statements: list[str] = []
    sa.event.listen(
        store._engine, "before_cursor_execute", lambda *call: statements.append(call[2])
    )
    for question, most in (
        (lambda: ranked(store), 4),
        (lambda: rejected(store), 3),
        (lambda: funnel(store, "kda-1"), 4),
        (lambda: best_so_far(store, "kda-1"), 3),
        (lambda: store.load_trials("kda-1"), 5),
    ):
        statements.clear()
        question()
        assert len(statements) <= most, statements
