"""Questions on a whole campaign: errors of all trials, controls of a job, jobs still open."""

from __future__ import annotations

import board

from leaderboard import (
    Clock,
    JobStatus,
    Store,
    TrialStatus,
    Verdict,
    compare,
    control_spans,
    ranked,
    trial_errors,
)


def test_of_each_output_the_largest_error_is_told_by_stage_and_regime(store: Store) -> None:
    trial = board.begin(store, 0)
    seen = [
        board.error(max_rel=0.004, rms_rel=0.003),
        board.error(max_rel=0.009, rms_rel=0.001, workload=board.WORKLOADS[1]),
        board.error(tensor="final_state", max_rel=0.002),
        board.error(stage="emulate", max_rel=0.5, within=False),
        board.error(regime="beyond_20", out_of_contract=True, max_rel=None, rms_rel=None),
    ]
    store.record_stage(trial.id, board.stage("gate"), errors=seen)
    found = {(e.stage, e.regime, e.tensor): e for e in trial_errors(store, "kda-1")}
    assert set(found) == {
        ("gate", "production", "o"),
        ("gate", "production", "final_state"),
        ("emulate", "production", "o"),
    }
    worst = found["gate", "production", "o"]
    assert (worst.id, worst.max_rel, worst.rms_rel, worst.within) == (trial.id, 0.009, 0.003, True)
    assert not found["emulate", "production", "o"].within
    assert trial_errors(store, "kda-1", regimes=["slow"]) == []
    assert trial_errors(store, "another") == []


def test_an_error_that_is_not_finite_anywhere_has_no_size(store: Store) -> None:
    trial = board.begin(store, 0)
    lost = board.error(max_rel=None, rms_rel=None, finite=False, within=False)
    store.record_stage(trial.id, board.stage(), errors=[board.error(max_rel=0.004), lost])
    (found,) = trial_errors(store, "kda-1")
    assert (found.finite, found.within, found.max_rel, found.rms_rel) == (False, False, None, None)


def test_a_control_spans_its_readings_without_the_finals(store: Store) -> None:
    first, second = board.WORKLOADS
    store.add_measurements(
        [
            board.time("job-1", first, 100.0, control="flashkda", phase="before"),
            board.time("job-1", first, 110.0, control="flashkda", phase="after"),
            board.time("job-1", first, 500.0, control="flashkda", phase="final"),
            board.time("job-1", second, 7.0, control="flashkda", phase="before"),
        ]
    )
    spans = {s.workload: s for s in control_spans(store, "job-1")}
    assert spans[first].readings == 2
    assert spans[first].median_us == 105.0
    assert (spans[first].low_us, spans[first].high_us) == (99.0, 110.0 * 1.01)
    assert spans[second].clock is Clock.GPU
    assert control_spans(store, "job-2") == []


def test_an_open_job_ranks_only_for_whoever_looks_on(store: Store) -> None:
    board.passed(store, 0, "job-1", 40.0)
    assert ranked(store) == []
    assert [r.score_us for r in ranked(store, live=True)] == [40.0]
    store.close_job("job-1", JobStatus.VOID, note="drift")
    assert ranked(store, live=True) == []


def samples(us: float) -> tuple[float, ...]:
    return tuple(us * (1 + 0.001 * n) for n in range(-5, 6))


def test_each_shape_has_a_verdict_of_its_own(store: Store) -> None:
    """Faster on one shape, slower on the other, no difference over both."""
    ids = []
    for number, factors in enumerate(((1.0, 1.0), (1.25, 0.8))):
        trial = board.begin(store, number)
        store.record_stage(trial.id, board.stage("gate"), errors=[board.error()])
        times = [
            board.time(
                "job-1", w, us * f, trial_id=trial.id, regime=regime, samples_us=samples(us * f)
            )
            for regime in ("production", "slow")
            for w, us, f in zip(board.WORKLOADS, (80.0, 20.0), factors, strict=True)
        ]
        store.record_stage(trial.id, board.stage("time"), measurements=times)
        store.finish_trial(
            trial.id,
            TrialStatus.PASSED,
            clock=Clock.GPU,
            score_us=40.0,
            slow_us=40.0,
            job_id="job-1",
        )
        ids.append(trial.id)
    store.close_job("job-1", JobStatus.VALID)
    found = compare(store, *ids)
    assert found.verdict is Verdict.NOT_TOLD_APART
    assert [s.verdict for s in found.shapes] == [Verdict.FASTER, Verdict.SLOWER]
    for shape, ratio in zip(found.shapes, (0.8, 1.25), strict=True):
        assert shape.low is not None
        assert shape.high is not None
        assert shape.low <= ratio <= shape.high
        assert shape.high / shape.low < 1.05
