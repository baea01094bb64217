"""One child process of a job: started, spoken to, watched, ended.

It knows messages and limits; it must not know what a right answer is.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, BinaryIO

from factory.device.answers import Answer, Nonsense, Reader, checked, safe
from factory.device.protocol import Load, Open
from factory.machine import end_marked
from factory.stages.base import HarnessError

__all__ = ["Child", "ChildFailure", "Spawner"]

_MARK = "FACTORY_CANDIDATE"
"""Environment variable by which the processes of one candidate are known."""
_POLL_S = 0.2
_REAP_S = 20.0
_HANGUP_S = 10.0
"""Between the end of its pipe and its own, where it ends by itself, on a busy machine too."""
_READS_LEFT = 16
"""Reads of what a process left behind, or wrote when its time was up: more than a pipe holds."""
_TAIL_BYTES = 4000
_LOG_BYTES = 4 << 20
"""Kept of a log, half of it from each end; a process may write more while it runs."""
_SEND_BYTES = 1 << 20
_HEADER = struct.Struct("!i")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ChildFailure(Exception):
    """A child that did not answer as asked.

    Attributes
    ----------
    kind : str
        ``timeout``, ``died`` or ``memory``; or what the child says of itself:
        ``candidate``, ``rejected``, ``build``, ``toolchain`` or ``harness``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Spawner:
    """Starts processes from one thread that lives as long as the job.

    A child asks the kernel to be killed when its parent dies; for Linux that
    is the thread which started it, so it must not be a passing one.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="factory-spawner")

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return self._thread.submit(lambda: subprocess.Popen(command, **options)).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)


class Child:
    """A process in a process group of its own.

    It is alive and loading when the constructor returns; :meth:`ready` waits.

    Parameters
    ----------
    spawner : Spawner
    opening, load : Open, Load
        Its first two messages.
    load_s : float
        Limit on start, imports and compilation; kept by a timer, so that it
        holds while nobody waits.
    host_bytes : int
        Limit on resident memory, looked at while the job waits.
    log_path : Path
        Receives its standard output and error.
    baseline : bool
        Whether it runs a baseline: what it may answer differs.
    believed : callable, optional
        Whether to believe, on loading, that the toolchain is at fault; takes
        what the process says.  Default: never.
    """

    def __init__(
        self,
        spawner: Spawner,
        opening: Open,
        load: Load,
        *,
        load_s: float,
        host_bytes: int,
        log_path: Path,
        baseline: bool = False,
        believed: Callable[[str], bool] | None = None,
    ) -> None:
        self.log_path = log_path
        self._host_bytes = host_bytes
        self._load_s = load_s
        self._baseline = baseline
        self._believed = believed or (lambda message: False)
        self._lock = threading.Lock()
        """Between the job's thread and the timer of the load limit; nothing waits under it."""
        self._expired = False
        self._gone = False
        """Whether it was waited for: its number may belong to somebody else."""
        self._ready: dict[str, Any] | None = None
        self._load = load
        self._mark = uuid.uuid4().hex
        """In the environment of whatever it starts."""
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        self._reader = Reader(self._link)
        self._unsent = bytearray()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "ab") as log:
            # By what was opened: what has its name in the end may be another file.
            self._log = open(log_path, "r+b")  # noqa: SIM115  closed when the process has ended
            self._tail = b""
            self._process = spawner.start(
                [
                    sys.executable,
                    "-m",
                    "factory.device.child",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=_environment(self._mark, alone=opening.device.torch_device == "cpu"),
            )
        theirs.close()
        self._left_s = load_s
        self._started = time.monotonic()
        self._timer: threading.Timer | None = None
        self._arm()
        self._send(opening)
        self._send(load)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs; looks without reaping, which would free its number for others."""
        if self._gone:
            return False
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, look) is None

    def ready(self) -> dict[str, Any]:
        """Wait until it has loaded its target; what it said of it.

        Raises
        ------
        ChildFailure
        """
        if self._ready is None:
            self._ready = self._answer(self._load, None)
            self._disarm()
        return self._ready

    def ask(self, message: Any, limit_s: float) -> dict[str, Any]:
        """Send a message and wait for the answer; the process is ended if there is none.

        Raises
        ------
        ChildFailure
        """
        try:
            early = self._heard(_READS_LEFT) is not None
        except (EOFError, Nonsense):
            early = False  # found again, and told, by the wait for an answer
        if early:
            self.kill()
            raise ChildFailure("candidate", "its process answered before it was asked")
        self._reader.at = ""
        self._send(message)
        return self._answer(message, limit_s)

    def pause(self) -> None:
        """Stop a process that is still loading, so that nothing runs beside a timing."""
        if self._ready is None and self.alive:
            self._disarm()
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on; its limit stood still meanwhile."""
        if self._ready is None and self.alive:
            self._signal(signal.SIGCONT)
            self._arm()

    def kill(self) -> None:
        """End its whole process group and wait until it is gone; idempotent.

        What it started and moved to another group or session ends with it.

        Raises
        ------
        HarnessError
            If the operating system does not let go of it.
        """
        if self._gone:
            return
        self._disarm()
        self._signal(signal.SIGKILL)
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            raise HarnessError(
                f"process {self.pid} survives SIGKILL; the device driver holds it"
            ) from None
        end_marked(_MARK, self._mark)
        with self._lock:
            self._gone = True
            self._link.close()
        self._end_log()

    def _end_log(self) -> None:
        """Keep its last words, and of a long log both ends."""
        with suppress(OSError), self._log as log:  # without them where the disk does not answer
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            self._tail = log.read()
            _shorten(log)

    def _arm(self) -> None:
        self._started = time.monotonic()
        self._timer = threading.Timer(self._left_s, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_s = max(1.0, self._left_s - (time.monotonic() - self._started))

    def _expire(self) -> None:
        """End a process that has not answered; one that has may wait to be heard."""
        with self._lock:
            if self._gone:
                return
            try:
                for _ in range(_READS_LEFT):
                    if self._reader.answered or not self._reader.pump():
                        break
            except (EOFError, Nonsense):
                pass  # it has not answered
            if self._reader.answered:
                return
            self._expired = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # The group outlives its leader while a descendant runs, and its number is
        # nobody else's before the leader is reaped.
        if self._gone:
            return
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _send(self, message: Any) -> None:
        """Queue a message; what its pipe does not take now is sent while the job waits."""
        packed = ForkingPickler.dumps(message)
        # The framing of multiprocessing.connection, which the child reads it with.
        long = len(packed) > 0x7FFFFFFF
        self._unsent += struct.pack("!iQ", -1, len(packed)) if long else _HEADER.pack(len(packed))
        self._unsent += packed
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._link.send(memoryview(self._unsent)[:_SEND_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # nobody reads it: the wait for an answer finds out why

    def _answer(self, message: Any, limit_s: float | None) -> dict[str, Any]:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        try:
            while True:
                # Asked before reading: what it wrote before it ended is still heard.
                ended = not self.alive
                answer = self._heard(_READS_LEFT if ended else 1)
                if answer is not None:
                    return self._believe(answer, message)
                if ended:
                    raise self._death()
                self._watch_memory()
                if deadline is not None and time.monotonic() > deadline:
                    self.kill()
                    raise ChildFailure("timeout", self._where(f"no answer within {limit_s:.0f} s"))
                self._flush()
                self._wait()
        except EOFError:
            raise self._death() from None
        except Nonsense as error:
            expired = self._expired
            self.kill()
            if expired:
                raise self._late() from None
            raise ChildFailure(
                "candidate", self._where(f"its process wrote nonsense to the job ({error})")
            ) from None

    def _wait(self) -> None:
        """Until there is something to read or room to write, for a moment at most."""
        waited = select.poll()
        waited.register(self._link, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        waited.poll(_POLL_S * 1000)

    def _heard(self, reads: int) -> Answer | None:
        """An answer, if one is whole after a few reads that do not wait."""
        with self._lock:
            for _ in range(reads):
                if self._reader.answered or not self._reader.pump():
                    break
            return self._reader.take() if self._reader.answered else None

    def _believe(self, answer: Answer, message: Any) -> dict[str, Any]:
        if answer.fault is None:
            assert answer.ok is not None
            return checked(answer.ok, message, baseline=self._baseline)
        kind, said = answer.fault
        if kind == "toolchain" and not (isinstance(message, Load) and self._believed(said)):
            kind = "candidate"
        self.kill()
        raise ChildFailure(kind, self._where(said))

    def _watch_memory(self) -> None:
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return
        if pages * _PAGE_BYTES > self._host_bytes:
            self.kill()
            raise ChildFailure(
                "memory", f"host memory above its limit of {self._host_bytes / 2**30:.1f} GiB"
            )

    def _death(self) -> ChildFailure:
        until = time.monotonic() + _HANGUP_S
        while self.alive and time.monotonic() < until:
            time.sleep(0.01)
        hung_up = self.alive and not self._expired
        expired = self._expired
        self.kill()
        if expired:
            return self._late()
        if hung_up:
            return ChildFailure("died", self._where("its process closed its pipe to the job"))
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = self._last_words()
        return ChildFailure("died", self._where(f"its process ended: {how}{said}"))

    def _late(self) -> ChildFailure:
        return ChildFailure("timeout", f"did not load within {self._load_s:.0f} s")

    def _where(self, message: str) -> str:
        return f"{self._reader.at}: {message}" if self._reader.at else message

    def _last_words(self) -> str:
        """The last line of its log that looks like an error, or nothing."""
        lines = self._tail.decode(errors="replace").splitlines()
        telling = [line.strip() for line in lines if re.search(r"error|abort|fatal", line, re.I)]
        return f" ({safe(telling[-1], 200)})" if telling else ""


def _shorten(log: BinaryIO) -> None:
    """Keep both ends of a log that nobody writes any more, and say what was left out."""
    size = log.seek(0, os.SEEK_END)
    if size <= _LOG_BYTES:
        return
    half = _LOG_BYTES // 2
    log.seek(size - half)
    end = log.read()
    log.seek(half)
    log.write(f"\n[... {size - 2 * half} bytes left out ...]\n".encode())
    log.write(end)
    log.truncate()


def _environment(mark: str, *, alone: bool) -> dict[str, str]:
    """The job's own, with its import path, a traceback on fatal signals and a mark.

    On a CPU (``alone``) one thread unless the user says otherwise: threads of tensors that
    small wait for each other, for minutes where the cores have other work.
    """
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {
        **({"OMP_NUM_THREADS": "1"} if alone else {}),
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        _MARK: mark,
    }
