"""The engine of the documentation, an example of vendoring, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ENGINE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "kda_engine.py"


def load_engine() -> ModuleType:
    """Import it anew."""
    spec = importlib.util.spec_from_file_location("kda_engine", ENGINE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kda_engine"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
