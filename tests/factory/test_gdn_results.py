"""The page of Gated DeltaNet's results: what it shows once a campaign of it is shipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import export_board as board
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import leaderboard  # noqa: E402
from docs.data import everything  # noqa: E402
from docs.data.pages import marks, spliced  # noqa: E402

NAME = "docs/gdn_results.md"
NONE = "No measured campaign of `gdn_prefill` is shipped yet."


def lines() -> list[str]:
    """A made-up campaign with a control that takes what the second schedule takes."""
    made: list[dict[str, Any]] = [json.loads(line) for line in board.lines(subject=board.GDN)]
    *items, end = made
    for item in items:
        if item["kind"] == "campaign":
            item["config"] = {"device": {"drift": 0.03}, "controls": None}
        elif item["kind"] == "trial":
            item["errors"] += [e | {"tensor": "final_state"} for e in item["errors"]]
    phases = {"search": "before", "final": "final"}
    theirs = [
        item
        | {"uid": f"{item['uid']}-fla", "trial_uid": None, "control": "fla"}
        | {"phase": phases[item["phase"]]}
        for item in items
        if item.get("trial_uid") == board.uid("trial", 1) and not item["held_out"]
    ]
    end["lines"] += len(theirs)
    return [json.dumps(item) for item in (*items, *theirs, end)]


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, Any]]:
    with leaderboard.open_store("sqlite://") as store:
        leaderboard.import_lines(store, lines())
        yield everything.shown_in(store)


def test_the_page_has_a_place_for_everything_that_is_known_of_a_campaign(
    shown: dict[str, Any],
) -> None:
    assert set(shown) == {"gdn_prefill"}
    page = (ROOT / NAME).read_text("utf-8")
    blocks = everything.blocks_of(NAME, shown)
    assert set(marks(page)) == set(blocks)
    text = spliced(page, blocks)
    assert NONE not in text
    assert board.GDN.schedules[0].key in text
    assert "### fla" in text
    assert "| `2048/4/8/1` |" in text


def test_without_a_campaign_each_place_says_so() -> None:
    page = (ROOT / NAME).read_text("utf-8")
    blocks = everything.blocks_of(NAME, {})
    assert set(blocks) == set(marks(page))
    assert set(blocks.values()) == {NONE}
