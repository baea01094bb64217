"""What the pages show of data is what the shipped results and the code say.

After a change of either, ``make docs-data`` renders all of it again, in place.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import leaderboard  # noqa: E402
from docs.data import everything  # noqa: E402
from docs.data.pages import marks, spliced  # noqa: E402
from docs.data.ship import ship  # noqa: E402
from docs.data.shown import Shown, choose  # noqa: E402
from factory.config import changed_keys, load_campaign  # noqa: E402

RENDERED = [*everything.PAGES, everything.EXAMPLE, everything.PICTURE, everything.SEARCHES]


@pytest.fixture(scope="module")
def all_shown() -> Iterator[dict[str, Shown]]:
    with leaderboard.shipped_store() as store:
        yield everything.shown_in(store)


@pytest.fixture(scope="module")
def shown(all_shown: dict[str, Shown]) -> Shown:
    """What the first page shows."""
    return all_shown[everything.MEASURED["README.md"]]


@pytest.fixture(scope="module")
def rendered(all_shown: dict[str, Shown], shown: Shown) -> dict[str, str]:
    return everything.pages(all_shown, run=False) | everything.reports(shown)


@pytest.mark.parametrize("name", RENDERED)
def test_data_on_the_pages_are_those_of_the_shipped_results(
    rendered: dict[str, str], name: str
) -> None:
    there = (ROOT / name).read_text("utf-8")
    same = there == rendered[name]
    assert same, f"{name} is not what the shipped results give; run: make docs-data"


@pytest.mark.parametrize("name", everything.PAGES)
def test_every_block_of_a_page_is_rendered(all_shown: dict[str, Shown], name: str) -> None:
    page = (ROOT / name).read_text("utf-8")
    opened = re.findall(r"^<!-- ([\w -]+) -->$", page, re.M)
    assert opened == marks(page), f"{name} has a block that does not end"
    wanted = {*everything.blocks_of(name, all_shown)} | (
        {"example"} if name == "README.md" else set()
    )
    assert set(opened) == wanted


def test_a_block_is_put_in_place_and_the_rest_is_left_alone() -> None:
    page = "a\n<!-- x y -->\nold\n\nold\n<!-- /x y -->\nb\n"
    assert spliced(page, {"x y": "new"}) == "a\n<!-- x y -->\n\nnew\n\n<!-- /x y -->\nb\n"
    with pytest.raises(KeyError):
        spliced(page, {"other": "new"})


def test_the_summary_says_what_the_leaderboard_says(shown: Shown) -> None:
    """Read back from the page, by another way than it was rendered."""
    page = (ROOT / "README.md").read_text("utf-8")
    first = leaderboard.winner(shown.store, shown.campaign.id)
    assert first is not None
    assert f"`{first.schedule_key}`" in page
    drift = shown.campaign.config["device"]["drift"]
    for control in shown.controls:
        against = leaderboard.ratio(shown.store, first.id, control)
        found = re.search(rf"\* `{control}`: ([^;]*)", page)
        assert found is not None, control
        near = abs(against.ratio - 1) <= drift
        times = max(against.ratio, 1 / against.ratio)
        said = f"{times:.1f}" if times >= 1.5 else f"{times:.2f}"
        fast, slow = f"{said} times as fast", f"{said} times as slow"
        assert ("about equal" if near else fast if against.ratio < 1 else slow) in found[1]
        counts = {
            "faster on": sum(s.ratio < 1 - drift for s in against.shapes),
            "slower on": sum(s.ratio > 1 + drift for s in against.shapes),
        }
        for words, count in counts.items():
            if count not in (0, len(against.shapes)):
                assert f"{words} {count}" in found[1], control


@pytest.mark.parametrize("page", ["docs/results.md", "docs/gdn_results.md"])
def test_the_command_on_a_page_is_that_of_its_campaign(
    all_shown: dict[str, Shown], page: str
) -> None:
    found = re.search(
        r"^\| command \| `factory launch (\w+)(?: --sampler (\w+))?`: (\d+) schedules \|$",
        (ROOT / page).read_text("utf-8"),
        re.M,
    )
    assert found is not None
    campaign = all_shown[everything.MEASURED[page]].campaign
    asked = load_campaign(found[1], {"sampler": found[2], "clock": "gpu"})
    assert changed_keys(campaign.config, asked.model_dump()) == []
    assert asked.sampler == campaign.config["sampler"]
    assert (asked.name, int(found[3])) == (campaign.name, campaign.budget)


def test_the_page_of_scale_says_of_the_searches_what_their_table_says() -> None:
    """The table is rendered, the sentence under the drawing is not."""
    table = (ROOT / "docs/search.md").read_text("utf-8")
    said = (ROOT / "docs/scale.md").read_text("utf-8")
    lines = re.findall(r"^(tpe|random|grid) +0 +1 +([\d.]+) +(\d+%)", table, re.M)
    assert [name for name, *_ in lines] == ["tpe", "random", "grid"]
    for name, trials, share in lines:
        assert re.search(rf"`{name}` {trials}( trials)? \({share}[ )]", said), name


def test_a_shipped_campaign_gets_a_file_of_its_own(shown: Shown, tmp_path: Path) -> None:
    path = ship(shown.store, shown.campaign, tmp_path)
    assert path.name.startswith(f"{shown.campaign.operation}-h200-")
    with leaderboard.open_store(f"sqlite:///{tmp_path}/again.db") as store:
        leaderboard.import_file(store, path)
        again = choose(store, shown.campaign.operation)
        with pytest.raises(LookupError, match="no finished campaign of toy"):
            choose(store, "toy")
        assert [r.uid for r in again.rows] == [r.uid for r in shown.rows]


def test_what_is_not_measured_is_not_shipped(shown: Shown, tmp_path: Path) -> None:
    running = shown.campaign.model_copy(update={"status": leaderboard.CampaignStatus.RUNNING})
    with pytest.raises(ValueError, match="not finished"):
        ship(shown.store, running, tmp_path)
    with leaderboard.open_store(f"sqlite:///{tmp_path}/modelled.db") as store:
        empty = store.create_campaign(shown.campaign)
        with pytest.raises(ValueError, match="no measured time"):
            ship(store, empty, tmp_path)
    assert not list(tmp_path.glob("*.jsonl*"))
