"""Which of our schedules a bench times: those that are named, or the leaderboard's winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candidates import Family, Schedule
from factory.errors import UserError
from factory.leader import leaders
from leaderboard.records import Clock
from operations import Operation

if TYPE_CHECKING:
    from leaderboard import Store

__all__ = ["WINNER", "Entry", "Missing", "choose", "named"]

WINNER = "winner"
"""Instead of a schedule's key: the leaderboard's current winner."""


@dataclass(frozen=True)
class Missing:
    """What is not in the table, and why, in one line."""

    id: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """One of our schedules.

    Parameters
    ----------
    schedule : Schedule
    origin : str
        Where it comes from, in words.
    trial_id : int or None
        Its ranked trial of the same source in the leaderboard asked, if any.
    """

    schedule: Schedule
    origin: str
    trial_id: int | None = None


def choose(
    operation: Operation,
    family: Family,
    keys: Sequence[str],
    stores: Sequence[Store],
    gpu: str | None = None,
) -> tuple[tuple[Entry, ...], tuple[Missing, ...]]:
    """Our schedules to time: by key, or as the current winner.

    Parameters
    ----------
    operation : Operation
    family : Family
    keys : sequence of str
        Schedule keys, as the leaderboard prints them, or :data:`WINNER`.
    stores : sequence of Store
        Asked in turn for a winner, and all of them for the trial of a key.
    gpu : str, optional
        Name of the GPU at hand: its own winner goes before those of others.

    Raises
    ------
    UserError
        If a key is no schedule of the family, or one that cannot be built.
    """
    entries: dict[Schedule, Entry] = {}
    missing = []
    for key in keys:
        if key == WINNER:
            found = _winner(operation, family, stores, gpu)
            if isinstance(found, Missing):
                missing.append(found)
            else:
                entries.setdefault(found.schedule, found)
        else:
            schedule = named(family, key)
            entries.setdefault(schedule, _asked_for(operation, family, schedule, stores))
    return tuple(entries.values()), tuple(missing)


def _winner(
    operation: Operation, family: Family, stores: Sequence[Store], gpu: str | None
) -> Entry | Missing:
    """First of the finals of the campaign that leads the ranking, else its leader."""
    from leaderboard import winner

    for store in stores:
        firsts = leaders(store, operation, family)
        if not firsts:
            continue
        first = firsts.get(str(gpu)) or max(firsts.values(), key=lambda row: row.id)
        final = winner(store, first.campaign_id)
        trial = store.get_trial(first.id if final is None else final.id)
        where = f"trial {trial.id} of {trial.campaign_id} in {store.name}"
        try:
            schedule = family.schedule(trial.schedule)
            problems = family.problems(schedule)
        except ValueError as error:
            problems = (str(error),)
        if problems:
            return Missing(
                "winner", f"{trial.schedule_key} ({where}) cannot be built any more: {problems[0]}"
            )
        if trial.source_hash != family.source_hash():
            return Entry(schedule, f"{where}, measured with other source")
        return Entry(schedule, where, trial.id)
    names = " or ".join(s.name for s in stores)
    return Missing(
        "winner",
        f"no measured trial of {operation.name} {operation.version} in {names};"
        " run factory launch, or name a schedule with --schedule",
    )


def named(family: Family, key: str) -> Schedule:
    """The schedule of a key, as the leaderboard prints it.

    Raises
    ------
    UserError
        If it is none of the family's, or cannot be built.
    """
    choices = {p.name: {str(c): c for c in p.choices} for p in family.parameters}
    values: dict[str, Any] = {}
    for item in key.split():
        name, _, text = item.partition("=")
        values[name] = choices.get(name, {}).get(text, text)
    try:
        schedule = family.schedule(values)
    except ValueError as error:
        raise UserError(f"no schedule {key!r}: {error}") from error
    problems = family.problems(schedule)
    if problems:
        raise UserError(f"schedule {key!r} cannot be built: {problems[0]}")
    return schedule


def _asked_for(
    operation: Operation, family: Family, schedule: Schedule, stores: Sequence[Store]
) -> Entry:
    from leaderboard import ranked

    current = family.source_hash()
    for store in stores:
        for row in ranked(
            store,
            operation=operation.name,
            operation_version=operation.version,
            clock=Clock.GPU,
            source_hash=current,
        ):
            if row.schedule_key == schedule.key and not row.superseded:
                where = f"trial {row.id} of {row.campaign_id} in {store.name}"
                return Entry(schedule, f"named; {where}", row.id)
    return Entry(schedule, "named")
