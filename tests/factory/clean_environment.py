"""A virtual environment that holds named distributions and what they require, and nothing else.

Made of links to what is installed here, so that it costs no network and a second or two.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

__all__ = ["make", "required"]


def required(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Installed distributions that these need, themselves included, by normal name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        try:
            here = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform, or left out where this environment was made
        extras = [{"extra": e} for e in (*wanted.extras, "")]
        known = name in found
        found[name] = here
        for line in here.requires or ():
            needs = Requirement(line)
            environment = default_environment()
            if needs.marker is None or any(
                needs.marker.evaluate({**environment, **e}) for e in extras
            ):
                inner = re.sub(r"[-_.]+", "-", needs.name).lower()
                if inner not in found or (not known and needs.extras):
                    waiting.append(needs)
    return found


def make(folder: Path, names: Iterable[str]) -> Path:
    """Make it in ``folder``; returns its interpreter."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    for distribution in required(names).values():
        for file in distribution.files or ():
            top = file.parts[0]
            if top in ("..", "__pycache__", "/") or (site / top).exists():
                continue
            source = Path(str(distribution.locate_file(top)))
            if source.exists():
                (site / top).symlink_to(source)
    return folder / "bin" / "python"
