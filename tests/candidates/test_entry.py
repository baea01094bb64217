"""What the entry point refuses, by name and before any launch, and what it passes on."""

from __future__ import annotations

import math

import pytest
import torch

from candidates.kda_prefill.kernel import entry
from candidates.kda_prefill.kernel.entry import Config, kda_prefill

CONFIG = Config(bt=32, anchor="mid")


@pytest.fixture
def launched(monkeypatch):
    """Serve CPU tensors with a function that records its arguments and fills the outputs."""
    calls = []

    def compiled(config, with_state):
        def function(*args):
            calls.append((config, with_state, args))
            args[7].fill_(1.0)
            args[8].fill_(2.0)

        return function

    monkeypatch.setattr(entry, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(entry, "compiled", compiled)
    monkeypatch.setattr(entry, "_on_stream", lambda stream, device: None)
    return calls


def tensors(T=37, H=3, N=2, batch=None):
    lead = (T, H) if batch is None else (batch, T, H)
    bf16 = {n: torch.randn(*lead, 128).bfloat16() for n in ("q", "k", "v")}
    out = {**bf16, "g": -torch.rand(*lead, 128), "beta": torch.rand(*lead)}
    if batch is None:
        cu = [T * n // N for n in range(N)] + [T] if N else [0]
        out["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32)
    return out


def states(N=2, H=3):
    return torch.randn(N, H, 128, 128)


def test_packed_call_passes_tensors_in_the_documented_order(launched):
    x, state = tensors(), states()
    o, final_state = kda_prefill(**x, initial_state=state, schedule=CONFIG)
    ((config, with_state, args),) = launched
    assert config == CONFIG
    assert with_state
    for got, name in zip(args, ("q", "k", "v", "g", "beta", "cu_seqlens"), strict=False):
        assert got is x[name]
    assert args[6] is state
    assert args[7].data_ptr() == o.data_ptr()
    assert args[8] is final_state
    assert o.shape == (37, 3, 128)
    assert o.dtype == torch.bfloat16
    assert final_state.shape == (2, 3, 128, 128)
    assert final_state.dtype == torch.float32


def test_scratch_is_sized_by_slots_and_new_in_each_call(launched):
    x = tensors(T=37, N=2)
    for _ in range(2):
        kda_prefill(**x, schedule=CONFIG)
    first, second = (args[9] for _, _, args in launched)
    unroll = CONFIG.unroll
    assert first.shape[0] == unroll * (37 // (32 * unroll) + 2)
    assert first.shape[1:] == (3, entry.ImageLayout(32).elements)
    assert first.dtype == torch.bfloat16
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize(
    ("scale", "passed"), [(None, 1 / math.sqrt(128)), (0.0, 0.0), (0, 0.0), (0.5, 0.5), (1.0, 1.0)]
)
def test_scale_is_honoured_and_zero_is_not_missing(launched, scale, passed):
    kda_prefill(**tensors(), scale=scale, schedule=CONFIG)
    assert launched[0][2][-1] == passed
    assert isinstance(launched[0][2][-1], float)


def test_batch_without_offsets_is_equal_sequences(launched):
    x = tensors(T=20, batch=3)
    o, final_state = kda_prefill(**x, schedule=CONFIG)
    args = launched[0][2]
    assert args[0].shape == (60, 3, 128)
    assert args[4].shape == (60, 3)
    assert args[5].tolist() == [0, 20, 40, 60]
    assert args[5].dtype == torch.int32
    assert o.shape == (3, 20, 3, 128)
    assert final_state.shape == (3, 3, 128, 128)
    assert torch.all(o == 1)


def test_given_outputs_are_written_and_returned(launched):
    x, out, final_state = tensors(), torch.empty(37, 3, 128).bfloat16(), states()
    o, s = kda_prefill(**x, out=out, final_state=final_state, schedule=CONFIG)
    assert o is out
    assert s is final_state
    assert torch.all(out == 1)


def test_no_tokens_copies_every_state_without_a_launch(launched):
    state = states()
    o, final_state = kda_prefill(**tensors(T=0), initial_state=state, schedule=CONFIG)
    assert o.shape == (0, 3, 128)
    assert torch.equal(final_state, state)
    _, zero = kda_prefill(**tensors(T=0), schedule=CONFIG)
    assert torch.all(zero == 0)
    assert not launched


def test_no_sequences_writes_zero_rows_without_a_launch(launched):
    o, final_state = kda_prefill(**tensors(N=0), schedule=CONFIG)
    assert torch.all(o == 0)
    assert final_state.shape == (0, 3, 128, 128)
    assert not launched


def test_state_may_be_updated_in_place(launched):
    state = states()
    _, final_state = kda_prefill(
        **tensors(), initial_state=state, final_state=state, schedule=CONFIG
    )
    assert final_state is state
    segmented = Config(bt=32, anchor="mid", segments=2)
    with pytest.raises(ValueError, match="final_state shares memory with initial_state"):
        kda_prefill(**tensors(), initial_state=state, final_state=state, schedule=segmented)
    with pytest.raises(ValueError, match="final_state shares memory with initial_state"):
        kda_prefill(
            **tensors(), initial_state=state, final_state=state.view(2, 3, 128, 128),
            schedule=segmented,
        )  # fmt: skip


def strided(x):
    """Equal values behind a stride that is not compact."""
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    view = wide[..., : x.shape[-1]]
    return view.copy_(x)


def shifted(x):
    """Equal values 2 elements past an aligned address."""
    flat = torch.empty(x.numel() + 2, dtype=x.dtype)
    return flat[2:].view(x.shape).copy_(x)


REFUSED = {
    "q in fp16": (lambda x: {"q": x["q"].half()}, TypeError, "q is float16"),
    "v in fp32": (lambda x: {"v": x["v"].float()}, TypeError, "v is float32"),
    "g in bf16": (lambda x: {"g": x["g"].bfloat16()}, TypeError, "g is bfloat16"),
    "beta in bf16": (lambda x: {"beta": x["beta"].bfloat16()}, TypeError, "beta is bfloat16"),
    "offsets in int64": (
        lambda x: {"cu_seqlens": x["cu_seqlens"].long()},
        TypeError,
        "cu_seqlens is int64",
    ),
    "offsets as a list": (lambda x: {"cu_seqlens": [0, 37]}, TypeError, "cu_seqlens must be"),
    "no offsets at all": (
        lambda x: {"cu_seqlens": x["cu_seqlens"][:0]},
        ValueError,
        "cu_seqlens must be",
    ),
    "offsets in two rows": (
        lambda x: {"cu_seqlens": x["cu_seqlens"][None]},
        ValueError,
        "cu_seqlens must be",
    ),
    "q is no tensor": (lambda x: {"q": 3}, TypeError, "q must be a torch.Tensor"),
    "head size 64": (lambda x: {n: x[n][..., :64].contiguous() for n in "qkv"}, ValueError, "64"),
    "grouped heads": (
        lambda x: {"v": torch.cat([x["v"], x["v"]], 1)},
        ValueError,
        r"v must be \[37, 3, 128\]",
    ),
    "fewer keys": (lambda x: {"k": x["k"][:-1]}, ValueError, "k must be"),
    "gate per head": (lambda x: {"g": x["g"][..., 0].contiguous()}, ValueError, "g must be"),
    "beta per channel": (lambda x: {"beta": x["g"]}, ValueError, "beta must be"),
    "batch beside offsets": (lambda x: {"q": x["q"][None]}, ValueError, "q must be"),
    "no offsets for packed": (lambda x: {"cu_seqlens": None}, ValueError, "without cu_seqlens"),
    "q strided": (lambda x: {"q": strided(x["q"])}, ValueError, "q has strides"),
    "v strided": (lambda x: {"v": strided(x["v"])}, ValueError, "v has strides"),
    "beta strided": (lambda x: {"beta": strided(x["beta"])}, ValueError, "beta has strides"),
    "k misaligned": (lambda x: {"k": shifted(x["k"])}, ValueError, "k must start on"),
    "k elsewhere": (lambda x: {"k": x["k"].to("meta")}, ValueError, "k is on meta"),
    "offsets elsewhere": (
        lambda x: {"cu_seqlens": x["cu_seqlens"].to("meta")},
        ValueError,
        "cu_seqlens is on meta",
    ),
    "state in bf16": (
        lambda x: {"initial_state": states().bfloat16()},
        TypeError,
        "initial_state is bfloat16",
    ),
    "state in fp16": (
        lambda x: {"initial_state": states().half()},
        TypeError,
        "initial_state is float16",
    ),
    "state for another N": (
        lambda x: {"initial_state": states(N=3)},
        ValueError,
        "initial_state must be",
    ),
    "state transposed": (
        lambda x: {"initial_state": states().transpose(2, 3)},
        ValueError,
        "initial_state has strides",
    ),
    "out in fp32": (lambda x: {"out": x["g"]}, TypeError, "out is float32"),
    "out of another shape": (lambda x: {"out": x["q"][1:].clone()}, ValueError, "out must be"),
    "out over q": (lambda x: {"out": x["q"]}, ValueError, "out shares memory with q"),
    "state out in bf16": (
        lambda x: {"final_state": states().bfloat16()},
        TypeError,
        "final_state is bfloat16",
    ),
    "scale is text": (lambda x: {"scale": "0.5"}, TypeError, "scale must be a number"),
    "scale is NaN": (lambda x: {"scale": math.nan}, ValueError, "scale is nan"),
    "safe gate": (lambda x: {"gate": "safe"}, ValueError, "gate='safe'"),
    "lower bound": (lambda x: {"lower_bound": -5.0}, ValueError, "lower_bound is not served"),
    "A_log": (lambda x: {"A_log": torch.zeros(3)}, ValueError, "A_log is not served"),
    "dt_bias": (lambda x: {"dt_bias": torch.zeros(3, 128)}, ValueError, "dt_bias is not served"),
    "beta logits": (lambda x: {"beta_logits": True}, ValueError, "beta_logits is not served"),
    "l2norm": (lambda x: {"l2norm": True}, ValueError, "l2norm is not served"),
    "unknown schedule name": (
        lambda x: {"schedule": {"bt": 32, "anchor": "mid", "stage": 3}},
        ValueError,
        "no 'stage'",
    ),
    "schedule without bt": (lambda x: {"schedule": {"anchor": "mid"}}, ValueError, "needs 'bt'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_before_any_launch(launched, case):
    change, error, message = REFUSED[case]
    x = tensors()
    with pytest.raises(error, match=message):
        kda_prefill(**{**x, "schedule": CONFIG, **change(x)})
    assert not launched


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_gradients_are_declined_and_no_grad_serves(launched, name):
    x = {**tensors(), "initial_state": states()}
    x[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires grad"):
        kda_prefill(**x, schedule=CONFIG)
    assert not launched
    with torch.no_grad():
        kda_prefill(**x, schedule=CONFIG)
    assert len(launched) == 1


def test_partly_overlapping_states_are_refused(launched):
    both = torch.empty(3, 3, 128, 128)
    with pytest.raises(ValueError, match="final_state shares memory with initial_state"):
        kda_prefill(**tensors(), initial_state=both[:2], final_state=both[1:], schedule=CONFIG)


def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="q is on cpu"):
        kda_prefill(**tensors(), schedule=CONFIG)


def test_too_many_rows_for_int32_offsets_are_refused(monkeypatch):
    monkeypatch.setattr(entry, "DEVICE_TYPE", "meta")
    q = torch.empty(2**31, 1, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="2147483648 rows"):
        entry.check(q, q, q, q, q, cu_seqlens=torch.empty(2, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 30], "ends with 30, but q has 37"),
        ([1, 37], "starts with 1"),
        ([0, 20, 10, 37], "falls from 20 to 10 at sequence 1"),
        ([0, 40, 37], "falls from 40 to 37 at sequence 1"),
    ],
)
def test_validate_names_what_is_wrong_with_the_offsets(launched, monkeypatch, offsets, message):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x = {**tensors(), "cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        kda_prefill(**x, validate=True, schedule=CONFIG)
    assert not launched
    kda_prefill(**x, schedule=CONFIG)
    assert len(launched) == 1


def test_validate_accepts_empty_sequences_and_declines_in_a_capture(launched, monkeypatch):
    x = {**tensors(), "cu_seqlens": torch.tensor([0, 0, 37, 37], dtype=torch.int32)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kda_prefill(**x, validate=True, schedule=CONFIG)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="capture"):
        kda_prefill(**x, validate=True, schedule=CONFIG)


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        ("0", TypeError, "stream must be"),
        (True, TypeError, "stream must be"),
        (-1, ValueError, "-1"),
    ],
)
def test_a_stream_that_is_none_is_refused(stream, error, message):
    with pytest.raises(error, match=message):
        entry._on_stream(stream, torch.device("cuda", 0))


def test_a_compiled_entry_point_runs_eagerly(launched):
    x = tensors()
    step = torch.compile(lambda **kw: kda_prefill(**kw, schedule=CONFIG)[0] + 1, backend="eager")
    assert torch.all(step(**x) == 2)
    assert len(launched) == 1
