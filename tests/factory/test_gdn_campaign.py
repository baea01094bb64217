"""A campaign on the second shipped operation, from its preset, on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from factory.config import load_campaign
from factory.plan import make_plan


def launched(folder: Path, *more: str) -> dict:
    command = [sys.executable, "-m", "factory", "launch", "gdn_quickstart", "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["gdn_prefill", "gdn_quickstart"])
def test_the_presets_offer_what_they_say_and_nothing_that_breaks_a_budget(name: str) -> None:
    config = load_campaign(name)
    family = make_plan(config).family
    offered = family.offered(config.space)
    assert config.budget == len(offered)
    assert [s for s in offered if family.problems(s)] == []


def test_the_quickstart_goes_through_the_funnel_and_ranks_what_passed(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    found = launched(tmp_path, "--clock", "modelled", "--budget", "1", "--workers", "1")
    assert found["clock"] == "modelled"
    assert (found["finished"], found["passed"]) == (1, 1)
    assert found["offered"] == 11
    (row,) = found["ranked"]
    assert row["schedule"]["form"] in ("split", "fused")
    assert found["winner"] is None  # a model names none


@pytest.mark.soak
def test_every_schedule_of_the_quickstart_passes(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    found = launched(tmp_path, "--clock", "modelled")
    assert (found["finished"], found["passed"]) == (11, 11)
