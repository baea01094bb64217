"""``factory doctor``: the machine and its toolchain."""

from __future__ import annotations

from dataclasses import asdict

import click

from factory.cli.common import json_option, print_json, print_table
from factory.errors import EXIT_DONE, EXIT_MACHINE

__all__ = ["doctor"]


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Is this machine and its toolchain fit?  Exit code 3 if something is broken.

    With --json: a list of objects with id, status (ok, note, fault), found,
    needed_for and fix.
    """
    from factory.doctor import examine

    findings = examine()
    if as_json:
        print_json([asdict(f) for f in findings])
    else:
        print_table(
            ["", "what", "found", "needed for", "fix"],
            ([f.status, f.id, f.found, f.needed_for, f.fix or "-"] for f in findings),
            spill="fix",
        )
    return EXIT_MACHINE if any(f.status == "fault" for f in findings) else EXIT_DONE
