"""Column types that behave alike on SQLite and PostgreSQL.

They must not know the tables that use them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

__all__ = ["JsonValue", "UtcDateTime", "decode_json", "encode_json", "load_json"]

_FLOAT = "$float"


def encode_json(value: Any) -> Any:
    """Make ``value`` strict JSON; non-finite floats become ``{"$float": "inf"}``.

    Strict JSON (and PostgreSQL) has no NaN or infinity, and a gate reports
    exactly those.

    Raises
    ------
    TypeError
        If something in it has no JSON form; the message names the type.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        if any(not isinstance(key, str) for key in value):
            raise TypeError(f"JSON keys must be text, got {list(value)!r}")
        return {key: encode_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode_json(item) for item in value]
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def decode_json(value: Any) -> Any:
    """Undo :func:`encode_json`; tuples come back as lists."""
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(value.get(_FLOAT), str):
            return float(value[_FLOAT])
        return {key: decode_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    return value


def load_json(text: str | bytes, **how: Any) -> Any:
    """Parse JSON that :func:`encode_json` made; ``how`` is as for :func:`json.loads`.

    Most has no float of that kind, and is not walked through to find that out.
    """
    value = json.loads(text, **how)
    raw = text.encode() if isinstance(text, str) else text
    there = _FLOAT.encode() in raw or b"\\u" in raw  # an escape may spell it, too
    return decode_json(value) if there else value


class JsonValue(TypeDecorator[Any]):
    """JSON that keeps NaN and infinities, in an engine that reads it by :func:`load_json`."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return encode_json(value)


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC; naive datetimes are refused, for their zone is a guess."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone; use datetime.now(UTC)")
        value = value.astimezone(UTC)
        # SQLite keeps text without a zone: all of it is UTC.
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
