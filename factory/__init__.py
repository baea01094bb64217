"""The campaign: configuration, search, the funnel of stages, executors and the command.

It knows operations, candidates and the leaderboard's records; it must not know SQL.
Importing it imports none of torch, cutlass, optuna, ray or sqlalchemy.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
