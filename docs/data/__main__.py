"""``python -m docs.data``: render everything on the pages that is a copy of data, in place."""

from __future__ import annotations

import sys

from docs.data.everything import render
from docs.data.pages import ROOT


def main() -> None:
    changed = []
    for name, text in render().items():
        path = ROOT / name
        if not path.exists() or path.read_text("utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8", newline="\n")
            changed.append(name)
    said = "\n".join(f"rendered {name}" for name in changed) or "all pages are up to date"
    sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main()
