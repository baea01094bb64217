"""What the ``factory`` command answers, asked in the process of a test."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from factory.cli import main


class Answer(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def ask(capsys: pytest.CaptureFixture[str], *argv: object) -> Answer:
    """Run the command with these words, in the working directory."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in argv])
    said = capsys.readouterr()
    return Answer(int(left.value.code or 0), said.out, said.err)


def one_line(err: str) -> str:
    """The only line of an error, which is no traceback."""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]
