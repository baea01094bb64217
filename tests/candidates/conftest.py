"""What several modules of these tests are given."""

from __future__ import annotations

import entry_stand_in
import pytest


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> entry_stand_in.Launches:
    """What KDA's entry point launched, on CPU tensors."""
    return entry_stand_in.serve(monkeypatch)
