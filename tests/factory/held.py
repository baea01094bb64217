"""Holds toy trials inside their emulation, so that what a test does to them finds them there."""

from __future__ import annotations

from pathlib import Path

from waiting import until

from leaderboard.whole_file import whole_file


class Hold:
    """A folder that ``toy_scale`` looks at, in whichever process, if ``TOY_HOLD`` names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def after(self, block: int) -> None:
        """Let blocks up to this one go, and hold all others.

        These take workers away: let at least as many blocks go as there are workers, and wait for
        their trials before the next call, so that what is let go finds a worker in its turn.
        """
        with whole_file(self.folder / "last") as last:
            last.write(f"{block}\n")

    def none(self) -> None:
        """Let all go."""
        (self.folder / "last").unlink()

    def worker_of(self, block: int) -> int:
        """The process that holds a block; waits until one does."""
        note = self.folder / f"block-{block}"
        said = until(lambda: note.exists() and note.read_text(), f"a worker with block {block}")
        assert isinstance(said, str)
        return int(said)
