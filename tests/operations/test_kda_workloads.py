"""Shapes, specs and byte counts of KDA prefill."""

from __future__ import annotations

from typing import Any

import pytest

from operations import Workload
from operations.kda_prefill import OPERATION, KdaWorkload

TUNED = [
    "2048/12/1",
    "2048/16/1",
    "4096/8/1",
    "4096/12/1",
    "8192/12/4",
    "8192/16/1",
    "1024/4/1",
    "3072/10/1",
    "8192/24/1",
    "16384/16/8",
]


def test_tuned_workloads_are_the_ten_shapes_in_reporting_order() -> None:
    assert [w.name for w in OPERATION.tuned()] == TUNED
    assert list(OPERATION.workloads)[: len(TUNED)] == TUNED


@pytest.mark.parametrize("name", TUNED)
def test_tuned_name_states_tokens_heads_and_equal_sequences(name: str) -> None:
    w = OPERATION.workloads[name]
    T, H, N = (int(x) for x in name.split("/"))
    assert (w.tokens, w.heads, w.sequences) == (T, H, N)
    assert len(set(w.lengths)) == 1
    assert w.initial_state


def test_held_out_workloads_cover_what_tuned_ones_do_not() -> None:
    held: list[Any] = list(OPERATION.held_out())
    assert len(held) >= 12
    assert {w.name for w in held}.isdisjoint(TUNED)
    assert {1, 32} <= {w.heads for w in held}
    assert any(w.lengths == (32768,) for w in held)
    assert any(w.lengths == (1,) for w in held)
    assert any(0 in w.lengths[1:-1] for w in held), "an empty sequence between others"
    assert any(not w.initial_state for w in held)
    assert any(w.scale != OPERATION.workloads[TUNED[0]].scale for w in held)
    assert any(w.longest > 1000 * min(n for n in w.lengths if n) for w in held), "very unequal"
    edges = {n for w in held for n in w.lengths}
    for bt in (16, 32, 64):
        assert {bt - 1, bt, bt + 1} <= edges
    assert sum(n % 2 for n in edges) > len(edges) // 3


def test_boundaries_are_the_running_sum_of_lengths() -> None:
    w = KdaWorkload("x", heads=1, lengths=(0, 3, 0, 5))
    assert w.boundaries == (0, 0, 3, 3, 8)
    assert (w.tokens, w.sequences, w.longest) == (8, 4, 5)


@pytest.mark.parametrize(("heads", "lengths"), [(0, (1,)), (1, (1, -1))])
def test_impossible_sizes_are_refused_by_name(heads: int, lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="workload 'odd'"):
        KdaWorkload("odd", heads=heads, lengths=lengths)


def test_workload_of_another_operation_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a KdaWorkload, got Workload 'foreign'"):
        OPERATION.generate(Workload("foreign"), OPERATION.regimes["slow"], seed=0)


def test_every_output_has_a_tolerance_and_every_tolerance_an_output() -> None:
    outputs = {s.name for s in OPERATION.tensors if s.role == "output"}
    assert set(OPERATION.tolerances) == outputs
    for t in OPERATION.tolerances.values():
        assert (t.max_rel, t.rms_rel) == (1.5e-2, 1e-2)
        assert t.source
