"""A CPU worker process: runs emulate and compile tasks for one driver, one at a time.

It ends when its driver does, however that happens, and keeps whatever the
stage prints, compilers and dying native code included, in the trial's log.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from factory.executors.base import Task, WorkerContext

__all__ = ["worker_main"]


def worker_main(context: WorkerContext, tasks: Connection, lifeline: Connection) -> None:
    """Serve tasks until the driver closes the connection.

    Sends ``("ready", None, 0.0)`` once, then for each task
    ``("result", StageResult, seconds)`` or ``("fault", message, seconds)``.
    """
    os.setsid()  # Ctrl-C is the driver's to handle, and killing the group takes compilers along
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_driver, args=(lifeline,), daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        import candidates
        import operations
        from factory.artefacts import default_store
        from factory.funnel import run_cpu_stage
        from factory.stages.base import HarnessError, StageResult
        from factory.stages.emulate import References

        operation = operations.get(context.operation)
        family = candidates.get(context.operation)
        references = References(operation, seed=context.seed)
        store = default_store()
        import torch

        torch.set_num_threads(1)
    except Exception as error:  # noqa: BLE001 - the driver reports it and stops
        tasks.send(("fault", f"worker did not start: {type(error).__name__}: {error}", 0.0))
        return
    tasks.send(("ready", None, 0.0))
    while True:
        try:
            task: Task = tasks.recv()
        except EOFError:
            return
        start = time.perf_counter()
        kind: str
        payload: StageResult | str
        try:
            with _logged(task):
                try:
                    result = run_cpu_stage(
                        task.stage,
                        family,
                        task.schedule,
                        references,
                        store=store,
                        objects=context.measured,
                    )
                    kind, payload = "result", result
                except HarnessError as error:
                    kind, payload = "fault", str(error)
                except Exception as error:  # noqa: BLE001 - a bug here is no verdict on a candidate
                    traceback.print_exc()
                    kind = "fault"
                    payload = f"{task.stage} failed: {type(error).__name__}: {error}"
        except OSError as error:  # of the log itself; what the stage raises is caught inside
            kind = "fault"
            payload = f"cannot write {task.log_path}: {error.strerror or error}"
        tasks.send((kind, payload, time.perf_counter() - start))


def _die_with_driver(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


@contextmanager
def _logged(task: Task) -> Iterator[None]:
    """Send file descriptors 1 and 2 to the trial's log, native output included."""
    path = Path(task.log_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as log:
        log.write(f"== {task.stage}: {task.schedule.key}\n")
        log.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os.dup2(saved[0], 1)
                os.dup2(saved[1], 2)
                os.close(saved[0])
                os.close(saved[1])
