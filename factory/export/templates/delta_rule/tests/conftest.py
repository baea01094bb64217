"""Finds the vendored package beside these tests, whatever its folder is called."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
for folder in (PACKAGE.parent, Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
