"""What can go wrong at the leaderboard, each as one line a user can act on.

Knows nothing of SQL: the store translates database errors into these.
"""

from __future__ import annotations

__all__ = [
    "AbsentError",
    "HeldError",
    "OlderError",
    "QueryError",
    "StoreError",
    "TransferError",
    "UnknownError",
    "UnreachableError",
]


class StoreError(Exception):
    """The leaderboard cannot do what was asked; the message is one line with the fix."""


class AbsentError(StoreError):
    """There is no leaderboard yet where one was to be read."""


class OlderError(StoreError):
    """The database has the schema of an earlier version: opened for writing it gets this one's."""


class UnreachableError(StoreError):
    """The database's server does not answer: nothing that was typed need be wrong."""


class HeldError(StoreError):
    """Another driver holds the campaign.

    Attributes
    ----------
    holder : str
        ``host:pid`` of the driver that holds it.
    age_seconds : float
        Time since its last sign of life.
    """

    def __init__(self, message: str, *, holder: str, age_seconds: float) -> None:
        super().__init__(message)
        self.holder = holder
        self.age_seconds = age_seconds


class UnknownError(StoreError, LookupError):
    """No campaign, trial or job of that name; the message suggests the nearest."""


class QueryError(StoreError):
    """The numbers asked for must not be compared; the message says why."""


class TransferError(StoreError):
    """An export file is damaged, foreign, or contradicts what is stored."""
