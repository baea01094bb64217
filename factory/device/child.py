"""The process in which a candidate runs: ``python -m factory.device.child FD PARENT``.

It holds no oracle, no seed and no database.  What it is told comes as pickle
from the job; what it answers is JSON.  The clock is bound (:class:`Open`)
before anything foreign is imported (:class:`Load`).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# No import once foreign code is there: that could be its turn, outside all windows.
from candidates import BuildError, ToolchainError
from factory.device.clock import Course, take_times
from factory.device.hardware import Bench, RecordingError
from factory.device.protocol import Bound, Case, Load, Open, Ref, Run, Target, Time

_PR_SET_PDEATHSIG = 1
_LONGEST_REASON = 4000
"""Characters of a fault's words, which may be a candidate's: an answer has to fit into a frame."""


class _Fault(Exception):
    """Carries a verdict to the job: ``kind`` says whose fault it is."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@contextmanager
def _foreign(doing: str) -> Iterator[None]:
    """Attribute whatever is raised inside to the candidate."""
    try:
        yield
    except _Fault:
        raise
    except RecordingError as error:
        raise _Fault("harness", _said(error)) from error
    except BuildError as error:
        raise _Fault("build", _said(error)) from error
    except BaseException as error:
        if isinstance(error, ToolchainError) and doing == "load":
            raise _Fault("toolchain", _said(error)) from error
        if type(error) is OSError and error.errno == errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            said = f"{doing}: its output, or a file it writes, exceeds {limit / 2**20:.0f} MiB"
            raise _Fault("candidate", said) from error
        text = _said(error).strip().splitlines()
        raise _Fault(
            "candidate", f"{doing}: {type(error).__name__}: {text[0] if text else ''}"
        ) from error


def _said(error: BaseException) -> str:
    """Its message, which may be code of a candidate too."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  whatever it is, it is no message
        return ""


class _Service:
    def __init__(self, connection: Connection, bench: Bench) -> None:
        self._connection = connection
        self._bench = bench
        self._target = Target()
        self._runnable: Any = None
        self._loaded: dict[int, Any] = {}
        """Baselines by the identity of the message's inputs; emptied with each message."""
        # Bound before foreign code is imported, as the clock is.
        import torch

        self._tensor = torch.Tensor
        self._address = torch.Tensor.data_ptr
        self._stride = torch.Tensor.stride
        self._copy = torch.Tensor.copy_
        self._clone = torch.Tensor.clone

    def load(self, message: Load) -> dict[str, Any]:
        with _foreign("load"):
            self._target = pickle.loads(message.target)
            if self._target.family is not None:
                assert self._target.schedule is not None
                self._runnable = self._load(self._target.family, self._target.schedule)
                self._bench.synchronize()
                chunk = getattr(self._runnable, "chunk_tokens", None)
                return {
                    "kernel_names": list(self._runnable.kernel_names),
                    "chunk": None if chunk is None else int(chunk),
                    "bitwise_causal": bool(getattr(self._runnable, "bitwise_causal", False)),
                }
        return {"kernel_names": []}

    def _load(self, family: Any, schedule: Any) -> Any:
        if self._target.objects is not None:
            try:
                return family.load_objects(schedule, Path(self._target.objects))
            except Exception:  # noqa: BLE001  compiling it is slower, and the same
                _log()
        return family.load(schedule)

    def run(self, message: Run) -> dict[str, Any]:
        self._loaded.clear()
        for case in message.cases:
            self._at(case.label)
            for number, bound in enumerate(case.sets):
                for ref in bound.outputs.values():
                    self._bench.poison(ref.nbytes)
                with _foreign("call"):
                    call = self._bind(self._for(case, bound), bound)
                    if number in case.busy:
                        self._bench.disturb()
                    returned = call()
                    self._bench.synchronize()
                self._deliver(returned, bound)
            self._bench.synchronize()
        return {}

    def time(self, message: Time) -> dict[str, Any]:
        self._loaded.clear()
        kept: dict[int, tuple[Bound, Any]] = {}
        courses, labels, skipped, names = [], [], {}, {}
        for case in message.cases:
            self._at(case.label)
            with _foreign("bind"):
                try:
                    courses.append(self._course(case, kept))
                except ValueError as error:
                    if self._target.baseline is None:
                        raise
                    skipped[case.label] = str(error)
                    continue
                names[case.label] = list(self._for(case, case.sets[0]).kernel_names)
            labels.append(case.label)
        begin = self._bench.now_ns()
        with _foreign("timed call"):
            readings = take_times(
                self._bench, courses, message.sampling, lambda number: self._at(labels[number])
            )
            self._bench.synchronize()
        passed_s = (self._bench.now_ns() - begin) / 1e9
        for bound, returned in kept.values():
            self._deliver(returned, bound)
        self._bench.synchronize()
        return {
            "readings": {n: asdict(r) for n, r in zip(labels, readings, strict=True)},
            "skipped": skipped,
            "kernel_names": names,
            "took_s": max(0.0, passed_s - sum(r.first_s for r in readings)),
        }

    def _course(self, case: Case, kept: dict[int, tuple[Bound, Any]]) -> Course:
        calls = [self._kept(case, bound, kept) for bound in case.sets]
        if case.work is None:
            return Course(calls, lambda i: calls[i % len(calls)])
        target = [self._tensors(bound) for bound in (case.work, *case.sets)]
        work, key = self._kept(case, case.work, kept), id(case.work)

        def sample(i: int) -> Callable[[], Any]:
            # Of the sample before; out here, because looking takes time too.
            if key in kept:
                self._look(kept[key][1])
            # New data at the address that the call was bound to: neither what
            # was computed when binding nor what an earlier call left can serve.
            for name, tensor in target[0].items():
                self._copy(tensor, target[1 + (i + 1) % len(calls)][name])
            return work

        return Course(calls, sample)

    def _kept(
        self, case: Case, bound: Bound, kept: dict[int, tuple[Bound, Any]]
    ) -> Callable[[], Any]:
        """Bind a call that remembers what it last returned, at the cost of one store."""
        call = self._bind(self._for(case, bound), bound)
        key = id(bound)

        def remembered() -> None:
            kept[key] = (bound, call())

        return remembered

    def _for(self, case: Case, bound: Bound) -> Any:
        """The thing to bind: the candidate, or the baseline loaded for these raw inputs."""
        if self._target.baseline is None:
            return self._runnable
        if id(bound) not in self._loaded:
            raw = None if bound.raw is None else self._arguments(bound.raw)
            self._loaded[id(bound)] = self._target.baseline.load(case.workload, raw)
        return self._loaded[id(bound)]

    def _bind(self, runnable: Any, bound: Bound) -> Callable[[], Any]:
        outputs = {n: self._bench.view(ref) for n, ref in bound.outputs.items()}
        call: Callable[[], Any] = runnable.bind(self._arguments(bound.inputs), outputs)
        return call

    def _arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {n: self._bench.view(v) if isinstance(v, Ref) else v for n, v in values.items()}

    def _tensors(self, bound: Bound) -> dict[str, Any]:
        return {n: self._bench.view(v) for n, v in bound.inputs.items() if isinstance(v, Ref)}

    def _look(self, returned: Any) -> None:
        """Refuse what could run code of its own when it is read: that could be the work itself.

        It would run outside all windows, and leave outputs that are right.
        """
        with _foreign("result"):
            if type(returned) is not dict:
                raise _Fault("rejected", f"returns {type(returned).__name__}, expected a dict")
            for name, tensor in returned.items():
                if type(name) is not str:
                    said = f"names an output by {type(name).__name__}, expected str"
                    raise _Fault("rejected", said)
                if type(tensor) is not self._tensor:
                    said = f"returns {name} as {type(tensor).__name__}, expected torch.Tensor"
                    raise _Fault("rejected", f"{said} itself")

    def _deliver(self, returned: Any, bound: Bound) -> None:
        """Put what was returned where the job looks for it."""
        self._look(returned)
        for name, ref in bound.outputs.items():
            with _foreign("result"):
                if name not in returned:
                    there = ", ".join(map(repr, returned)) or "nothing"
                    raise _Fault("rejected", f"output {name!r} is missing: there is {there}")
                tensor = returned[name]
                shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if shape != ref.shape:
                raise _Fault("rejected", f"returns {name} as {shape}, expected {ref.shape}")
            if dtype != ref.dtype and self._target.baseline is None:
                raise _Fault("rejected", f"returns {name} as {dtype}, expected {ref.dtype}")
            home = self._bench.view(ref)
            if tensor.device != home.device:
                said = f"returns {name} on {tensor.device}, expected {home.device}"
                raise _Fault("rejected", said)
            with _foreign("result"):  # a sparse tensor has no address
                # Not a method of the object, which can carry its own under that name.
                in_place = self._address(tensor) == self._address(home)
                if in_place and self._stride(tensor) != self._stride(home):
                    tensor = self._clone(tensor)  # what is copied may not be written meanwhile
                    in_place = False
                if not in_place:
                    self._copy(home, tensor)

    def _at(self, label: str) -> None:
        self._connection.send_bytes(json.dumps({"at": label}).encode())


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the job dies, however it dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _go_first() -> None:
    """Where memory runs out between two looks at this process, it and no other is ended."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _limit_files(nbytes: int) -> None:
    """No file of this process, its log among them, grows beyond that; for good."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def _log() -> None:
    """The current exception into the log, if that has room for it."""
    with suppress(OSError, ValueError):
        traceback.print_exc()


def _answer(
    connection: Connection, work: Callable[[], dict[str, Any]], *, quiet: bool = False
) -> bool:
    """Do what a message asks and report it; ``quiet`` reports faults only."""
    try:
        reply = {"ok": work()}
    except _Fault as fault:
        reply = _blame(fault.kind, str(fault))
        _log()
    except Exception as error:  # noqa: BLE001  reported to the job, which ends this process
        reply = _blame("harness", f"{type(error).__name__}: {error}")
        _log()
    if not (quiet and "ok" in reply):
        connection.send_bytes(json.dumps(reply).encode())
    return "ok" in reply


def _blame(kind: str, message: str) -> dict[str, Any]:
    return {"fault": {"kind": kind, "message": message[:_LONGEST_REASON]}}


def main(number: int, parent: int) -> None:
    """Serve one job until it hangs up or something fails."""
    _die_with(parent)
    _go_first()
    connection = Connection(number)
    service: _Service | None = None

    def handle(message: Any) -> dict[str, Any]:
        nonlocal service
        if isinstance(message, Open):
            _limit_files(message.file_bytes)
            service = _Service(connection, message.device.bench(message.arena, message.gpu_bytes))
            return {}
        assert service is not None
        if isinstance(message, Load):
            return service.load(message)
        return service.run(message) if isinstance(message, Run) else service.time(message)

    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        # The first answer a job hears is the one to Load.
        if not _answer(connection, partial(handle, message), quiet=isinstance(message, Open)):
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
