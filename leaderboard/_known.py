"""Names that a query may ask for: what is not there is an error, not an empty answer."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.orm import Session

from leaderboard._errors import UnknownError
from leaderboard._where import nearest
from leaderboard.models import CampaignRow, JobRow, MeasurementRow

__all__ = ["check_names", "gpu_named"]

_UNMEASURED = "nothing in it was measured, and modelled times have no GPU, regime or control"


def check_names(
    session: Session,
    where: str,
    *,
    operation: str | None = None,
    control: str | None = None,
    regime: str | None = None,
) -> None:
    """Refuse an operation, control or regime that the leaderboard has never met.

    Parameters
    ----------
    where : str
        Name of the database, for the message.

    Raises
    ------
    UnknownError
        One line with the nearest name, or with all that are there.
    """
    asked = (
        ("operation", operation, CampaignRow.operation),
        ("control", control, MeasurementRow.control),
        ("regime", regime, MeasurementRow.regime),
    )
    for what, name, column in asked:
        if name is None or session.scalar(sa.select(column).where(column == name).limit(1)):
            continue
        there: Iterable[str | None] = session.scalars(sa.select(column).distinct())
        known = [n for n in there if n is not None]
        hint = nearest(name, known) if known or what == "operation" else _UNMEASURED
        raise UnknownError(f"no {what} {name!r} in {where}; {hint}")


def gpu_named(session: Session, where: str, name: str) -> str:
    """Full name of the one GPU that is called so, or whose name holds the word: ``H200``.

    Raises
    ------
    UnknownError
        If there is none, or more than one.
    """
    there = list(session.scalars(sa.select(JobRow.gpu).distinct()))
    if name in there:
        return name
    found = sorted(gpu for gpu in there if name.lower() in gpu.lower())
    if len(found) == 1:
        return found[0]
    # Where nothing was timed the jobs are those of models, on no GPU.
    measured = session.scalar(sa.select(MeasurementRow.id).limit(1)) is not None
    hint = nearest(name, there) if measured else _UNMEASURED
    why = f"{len(found)} are: {', '.join(found)}" if found else hint
    raise UnknownError(f"no GPU {name!r} in {where}; {why}")
