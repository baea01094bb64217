"""A report in a browser, and one of ten thousand trials: too long for CI."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time

import pytest
from report_page import NOW, Page, begun, error, job, passed, rejected, shipped_page

from factory.report import build_report

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def shipped():
    with shipped_page() as found:
        yield found


@pytest.fixture
def store(tmp_path):
    with begun(tmp_path) as opened:
        yield opened


CLICKS = """
<script>
const put = (v) => { const s = document.getElementById("search"); s.value = v;
  s.dispatchEvent(new Event("input")); };
const rows = () => [...document.querySelectorAll("#table tbody tr")].map((r) =>
  [...r.cells].map((c) => c.textContent));
const out = {};
out.heads = [...document.querySelectorAll("#table thead th")].map((h) => h.textContent);
put("bt=32 and anchor=mid"); out.filtered = rows();
put("us<60"); out.fast = rows();
put("");
const head = [...document.querySelectorAll("#table th button")].find((b) => b.textContent === "us");
head.click(); out.up = rows(); head.click(); out.down = rows();
document.querySelector(".dot.bad").dispatchEvent(new MouseEvent("click", { bubbles: true }));
out.clicked = rows();
const pre = document.createElement("pre"); pre.id = "seen";
pre.textContent = JSON.stringify(out); document.body.append(pre);
</script>
"""


LOADED = """
<script>
window.addEventListener("load", () => setTimeout(() => {
  const ready = performance.getEntriesByType("navigation")[0].loadEventEnd;
  const start = performance.now();
  const s = document.getElementById("search");
  s.value = "bt=32 and us<90 n=4"; s.dispatchEvent(new Event("input"));
  [...document.querySelectorAll("#table th button")][3].click();
  document.body.getBoundingClientRect();
  const pre = document.createElement("pre"); pre.id = "loaded";
  pre.textContent = `${Math.round(ready)} ${Math.round(performance.now() - start)}`;
  document.body.append(pre);
}));
</script>
"""


def opened_in(path):
    """Milliseconds until the page could be used, and until a filter and an order were there."""
    found = re.search(r'<pre id="loaded">(\d+) (\d+)</pre>', opened(path))
    assert found
    return int(found[1]), int(found[2])


def opened(path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, check=True
    )
    assert ":CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def test_in_a_browser_filter_sort_and_points_work(shipped, tmp_path):
    file = tmp_path / "r.html"
    file.write_text(shipped[1].text.replace("</body>", CLICKS + "</body>"))
    dom = opened(file)
    seen = json.loads(Page(dom).said().rpartition('{"heads"')[2].join(['{"heads"', ""]))
    trial, us, status = (seen["heads"].index(name) for name in ("trial", "us", "status"))
    table = shipped[1].table
    want = [r for r in table if {"bt=32", "anchor=mid"} <= set(r["schedule"].split())]
    assert [int(r[trial]) for r in seen["filtered"]] == [r["trial"] for r in want]
    assert [int(r[trial]) for r in seen["fast"]] == [
        r["trial"] for r in table if r["us"] is not None and r["us"] < 60
    ]
    timed = [float(r[us]) for r in seen["up"] if r[us]]
    assert timed == sorted(timed)
    assert [float(r[us]) for r in seen["down"] if r[us]] == sorted(timed, reverse=True)
    assert not any(r[us] for r in seen["down"][len(timed) :])
    assert [r[status] for r in seen["clicked"]] == ["rejected"]


@pytest.mark.timeout(600)
def test_ten_thousand_trials_make_a_small_page_quickly(store, tmp_path):
    job(store)
    lines = [f"bt={16 << n % 3} anchor=mid n={n}" for n in range(10_000)]
    for number, key in enumerate(lines):
        schedule = {"bt": 16 << number % 3, "anchor": "mid", "n": number}
        if number % 3:
            seen = [error("production", 0.004), error("sweep_lb1", 0.003)]
            passed(
                store, number, 40.0 + number % 97, errors=seen, schedule_key=key, schedule=schedule
            )
        else:
            rejected(
                store,
                number,
                f"o has {number} non-finite",
                schedule_key=key,
                schedule=schedule,
                errors=[error("production", None, stage="emulate")],
            )
    start = time.process_time()
    text = build_report(store, store.get_campaign(), now=NOW)
    assert time.process_time() - start < 10
    assert len(text.encode()) < 4e6
    file = tmp_path / "big.html"
    file.write_text(text.replace("</body>", LOADED + "</body>"))
    # Best of several: a machine that does something else must not decide what the page costs.
    took = [opened_in(file) for _ in range(3)]
    assert min(ready for ready, _ in took) < 2000
    assert min(answered for _, answered in took) < 1000
