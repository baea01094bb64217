# part: fla_tests_say

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from any_prefill_vendored import inputs, on_hopper, package

pytestmark = on_hopper

# part: fla_is_there
HEADS = 2  # fla's autotuner takes a minute for each number of heads


@pytest.fixture(scope="module")
def any_chunk():
    importlib.import_module(f"{package.__name__}.fla_backend")
    return chunk.any_chunk


@pytest.fixture(scope="module")
def theirs():
    """fla's own function, behind the dispatcher."""
    return inspect.unwrap(chunk.any_chunk)


def launched(function):
    """What it returns, and the names of the kernels that it launched."""
    function()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        found = function()
        torch.cuda.synchronize()
    return found, [event.key for event in profile.key_averages()]


def activated():
    x = inputs([0, 100, 257], heads=HEADS, gates=(-4.5, 0.0))
    made = {name: x[name].unsqueeze(0) for name in ("q", "k", "v", "g", "beta")}
    made["initial_state"] = x["initial_state"].transpose(-1, -2).contiguous()
    # part: fla_activated


def as_a_model_calls_it():
    made = activated()
    draw = {"device": "cuda"}
    return made | {
        "q": (made["q"] * 3).contiguous(),
        "g": torch.randn(made["g"].shape, **draw).bfloat16(),
        "beta": torch.randn(made["beta"].shape, **draw).bfloat16(),
        "A_log": torch.randn(HEADS, **draw) * 0.2,
        "dt_bias": torch.randn(any_fla_bias, **draw) * 0.3,
        "initial_state": made["initial_state"].transpose(-1, -2).contiguous(),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        # part: fla_bound
        "state_v_first": True,
    }


def apart(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("made", [activated, as_a_model_calls_it])
@torch.inference_mode()
def test_results_are_flas_and_kernels_are_ours(any_chunk, theirs, made):
    x = made()
    (o, state), names = launched(lambda: any_chunk(**x))
    assert any(name.startswith(any_kernels_launched) for name in names), names
    assert not [name for name in names if "chunk_" in name], "fla's own kernels ran"
    want_o, want_state = theirs(**x)
    assert o.shape == want_o.shape
    assert state.shape == want_state.shape
    assert apart(o, want_o) < 1e-2
    assert apart(state, want_state) < 1e-2


def test_a_call_that_needs_gradients_stays_with_fla(any_chunk):
    backend = importlib.import_module(f"{package.__name__}.fla_backend").AnyPrefillBackend()
    x = activated()
    x["q"].requires_grad_()
    served, reason = backend.any_chunk_verifier(**x)
    assert not served
    assert "forward only" in reason
    with torch.no_grad():
        assert backend.any_chunk_verifier(**x) == (True, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # part: fla_declined
    ],
)
def test_the_verifier_declines_by_name(any_chunk, changes, said):
    backend = importlib.import_module(f"{package.__name__}.fla_backend").AnyPrefillBackend()
    served, reason = backend.any_chunk_verifier(**(activated() | changes))
    assert not served
    assert said in reason
