"""The cost model against what was measured."""

from __future__ import annotations

from scipy.stats import spearmanr

import candidates
import operations
from factory.stages.model import model
from leaderboard import query, shipped_store


def test_the_cost_model_orders_the_shipped_schedules() -> None:
    operation, family = operations.get("kda_prefill"), candidates.get("kda_prefill")
    with shipped_store() as store:
        rows = list(query(store, operation="kda_prefill", clock="gpu"))
    assert len(rows) >= 20
    measured = [r.score_us for r in rows]
    modelled = [model(operation, family, family.schedule(dict(r.schedule))).score_us for r in rows]
    assert spearmanr(measured, modelled).statistic >= 0.8
