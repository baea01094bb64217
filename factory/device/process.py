"""One child process of a job: started, spoken to, watched, ended.

It knows messages and limits; it must not know what a right answer is.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from factory.device.protocol import Load, Open
from factory.stages.base import HarnessError

__all__ = ["Child", "ChildFailure", "Spawner"]

_POLL_S = 0.2
_REAP_S = 20.0
_TAIL_BYTES = 4000
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
    ) -> None:
        self.log_path = log_path
        self._host_bytes = host_bytes
        self._load_s = load_s
        self._lock = threading.Lock()
        """Between the job's thread and the timer of the load limit."""
        self._expired = False
        self._heard = False
        """Whether anything was received from it."""
        self._gone = False
        """Whether it was waited for: its number may belong to somebody else."""
        self._ready: dict[str, Any] | None = None
        self._at = ""
        self._link, theirs = Pipe()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "ab") as log:
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
                env=_environment(),
            )
        theirs.close()
        self._left_s = load_s
        self._started = time.monotonic()
        self._timer: threading.Timer | None = None
        self._arm()
        try:
            self._link.send(opening)
            self._link.send(load)
        except OSError:
            pass  # it died already: ready() finds out how

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
            self._ready = self._answer(None)
            self._disarm()
        return self._ready

    def ask(self, message: Any, limit_s: float) -> dict[str, Any]:
        """Send a message and wait for the answer; the process is ended if there is none.

        Raises
        ------
        ChildFailure
        """
        self._at = ""
        try:
            self._link.send(message)
        except OSError:
            raise self._death() from None
        return self._answer(limit_s)

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
        with self._lock:
            self._gone = True
            self._link.close()

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
            if self._gone or self._heard or self._link.poll(0):
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

    def _answer(self, limit_s: float | None) -> dict[str, Any]:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            try:
                if self._link.poll(_POLL_S):
                    with self._lock:
                        self._heard = True
                        answer = self._link.recv_bytes()
                    reply: dict[str, Any] = json.loads(answer)
                    if "at" in reply:
                        self._at = str(reply["at"])
                        continue
                    if "fault" in reply:
                        self.kill()
                        raise ChildFailure(
                            reply["fault"]["kind"], self._where(reply["fault"]["message"])
                        )
                    return dict(reply["ok"])
            except (EOFError, OSError):
                raise self._death() from None
            except (ValueError, KeyError, TypeError):
                self.kill()
                raise ChildFailure("candidate", "its process wrote nonsense to the job") from None
            self._watch_memory()
            if deadline is not None and time.monotonic() > deadline:
                self.kill()
                raise ChildFailure("timeout", self._where(f"no answer within {limit_s:.0f} s"))

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
        expired = self._expired
        self.kill()
        if expired:
            return ChildFailure("timeout", f"did not load within {self._load_s:.0f} s")
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = self._last_words()
        return ChildFailure("died", self._where(f"its process ended: {how}{said}"))

    def _where(self, message: str) -> str:
        return f"{self._at}: {message}" if self._at else message

    def _last_words(self) -> str:
        """The last line of its log that looks like an error, or nothing."""
        with open(self.log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        telling = [line.strip() for line in lines if re.search(r"error|abort|fatal", line, re.I)]
        return f" ({telling[-1][:200]})" if telling else ""


def _environment() -> dict[str, str]:
    """The job's own, with its import path and a traceback on fatal signals."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
