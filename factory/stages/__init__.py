"""Stages of the funnel: plain functions from a schedule to a :class:`StageResult`."""

from __future__ import annotations

from factory.stages.base import HarnessError, StageResult

__all__ = ["HarnessError", "StageResult"]
