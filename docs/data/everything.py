"""All files of the documentation that hold data, as they should be."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping

import leaderboard
import operations
from docs.data import commands, operation, results, shapes
from docs.data.pages import ROOT, marks, spliced
from docs.data.picture import picture
from docs.data.shown import Shown, choose
from factory.report.data import gather
from factory.report.page import render as report_page

__all__ = ["EXAMPLE", "PAGES", "blocks_of", "example_output", "pages", "render", "reports"]

PAGES = (
    "README.md",
    "docs/results.md",
    "docs/kernel.md",
    "docs/operations.md",
    "docs/json.md",
    "docs/commands.md",
)
EXAMPLE = "docs/example/report.html"
PICTURE = "docs/example/report.svg"

_PYTHON = re.compile(r"^## Python\n.*?^```python\n(.*?)^```$", re.M | re.S)


def blocks_of(name: str, shown: Shown) -> Mapping[str, str]:
    """Blocks of one page, but for the output of the first page's example."""
    if name == "README.md":
        return results.readme_blocks(shown)
    if name == "docs/results.md":
        return results.results_blocks(shown)
    if name == "docs/kernel.md":
        return results.kernel_blocks(shown)
    if name == "docs/json.md":
        return shapes.blocks()
    if name == "docs/commands.md":
        return commands.blocks()
    return operation.blocks(operations.get("kda_prefill"))


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


def pages(shown: Shown, *, run: bool) -> dict[str, str]:
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
    """The example report and its picture, as of the campaign's last change."""
    report = gather(shown.store, shown.campaign, now=shown.campaign.updated_at)
    return {EXAMPLE: report_page(report), PICTURE: picture(report)}


def render() -> dict[str, str]:
    """Every file by its name."""
    with leaderboard.shipped_store() as store:
        shown = choose(store)
        return pages(shown, run=True) | reports(shown)
