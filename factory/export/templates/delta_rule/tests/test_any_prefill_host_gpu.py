"""Streams, graphs, memory, devices and torch.compile on a Hopper GPU."""

from __future__ import annotations

import math

import pytest
import torch
from any_prefill_vendored import inputs, on_hopper, package

pytestmark = on_hopper

call = package.any_prefill


def test_served_and_refused_calls_cost_no_synchronisation():
    x = inputs([0, 20, 37])
    call(**x)
    wrong = {**x, "v": x["v"].half()}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert package.support(**x)
        assert not package.support(**wrong)
        with pytest.raises(TypeError, match="v is float16"):
            call(**wrong)
        call(**x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_inputs_are_left_as_they_were():
    x = inputs([0, 20, 37])
    before = {name: value.clone() for name, value in x.items()}
    call(**x)
    assert all(torch.equal(x[name], before[name]) for name in x)


def test_two_streams_for_200_rounds_give_what_one_after_the_other_gives():
    shapes = [0, 300, 801]
    first, second = inputs(shapes, seed=1), inputs(shapes, seed=2)
    alone = [call(**first), call(**second)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    rounds = []
    for _ in range(200):
        together = []
        for x, stream in zip((first, second), streams, strict=True):
            with torch.cuda.stream(stream):
                together.append(call(**x))
        rounds.append(together)
        if len(rounds) == 20:  # bounded memory, without waiting in between
            torch.cuda.synchronize()
            for found in rounds:
                for got, want in zip(found, alone, strict=True):
                    assert torch.equal(got[0], want[0])
                    assert torch.equal(got[1], want[1])
            rounds.clear()


def test_it_runs_on_the_callers_stream_between_producer_and_consumer():
    x, later = inputs([0, 500], seed=1), inputs([0, 500], seed=2)
    want = call(**later)[0].float() + 1
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(100):
        v = torch.full_like(x["v"], math.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            v.copy_(later["v"])
            got = call(**{**later, "v": v})[0].float() + 1
        stream.synchronize()
        assert torch.equal(got, want)


def test_handle_0_is_the_default_stream_and_none_the_current_one():
    x = inputs([0, 64])
    call(**x)
    side = torch.cuda.Stream()

    def ran_at_once(stream):
        """Whether a call from within a stream that is busy ends while that one still is."""
        out = torch.full_like(x["v"], math.nan)
        with torch.cuda.stream(side):  # nothing is loaded or allocated for the first time below
            call(**x, out=out, stream=stream)
        torch.cuda.synchronize()
        bool(torch.isfinite(out.fill_(math.nan)).all())
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)  # tens of milliseconds
            call(**x, out=out, stream=stream)
        done = bool(torch.isfinite(out).all())  # waits for the default stream alone
        assert not side.query(), "the busy stream ended too early to tell"
        torch.cuda.synchronize()
        assert torch.isfinite(out).all()
        return done

    assert ran_at_once(0)
    assert ran_at_once(torch.cuda.default_stream())
    assert not ran_at_once(None)
    assert not ran_at_once(side)
    assert not ran_at_once(side.cuda_stream)


def test_a_captured_graph_replays_on_changed_contents():
    x, other = inputs([0, 100, 333], seed=1), inputs([0, 233, 333], seed=2)
    want = call(**other)
    call(**x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = call(**x)
    for name, value in other.items():
        x[name].copy_(value)
    for _ in range(3):
        o.fill_(math.nan)
        state.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, want[0])
        assert torch.equal(state, want[1])
    with pytest.raises(ValueError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(**x, validate=True)
    torch.cuda.synchronize()


def test_500_lengths_leave_memory_flat():
    largest = inputs([0, 700], heads=2)

    def once(T):
        x = {n: largest[n][:T] for n in ("q", "k", "v", "g", "beta")}
        call(**x, cu_seqlens=largest["cu_seqlens"].clamp(max=T))

    for T in range(1, 700, 70):
        once(T)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = package.api.entry.compiled.cache_info().currsize
    for T in range(100, 600):
        once(T)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert package.api.entry.compiled.cache_info().currsize == kept


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_decides():
    here, there = inputs([0, 40, 77]), inputs([0, 40, 77], device="cuda:1")
    want = call(**here)
    with torch.cuda.device(0):
        o, state = call(**there)
        assert o.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
    assert torch.equal(o.cpu(), want[0].cpu())
    assert torch.equal(state.cpu(), want[1].cpu())
    with pytest.raises(ValueError, match="v is on cuda:1"):
        call(**{**here, "v": there["v"]})


def test_offsets_on_the_cpu_are_refused():
    x = inputs([0, 37])
    with pytest.raises(ValueError, match="cu_seqlens is on cpu"):
        call(**{**x, "cu_seqlens": x["cu_seqlens"].cpu()})


def test_a_compiled_call_is_one_operator_and_gives_what_an_eager_one_gives():
    x = inputs([0, 20, 133])

    def step(x):
        o, state = call(**x)
        return o * 2, state + 1

    with torch.no_grad():
        want = step(x)
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_gradients_are_refused_eagerly_and_compiled():
    x = inputs([0, 37])
    x["q"].requires_grad_()
    with pytest.raises(ValueError, match="q requires grad"):
        call(**x)
    with pytest.raises(Exception, match=r"no backward pass|requires grad"):
        torch.compile(lambda x: call(**x)[0].sum(), backend="aot_eager")(x)
    with torch.no_grad():
        o, _ = call(**x)
    assert not o.requires_grad
