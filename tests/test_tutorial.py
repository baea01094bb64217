"""What the tutorial shows is what its commands print: the parts that need no GPU are run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)


def console(title: str) -> list[tuple[str, list[str]]]:
    """Commands of a section, each with the lines that the page shows under it."""
    part = re.search(rf"^## {re.escape(title)}\n(.*?)^## ", TUTORIAL, re.M | re.S)
    assert part is not None, title
    found: list[tuple[str, list[str]]] = []
    for block in _CONSOLE.findall(part[1]):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def plain(line: str) -> str:
    """A line without what differs from run to run, or between builds of torch."""
    line = re.sub(r"quickstart-\d{8}-\d{6}-\w{4}", "CAMPAIGN", line)
    line = re.sub(r"\d\.\de-", "e-", line)
    return re.sub(r"\u2500+", "-", " ".join(line.split()))


def missing(shown: list[str], said: str) -> list[str]:
    """Lines of a page that the output lacks; ``...`` stands for anything that follows."""
    lines = [plain(line) for line in said.splitlines()]

    def there(line: str) -> bool:
        start, cut, _ = plain(line).partition("...")
        return any(x.startswith(start.rstrip()) if cut else x == start for x in lines)

    return [line for line in shown if not there(line)]


_ROW = re.compile(r"^( *\d+)?( +)(\d+)( +(?:[\d.]+|\w+ +\w+) +)(form=\S+(?: \w+=\S+)*)", re.M)
"""A row of a ranking, or of the rejected: rank, trial, time or verdict, schedule."""


def renumbered(text: str, numbers: dict[str, str]) -> str:
    """``text`` with these numbers for its trials, wherever it names one."""

    def row(found: re.Match[str]) -> str:
        rank, gap, trial, middle, schedule = found.groups()
        return f"{rank or ''}{gap}{numbers.get(trial, trial)}{middle}{schedule}"

    def named(found: re.Match[str]) -> str:
        return f"{found[1]} {numbers.get(found[2], found[2])}"

    return re.sub(r"\b(show|trial) (\d+)\b", named, _ROW.sub(row, text))


def trials(text: str) -> dict[str, str]:
    """Schedule to the number of its trial, in a ranking or among the rejected."""
    return {found[5]: found[3] for found in _ROW.finditer(text)}


def test_trials_are_renumbered_wherever_they_are_named() -> None:
    page = (
        "   1       8   96.68   form=split bt=32\n"
        "    7   rejected   emulate   form=split bt=64 anchor=mid     regime\n"
    )
    assert trials(page) == {"form=split bt=32": "8", "form=split bt=64 anchor=mid": "7"}
    here = renumbered(page + "factory show 7 --again\ntrial 8 of", {"8": "3", "7": "11"})
    assert [" ".join(line.split()) for line in here.splitlines()] == [
        "1 3 96.68 form=split bt=32",
        "11 rejected emulate form=split bt=64 anchor=mid regime",
        "factory show 11 --again",
        "trial 3 of",
    ]


def test_a_line_that_is_not_printed_is_noticed() -> None:
    said = "1  8  96.68  form=a\ncampaign quickstart-20261130-093958-5cd9 finished"
    shown = ["1   8   96.68   form=a", "campaign quickstart-20250101-000000-0000 fin...", "..."]
    assert missing(shown, said) == []
    assert missing(["1  8  96.69  form=a"], said) == ["1  8  96.69  form=a"]


def said_by(line: str, folder: Path) -> str:
    """What a command of the page prints in ``folder``, where it ends well."""
    command = [sys.executable, "-m", *shlex.split(line)] if line.startswith("factory ") else line
    done = subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout + done.stderr


def test_the_export_of_the_tutorial_is_written_where_the_page_says(tmp_path: Path) -> None:
    lines = [line for line, _ in console("6. Export")]
    *before, tested = lines
    for line in before:
        if not line.startswith("pip "):
            said_by(line, tmp_path)
    assert "pip install pytest" in before
    python, m, pytest_, folder = shlex.split(tested)
    assert (python, m, pytest_) == ("python", "-m", "pytest")
    assert list((tmp_path / folder / "tests").glob("test_*.py"))


@pytest.mark.soak
def test_the_tutorial_shows_what_its_commands_print(tmp_path: Path) -> None:
    """But for the numbers of trials, which depend on which of them end first."""
    ran = 0
    numbers: dict[str, str] = {}
    for line, shown in console("2. The smallest campaign") + console("3. Why was it rejected?"):
        if not line.startswith("factory "):
            continue
        said = said_by(renumbered(line, numbers), tmp_path)
        if not ran:
            here = trials(said)
            numbers = {n: here[schedule] for schedule, n in trials("\n".join(shown)).items()}
            assert len(numbers) == 5
        assert missing([renumbered(x, numbers) for x in shown], said) == [], line
        ran += 1
    assert ran == 2
