"""Which source files decide what a candidate of a family computes, and how long that takes."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["source_hash"]

_SHARED = Path(__file__).resolve().parent


def source_hash(root: Path) -> str:
    """sha256 over path and bytes of every module of a family that decides a measured result.

    Those are the family's own and the shared ones of this package.  Left out are baselines and
    cost models: changing them changes neither what a candidate computes nor how long it takes.

    Parameters
    ----------
    root : Path
        Folder of the family's package.
    """
    digest = hashlib.sha256()
    for folder in (_SHARED, root):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if relative.parts[0] in ("baselines", "cost.py"):
                continue
            digest.update(f"{relative.as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
        digest.update(b"\0")  # a module that changes its package is another one
    return digest.hexdigest()
