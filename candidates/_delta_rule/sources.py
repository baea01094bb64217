"""Which source files decide what a candidate of a family computes, and how long that takes."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["hashed", "source_hash"]

_SHARED = Path(__file__).resolve().parent


def hashed(root: Path) -> tuple[tuple[Path, Path], ...]:
    """Modules that decide a measured result of a family, each as a folder and a path in it.

    Those are the family's own and the shared ones of this package.  Left out are baselines and
    cost models: changing them changes neither what a candidate computes nor how long it takes.

    Parameters
    ----------
    root : Path
        Folder of the family's package.
    """
    return tuple(
        (folder, path)
        for folder in (_SHARED, root)
        for path in sorted(p.relative_to(folder) for p in folder.rglob("*.py"))
        if path.parts[0] not in ("baselines", "cost.py")
    )


def source_hash(root: Path) -> str:
    """sha256 over package, path and bytes of every module that :func:`hashed` names."""
    digest = hashlib.sha256()
    for folder, path in hashed(root):
        data = (folder / path).read_bytes()
        shared = "shared" if folder == _SHARED else "own"
        digest.update(f"{shared}\0{path.as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
