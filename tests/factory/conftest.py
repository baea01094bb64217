"""Makes the toy operation a plugged-in distribution for tests and their child processes."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = str(Path(__file__).parent / "plugins")
sys.path.insert(0, PLUGINS)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [PLUGINS, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where the schedule that dies once remembers that it did. Set before any worker starts: a
# server of worker processes hands out the environment that it was itself started with.
os.environ["TOY_MARK"] = os.path.join(tempfile.gettempdir(), f"toy-mark-{os.getpid()}")
