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
    ran = 0
    for line, shown in console("2. The smallest campaign") + console("3. Why was it rejected?"):
        if not line.startswith("factory "):
            continue
        assert missing(shown, said_by(line, tmp_path)) == [], line
        ran += 1
    assert ran == 2
