"""Tables on a terminal of 80 columns, with and without colour, and in a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

import pytest

import leaderboard
from factory.cli.table import print_failures, print_note, print_table

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    ("leaderboard",),
    ("leaderboard", "--shapes", "--limit", "9"),
    ("leaderboard", "--status", "all"),
    ("leaderboard", "--rejected"),
    ("leaderboard", "--columns", "rank,us,slow,losses,schedule"),
    ("show", "24"),
    ("show", "22"),
    ("status",),
    ("status", "survey"),
    ("compare", "24", "26"),
    ("doctor",),
    ("operations",),
    ("operations", "kda_prefill"),
    ("launch", "quickstart", "--dry-run"),
)
COLOURED = (("show", "24"), ("leaderboard", "--rejected"), ("status",))
RUN = """
import sys
from factory.cli import _run
for argv in {commands!r}:
    print("==", *argv)
    _run(list(argv))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory whose leaderboard holds the shipped results."""
    found = tmp_path_factory.mktemp("terminal")
    with leaderboard.open_store(f"sqlite:///{found}/factory.db") as store:
        for file in sorted((ROOT / "leaderboard" / "shipped").glob("*.jsonl.xz")):
            leaderboard.import_file(store, file)
    return found


def on_a_terminal(
    folder: Path, commands: Sequence[Sequence[str]], columns: int = 80, **environment: str
) -> str:
    """What one process printed, standard output being a terminal."""
    mine, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, columns))
    child = subprocess.Popen(
        [sys.executable, "-c", RUN.format(commands=commands)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TERM": "xterm", **environment},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(mine, 65536)
        except OSError:  # what Linux says at the end of a terminal
            break
        if not part:
            break
        parts.append(part)
    os.close(mine)
    assert child.wait() == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


@pytest.fixture(scope="module")
def plain(folder: Path) -> str:
    return on_a_terminal(folder, COMMANDS, NO_COLOR="1")


def test_no_line_is_wider_than_the_terminal(plain: str) -> None:
    wide = [
        line
        for line in plain.splitlines()
        # A path is one word, and a command is there to be copied.
        if len(line) > 80 and not line.startswith(("log ", "  factory "))
    ]
    assert wide == []
    assert plain.count("==") >= len(COMMANDS)
    assert "form=fused" in plain


def test_no_color_is_honoured_bold_included(plain: str) -> None:
    assert "\x1b" not in plain


def test_verdicts_have_colours_on_a_terminal_only(folder: Path) -> None:
    seen = on_a_terminal(folder, COLOURED)
    for word in ("\x1b[32mpassed\x1b[0m", "\x1b[31mrejected\x1b[0m", "\x1b[1m"):
        assert word in seen
    assert "\x1b" not in on_a_terminal(folder, COLOURED[2:], TERM="dumb")
    piped = subprocess.run(
        [sys.executable, "-c", RUN.format(commands=COLOURED)],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "\x1b" not in piped
    assert "\u2026" not in piped  # nothing is cut
    assert "left out" not in piped


# -- one table -------------------------------------------------------------------------


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factory.cli.table.line_width", lambda: 40)


ROWS = [["1", "passed", "a" * 30, "x"], ["22", "slow", "b", "a reason of several words"]]


def test_a_pipe_gets_everything(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["trial", "verdict", "key", "why"], ROWS, right="trial")
    assert capsys.readouterr().out.splitlines() == [
        "trial   verdict   key                              why",
        "\u2500" * 76,
        "    1   passed    aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa   x",
        "   22   slow      b                                a reason of several words",
    ]


def test_a_narrow_terminal_leaves_out_then_cuts_and_says_so(
    narrow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(
        ["trial", "verdict", "key", "why"], ROWS, right="trial", drop="why", keep={"key": 20}
    )
    assert capsys.readouterr().out.splitlines() == [
        "trial  verdict  key",
        "\u2500" * 40,
        "    1  passed   aaaaaaaaaaaaaaaaaaaaaaa\u2026",
        "   22  slow     b",
        "(why left out; long texts cut: a wider",
        "terminal or a pipe shows all)",
    ]


def test_a_schedule_goes_on_in_the_next_line_and_is_not_cut(
    narrow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where they differ in the middle only, cut ones would be alike."""
    rows = [["1", "form=split bt=64 block=16 segments=4"], ["2", "form=fused"]]
    print_table(["trial", "schedule"], rows, right="trial", fold="schedule")
    assert capsys.readouterr().out.splitlines() == [
        "trial  schedule",
        "\u2500" * 40,
        "    1  form=split bt=64 block=16",
        "         segments=4",
        "    2  form=fused",
    ]


def test_a_terminal_shows_the_first_rows_and_how_many_more_there_are(plain: str) -> None:
    ranking = plain.split("== leaderboard\n")[1].split("== ")[0]
    assert "and 8 more; --limit 28 shows all" in ranking
    assert "\n  20  " in ranking
    assert "\n  21  " not in ranking


def test_long_texts_stand_under_the_table(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["1", "passed", "-"], ["22", "slow", "a reason of very many and long words"]]
    print_table(["trial", "verdict", "why"], rows, spill="why")
    assert capsys.readouterr().out.splitlines() == [
        "trial  verdict",
        "\u2500" * 14,
        "1      passed",
        "22     slow",
        "22: a reason of very many and long words",
    ]


def test_heads_of_several_lines_stand_on_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["shape", "cudnn\nfused"], [["a", "1"]], right="cudnn\nfused")
    assert capsys.readouterr().out.splitlines() == [
        "        cudnn",
        "shape   fused",
        "\u2500" * 13,
        "a           1",
    ]


def test_control_characters_of_a_candidate_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(["why"], [["\x1b[31mred\x07\nnext"]])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert len(out.splitlines()) == 3


def test_notes_break_between_words(narrow: None, capsys: pytest.CaptureFixture[str]) -> None:
    print_note("one two three four five six seven eight", first="said: ", indent="  ")
    assert capsys.readouterr().out.splitlines() == [
        "said: one two three four five six seven",
        "  eight",
    ]


def test_failures_are_entries_on_a_terminal(
    narrow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    class Row:
        id = 7
        stage = "emulate"
        schedule_key = "bt=32"
        reason = "o has 24 non-finite of 96, and that is many"

        class status:
            value = "rejected"

    print_failures([Row()], title="not ranked")
    assert capsys.readouterr().out.splitlines() == [
        "not ranked",
        "trial 7  rejected at emulate",
        "  bt=32",
        "  o has 24 non-finite of 96, and that is",
        "  many",
    ]


def test_wide_characters_keep_columns_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["key", "n"], [["\u9577\u3044", "1"], ["abcd", "2"]])
    assert [line[-1] for line in capsys.readouterr().out.splitlines()[2:]] == ["1", "2"]
