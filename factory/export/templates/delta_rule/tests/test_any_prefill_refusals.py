"""What is refused is refused by name, before any launch and without a synchronisation.

On tensors without data (torch's ``meta`` device): whoever looks at a value there gets an error, so
a refusal that comes through has read none.  No GPU is needed.
"""

from __future__ import annotations

import importlib
import math
import subprocess
import sys

import pytest
import torch
from any_prefill_vendored import ROOT, api, arguments, entry, inputs, package


@pytest.fixture(autouse=True)
def without_data(monkeypatch):
    """Serve ``meta`` tensors up to the launch, which fails the test."""

    def compiled(*args, **kwargs):
        raise AssertionError("a refused call came to compile a kernel")

    monkeypatch.setattr(arguments, "on_gpu", lambda x: x.is_meta)
    monkeypatch.setattr(entry, "compiled", compiled)
    monkeypatch.setattr(api, "_machine_problem", lambda index: "")


def meta(**changes):
    return inputs([0, 20, 37], device="meta", **changes)


REFUSED = {
    "q in fp16": (lambda x: {"q": x["q"].half()}, "q is float16"),
    "k in fp32": (lambda x: {"k": x["k"].float()}, "k is float32"),
    "three heads of v beside two of q": (
        lambda x: {n: x[n][:, :2].contiguous() for n in "qk"},
        "v has 3 heads",
    ),
    "head size 64": (lambda x: {n: x[n][..., :64].contiguous() for n in "qkv"}, "64"),
    "batch of 2 beside offsets": (lambda x: {"q": torch.stack([x["q"]] * 2)}, "q must be"),
    "no offsets for packed": (lambda x: {"cu_seqlens": None}, "cu_seqlens"),
    "offsets on the CPU": (
        lambda x: {"cu_seqlens": torch.tensor([0, 37], dtype=torch.int32)},
        "cu_seqlens is on cpu",
    ),
    "offsets as a list": (lambda x: {"cu_seqlens": [0, 37]}, "cu_seqlens must be"),
    "v on another device": (lambda x: {"v": torch.empty_like(x["v"], device="cpu")}, "v is on cpu"),
    "state in fp16": (lambda x: {"initial_state": x["initial_state"].half()}, "initial_state is"),
    "state for other sequences": (
        lambda x: {"initial_state": x["initial_state"][:1]},
        "initial_state must be",
    ),
    "channels of v not contiguous": (
        lambda x: {"v": x["v"].transpose(0, 2).contiguous().transpose(0, 2)},
        "v has strides",
    ),
    "keys too few": (lambda x: {"k": x["k"][:-1]}, "k must be"),
    # part: refused_gate
    "scale not finite": (lambda x: {"scale": math.nan}, "scale"),
    "scale as text": (lambda x: {"scale": "0.5"}, "scale"),
    "gate of no known form": (lambda x: {"gate": "tanh"}, "gate"),
    "out in fp32": (lambda x: {"out": x["g"]}, "out is float32"),
    # part: refused_activation
    "q is no tensor": (lambda x: {"q": [1.0]}, "q must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_without_a_look_at_the_device(case):
    change, named = REFUSED[case]
    x = meta()
    x.update(change(x))
    with pytest.raises((TypeError, ValueError)) as caught:
        package.any_prefill(**x)
    assert named in str(caught.value)
    answer = package.support(**x)
    assert not answer
    assert answer.reason == str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_gradients_are_refused_by_name(name):
    x = meta()
    x[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires grad"):
        package.any_prefill(**x)
    assert f"{name} requires grad" in package.support(**x).reason
    with torch.no_grad():
        assert package.support(**x)


@pytest.mark.parametrize("value", ["no", 1, 0, None])
def test_validate_is_true_or_false_and_nothing_that_could_be_taken_for_it(value):
    with pytest.raises(TypeError, match="validate must be True or False, not"):
        package.any_prefill(**meta(), validate=value)


def test_more_rows_than_offsets_can_name_are_refused_before_anything_is_allocated():
    T = 2**31
    q = torch.empty(T, 1, 128, dtype=torch.bfloat16, device="meta")
    x = {"q": q, "k": q, "v": q, "g": any_gate_of_q, "beta": q[..., 0].float()}
    x["cu_seqlens"] = torch.empty(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=str(T)):
        package.any_prefill(**x)


def test_what_is_served_is_said_to_be():
    assert package.support(**meta())
    assert package.support(**meta(state=False), scale=0.0)
    batch = {n: x.unflatten(0, (1, 37)) for n, x in meta().items() if n in "qkvg" or n == "beta"}
    assert package.support(**batch)
    assert str(package.support(**meta())) != ""


def test_another_architecture_is_refused_by_its_name(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA B200")
    api._machine_problem.cache_clear()
    try:
        problem = api._machine_problem(0)
    finally:
        api._machine_problem.cache_clear()
    assert "NVIDIA B200" in problem
    assert "sm_90a" in problem


# part: row_is_chosen


def test_compiled_graphs_know_shapes_and_dtypes_without_a_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    operator = importlib.import_module(f"{package.__name__}._op")._operator()
    with FakeTensorMode(), torch.no_grad():
        x = inputs([0, 20, 37], device="cpu")
        o, state = operator(
            *x.values(), None, any_default_forms
        )  # fmt: skip
    assert (o.shape, o.dtype) == ((37, 3, 128), torch.bfloat16)
    assert (state.shape, state.dtype) == ((2, 3, 128, 128), torch.float32)


def test_a_compiled_call_refuses_gradients():
    x = meta()
    x["q"].requires_grad_()
    step = torch.compile(lambda x: package.any_prefill(**x)[0].sum(), backend="eager")
    with pytest.raises(Exception, match=r"no backward pass|requires grad"):
        step(x)


def test_the_operator_itself_refuses_gradients(monkeypatch):
    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
    operator = importlib.import_module(f"{package.__name__}._op")._operator()
    x = inputs([0, 20, 37], device="cpu")
    x["v"].requires_grad_()
    with pytest.raises(ValueError, match="v requires grad, and there is no backward pass"):
        operator(
            *x.values(), None, any_default_forms
        )  # fmt: skip


def test_a_compiled_call_refuses_when_it_runs_what_it_could_not_when_it_was_traced(monkeypatch):
    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
    x = inputs([0, 20, 37], device="cpu")
    x["k"] = x["k"].half()
    for more in ({}, {"validate": True}):
        step = torch.compile(lambda x, m: package.any_prefill(**x, **m), backend="eager")
        with pytest.raises(TypeError, match="k is float16"):
            step(x, more)


def test_importing_the_folder_does_not_bring_torchs_tracer_in():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); import {ROOT.name}.api;"
            "print('torch._dynamo' in sys.modules, 'cutlass' in sys.modules)",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["False", "False"], done.stderr
