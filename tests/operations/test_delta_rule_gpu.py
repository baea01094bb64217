"""Oracle, generators and comparison on a GPU: right there, and quick enough to gate with."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from operations import Operation, Workload, gdn_prefill, kda_prefill
from operations.gdn_prefill import GdnWorkload
from operations.kda_prefill import KdaWorkload

pytestmark = pytest.mark.gpu

GDN, KDA = gdn_prefill.OPERATION, kda_prefill.OPERATION
BOTH = pytest.mark.parametrize("operation", [KDA, GDN], ids=lambda o: o.name)


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def to(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(
    ("operation", "name"), [(o, name) for o in (KDA, GDN) for name in o.regimes]
)
def test_chunked_form_on_the_gpu_equals_the_definition_on_the_cpu(
    operation: Operation, name: str
) -> None:
    for w in operation.reduced():
        inputs = operation.generate(w, operation.regimes[name], seed=0)
        want = operation.oracle(inputs)
        got = operation.fast_oracle({n: to(x, "cuda") for n, x in inputs.items()})
        for n, x in want.items():
            assert (got[n].cpu() - x).abs().max() <= 1e-10 * x.abs().max().clamp_min(1e-30)


@pytest.mark.parametrize(
    ("operation", "w"),
    [
        (KDA, KdaWorkload("judged", heads=3, lengths=(20, 0, 41, 1))),
        (GDN, GdnWorkload("judged", heads=1, value_heads=3, lengths=(20, 0, 41, 1))),
    ],
    ids=["kda", "gdn"],
)
def test_errors_on_the_gpu_are_those_of_the_cpu(operation: Operation, w: Workload) -> None:
    inputs = operation.generate(w, operation.regimes["slow"], seed=0)
    want = operation.fast_oracle(inputs)
    got = {"o": want["o"].bfloat16(), "final_state": want["final_state"].bfloat16()}
    here = operation.compare(got, want, w)
    there = operation.compare(
        {n: x.cuda() for n, x in got.items()}, {n: x.cuda() for n, x in want.items()}, w
    )
    for a, b in zip(here, there, strict=True):
        assert (a.tensor, a.scope, a.within) == (b.tensor, b.scope, b.within)
        assert b.max_rel == pytest.approx(a.max_rel, rel=1e-12)
        assert b.rms_rel == pytest.approx(a.rms_rel, rel=1e-12)


@BOTH
def test_equal_arguments_draw_equal_bytes_on_the_gpu(operation: Operation) -> None:
    w = operation.reduced()[0]
    first, again = (
        operation.generate(w, operation.regimes["production"], seed=0, device="cuda")
        for _ in range(2)
    )
    for n, x in first.items():
        assert torch.equal(x, again[n]) if isinstance(x, torch.Tensor) else x == again[n]


KDA_LARGE = ("16384/16/8", "8192/24/1", "long-32768/4", "many-short/8", "primes-1021-509-1031/32")
GDN_LARGE = ("16384/16/32/8", "8192/16/32/1", "long-32768/2/4", "8192/8/16/64")


@pytest.mark.parametrize(
    ("operation", "reset", "name"),
    [
        *((KDA, "beyond_single_inf", name) for name in KDA_LARGE),
        *((GDN, "single_inf", name) for name in GDN_LARGE),
    ],
)
def test_one_gate_of_a_large_shape_takes_about_a_second(
    operation: Operation, reset: str, name: str
) -> None:
    w = operation.workloads[name]
    took: dict[str, float] = {}
    for regime in ("production", reset):  # the first draw also warms up
        torch.cuda.synchronize()
        start = time.perf_counter()
        inputs = operation.generate(w, operation.regimes[regime], seed=0, device="cuda")
        torch.cuda.synchronize()
        drawn = time.perf_counter()
        want = operation.fast_oracle(inputs)
        torch.cuda.synchronize()
        evaluated = time.perf_counter()
        got = {"o": want["o"].bfloat16(), "final_state": want["final_state"].float()}
        assert all(e.within for e in operation.compare(got, want, w))
        took = {
            "generate": drawn - start,
            "oracle": evaluated - drawn,
            "compare": time.perf_counter() - evaluated,
        }
    assert sum(took.values()) < 1.5, took
