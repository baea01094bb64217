"""Taking times inside a child: warm-up, samples, and which kernels ran.

Written against a :class:`~factory.device.hardware.Bench` only, whose functions
were bound before any foreign code was imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from factory.device.hardware import Bench, KernelEvent, RecordingError
from factory.device.protocol import Sampling

__all__ = ["Course", "Reading", "busy_ns", "take_times", "windows"]

_STABLE = 1.03
_BATCHES = 3
_MOST_BATCHES = 400
_LEAST_SAMPLES = 3
_ATTEMPTS = 4
_LOOK_EVERY = 10
"""Samples between two looks at the device's clock, each taken right after work."""
_REST_S = 0.2

Call = Callable[[], Any]


@dataclass
class Course:
    """One workload to be timed.

    Parameters
    ----------
    calls : sequence of callables
        Bound calls on different inputs; back-to-back calls rotate over them.
    sample : callable
        Prepares sample ``i`` outside the timed window and returns its call: the same one for
        every ``i``, or one of ``calls``.
    """

    calls: Sequence[Call]
    sample: Callable[[int], Call]


@dataclass
class Reading:
    """Samples in microseconds by clock, and the kernels of the ``gpu`` samples."""

    gpu: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    """As ``gpu``, with the L2 cache evicted before each sample."""
    per_call: list[float] = field(default_factory=list)
    pipelined: list[float] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    """Name to launches in all ``gpu`` samples together, in order of appearance."""
    empty: int = 0
    """``gpu`` samples during which the device ran nothing."""
    burst: int = 0
    """Calls in one sample of ``pipelined``."""
    thrown_away: int = 0
    """Samples that were taken while the clock was low, and taken again."""
    sm_share: float | None = None
    """Lowest SM clock seen, over its maximum; None where it cannot be read."""
    throttled: bool = False
    """Whether samples were kept although the clock stayed low."""
    first_s: float = 0.0
    """Seconds that its very first calls took, which no sample holds."""


def _each_once(bench: Bench, course: Course) -> None:
    """Run every call of a course once, untimed.

    Here is paid for what a call compiles, tunes or uploads when it is made for the
    first time, or for the first time since many others.
    """
    # Values of sample 1: neither those of the first sample nor those of the last one, so that
    # a result which is kept from here is wrong when it is looked at.
    for call in dict.fromkeys((*course.calls, course.sample(1))):
        call()
    bench.synchronize()


def warm_up(bench: Bench, course: Course, limit_s: float) -> float:
    """Call until three batches in a row agree within 3%; returns seconds per call.

    A batch calls on every input set once.  No batch starts after ``limit_s``.
    """
    recent: list[float] = []
    begin = bench.now_ns()
    for _ in range(_MOST_BATCHES):
        start = bench.now_ns()
        for call in course.calls:
            call()
        bench.synchronize()
        recent = [*recent[-(_BATCHES - 1) :], (bench.now_ns() - start) / 1e9]
        if (bench.now_ns() - begin) / 1e9 > limit_s:
            break
        if len(recent) == _BATCHES and max(recent) <= _STABLE * min(recent):
            break
    return recent[-1] / len(course.calls)


def _count(wanted: int, budget_s: float, seconds: float, multiple: int = 1) -> int:
    """Samples that fit the budget, rounded up so that every input set is met equally often."""
    if wanted == 0:
        return 0
    count = max(_LEAST_SAMPLES, min(wanted, int(budget_s / max(seconds, 1e-9))))
    return count + -count % multiple


def windows(events: Sequence[KernelEvent], marker: str) -> list[list[KernelEvent]]:
    """Split what the device ran at its markers; keep what lies inside a pair.

    A window is opened by one marker and closed by the next one.

    Raises
    ------
    RecordingError
        If a marker is left over.
    """
    found: list[list[KernelEvent]] = []
    inside = False
    for event in events:
        if event.name == marker:
            inside = not inside
            if inside:
                found.append([])
        elif inside:
            found[-1].append(event)
    if inside:
        raise RecordingError("the markers around timed calls do not pair up")
    return found


def take_times(
    bench: Bench, courses: Sequence[Course], sampling: Sampling, progress: Callable[[int], None]
) -> list[Reading]:
    """Time every course; all ``gpu`` samples share one recording.

    Every call of a course runs once, untimed, before its warm-up, and again before
    its samples of the ``gpu`` clock and of the host clocks: other courses come
    in between.

    Samples taken while the device's clock was low are thrown away and taken
    again, a few times; the last attempt stays, and says so.

    Raises
    ------
    RecordingError
        If the recording does not hold one window for each sample.
    """
    readings = [Reading() for _ in courses]
    seconds: list[float] = []
    for number, course in enumerate(courses):
        progress(number)
        begin = bench.now_ns()
        _each_once(bench, course)
        readings[number].first_s = (bench.now_ns() - begin) / 1e9
        seconds.append(warm_up(bench, course, sampling.warm_s))
    if sampling.gpu:
        _gpu_clock(bench, courses, sampling, seconds, readings, progress)
    for number, course in enumerate(courses):
        progress(number)
        _host_clocks(bench, course, sampling, seconds[number], readings[number])
    return readings


@dataclass(frozen=True)
class _Pass:
    """One attempt at the ``gpu`` samples of one course."""

    course: int
    warm: int
    cold: int
    kept: bool


def _gpu_clock(
    bench: Bench,
    courses: Sequence[Course],
    sampling: Sampling,
    seconds: Sequence[float],
    readings: Sequence[Reading],
    progress: Callable[[int], None],
) -> None:
    passes: list[_Pass] = []

    def sample(call: Call, flush: bool) -> None:
        if flush:
            bench.flush()
        bench.synchronize()
        bench.mark()
        call()
        # Waiting before the closing marker keeps work on other streams inside.
        bench.synchronize()
        bench.mark()

    def body() -> None:
        for number, course in enumerate(courses):
            progress(number)
            sets = len(course.calls)
            warm = _count(sampling.gpu, sampling.budget_s, seconds[number], sets)
            cold = 0
            if seconds[number] * _LEAST_SAMPLES <= sampling.budget_s:
                cold = _count(sampling.cold, sampling.budget_s, seconds[number], sets)

            def attempt(
                look: Call, course: Course = course, warm: int = warm, cold: int = cold
            ) -> None:
                for i in range(warm):
                    sample(course.sample(i), sampling.flush)
                    if i % _LOOK_EVERY == _LOOK_EVERY - 1:
                        look()
                for i in range(cold):
                    sample(course.sample(i), True)

            _each_once(bench, course)
            for kept in _attempts(bench, sampling.clock_share, readings[number], attempt):
                passes.append(_Pass(number, warm, cold, kept))
        bench.synchronize()

    found = windows(bench.record(body), bench.marker)
    expected = sum(p.warm + p.cold for p in passes)
    if len(found) != expected:
        raise RecordingError(f"{len(found)} timed windows were recorded instead of {expected}")
    taken = iter(found)
    for tried in passes:
        reading = readings[tried.course]
        for number in range(tried.warm + tried.cold):
            window = next(taken)
            if tried.kept:
                _add(reading, window, reading.gpu if number < tried.warm else reading.cold)
            else:
                reading.thrown_away += 1


def _attempts(
    bench: Bench, share: float, reading: Reading, take: Callable[[Call], None]
) -> Iterator[bool]:
    """Take samples until the clock was high whenever looked at; yields whether they count.

    ``take`` is handed a function that looks; the end of it is looked at here.

    The last attempt counts whatever the clock, and is marked.
    """
    for number in range(_ATTEMPTS):
        seen: list[float | None] = []

        def look(seen: list[float | None] = seen) -> None:
            seen.append(bench.sm_share())

        take(look)
        look()
        lowest = min((s for s in seen if s is not None), default=None)
        if lowest is None:
            yield True
            return
        reading.sm_share = min(reading.sm_share or 1.0, lowest)
        if lowest >= share:
            yield True
            return
        if number == _ATTEMPTS - 1:
            reading.throttled = True
            yield True
            return
        yield False
        bench.rest(_REST_S)


def busy_ns(events: Sequence[KernelEvent]) -> int:
    """Nanoseconds in which the device ran at least one of these, in order of their begins.

    A kernel that is launched programmatically may stand by while the one in front of it ends:
    their durations added up would count that time twice.
    """
    busy, until = 0, 0
    for event in events:
        end = event.start_ns + event.duration_ns
        busy += max(end - max(event.start_ns, until), 0)
        until = max(until, end)
    return busy


def _add(reading: Reading, window: Sequence[KernelEvent], samples: list[float]) -> None:
    reading.empty += not window
    samples.append(busy_ns(window) / 1e3)
    for event in window:
        reading.kernels[event.name] = reading.kernels.get(event.name, 0) + 1


def _host_clocks(
    bench: Bench, course: Course, sampling: Sampling, seconds: float, reading: Reading
) -> None:
    calls = _count(sampling.per_call, sampling.budget_s, seconds, len(course.calls))
    burst = max(2, min(sampling.burst, int(sampling.budget_s / 4 / max(seconds, 1e-9))))
    bursts = _count(sampling.pipelined, sampling.budget_s, seconds * burst)
    reading.burst = burst

    def attempt(look: Call) -> None:
        for i in range(calls):
            call = course.sample(i)
            if sampling.flush:
                bench.flush()
            bench.synchronize()
            start = bench.now_ns()
            call()
            bench.synchronize()
            reading.per_call.append((bench.now_ns() - start) / 1e3)
            if i % _LOOK_EVERY == _LOOK_EVERY - 1:
                look()
        for _ in range(bursts):
            start = bench.now_ns()
            for i in range(burst):
                course.calls[i % len(course.calls)]()
            bench.synchronize()
            reading.pipelined.append((bench.now_ns() - start) / 1e3 / burst)

    if not calls and not bursts:
        return
    _each_once(bench, course)
    for kept in _attempts(bench, sampling.clock_share, reading, attempt):
        if not kept:
            reading.thrown_away += len(reading.per_call) + len(reading.pipelined)
            reading.per_call.clear()
            reading.pipelined.clear()
