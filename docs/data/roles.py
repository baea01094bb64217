"""Sphinx's roles in docstrings (``:func:`NAME```) as plain code, for the site's API pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Roles"]

_ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc|obj):`~?([^`]+)`")


def _plain(thing: griffe.Object) -> None:
    if thing.docstring is not None:
        thing.docstring.value = _ROLE.sub(r"`\1`", thing.docstring.value)


class Roles(griffe.Extension):
    """Rewrites docstrings once a package is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        _plain(obj)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _plain(pkg)
