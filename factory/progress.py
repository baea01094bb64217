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
    from rich.console import Console, RenderableType
    from rich.live import Live

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
    """A few lines that are redrawn, with events scrolling above them."""

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
        from rich.text import Text

        style = {TrialStatus.PASSED: "green", TrialStatus.SLOW: "yellow"}.get(trial.status, "red")
        text = f"trial {trial.id} {trial.schedule_key}: {_verdict(trial, best=best)}"
        # A style given to print() would colour the display below the line too.
        self._console.print(Text(text, style="bold green" if best else style))

    def note(self, text: str) -> None:
        """See :class:`View`."""
        self._console.print(text, markup=False, highlight=False)

    def refresh(self) -> None:
        """See :class:`View`; the live display refreshes itself."""

    def end(self) -> None:
        """See :class:`View`."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        tally = self._tally
        assert tally is not None
        head = Text(
            f"{tally.campaign_id}  {tally.finished}/{tally.target} trials  "
            f"{seconds_text(tally.elapsed_s)} elapsed, {seconds_text(tally.left_s)} left"
        )
        stages = Table.grid(padding=(0, 2))
        stages.add_row(
            *(
                f"{stage} {tally.through[stage]}/{tally.entered[stage]}{_busy(tally, stage)}"
                for stage in tally.stages
            )
        )
        lines: list[RenderableType] = [
            head,
            ProgressBar(total=max(1, tally.target), completed=tally.finished, width=60),
            stages,
        ]
        if tally.best is not None:
            lines.append(
                Text(f"best {tally.best.score_us:.1f} us {tally.clock}: {tally.best.schedule_key}")
            )
        lines += [Text(f"{n} x {why}", style="dim") for why, n in tally.reasons.most_common(4)]
        return Group(*lines)


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
