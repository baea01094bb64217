"""The cost model against what was measured."""

from __future__ import annotations

import pytest
from scipy.stats import spearmanr

import candidates
import operations
from factory.stages.model import model
from leaderboard import query, shipped_store


@pytest.mark.parametrize("name", ["kda_prefill", "gdn_prefill"])
def test_the_cost_model_orders_the_shipped_schedules(name: str) -> None:
    operation, family = operations.get(name), candidates.get(name)
    with shipped_store() as store:
        rows = list(query(store, operation=name, clock="gpu"))
    assert len(rows) >= 20
    measured = [r.score_us for r in rows]
    modelled = [model(operation, family, family.schedule(dict(r.schedule))).score_us for r in rows]
    assert spearmanr(measured, modelled).statistic >= 0.8
