"""All files of the documentation that hold data, as they should be."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

import leaderboard
import operations
from docs.data import commands, kernel, operation, printed, results, scale, shapes
from docs.data.pages import ROOT, marks, spliced
from docs.data.picture import picture
from docs.data.shown import Shown, choose
from factory.report.data import gather
from factory.report.page import render as report_page
from leaderboard import Store

__all__ = [
    "DEFINED", "EXAMPLE", "MEASURED", "PAGES", "PICTURE", "SEARCHES", "blocks_of",
    "example_output", "pages", "render", "reports", "shown_in",
]  # fmt: skip

MEASURED = {
    "README.md": "kda_prefill",
    "docs/index.md": "kda_prefill",
    "docs/results.md": "kda_prefill",
    "docs/kernel.md": "kda_prefill",
    "docs/scale.md": "kda_prefill",
    "docs/gdn_results.md": "gdn_prefill",
}
"""Page to the operation whose newest shipped campaign it shows; it may show none yet."""

DEFINED = {"docs/operations.md": "kda_prefill", "docs/gdn_prefill.md": "gdn_prefill"}
"""Page to the operation whose tables it has."""

PAGES = (
    *MEASURED,
    *DEFINED,
    "docs/json.md",
    "docs/commands.md",
    *printed.PAGES,
)
SEARCHES = f"docs/example/{printed.SEARCHES}"
EXAMPLE = "docs/example/report.html"
PICTURE = "docs/example/report.svg"

_PYTHON = re.compile(r"^## Python\n.*?^```python\n(.*?)^```$", re.M | re.S)


def blocks_of(name: str, shown: Mapping[str, Shown]) -> Mapping[str, str]:
    """Blocks of one page, but for the output of the first page's example.

    ``shown`` is by operation; a page about one that it lacks says so in each block.
    """
    if name in DEFINED:
        return operation.blocks(operations.get(DEFINED[name]))
    if name == "docs/json.md":
        return shapes.blocks()
    if name == "docs/commands.md":
        return commands.blocks()
    if name not in MEASURED:
        return printed.blocks(name)
    if MEASURED[name] not in shown:
        said = f"No measured campaign of `{MEASURED[name]}` is shipped yet."
        return dict.fromkeys(marks((ROOT / name).read_text("utf-8")), said)
    campaign = shown[MEASURED[name]]
    if name == "docs/scale.md":
        return scale.blocks(campaign)
    if name == "README.md":
        return results.readme_blocks(campaign)
    if name == "docs/index.md":
        return {"summary": results.readme_blocks(campaign)["summary"]}
    if name == "docs/kernel.md":
        return kernel.kernel_blocks(campaign)
    if name == "docs/results.md":
        return results.results_blocks(campaign)
    return {**results.readme_blocks(campaign), **results.results_blocks(campaign)}


def shown_in(store: Store) -> dict[str, Shown]:
    """What the pages show of measured campaigns, by operation, of those that have one."""
    found = {}
    for name in dict.fromkeys(MEASURED.values()):
        with suppress(LookupError):
            found[name] = choose(store, name)
    return found


def example_output(page: str) -> str:
    """What the first page's example prints; it is run.

    Raises
    ------
    RuntimeError
        If it fails.
    """
    found = _PYTHON.search(page)
    assert found is not None
    done = subprocess.run(
        [sys.executable, "-c", found[1]],
        cwd=ROOT / "docs",  # where there is no factory.db
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return f"```\n{done.stdout}```"


def pages(shown: Mapping[str, Shown], *, run: bool) -> dict[str, str]:
    """Text of each page; its example's output only with ``run``, for that takes seconds."""
    found = {}
    for name in PAGES:
        text = (ROOT / name).read_text("utf-8")
        blocks = dict(blocks_of(name, shown))
        if "example" in marks(text):
            kept = re.search(r"<!-- example -->\n(.*?)<!-- /example -->", text, re.S)
            assert kept is not None
            blocks["example"] = example_output(text) if run else kept[1]
        found[name] = spliced(text, blocks)
    return found


def reports(shown: Shown) -> dict[str, str]:
    """The example report as of the campaign's last change, its picture, and that of a replay."""
    report = gather(shown.store, shown.campaign, now=shown.campaign.updated_at)
    return {
        EXAMPLE: report_page(report),
        PICTURE: picture(report, shown),
        SEARCHES: printed.searches(),
    }


def render() -> dict[str, str]:
    """Every file by its name."""
    with leaderboard.shipped_store() as store:
        shown = shown_in(store)
        return pages(shown, run=True) | reports(shown[MEASURED["README.md"]])
