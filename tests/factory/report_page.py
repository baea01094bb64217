"""A report's page as a reader finds it, and small campaigns to report on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import record_makers as make

import leaderboard
import operations
from factory.report import build_report
from leaderboard import Clock, ErrorRecord, MeasurementRecord, StageStatus, Store, TrialStatus

NOW = datetime(2026, 11, 30, 8, 0, tzinfo=UTC)
SHAPES = make.WORKLOADS
VOID_ELEMENTS = {"meta", "input", "br", "hr", "link", "img"}


class Page(HTMLParser):
    """What a reader of the page would find; fails on elements that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_ELEMENTS:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.words.append(data)

    def said(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of_class(self, name: str) -> list[dict[str, Any]]:
        return [a for _, a in self.tags if name in (a.get("class") or "").split()]

    @property
    def table(self) -> list[dict[str, Any]]:
        found = re.search(r'<script type="application/json" id="trials">(.*?)</script>', self.text)
        assert found
        data = json.loads(found[1])
        names = [c["name"] for c in data["columns"]]
        return [dict(zip(names, row, strict=True)) for row in data["rows"]]


def page_of(store: Store, campaign: str | None = None) -> Page:
    return Page(build_report(store, store.get_campaign(campaign), now=NOW))


@contextmanager
def shipped_page() -> Iterator[tuple[Store, Page]]:
    """The shipped campaign of KDA prefill; its operation is made to be the one that it met."""
    with leaderboard.shipped_store() as store, pytest.MonkeyPatch.context() as patched:
        first = store.get_campaign("kda_prefill")
        patched.setattr(operations.get("kda_prefill"), "version", first.operation_version)
        yield store, page_of(store, first.id)


@contextmanager
def begun(folder: Path, **changes: Any) -> Iterator[Store]:
    """A leaderboard with a campaign ``mine`` of KDA prefill, which nothing was tried in yet."""
    values = {"operation_version": operations.get("kda_prefill").version, "slow_regime": None}
    with leaderboard.open_store(f"sqlite:///{folder}/factory.db") as store:
        store.create_campaign(make.campaign("c-1", name="mine", **{**values, **changes}))
        yield store


def job(store: Store, id_: str = "job-1", gpu: str = "NVIDIA H200") -> None:
    store.put_fingerprint(make.FINGERPRINT)
    store.open_job(make.job(id_, "c-1", gpu=gpu))


def readings(job_id: str, us: float, **owner: Any) -> list[MeasurementRecord]:
    """A time on each shape, of which ``us`` is the geomean."""
    return [make.time(job_id, w, us * f, **owner) for w, f in zip(SHAPES, (2.0, 0.5), strict=True)]


def error(regime: str, max_rel: float | None, **changes: Any) -> ErrorRecord:
    """Within its bounds, or not finite."""
    said = max_rel is not None
    values = {"max_rel": max_rel, "rms_rel": max_rel, "finite": said, "within": said}
    return make.error(regime=regime, **{**values, **changes})


def begin(store: Store, number: int, **changes: Any) -> int:
    schedule = {"anchor": "mid", "bt": 16, "n": number}
    values = {"schedule": schedule, "gate_bound": None, **changes}
    return make.begin(store, number, "c-1", **values).id


def passed(
    store: Store,
    number: int,
    us: float,
    job_id: str = "job-1",
    errors: Sequence[ErrorRecord] = (),
    **changes: Any,
) -> int:
    id_ = begin(store, number, **changes)
    store.record_stage(id_, make.stage("gate", seconds=1), errors=errors)
    times = readings(job_id, us, trial_id=id_)
    store.record_stage(id_, make.stage("time", seconds=1), measurements=times)
    store.finish_trial(id_, TrialStatus.PASSED, clock=Clock.GPU, score_us=us, job_id=job_id)
    return id_


def rejected(
    store: Store, number: int, reason: str, errors: Sequence[ErrorRecord] = (), **changes: Any
) -> int:
    id_ = begin(store, number, **changes)
    failed = make.stage("emulate", StageStatus.REJECTED, reason=reason, seconds=1)
    store.record_stage(id_, failed, errors=errors)
    store.finish_trial(id_, TrialStatus.REJECTED, reason=reason)
    return id_
