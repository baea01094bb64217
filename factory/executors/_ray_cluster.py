"""A Ray cluster for one campaign: started on this machine, or joined by address.

It knows how to get a cluster and what may be wrong with one; it must not know
what a trial is.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from factory.errors import MachineError
from factory.machine import cpu_count, sm90_gpus

__all__ = ["Cluster", "import_ray", "join", "plasma_directory", "probe", "start"]

OBJECT_STORE_BYTES = 80 << 20
"""Just above the least that Ray accepts (75 MiB): only small records cross it."""

_REACH_S = 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""What an HTTP/2 client says first (RFC 9113, section 3.4): the preface and empty settings."""
_SETTINGS = 4
"""Frame type of the only thing that an HTTP/2 server may answer it with."""

_SHIPPED = ("operations", "candidates", "factory", "leaderboard")


@dataclass(frozen=True)
class Cluster:
    """What a campaign may use of a cluster.

    Parameters
    ----------
    ray : module
    cpus, gpus : int
        GPUs are those that nobody holds.
    spare : int
        CPUs that every GPU's node can keep for it.
    address : str or None
        Where it was joined; None if it runs on this machine, so that files
        written here are seen everywhere in it.
    owned : bool
        Whether this process connected to it and has to leave it.
    """

    ray: Any
    cpus: int
    gpus: int
    spare: int
    address: str | None
    owned: bool

    def close(self) -> None:
        """Leave it; one started here ends, with all of its processes."""
        if self.owned:
            self.ray.shutdown()


def import_ray() -> Any:
    """The ``ray`` module.

    Raises
    ------
    MachineError
        It is not installed or does not import.
    """
    try:
        # Ray reads this once.  What it says goes to standard output, which is ours;
        # a worker's death comes back as an event, and the rest is in Ray's own logs.
        with _environment({"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}):
            return import_module("ray")
    except ImportError as error:
        raise MachineError(
            f"executor 'ray' needs ray, and it does not import ({_line(error)}); "
            "pip install 'ray>=2.50', or use --executor inline"
        ) from error


def start(*, workers: int, measured: bool, most_ahead: int, gpus: int | None = None) -> Cluster:
    """A cluster of this machine alone; one that this process already runs is used as it is.

    Parameters
    ----------
    workers : int
        CPU tasks at once; 0 leaves it to the machine.
    measured : bool
        Whether its sm90 GPUs are wanted.
    most_ahead : int
        CPUs worth keeping for a GPU.
    gpus : int, optional
        GPUs to announce, instead of those of this machine.

    Raises
    ------
    MachineError
        Ray is missing or does not start.
    """
    ray = import_ray()
    if ray.is_initialized():
        return _describe(ray, None, most_ahead, owned=False)
    found = [g.uuid for g in sm90_gpus()] if measured else []
    count = len(found) if gpus is None else gpus
    environment = {"RAY_USAGE_STATS_ENABLED": "0"}
    if found and count <= len(found):  # the Hopper ones, by names that no numbering can confuse
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(found[:count])
    try:
        with _environment(environment):
            ray.init(
                address="local",  # never another campaign's cluster, nor what is left of one
                num_cpus=max(cpu_count(), workers),
                num_gpus=count,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _plasma_directory=plasma_directory(),
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Workers come with their tasks, not one for each CPU of a large machine.
                _system_config={"prestart_worker_first_driver": False},
            )
        return _describe(ray, None, most_ahead, owned=True)
    except BaseException as error:
        ray.shutdown()
        if isinstance(error, Exception):
            raise MachineError(
                f"ray does not start on this machine: {_line(error)}; use --executor inline"
            ) from error
        raise


def join(address: str, operation: str, *, most_ahead: int, wait_s: float = 120.0) -> Cluster:
    """Join a running cluster and bring the project's code to it.

    Parameters
    ----------
    address : str
        ``host:port``, or ``auto`` for the cluster of this machine.
    operation : str
        What is to run there.
    most_ahead : int
        CPUs worth keeping for a GPU.
    wait_s : float
        How long its first task may take, shipping the code included.

    Raises
    ------
    MachineError
        Nothing answers there, it is no Ray cluster, another version, or it
        has no CPU to give.  The message names the fix.
    """
    ray = import_ray()
    here = f"Ray cluster at {address}"
    if address.startswith("ray://"):
        raise MachineError(
            f"{here}: Ray Client addresses are not supported; run on a node of the cluster and "
            "give its own address, host:port"
        )
    if address != "auto":
        probe(address)
    try:
        with _environment({"RAY_USAGE_STATS_ENABLED": "0"}):
            ray.init(
                address=address,
                runtime_env={"py_modules": _modules(), "excludes": ["__pycache__"]},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        cluster = _describe(ray, address, most_ahead, owned=True)
        _greet(ray, here, operation, wait_s)
    except MachineError:
        ray.shutdown()
        raise
    except BaseException as error:
        ray.shutdown()
        if isinstance(error, Exception):
            raise MachineError(
                f"{here} cannot be joined: {_line(error)}; it needs the same ray and Python as "
                "here, and RAY_AUTH_MODE=token in the environment if it asks for a token"
            ) from error
        raise
    if cluster.cpus < 1:
        cluster.close()
        raise MachineError(f"{here} has no CPU to give; add a node with 'ray start --address'")
    return cluster


def probe(address: str) -> None:
    """Find out in seconds what Ray itself needs minutes for: whether a cluster answers.

    Raises
    ------
    MachineError
        The address is malformed, nothing listens there, or something else does.
    """
    here = f"no Ray cluster at {address}"
    fix = "start one with 'ray start --head --port PORT', or leave --ray-address out"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise MachineError(f"{here}: give host:port, for example 10.0.0.1:6379")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S) as link:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            link.settimeout(_REACH_S)
            link.sendall(_PREFACE)
            answer = link.recv(9)
    except TimeoutError:
        raise MachineError(f"{here}: it does not answer within {_REACH_S:g} s; {fix}") from None
    except OSError as error:
        raise MachineError(f"{here}: {error.strerror or error}; {fix}") from None
    if len(answer) < 4 or answer[3] != _SETTINGS:
        raise MachineError(f"{here}: something else listens there; {fix}")


def plasma_directory(shm: str = "/dev/shm", free: int | None = None) -> str:
    """Where the object store's memory is mapped.

    ``shm`` if it has room; else the temporary folder, which is as good for the
    few small records that a campaign sends.
    """
    if free is None:
        try:
            found = os.statvfs(shm)
        except OSError:
            return tempfile.gettempdir()
        free = found.f_bavail * found.f_frsize
    return shm if free > OBJECT_STORE_BYTES * 5 // 4 else tempfile.gettempdir()


def _describe(ray: Any, address: str | None, most_ahead: int, *, owned: bool) -> Cluster:
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    with_gpus = [(int(n.get("CPU", 0)), int(n["GPU"])) for n in nodes if n.get("GPU", 0) >= 1]
    total = sum(count for _, count in with_gpus)
    free = total if address is None else int(ray.available_resources().get("GPU", 0))
    spare = min([most_ahead, *(max(0, (cpus - 1) // gpus) for cpus, gpus in with_gpus)])
    cpus = sum(int(n.get("CPU", 0)) for n in nodes)
    return Cluster(ray, cpus, free, spare if total else 0, address, owned)


def _greet(ray: Any, here: str, operation: str, wait_s: float) -> None:
    """Run one task: the cluster is alive, has a CPU, and imports the code it was sent."""
    ref = ray.remote(num_cpus=1, max_retries=0)(_versions).remote(operation)
    try:
        theirs = ray.get(ref, timeout=wait_s)
    except ray.exceptions.GetTimeoutError:
        raise MachineError(
            f"{here}: it started no task within {wait_s:g} s; look at 'ray status' for free CPUs "
            "and dead nodes"
        ) from None
    ours = _versions(operation)
    for name, version in ours.items():
        if theirs[name] != version:
            raise MachineError(
                f"{here} has {name} {theirs[name]} where this machine has {version}; "
                "install the same there"
            )


def _versions(operation: str) -> Mapping[str, str]:
    """What must be the same on both sides for verdicts to be comparable."""
    import candidates
    from factory.machine import installed
    from factory.provenance import digest

    # Importing shows that the code arrived whole with what it needs.
    import_module("factory.executors._ray_remote")
    sources = {
        f"{folder.name}/{path.relative_to(folder)}": path.read_text("utf-8")
        for folder in map(Path, _modules())
        for path in sorted(folder.rglob("*.py"))
    }
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": (installed("torch") or "missing").partition("+")[0],
        "nvidia-cutlass-dsl": installed("nvidia-cutlass-dsl") or "missing",
        "project source": digest(sources),
        f"source of {operation}": candidates.get(operation).source_hash(),
    }


def _modules() -> list[str]:
    """Folders of the project's packages as this process imports them."""
    return [str(Path(import_module(name).__file__ or "").parent) for name in _SHIPPED]


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for processes started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
