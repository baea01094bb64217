"""The vendored package under the name of its folder, and inputs for its tests."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

package = importlib.import_module(ROOT.name)
arguments = importlib.import_module(f"{ROOT.name}.kernel.arguments")
api = importlib.import_module(f"{ROOT.name}.api")
entry = importlib.import_module(f"{ROOT.name}.kernel.entry")

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm90 GPU (H100, H200)",
)

CONFIGS = tuple(dict.fromkeys(row.config for row in package.ROWS))
"""The distinct schedules of the dispatch table."""


# part: inputs
