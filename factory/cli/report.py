"""``factory report``: a campaign as one web page."""

from __future__ import annotations

from pathlib import Path

import click

from factory.cli.common import db_option, open_reading
from factory.errors import UserError

__all__ = ["report"]


@click.command()
@click.argument("campaign", required=False)
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write.",
)
@db_option
def report(campaign: str | None, output: Path, db: str | None) -> None:
    """CAMPAIGN (an id or a name; the newest by default) as one page that opens offline.

    Best so far, error against time, each shape beside its controls, the
    severity sweep, the funnel, all trials and the fingerprint.  A running
    campaign is shown as it stands.
    """
    from factory.report import write_report

    with open_reading(db) as store:
        found = store.get_campaign(campaign)
        try:
            size = write_report(store, found, output)
        except OSError as error:
            raise UserError(f"cannot write {output}: {error.strerror or error}") from error
    click.echo(f"wrote {output} ({size / 1e6:.1f} MB): campaign {found.id}", err=True)
