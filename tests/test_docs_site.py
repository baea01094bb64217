"""The documentation builds as a site, and a link that leads nowhere fails it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

ROOT = Path(__file__).resolve().parents[1]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site_and_its_navigation(site: Path) -> None:
    pages = {p.relative_to(ROOT / "docs").with_suffix("") for p in ROOT.glob("docs/**/*.md")}
    found = {p.parent.relative_to(site) for p in site.rglob("index.html")}
    assert {p for p in pages if p.name != "index"} == found - {Path()}
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    assert {Path(p).with_suffix("") for p in listed} == pages


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("operations", "operations.Operation.oracle"),
        ("candidates", "candidates.Family.emulate"),
        ("leaderboard", "leaderboard.query"),
        ("factory", "factory.config.CampaignConfig"),
    ],
)
def test_the_api_reference_is_made_of_the_docstrings(site: Path, package: str, name: str) -> None:
    page = (site / "api" / package / "index.html").read_text("utf-8")
    assert f'id="{name}"' in page
    assert not re.search(r":(mod|class|func|meth):", page)


def test_no_mark_of_markdown_is_left_on_a_page(site: Path) -> None:
    for path in site.rglob("index.html"):
        shown = re.sub(r"<pre>.*?</pre>", "", path.read_text("utf-8"), flags=re.S)
        assert not re.search(r"\\\||:(?:func|class|meth|attr):|\]\(", shown), path


def test_a_page_has_one_title(site: Path) -> None:
    for path in site.rglob("index.html"):
        assert path.read_text("utf-8").count("<h1") == 1, path


def test_the_example_of_a_report_is_served_and_the_tools_are_not(site: Path) -> None:
    assert (site / "example" / "report.html").read_text("utf-8").startswith("<!doctype html>")
    assert (site / "examples" / "kda_one_anchor.py").is_file()
    assert not (site / "data").exists()


def test_nothing_of_the_site_is_asked_of_another_server(site: Path) -> None:
    page = (site / "index.html").read_text("utf-8")
    assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', page)


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("api"))
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    # Without the API pages: they are slow, and not what is asked here.
    config = config[: config.index("  - API:")] + config[config.index("markdown_extensions:") :]
    config = config[: config.index("  - mkdocstrings:")]
    (tmp_path / "mkdocs.yml").write_text(config)
    for page in tmp_path.glob("docs/*.md"):
        page.write_text(re.sub(r"\]\(api/[^)]*\)", "](index.md)", page.read_text("utf-8")))
    assert build(tmp_path, tmp_path / "right").returncode == 0
    page = tmp_path / "docs" / "tutorial.md"
    page.write_text(page.read_text("utf-8") + "\n[nowhere](nowhere.md)\n")
    done = build(tmp_path, tmp_path / "wrong")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
