"""``factory gc``: make room in the artefact store."""

from __future__ import annotations

import re

import click

from factory.cli.common import json_option, print_json

__all__ = ["gc"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes, with a binary unit where there is one: ``0``, ``500M``, ``2G``."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{value!r} is no size; write 0, 500M or 2G", ctx, param)
    return int(float(found[1]) * _UNITS[found[2].upper()])


@click.command()
@click.option(
    "--max-size",
    callback=_size,
    metavar="SIZE",
    help="What may stay, for example 500M; default: 2G.",
)
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@json_option
def gc(max_size: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove compiled kernels from the artefact store, the longest unused first.

    The store is a cache: whatever is removed is compiled again when it is
    next needed. With --json: one object with store, dry_run, kept, kept_bytes,
    freed and freed_bytes.
    """
    from factory.artefacts import ARTEFACT_BYTES, default_store

    store = default_store()
    limit = ARTEFACT_BYTES if max_size is None else max_size
    done = store.collect(limit, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "store": str(store.root),
                "dry_run": dry_run,
                "kept": done.kept,
                "kept_bytes": done.kept_bytes,
                "freed": done.freed,
                "freed_bytes": done.freed_bytes,
            }
        )
        return
    would = "would free" if dry_run else "freed"
    click.echo(
        f"{would} {_text(done.freed_bytes)} of {done.freed} entries; "
        f"{_text(done.kept_bytes)} of {done.kept} stay in {store.root}"
    )


def _text(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
