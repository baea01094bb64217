"""Which tests run where: those for a GPU are skipped without one, however they were chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("chosen", ["gpu", "soak"])
def test_tests_for_a_gpu_are_skipped_without_one(chosen: str) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen,
            "tests/factory/test_device_kda_gpu.py",
        ],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    counts = done.stdout.splitlines()[-1]
    assert "skipped" in counts
    assert "passed" not in counts
