"""Progress of a campaign: live on a terminal, one line an event in a pipe.

Writes to standard error, so that results on standard output stay clean.
``NO_COLOR`` is honoured.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from factory.tally import Tally
from leaderboard.records import TrialRecord, TrialStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

__all__ = ["LineView", "LiveView", "Silent", "View", "make_view", "seconds_text"]


class View(Protocol):
    """What a driver tells about its work."""

    def begin(self, tally: Tally) -> None:
        """The campaign starts or goes on."""

    def trial(self, trial: TrialRecord, *, best: bool) -> None:
        """A trial is finished."""

    def note(self, text: str) -> None:
        """Something else worth a line."""

    def refresh(self) -> None:
        """Time has passed."""

    def end(self) -> None:
        """Nothing more will come; idempotent."""


class Silent:
    """Shows nothing."""

    def begin(self, tally: Tally) -> None:
        """See :class:`View`."""

    def trial(self, trial: TrialRecord, *, best: bool) -> None:
        """See :class:`View`."""

    def note(self, text: str) -> None:
        """See :class:`View`."""

    def refresh(self) -> None:
        """See :class:`View`."""

    def end(self) -> None:
        """See :class:`View`."""


def seconds_text(seconds: float | None) -> str:
    """A duration as people write it, for example ``"3m20s"``."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _verdict(trial: TrialRecord, *, best: bool) -> str:
    if trial.status is TrialStatus.PASSED:
        return f"passed, {trial.score_us:.1f} us {trial.clock}{' (best so far)' if best else ''}"
    return f"{trial.status.value} at {trial.stage}: {trial.reason}"


class LineView:
    """One plain line an event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tally: Tally | None = None

    def begin(self, tally: Tally) -> None:
        """See :class:`View`."""
        self._tally = tally
        self._print(
            f"campaign {tally.campaign_id}: {tally.finished} of {tally.target} trials finished, "
            f"clock {tally.clock}, stages {' > '.join(tally.stages)}"
        )

    def trial(self, trial: TrialRecord, *, best: bool) -> None:
        """See :class:`View`."""
        assert self._tally is not None
        self._print(
            f"[{self._tally.finished}/{self._tally.target}] trial {trial.id} "
            f"{trial.schedule_key}: {_verdict(trial, best=best)}; "
            f"left {seconds_text(self._tally.left_s)}"
        )

    def note(self, text: str) -> None:
        """See :class:`View`."""
        self._print(text)

    def refresh(self) -> None:
        """See :class:`View`."""

    def end(self) -> None:
        """See :class:`View`."""

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A few lines that are redrawn, with events scrolling above them.

    No line is wider than the terminal: what is longer is cut, and stands whole in the trial's log
    and in ``factory show``.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tally: Tally | None = None
        self._live: Live | None = None

    def begin(self, tally: Tally) -> None:
        """See :class:`View`."""
        from rich.live import Live

        self._tally = tally
        self._live = Live(
            console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True
        )
        self._live.start()

    def trial(self, trial: TrialRecord, *, best: bool) -> None:
        """See :class:`View`."""
        style = {TrialStatus.PASSED: "green", TrialStatus.SLOW: "yellow"}.get(trial.status, "red")
        text = f"trial {trial.id} {_verdict(trial, best=best)}  {trial.schedule_key}"
        # A style given to print() would colour the display below the line too.
        line = self._line(text, "bold green" if best else style)
        # print() takes a text apart and would wrap it again.
        self._console.print(line, no_wrap=True, overflow="ellipsis")

    def note(self, text: str) -> None:
        """See :class:`View`."""
        self._console.print(text, markup=False, highlight=False)

    def _line(self, text: str, style: str = "") -> Text:
        """One line, cut at the terminal's edge; without any style where no colour is wanted."""
        from rich.text import Text

        style = "" if self._console.no_color else style
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    def refresh(self) -> None:
        """See :class:`View`; the live display refreshes itself."""

    def end(self) -> None:
        """See :class:`View`."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> RenderableType:
        from rich.console import Group

        tally = self._tally
        assert tally is not None
        width = self._console.width
        head = (
            f"{tally.finished}/{tally.target} trials  {seconds_text(tally.elapsed_s)} elapsed, "
            f"{seconds_text(tally.left_s)} left  {tally.campaign_id}"
        )
        stages = [
            f"{stage} {tally.through[stage]}/{tally.entered[stage]}{_busy(tally, stage)}"
            for stage in tally.stages
        ]
        lines: list[RenderableType] = [
            self._line(head),
            self._line(_bar(tally.finished, tally.target, min(60, width)), "green"),
            *(self._line(line) for line in _in_columns(stages, width)),
        ]
        if tally.best is not None:
            best = f"best {tally.best.score_us:.1f} us {tally.clock}: {tally.best.schedule_key}"
            lines.append(self._line(best))
        lines += [self._line(f"{n} x {why}", "dim") for why, n in tally.reasons.most_common(4)]
        return Group(*lines)


def _bar(done: int, whole: int, width: int) -> str:
    full = width * min(done, whole) // max(whole, 1)
    return "\u2501" * full + "\u2500" * (width - full)


def _in_columns(words: Sequence[str], width: int) -> list[str]:
    """Words in as few lines as fit, below each other in columns."""
    for count in range(len(words), 0, -1):
        lines = [words[i : i + count] for i in range(0, len(words), count)]
        sizes = [max(len(line[n]) for line in lines if n < len(line)) for n in range(count)]
        if sum(sizes) + 2 * (count - 1) <= width or count == 1:
            return [
                "  ".join(w.ljust(size) for w, size in zip(line, sizes, strict=False)).rstrip()
                for line in lines
            ]
    return []


def _busy(tally: Tally, stage: str) -> str:
    count = sum(s == stage for s in tally.running.values())
    return f" (+{count})" if count else ""


def make_view(*, quiet: bool = False) -> View:
    """The view that fits standard error."""
    if quiet:
        return Silent()
    from rich.console import Console

    console = Console(stderr=True)
    return LiveView(console) if sys.stderr.isatty() else LineView(console)
