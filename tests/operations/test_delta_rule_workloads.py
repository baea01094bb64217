"""Shapes, specs and byte counts of every gated delta rule; more in the files of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from operations import Operation, Workload, gdn_prefill, kda_prefill
from operations._delta_rule.workloads import DeltaRuleWorkload
from operations.gdn_prefill import GdnWorkload
from operations.kda_prefill import KdaWorkload

GDN, KDA = gdn_prefill.OPERATION, kda_prefill.OPERATION
EACH = pytest.mark.parametrize("operation", [KDA, GDN], ids=lambda o: o.name)


def own(workload: Workload) -> DeltaRuleWorkload:
    assert isinstance(workload, DeltaRuleWorkload)
    return workload


@EACH
def test_reduced_workloads_have_work_for_eight_segments_of_64_token_chunks(
    operation: Operation,
) -> None:
    reduced = [own(w) for w in operation.reduced()]
    assert any(-(-w.longest // 64) > 8 and w.initial_state for w in reduced)
    assert any(0 in w.lengths and 1 in w.lengths for w in reduced)
    assert any(w.heads > 1 for w in reduced)
    assert any(not w.initial_state for w in reduced)
    cost = sum(w.tokens * w.state_heads for w in reduced)
    assert cost < 2000, "emulation of a whole space is quick"
    names = {w.name for w in reduced} | set(operation.workloads)
    assert len(names) == len(reduced) + len(operation.workloads)


@pytest.mark.parametrize(
    ("operation", "w"),
    [pytest.param(o, own(w), id=f"{o.name}-{w.name}") for o in (KDA, GDN) for w in o.reduced()],
)
def test_generated_tensors_and_outputs_match_the_specs(
    operation: Operation, w: DeltaRuleWorkload
) -> None:
    inputs = operation.generate(w, operation.regimes["production"], seed=0)
    tensors: dict[str, Any] = {**inputs, **operation.outputs(inputs)}
    sizes = {"T": w.tokens, "H": w.heads, "HV": w.state_heads}
    sizes |= {"N": w.sequences, "N+1": w.sequences + 1}
    for spec in operation.tensors:
        x = tensors.pop(spec.name)
        if x is None:
            assert spec.role == "optional"
            assert not w.initial_state
            continue
        assert list(x.shape) == [sizes[d] if isinstance(d, str) else d for d in spec.dims]
        assert str(x.dtype) == f"torch.{spec.dtype}"
        assert x.is_contiguous()
        if spec.role == "output":
            assert x.isnan().all(), "unwritten elements must show"
    assert tensors == {"scale": w.scale}


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (KDA, "1024/4/1"),
        (KDA, "empty-around-37/3"),
        (KDA, "many-short/8"),
        (KDA, "no-state-empty-between/2"),
        (GDN, "2048/4/8/1"),
        (GDN, "empty-around-37/3/3"),
        (GDN, "many-short/4/8"),
        (GDN, "no-state-empty-between/2/4"),
    ],
)
def test_floor_bytes_count_each_tensor_once_and_the_states_there_are(
    operation: Operation, name: str
) -> None:
    w = own(operation.workloads[name])
    inputs = operation.generate(w, operation.regimes["slow"], seed=0)
    moved = [inputs[n] for n in ("q", "k", "v", "g", "beta", "initial_state")]
    moved += operation.outputs(inputs).values()
    expected = sum(x.numel() * x.element_size() for x in moved if x is not None)
    assert operation.floor_bytes(w) == expected
    raw = operation.raw_form(w, operation.regimes["slow"], seed=0)
    assert raw is not None
    models = ("g_raw", "beta_logits", "A_log", "dt_bias")
    expected -= sum(inputs[n].numel() * inputs[n].element_size() for n in ("g", "beta"))
    expected += sum(raw[n].numel() * raw[n].element_size() for n in models)
    assert operation.raw_floor_bytes(w) == expected
    assert (inputs["initial_state"] is not None) == w.initial_state


@pytest.mark.parametrize(
    ("operation", "regime", "shape"),
    [
        (KDA, "beyond_single_inf", KdaWorkload("nothing", heads=2)),
        (GDN, "single_inf", GdnWorkload("nothing", heads=1, value_heads=2)),
    ],
    ids=["kda", "gdn"],
)
@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_tokens_and_no_sequences_are_workloads_too(
    operation: Operation, regime: str, shape: DeltaRuleWorkload, lengths: tuple[int, ...]
) -> None:
    w = replace(shape, lengths=lengths)
    inputs = operation.generate(w, operation.regimes[regime], seed=0)
    assert inputs["q"].shape == (0, w.heads, 128)
    for evaluate in (operation.oracle, operation.fast_oracle):
        expected = evaluate(inputs)
        assert torch.equal(expected["final_state"], inputs["initial_state"].double())
        assert expected["o"].shape == (0, 2, 128)
    assert all(e.within for e in operation.compare(expected, expected, w))
