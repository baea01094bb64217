"""Shapes, specs, byte counts and probes of GDN prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from operations import Workload
from operations.gdn_prefill import OPERATION, GdnWorkload
from operations.kda_prefill import KdaWorkload

MODEL = (16, 32)
"""Heads of q and k, and of v, in a layer of Qwen3-Next."""


def own(workloads: tuple[Workload, ...]) -> list[GdnWorkload]:
    assert all(isinstance(w, GdnWorkload) for w in workloads)
    return [w for w in workloads if isinstance(w, GdnWorkload)]


def test_tuned_workloads_have_the_model_s_heads_or_a_device_s_share_of_them() -> None:
    tuned = own(OPERATION.tuned())
    assert len(tuned) == 10
    shares = {tuple(n // devices for n in MODEL) for devices in (1, 2, 4, 8)}
    assert {(w.heads, w.value_heads) for w in tuned} == shares
    assert all(w.initial_state for w in tuned)
    assert list(OPERATION.workloads)[:10] == [w.name for w in tuned]


def test_tuned_workloads_have_one_long_many_short_and_unequal_sequences() -> None:
    tuned = own(OPERATION.tuned())
    assert any(w.sequences == 1 and w.tokens >= 8192 for w in tuned)
    assert any(w.sequences >= 64 and w.longest <= 128 for w in tuned)
    assert any(w.longest >= 1000 * min(w.lengths) for w in tuned)


@pytest.mark.parametrize("w", own(OPERATION.tuned()), ids=lambda w: w.name)
def test_a_tuned_name_says_the_sizes(w: GdnWorkload) -> None:
    name = w.name.split("/")
    assert name[1:3] == [str(w.heads), str(w.value_heads)]
    assert name[0].rpartition("-")[2] == str(w.tokens)
    if len(name) == 4:
        assert int(name[3]) == w.sequences
        assert len(set(w.lengths)) == 1


def test_held_out_workloads_cover_what_tuned_ones_do_not() -> None:
    held = own(OPERATION.held_out())
    assert {w.name for w in held}.isdisjoint(w.name for w in OPERATION.tuned())
    assert {1, 2, 3, 4} <= {w.group for w in held}
    assert any(w.lengths == (32768,) for w in held)
    assert any(w.lengths == (1,) for w in held)
    assert any(0 in w.lengths[1:-1] for w in held), "an empty sequence between others"
    assert any(w.lengths[0] == 0 for w in held)
    assert any(w.lengths[-1] == 0 for w in held)
    assert any(not w.initial_state for w in held)
    assert any(w.scale == 0.5 for w in held)
    edges = {n for w in held for n in w.lengths}
    for bt in (16, 32, 64, 128):
        assert {bt - 1, bt, bt + 1} <= edges


def test_a_reduced_workload_has_groups_of_several_key_heads() -> None:
    assert any(w.heads > 1 and w.group > 1 for w in own(OPERATION.reduced()))


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ({"heads": 0, "value_heads": 1}, "heads must be at least 1, got 0"),
        ({"heads": 2, "value_heads": 3}, "positive multiple of heads = 2, got 3"),
        ({"heads": 2, "value_heads": 1}, "positive multiple of heads = 2, got 1"),
        ({"heads": 1, "value_heads": 0}, "positive multiple of heads = 1, got 0"),
        ({"lengths": (1, -1)}, "lengths must be >= 0"),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"workload 'odd': .*{fault}"):
        GdnWorkload("odd", **sizes)


def test_workload_of_another_operation_is_refused() -> None:
    foreign = KdaWorkload("foreign", heads=1, lengths=(3,))
    with pytest.raises(TypeError, match="gdn_prefill takes a GdnWorkload, got KdaWorkload"):
        OPERATION.generate(foreign, OPERATION.regimes["slow"], seed=0)


def test_every_output_has_a_tolerance_and_every_tolerance_an_output() -> None:
    outputs = {s.name for s in OPERATION.tensors if s.role == "output"}
    assert set(OPERATION.tolerances) == outputs
    assert all(t.source for t in OPERATION.tolerances.values())


def test_probes_keep_the_groups_and_ask_for_every_argument() -> None:
    w = OPERATION.workloads["groups-of-4-1111-300/4/16"]
    probes = OPERATION.probes(w, OPERATION.regimes["production"], seed=0)
    assert {(p.workload.heads, p.workload.value_heads) for p in probes} == {(2, 8)}
    base = probes[0]
    changed = {
        name
        for p in probes[1:]
        for name, x in p.inputs.items()
        if not (torch.equal(x, base.inputs[name]) if torch.is_tensor(x) else x == base.inputs[name])
    }
    assert changed == {"q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "scale"}


def test_the_oracle_itself_passes_the_probes() -> None:
    w = OPERATION.workloads["2048/4/8/1"]
    outputs: dict[str, dict[str, torch.Tensor]] = {}
    asked = 0
    for p in OPERATION.probes(w, OPERATION.regimes["slow"], seed=0, chunk=16):
        outputs[p.name] = OPERATION.fast_oracle(p.inputs)
        if p.base is None:
            continue
        for region in (*p.same, *p.near):
            for first, last in region.rows:
                got, base = (outputs[n][region.tensor][first:last] for n in (p.name, p.base))
                torch.testing.assert_close(got, base, rtol=0, atol=1e-13)
                asked += 1
    assert asked
