"""What takes a file's place does so whole, and takes the place of nothing but a file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from leaderboard.whole_file import whole_file


def test_a_failure_in_the_middle_leaves_what_was_there(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("before")
    with pytest.raises(TypeError), whole_file(path) as stream:
        stream.writelines(["half", 0])
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_shows_before_all_is_written(tmp_path):
    path = tmp_path / "new.txt"
    with whole_file(path) as stream:
        stream.write("all")
        assert not path.exists()
    assert path.read_text() == "all"


def test_of_a_link_the_file_behind_it_is_written(tmp_path):
    target, link = tmp_path / "far" / "target.txt", tmp_path / "link.txt"
    target.parent.mkdir()
    target.write_text("before")
    link.symlink_to(target)
    with whole_file(link) as stream:
        stream.write("after")
    assert link.is_symlink()
    assert target.read_text() == "after"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with whole_file(pipe) as stream:
        stream.write("through")
    reader.join()
    assert read == ["through"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsADirectoryError), whole_file(Path(name)):
        pass
