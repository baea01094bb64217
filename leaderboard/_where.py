"""Conditions in words: ``bt=32 and (anchor=mid or anchor=pairs) and us<120``.

Pure text and values; knows nothing of the database.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from leaderboard._errors import QueryError, UnknownError

__all__ = ["Condition", "nearest", "parse_where"]

Condition = Callable[[Mapping[str, Any]], bool]

_TOKEN = re.compile(
    r"\s*(?:(?P<sign><=|>=|!=|==|=|<|>)|(?P<paren>[()])"
    r"|(?P<quoted>'[^']*'|\"[^\"]*\")|(?P<word>[^\s()<>=!'\"]+))"
)
_LONGEST = 10_000
_DEEPEST = 50
"""Characters, and ``not`` and parentheses within each other, of a condition."""
_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def nearest(word: str, known: Iterable[str]) -> str:
    """How a message about an unknown word ends: the nearest known one, else all of them."""
    names = sorted(set(known))
    near = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there: {', '.join(names) or 'none'}"


def parse_where(text: str, known: Iterable[str]) -> Condition:
    """A condition on a row, from its words.

    A comparison is ``NAME SIGN VALUE`` with one of ``= != < <= > >=``, or ``NAME in A,B``.
    They are joined by ``and``, ``or``, ``not`` and parentheses; ``and`` binds closer than ``or``.
    Numbers compare as numbers, all else as text without regard to case.  What a row does not
    have holds no comparison, not even ``!=``.

    Parameters
    ----------
    known : iterable of str
        Names that a row may have.

    Raises
    ------
    QueryError
        If the text is not a condition.
    UnknownError
        If it asks for a name that is not known; the message has the nearest.
    """
    return _Parser(text, frozenset(known)).condition()


class _Parser:
    def __init__(self, text: str, known: frozenset[str]) -> None:
        self._text = text if len(text) <= 200 else text[:197] + "..."
        if len(text) > _LONGEST:
            raise self._wrong(f"it is longer than {_LONGEST} characters")
        self._depth = 0
        self._known = known
        self._tokens = list(self._split(text))
        self._at = 0

    def _split(self, text: str) -> Iterable[tuple[str, str]]:
        end = len(text.rstrip())
        place = 0
        while place < end:
            found = _TOKEN.match(text, place)
            if found is None:
                raise self._wrong(f"cannot read {text[place:].strip()!r}")
            place = found.end()
            kind = str(found.lastgroup)
            value = found[kind]
            yield (kind, value[1:-1] if kind == "quoted" else value)

    def _wrong(self, why: str) -> QueryError:
        return QueryError(f"condition {self._text!r}: {why}")

    def condition(self) -> Condition:
        if not self._tokens:
            raise self._wrong("it is empty; for example 'bt=32 and anchor=mid'")
        found = self._either()
        if self._at < len(self._tokens):
            raise self._wrong(f"'and' or 'or' is missing before {self._tokens[self._at][1]!r}")
        return found

    def _keyword(self, *words: str) -> str | None:
        if self._at < len(self._tokens):
            kind, value = self._tokens[self._at]
            if kind == "word" and value.lower() in words:
                self._at += 1
                return value.lower()
        return None

    def _next(self, what: str) -> tuple[str, str]:
        if self._at == len(self._tokens):
            raise self._wrong(f"it ends where {what} should follow")
        self._at += 1
        return self._tokens[self._at - 1]

    def _either(self) -> Condition:
        parts = [self._both()]
        while self._keyword("or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else lambda row: any(p(row) for p in parts)

    def _both(self) -> Condition:
        parts = [self._one()]
        while self._keyword("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else lambda row: all(p(row) for p in parts)

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._wrong(f"'not' and parentheses are nested deeper than {_DEEPEST}")
        try:
            return self._within()
        finally:
            self._depth -= 1

    def _within(self) -> Condition:
        if self._keyword("not"):
            inner = self._one()
            return lambda row: not inner(row)
        kind, value = self._next("a comparison")
        if (kind, value) == ("paren", "("):
            inside = self._either()
            if self._next("')'") != ("paren", ")"):
                raise self._wrong("a parenthesis is not closed")
            return inside
        if kind not in ("word", "quoted"):
            raise self._wrong(f"{value!r} stands where a name should")
        return self._comparison(value)

    def _refuse_slip(self, name: str, value: str) -> None:
        slip = _SLIP.fullmatch(value)
        if slip is None:
            return
        if slip["end"]:
            raise self._wrong(f"{value!r} ends in {value[-1]!r}; leave that away")
        if slip["base"]:
            try:
                fix = f"; write {int(value, 0)}"
            except ValueError:
                fix = ""
            raise self._wrong(f"{value!r} is no decimal number{fix}")
        raise self._wrong(f"nothing equals {value}; what has no {name} holds no comparison anyway")

    def _comparison(self, name: str) -> Condition:
        if name not in self._known:
            raise UnknownError(
                f"condition {self._text!r}: no column or parameter {name!r}; "
                f"{nearest(name, self._known)}"
            )
        if self._keyword("in"):
            kind, listed = self._next("a list")
            if kind not in ("word", "quoted"):
                raise self._wrong(f"{listed!r} stands where a list like A,B should")
            wanted = [v.strip() for v in listed.split(",") if v.strip()]
            if not wanted:
                raise self._wrong(f"the list after {name} in is empty; for example {name} in A,B")
            if kind == "word":
                for one in wanted:
                    self._refuse_slip(name, one)
            return lambda row: any(_equal(row.get(name), v) for v in wanted)
        kind, sign = self._next("one of = != < <= > >= in")
        if kind != "sign":
            raise self._wrong(f"{sign!r} stands where one of = != < <= > >= in should")
        kind, value = self._next("a value")
        if kind not in ("word", "quoted"):
            raise self._wrong(f"{value!r} stands where a value should")
        if kind == "word":
            self._refuse_slip(name, value)
        if sign in ("=", "=="):
            return lambda row: _equal(row.get(name), value)
        if sign == "!=":
            return lambda row: row.get(name) is not None and not _equal(row.get(name), value)
        bound = _number(value)
        if bound is None:
            raise self._wrong(f"{name}{sign} needs a number, not {value!r}")
        holds = _ORDER[sign]

        def ordered(row: Mapping[str, Any]) -> bool:
            there = _number(row.get(name))
            return there is not None and holds(there, bound)

        return ordered


_SLIP = re.compile(r"(?P<end>.*[;,])|(?P<base>[+-]?0[xob][0-9a-f_]+)|(?P<nan>[+-]?nan)", re.I)
"""Values that nothing equals, and that somebody meant otherwise; in quotes they are text."""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _equal(there: object, wanted: str) -> bool:
    if there is None:
        return False
    if isinstance(there, tuple | list):
        return any(_equal(one, wanted) for one in there)
    a, b = _number(there), _number(wanted)
    if a is not None and b is not None:
        return a == b
    return str(there).lower() == wanted.lower()
