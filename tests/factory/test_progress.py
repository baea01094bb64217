"""Progress and totals: what is counted and what is shown."""

from __future__ import annotations

import io
import re
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from rich.console import Console

from factory.progress import LineView, LiveView, make_view, seconds_text
from factory.tally import Tally, reason_class
from leaderboard import Clock, StageRecord, StageStatus, TrialRecord, TrialStatus


def trial(number, status=TrialStatus.PASSED, score=None, reason="", stages=()):
    passed = status is TrialStatus.PASSED
    return TrialRecord(
        id=number,
        campaign_id="c",
        number=number,
        schedule_key=f"bt={number}",
        schedule={"bt": number},
        status=status,
        stage="emulate",
        reason=reason,
        clock=Clock.MODELLED if passed else None,
        score_us=score,
        source_hash="0",
        started_at=datetime.now(UTC),
        stages=stages,
    )


@pytest.fixture
def tally():
    return Tally("c-1", "modelled", target=4, stages=("validate", "emulate"))


def test_the_best_is_the_fastest_passed(tally):
    assert tally.count(trial(1, score=20.0))
    assert not tally.count(trial(2, score=30.0))
    assert tally.count(trial(3, score=10.0))
    assert not tally.count(trial(4, TrialStatus.REJECTED, reason="regime production, x: y"))
    assert (tally.best.trial_id, tally.finished, tally.passed) == (3, 4, 3)
    assert tally.reasons == {"rejected: regime production": 1}


def test_time_left_counts_only_this_launch(monkeypatch):
    now = 100.0
    monkeypatch.setattr("factory.tally.time", SimpleNamespace(monotonic=lambda: now))
    tally = Tally("c-1", "modelled", target=4, stages=("validate", "emulate"), _since=now)
    stage = StageRecord(stage="validate", status=StageStatus.PASSED, seconds=0.1)
    tally.restore([trial(1, score=5.0, stages=(stage,)), trial(2, TrialStatus.ABANDONED)])
    assert (tally.finished, tally.entered["validate"]) == (1, 1)
    assert tally.left_s is None
    now += 10.0
    tally.count(trial(3, score=6.0))
    assert tally.left_s == 20.0


def test_reasons_are_grouped_by_what_they_share():
    assert reason_class("regime production, workload a: o has 3") == "regime production"
    assert reason_class("worker died of SIGKILL in emulate, twice") == (
        "worker died of SIGKILL in emulate"
    )
    assert len(reason_class("x" * 100)) == 48


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0.2, "0s"), (61, "1m01s"), (3700, "1h01m")]
)
def test_durations_read_as_people_write_them(seconds, text):
    assert seconds_text(seconds) == text


def test_lines_tell_verdict_reason_and_time_left(tally):
    out = io.StringIO()
    view = LineView(Console(file=out, width=40))
    view.begin(tally)
    for number, one in enumerate(
        [trial(1, score=20.0), trial(2, TrialStatus.REJECTED, reason="[bold] regime x, y")]
    ):
        best = tally.count(one)
        view.trial(one, best=best)
        assert best == (number == 0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("[1/4] trial 1 bt=1: passed, 20.0 us modelled (best so far); left")
    assert "rejected at emulate: [bold] regime x, y" in lines[2]


def live_text(tally, **console):
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=100, **console))
    view.begin(tally)
    one = trial(1, score=20.0)
    tally.enter(1, "emulate")
    tally.leave(1, "emulate", StageStatus.PASSED)
    tally.enter(2, "emulate")
    view.trial(one, best=tally.count(one))
    tally.count(trial(3, TrialStatus.REJECTED, reason="regime x, y"))
    view._live.refresh()
    view.end()
    view.end()
    return out.getvalue()


def test_the_live_display_shows_counts_best_and_rejections(tally):
    text = live_text(tally)
    for part in ("2/4 trials", "emulate 1/1 (+1)", "best 20.0 us", "1 x rejected: regime x"):
        assert part in text


def test_the_colour_of_a_verdict_stays_on_its_line(tally):
    for line in live_text(tally).splitlines():
        if "trials" in line or "validate" in line:
            assert "32m" not in line


def test_no_color_is_honoured(tally, monkeypatch):
    assert "\x1b[1;32m" in live_text(tally)
    monkeypatch.setenv("NO_COLOR", "1")
    fresh = Tally("c-1", "modelled", target=4, stages=("validate", "emulate"))
    # Moving the cursor is what a live display does; no style is, bold and dim included.
    assert not re.findall(r"\x1b\[[\d;]*m", live_text(fresh))


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_of_the_live_display_is_wider_than_the_terminal(width):
    stages = ("validate", "emulate", "compile", "gate", "screen", "time")
    tally = Tally("kda_prefill-20261130-093958-5cd9", "gpu", target=112, stages=stages)
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=width))
    view.begin(tally)
    for stage in stages:
        for number in range(100, 112):
            tally.enter(number, stage)
            tally.leave(number, stage, StageStatus.PASSED)
    long = trial(1, TrialStatus.REJECTED, reason="regime production, workload x: " + "y" * 200)
    view.trial(long, best=tally.count(long))
    view._live.refresh()
    view.end()
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", out.getvalue())
    lines = [line for part in plain.splitlines() for line in part.split("\r")]
    assert max(map(len, lines)) <= width
    for stage in stages:
        assert f"{stage} 12/12" in plain
    assert "trial 1 rejected at emulate: regime production"[: width - 1] in plain


def test_a_pipe_gets_lines_and_a_terminal_the_live_display(monkeypatch):
    assert isinstance(make_view(), LineView)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(make_view(), LiveView)
