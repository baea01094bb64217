"""A throw-away PostgreSQL cluster on a Unix socket, for the tests that need a real server.

Its binaries are those of the machine (``tests/install_postgresql.sh`` brings Debian's).  The
server refuses to run as root, so there it runs as the user that the package made for it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

REQUIRED = "FACTORY_REQUIRE_POSTGRESQL"
"""Environment variable under which a missing server fails the tests instead of skipping them."""

_INITDB = ("-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions")
_LIMIT_S = 240.0
"""To start or to end: a disk that is busy with something else may keep it waiting."""
_USERS = ("postgres", "nobody")
_OPTIONS = {
    "listen_addresses": "",
    "max_connections": "200",
    # Nothing here has to outlive a power cut.
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    # The shared memory of a small container has no room for it.
    "dynamic_shared_memory_type": "mmap",
    "autovacuum": "off",
}


def binaries() -> Path | None:
    """Folder of the newest server's programs; None without one."""
    on_path = shutil.which("initdb")
    if on_path is not None and (Path(on_path).resolve().parent / "postgres").exists():
        return Path(on_path).resolve().parent
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: float(p.parts[-3])
    )
    return found[-1].parent if found else None


class Server:
    """A running cluster; each database is made on demand and lives as long as it does."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder = folder
        self._owner = owner
        self._made = 0

    def url(self, database: str) -> str:
        """URL of a database of this cluster, as ``factory --db`` takes it."""
        return f"postgresql://{self._owner}@/{database}?host={quote(str(self.folder), safe='')}"

    def new(self) -> str:
        """Make an empty database and return its URL."""
        import psycopg

        self._made += 1
        name = f"board{self._made}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        return self.url(name)


@contextmanager
def running() -> Iterator[Server]:
    """Start a cluster and end it."""
    programs = binaries()
    assert programs is not None, "no PostgreSQL server on this machine"
    owner = pwd.getpwuid(os.geteuid()).pw_name
    options: dict[str, object] = {}
    if os.geteuid() == 0:
        owner = next(name for name in _USERS if _known(name))
        options = {"user": owner, "group": pwd.getpwnam(owner).pw_gid, "extra_groups": []}
    # Short, for the path of a Unix socket has a hundred bytes, and open to the other user.
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    server = None
    try:
        if options:
            shutil.chown(folder, owner)
        data = folder / "data"
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", owner, *_INITDB],
            check=True,
            capture_output=True,
            cwd=folder,
            env={**os.environ, "HOME": str(folder)},
            **options,  # type: ignore[call-overload]
        )
        settings = [part for k, v in _OPTIONS.items() for part in ("-c", f"{k}={v}")]
        with open(folder / "log", "wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", data, "-k", folder, *settings],
                stdout=log,
                stderr=log,
                cwd=folder,
                **options,  # type: ignore[call-overload]
            )
        _wait(folder, owner, server)
        yield Server(folder, owner)
    finally:
        if server is not None:
            server.send_signal(3)  # SIGQUIT: at once; there is nothing to save
            server.wait(_LIMIT_S)
        shutil.rmtree(folder, ignore_errors=True)


def _known(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _wait(folder: Path, owner: str, server: subprocess.Popen[bytes]) -> None:
    import psycopg

    end = time.monotonic() + _LIMIT_S
    while True:
        try:
            psycopg.connect(Server(folder, owner).url("postgres")).close()
            return
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > end:
                said = (folder / "log").read_text(errors="replace")
                raise RuntimeError(f"PostgreSQL did not start: {error}\n{said}") from error
            time.sleep(0.05)
