"""Reading commands: whose results they show, which columns there are, and readers that leave."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import recorded
from answers import Answer, ask

import leaderboard
from factory.cli import _run

Run = Callable[..., Answer]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command, in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    return partial(ask, capsys)


@pytest.fixture
def modelled(run: Run, tmp_path: Path) -> Path:
    """A ``factory.db`` with two campaigns of one name, of which nothing was measured."""
    path = tmp_path / "factory.db"
    flat = [s for s in recorded.FAMILY.offered("all") if s["form"] == "flat"]
    tree = [s for s in recorded.FAMILY.offered("all") if s["form"] == "tree"]
    with leaderboard.open_store(f"sqlite:///{path}") as store:
        recorded.record(store, "first", [tree[0], flat[0], flat[1]])
        recorded.record(store, "second", tree[:1])
    return path


KDA = ("--operation", "kda_prefill")


def best(count: int = 1) -> list[leaderboard.Row]:
    """The first rows of the shipped ranking of KDA prefill."""
    with leaderboard.open_for_reading("shipped") as store:
        return leaderboard.ranked(store, operation="kda_prefill")[:count]


# -- the shipped results ------------------------------------------------------------------


def test_the_shipped_results_have_a_name_beside_a_database_of_ones_own(
    run: Run, modelled: Path
) -> None:
    code, out, _ = run("leaderboard", "--json", "--limit", "1")
    assert {row["clock"] for row in json.loads(out)} == {"modelled"}
    code, out, _ = run("leaderboard", "--json", "--limit", "1", "--db", "shipped")
    assert code == 0
    assert {row["clock"] for row in json.loads(out)} == {"gpu"}
    with leaderboard.open_for_reading("shipped") as store:
        assert store.read_only
        assert store.name == "the shipped results"


@pytest.mark.parametrize(
    "argv",
    [
        ("launch", "quickstart", "--db", "shipped"),
        ("launch", "quickstart", "--db", "shipped", "--dry-run"),
        ("leaderboard", "import", "some.jsonl", "--db", "shipped"),
    ],
)
def test_nothing_writes_to_the_shipped_results(
    run: Run, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    (tmp_path / "some.jsonl").write_text("{}")
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert "the shipped results are for reading only; name a database" in err
    assert not list(tmp_path.glob("*.db")), "none was made"


@pytest.mark.parametrize(
    ("argv", "reads"),
    [
        (("status",), True),
        (("leaderboard",), True),
        (("launch",), False),
        (("leaderboard", "import"), False),
    ],
)
def test_the_help_of_db_speaks_of_shipped_results_where_they_can_be_read(
    run: Run, argv: tuple[str, ...], reads: bool
) -> None:
    _, out, _ = run(*argv, "--help")
    assert ("shipped" in out) is reads


# -- what is shown -------------------------------------------------------------------------


def test_columns_do_not_depend_on_which_rows_are_left(run: Run) -> None:
    """The first rows of the shipped ranking are fused: they have no ``bt``."""
    rows = best(2)
    assert all("bt" not in row.schedule for row in rows)
    code, out, err = run(
        "leaderboard", *KDA, "--columns", "trial,bt,waves", "--csv", "--limit", "2"
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == ["id,bt,waves", *(f"{r.id},,{r.schedule['waves']}" for r in rows)]


def test_the_list_of_columns_has_their_short_names(run: Run) -> None:
    code, _, err = run("leaderboard", "--columns", "qqqqqqq")
    assert code == 2
    assert "there: us, slow, trial, schedule, id" in err


def test_rows_of_campaigns_of_one_name_have_their_ids(run: Run, modelled: Path) -> None:
    _, out, _ = run("leaderboard")
    assert "   first   " in out, "a name that is one campaign's is enough"
    with sqlite3.connect(modelled) as connection:
        connection.execute("UPDATE kf_campaigns SET name = 'first' WHERE name = 'second'")
    _, out, _ = run("leaderboard")
    assert "   first   " not in out
    assert "   first-1   " in out
    assert "   second-1   " in out


@pytest.mark.parametrize(
    "options", [("--regime", "slow"), ("--control", "torch"), ("--gpu", "H200")]
)
def test_what_modelled_times_do_not_have_is_said_so(
    run: Run, modelled: Path, options: tuple[str, ...]
) -> None:
    code, _, err = run("leaderboard", *options)
    assert code == 2
    assert "nothing in it was measured, and modelled times have no GPU, regime or control" in err


def test_a_trial_whose_logs_are_elsewhere_does_not_name_them(run: Run, tmp_path: Path) -> None:
    (row,) = best()
    trial = str(row.id)
    _, out, _ = run("show", trial, "--json")
    log = json.loads(out)["log_path"]
    _, out, _ = run("show", trial)
    assert out.splitlines()[0].startswith(f"trial {trial} of kda_prefill-")
    assert "number" not in out.splitlines()[0], "logs are numbered from 0, trials from 1"
    assert "no log file of it is here" in out
    assert log not in out
    (tmp_path / log).parent.mkdir(parents=True)
    (tmp_path / log).touch()
    _, out, _ = run("show", trial)
    assert f"\nlog {log}\n" in out


def test_time_that_nobody_noted_is_not_zero_seconds(run: Run, modelled: Path) -> None:
    def seconds() -> str:
        _, out, _ = run("status", "first")
        return next(line for line in out.splitlines() if line.startswith("compile")).split()[-1]

    assert seconds() != "-"
    with sqlite3.connect(modelled) as connection:
        connection.execute("UPDATE kf_stages SET seconds = 0 WHERE stage = 'compile'")
    assert seconds() == "-"


# -- readers that leave --------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [("leaderboard", "export"), ("leaderboard", "--status", "all", "--json"), ("--help",)]
)
def test_a_reader_that_leaves_is_no_failure(tmp_path: Path, argv: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "factory", *argv],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_pipe_that_breaks_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    reading, writing = os.pipe()
    monkeypatch.setattr("factory.cli.status.open_reading", broken)
    with os.fdopen(writing, "w") as read_by_somebody, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", read_by_somebody)
        with pytest.raises(RuntimeError, match="a pipe to another process broke"):
            _run(["status"])
    os.close(reading)


# -- the winner, and what is not told apart ------------------------------------------------


def test_the_winners_time_of_the_finals_stands_under_the_ranking(run: Run) -> None:
    (row,) = best()
    _, out, _ = run("show", str(row.id))
    finals = re.search(r"\nfinals: rank 1, (\S+ us), slow gates \S+ us\n", out)
    assert finals
    _, out, _ = run("leaderboard", *KDA, "--limit", "2")
    said = f"trial {row.id} is the winner of the finals, {finals[1]} there"
    assert out.splitlines()[-1] == said
    _, out, _ = run("leaderboard", *KDA, "--limit", "2", "--regime", "slow")
    assert "finals" not in out, "that was another regime"


def test_what_is_not_told_apart_from_the_control_is_no_loss(run: Run) -> None:
    """That is one mark, and the control's being faster another."""
    rows = best(4)
    _, out, _ = run("leaderboard", *KDA, "--shapes", "--limit", "4")
    lines = [line.split(maxsplit=1) for line in out.splitlines() if "/" in line[:12]]
    assert len(lines) == 10
    met = 0
    for place, row in enumerate(rows):
        marks, times = {}, {}
        for name, rest in lines:
            *ours, control = re.findall(r"([\d.]+)( [*=])?", rest)
            times[name], marks[name] = (float(ours[place][0]), float(control[0])), ours[place][1]
        even = {name for name, mark in marks.items() if mark == " ="}
        slower = {name for name in even if times[name][0] > times[name][1]}
        assert {name for name, mark in marks.items() if mark == " *"} == set(row.losses) - slower
        met += len(slower)
    assert met
    assert "= not told apart from the control of its own job" in out
