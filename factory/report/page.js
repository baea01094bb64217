"use strict";
// Sorts and filters the table of trials.  Its data are in the page: nothing is fetched.
(() => {
  const STEP = 200;
  const data = JSON.parse(document.getElementById("trials").textContent);
  const names = data.columns.map((c) => c.name);
  const body = document.querySelector("#table tbody");
  const heads = [...document.querySelectorAll("#table thead th")];
  const search = document.getElementById("search");
  const verdict = document.getElementById("verdict");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const index = (name) => names.indexOf(name);
  // Texts that are searched are made when somebody first searches: the page opens sooner.
  let made = null;
  function searched() {
    if (made === null) {
      const at = index("schedule");
      made = {
        texts: data.rows.map((row) => row.join(" ").toLowerCase()),
        words: data.rows.map((row) => new Set(row[at].toLowerCase().split(" "))),
      };
    }
    return made;
  }
  let shown = STEP;
  let order = { column: -1, down: false };

  // A word is: NAME<VALUE or NAME>VALUE on a column of numbers, NAME=VALUE of a column or of
  // the schedule, or any part of the row's text.  All words must hold.
  function test(word) {
    const found = /^([a-z_ /]+?)(<=|>=|<|>|=)(.+)$/.exec(word);
    if (found) {
      const [, name, sign, value] = found;
      const at = index(name);
      if (sign === "=") {
        const { words } = searched();
        return (n) => words[n].has(word) ||
          (at >= 0 && String(data.rows[n][at]).toLowerCase() === value);
      }
      const bound = Number(value);
      if (at >= 0 && !Number.isNaN(bound)) {
        const holds = {
          "<": (v) => v < bound, ">": (v) => v > bound,
          "<=": (v) => v <= bound, ">=": (v) => v >= bound,
        }[sign];
        return (n) => typeof data.rows[n][at] === "number" && holds(data.rows[n][at]);
      }
    }
    const { texts } = searched();
    return (n) => texts[n].includes(word);
  }

  function compare(a, b) {
    const x = data.rows[a][order.column];
    const y = data.rows[b][order.column];
    // What has no value is last in either direction.
    const gone = (v) => v === null || v === "";
    if (gone(x) || gone(y)) return gone(x) - gone(y) || a - b;
    const by = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
    return (order.down ? -by : by) || a - b;
  }

  function picked() {
    const tests = search.value.toLowerCase().split(/\s+/)
      .filter((w) => w && w !== "and").map(test);
    const status = index("status");
    const rows = [];
    for (let n = 0; n < data.rows.length; n += 1) {
      if (verdict.value && data.rows[n][status] !== verdict.value) continue;
      if (tests.every((t) => t(n))) rows.push(n);
    }
    if (order.column >= 0) rows.sort(compare);
    return rows;
  }

  function cell(value, column) {
    const td = document.createElement("td");
    td.className = column.kind;
    if (column.name === "status") {
      const span = document.createElement("span");
      span.className = `status ${value}`;
      span.textContent = value;
      td.append(span);
    } else {
      td.textContent = value === null ? "" : column.digits && typeof value === "number"
        ? Number(value.toPrecision(column.digits)).toString() : String(value);
    }
    return td;
  }

  function draw() {
    const rows = picked();
    const part = document.createDocumentFragment();
    for (const n of rows.slice(0, shown)) {
      const tr = document.createElement("tr");
      data.columns.forEach((column, at) => tr.append(cell(data.rows[n][at], column)));
      part.append(tr);
    }
    body.replaceChildren(part);
    count.textContent = `${rows.length} of ${data.rows.length} trials`;
    more.hidden = rows.length <= shown;
    more.textContent = `show ${Math.min(STEP * 5, rows.length - shown)} more`;
  }

  function restart() {
    shown = STEP;
    draw();
  }

  heads.forEach((head, at) => {
    head.querySelector("button").addEventListener("click", () => {
      order = { column: at, down: order.column === at && !order.down };
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      restart();
    });
  });
  search.addEventListener("input", restart);
  verdict.addEventListener("change", restart);
  more.addEventListener("click", () => {
    shown += STEP * 5;
    draw();
  });
  // A point in a drawing leads to its row.
  document.addEventListener("click", (event) => {
    const mark = event.target.closest("[data-trial]");
    if (!mark) return;
    search.value = `trial=${mark.dataset.trial}`;
    verdict.value = "";
    restart();
    document.getElementById("table").scrollIntoView({ block: "center" });
  });
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((d) => { d.open = true; });
  });
  draw();
})();
