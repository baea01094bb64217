"""Candidates that know how their process speaks to the job, and abuse it."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import device_fakes as fakes
import pytest
from device_jobs import LIMITS, schedule, start
from waiting import HANG_S, until

from factory import machine
from factory.device import DeviceJob, process
from factory.device.answers import Nonsense, Reader, checked, safe
from factory.device.protocol import Case, Load, Sampling, Time
from operations import Workload


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceJob]:
    with start(tmp_path_factory.mktemp("logs")) as opened:
        yield opened


SAID = {
    "says_half": ("timeout", "no answer within 60 s"),
    "floods_places": ("timeout", "x: no answer within 60 s"),
    "says_no_json": ("crashed", "its process wrote nonsense to the job"),
    "nests": ("crashed", "its process wrote nonsense to the job"),
    "announces_much": ("crashed", "its process wrote nonsense to the job"),
    "faults_with_numbers": ("crashed", "its process wrote nonsense to the job"),
    "faults_as_nobody": ("crashed", "its process wrote nonsense to the job"),
    "blames_by_pipe": ("crashed", "install another compiler"),
    "blames_the_toolchain": ("crashed", "ToolchainError: install another compiler"),
    "answers_twice": ("crashed", "two answers to one message"),
    "escapes": ("crashed", r"RuntimeError: \x1b[31mred \udcff\u202exxx"),
    "leaves_a_child_behind": ("crashed", "its process ended: exit code 7"),
    "leaves_a_session_behind": ("crashed", "its process ended: exit code 7"),
    "hangs_up": ("crashed", "its process closed its pipe to the job"),
    "loses_its_log": ("crashed", "its process ended: exit code 9"),
    "is_mute": ("crashed", "_Mute"),
}


@pytest.mark.parametrize("kind", SAID)
def test_what_it_writes_to_the_job_is_held_against_it(
    job: DeviceJob, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = job.prepare(schedule(kind))
    handle.child.ready()
    # What ends within its limit has time; the others are given up once they have begun.
    status, words = SAID[kind]
    if status == "timeout":
        monkeypatch.setattr(process, "time", Hurried(handle.child))
    if kind == "hangs_up":
        monkeypatch.setattr(process, "_HANGUP_S", 0.5)
    try:
        result = job.gate(handle)
    finally:
        job.release(handle)
    assert (result.status.value, words in result.reason) == (status, True), result.reason
    assert result.reason.isascii()
    assert result.reason.isprintable()
    mark = f"{process._MARK}={handle.child._mark}".encode()
    until(
        lambda: not any(machine._has(pid, mark) for pid in machine._processes()),
        "the end of all processes of a candidate",
    )
    assert len(result.reason) < 600


def test_only_its_own_log_is_cut(job: DeviceJob) -> None:
    """What has the log's name in the end may be any file of the user."""
    handle = job.prepare(schedule("hands_on_its_log"))
    victim = handle.log_path.with_name("victim")
    victim.write_bytes(b"x" * (process._LOG_BYTES + 1))
    assert job.gate(handle).status.value == "passed"
    job.release(handle)
    assert handle.log_path.is_symlink()
    assert victim.stat().st_size == process._LOG_BYTES + 1


class Hurried:
    """A clock that stands until a child has begun to speak, and is past all limits then."""

    def __init__(self, child: process.Child) -> None:
        self._child = child

    def monotonic(self) -> float:
        reader = self._child._reader
        return 1e6 if reader.at == "x" or reader._bytes else 0.0


LOADED = {
    "loads_as_nothing": ("crashed", "its process wrote nonsense to the job"),
    "loads_as_numbers": ("crashed", "its process wrote nonsense to the job"),
    "loads_never": ("timeout", "did not load within 120 s"),
    "loads_somewhere": ("timeout", "did not load within 120 s"),
}


@pytest.mark.parametrize("kind", LOADED)
def test_only_a_real_answer_ends_the_limit_of_loading(job: DeviceJob, kind: str) -> None:
    handle = job.prepare(schedule(kind))
    status, words = LOADED[kind]
    # Something is heard of it: now its limit runs out.
    assert select.select([handle.child._link], [], [], HANG_S)[0]
    if status == "timeout":
        handle.child._expire()
    result = job.gate(handle)
    job.release(handle)
    assert (result.status.value, words in result.reason) == (status, True), result.reason


def test_what_it_prints_cannot_fill_the_disk(job: DeviceJob) -> None:
    job._limits = replace(LIMITS, file_bytes=4 << 20)
    try:
        handle = job.prepare(schedule("floods_its_log"))
    finally:
        job._limits = LIMITS
    result = job.gate(handle)
    job.release(handle)
    assert result.status.value == "crashed"
    assert "its output, or a file it writes, exceeds 4 MiB" in result.reason
    assert handle.log_path.stat().st_size <= 4 << 20


@pytest.mark.parametrize(("left_gib", "limit_gib"), [(20, 16), (0.5, 8), (40, 24)])
def test_where_memory_is_short_a_candidate_gives_way(
    job: DeviceJob, monkeypatch: pytest.MonkeyPatch, left_gib: float, limit_gib: int
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: int(left_gib * 2**30))
    monkeypatch.setattr(job, "_limits", replace(LIMITS, host_bytes=24 << 30))
    handle = job.prepare(schedule("good"))
    try:
        handle.child.ready()
        assert Path(f"/proc/{handle.child.pid}/oom_score_adj").read_text() == "1000\n"
        assert handle.child._host_bytes == limit_gib << 30
    finally:
        job.release(handle)


def reader(*frames: bytes) -> Reader:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.sendall(b"".join(frames))
    theirs.close()
    return Reader(ours)


def test_a_frame_may_come_in_pieces_and_a_place_is_no_answer() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    found = Reader(ours)
    assert not found.pump()
    for byte in fakes.framed({"at": "a\x1b"}) + fakes.framed({"ok": {"a": 1}}):
        assert not found.answered
        theirs.sendall(bytes([byte]))
        assert found.pump()
    assert found.at == r"a\x1b"
    assert found.take().ok == {"a": 1}
    theirs.close()
    with pytest.raises(EOFError):
        found.pump()


@pytest.mark.parametrize(
    "frame",
    [b"[]", b"{}", b'{"ok": 1}', b'{"ok": {"a": NaN}}', b"\xff", b"[" * 60_000, b'{"at": 1}'],
)
def test_a_frame_of_another_form_is_nonsense(frame: bytes) -> None:
    with pytest.raises(Nonsense):
        reader(fakes.framed(frame)).pump()


READING = {
    "gpu": [1.0],
    "cold": [],
    "per_call": [],
    "pipelined": [],
    "kernels": {"k": 1},
    "empty": 0,
    "burst": 0,
    "thrown_away": 0,
    "sm_share": None,
    "throttled": False,
}
TIME = Time((Case("a", Workload("w"), ()),), Sampling(gpu=1))


def timed(**changes: object) -> dict[str, object]:
    readings = {"a": {**READING, **changes}}
    return {"readings": readings, "skipped": {}, "kernel_names": {"a": ["k"]}, "took_s": 1.0}


def test_an_honest_answer_is_kept_whole() -> None:
    assert checked(timed(), TIME, baseline=False) == timed()
    said = {"kernel_names": ["k"], "chunk": 64, "bitwise_causal": True}
    assert checked(said, Load(b""), baseline=False) == said
    skipped = {"readings": {}, "skipped": {"a": "too\nlong"}, "kernel_names": {}, "took_s": 0.0}
    assert checked(skipped, TIME, baseline=True)["skipped"] == {"a": "too long"}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"readings": {}, "skipped": {"a": "no time for me"}, "kernel_names": {}, "took_s": 0.0},
        {**timed(), "took_s": "a second"},
        timed(gpu=[]),
        timed(gpu=["1"]),
        timed(gpu=[-1.0]),
        timed(gpu=[json.loads("1e999")]),
        timed(gpu=[10**400]),
        timed(kernels={"\udcff": 1}),
        timed(kernels={"k": 0.5}),
        timed(burst=None),
        timed(sm_share="all"),
    ],
)
def test_times_of_another_form_are_nonsense(said: dict[str, object]) -> None:
    with pytest.raises(Nonsense):
        checked(said, TIME, baseline=False)


def test_foreign_text_becomes_one_bounded_printable_line() -> None:
    assert safe("a\n\tb  c") == "a b c"
    assert safe("\x1b]0;x\x07\ud800é") == r"\x1b]0;x\x07\ud800\xe9"
    assert len(safe("\x1b" * 10**6)) == 400


def test_the_arena_has_no_file_and_cannot_be_cut_short(job: DeviceJob) -> None:
    """A file would outlive a job that is killed; a shorter one would kill the job (SIGBUS)."""
    handle = job._arena.handle
    assert "memfd:" in os.readlink(handle)
    for nbytes in (0, job._arena.size + 1):
        with open(handle, "r+b") as found, pytest.raises(PermissionError):
            os.ftruncate(found.fileno(), nbytes)
