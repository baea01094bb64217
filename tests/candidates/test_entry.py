"""What the entry point refuses, by name and before any launch, and what it passes on."""

from __future__ import annotations

import math

import pytest
import torch
from entry_stand_in import CONFIG, apart, states, tensors

from candidates._delta_rule.kernel.image import ImageLayout
from candidates._delta_rule.kernel.options import Options
from candidates._delta_rule.kernel.pieces import Scratch
from candidates.kda_prefill.kernel import arguments, entry
from candidates.kda_prefill.kernel.entry import DEFAULT, Config, FusedConfig, kda_prefill
from candidates.kda_prefill.kernel.fused_plan import NEVER, SHORTER


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
    assert first.shape[1:] == (3, ImageLayout(32).elements)
    assert first.dtype == torch.bfloat16
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize(
    ("scale", "passed"), [(None, 1 / math.sqrt(128)), (0.0, 0.0), (0, 0.0), (0.5, 0.5), (1.0, 1.0)]
)
def test_scale_is_honoured_and_zero_is_not_missing(launched, scale, passed):
    kda_prefill(**tensors(), scale=scale, schedule=CONFIG)
    assert launched[0][2][11] == passed
    assert isinstance(launched[0][2][11], float)


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


@pytest.mark.parametrize(
    "schedule",
    [None, DEFAULT, {"form": "fused", "frame": "middle", "builders": 3, "waves": 1}],
)
def test_a_fused_kernel_is_the_default_and_may_be_named(launched, schedule):
    x = tensors()
    o, final_state = kda_prefill(**x, schedule=schedule)
    ((config, with_state, args),) = launched
    assert config == FusedConfig("middle", 3)
    assert not with_state
    assert args[0] is x["q"]
    assert args[7] is o
    assert args[8] is final_state
    assert args[9].numel() == Scratch(132).words(37, 3)
    assert args[9].dtype == torch.float32
    assert args[10] == 1 / math.sqrt(128)
    assert args[11:13] == (132, SHORTER)


def test_a_scratch_that_int32_cannot_count_is_avoided_by_whole_sequences(launched, monkeypatch):
    monkeypatch.setattr(arguments, "MAX_ROWS", 10_000)
    kda_prefill(**tensors())
    ((_, _, args),) = launched
    assert args[9].numel() == 1
    assert args[11:13] == (132, NEVER)


@pytest.mark.parametrize("schedule", [None, CONFIG])
def test_what_activates_the_gate_is_passed_on(launched, schedule):
    x, A_log, dt_bias = tensors(), torch.zeros(3), torch.ones(3, 128)
    x["g"], x["beta"] = x["g"].bfloat16(), x["beta"].bfloat16()
    kda_prefill(
        **x, schedule=schedule, gate="safe", lower_bound=-5, A_log=A_log, dt_bias=dt_bias,
        beta_logits=True, final_state=False,
    )  # fmt: skip
    ((_, _, args),) = launched
    assert args[8] is None
    assert args[-3] is A_log
    assert args[-2] is dt_bias
    assert args[-1] == -5.0
    assert isinstance(args[-1], float)


def test_options_follow_from_the_arguments(launched):
    x, state = tensors(), states().bfloat16()
    plain = entry.check(*x.values())
    assert plain == Options()
    assert entry.check(*x.values(), state).initial_state == "bfloat16"
    assert entry.check(*x.values(), final_state=state).final_state == "bfloat16"
    assert entry.check(*x.values(), final_state=False).final_state is None
    assert entry.check(*tensors(batch=2).values()).offsets == "equal"
    x["cu_seqlens"] = x["cu_seqlens"].long()
    assert entry.check(*x.values()).offsets == "int64"
    rows = torch.randn(37, 3, 384).bfloat16().split(128, -1)
    x |= dict(zip("qkv", rows, strict=True))
    assert not entry.check(*x.values()).compact
    for name in "vg":
        x[name] = torch.cat([x[name], x[name]], 1)
    x["beta"] = torch.rand(6, 37).T
    assert not entry.check(*x.values(), l2norm=True).compact


def test_a_fused_kernel_takes_a_batch_as_it_is(launched):
    x = tensors(T=20, batch=3)
    o, final_state = kda_prefill(**x)
    ((_, _, args),) = launched
    assert args[0] is x["q"]
    assert args[5] is None
    assert o.shape == (3, 20, 3, 128)
    assert final_state.shape == (3, 3, 128, 128)


def test_sequences_of_a_batch_follow_each_other(launched):
    x = tensors(T=20, batch=3)
    x["k"] = torch.randn(3, 21, 3, 128).bfloat16()[:, 1:]
    with pytest.raises(ValueError, match=r"k has strides .* sequences must follow"):
        kda_prefill(**x)


def test_a_fused_kernel_declines_a_state_in_place(launched):
    state = states()
    with pytest.raises(ValueError, match="final_state shares memory with initial_state"):
        kda_prefill(**tensors(), initial_state=state, final_state=state)


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


def padded(x):
    """Equal values, rows with 2 bytes between them."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)
    return wide[..., : x.shape[-1]].copy_(x)


def shifted(x):
    """Equal values 2 elements past an aligned address."""
    flat = torch.empty(x.numel() + 2, dtype=x.dtype)
    return flat[2:].view(x.shape).copy_(x)


REFUSED = {
    "q in fp16": (lambda x: {"q": x["q"].half()}, TypeError, "q is float16"),
    "q in fp64": (lambda x: {"q": x["q"].double()}, TypeError, "q is float64"),
    "v in fp32": (lambda x: {"v": x["v"].float()}, TypeError, "v is float32"),
    "g in fp16": (lambda x: {"g": x["g"].half()}, TypeError, "g is float16"),
    "beta in fp64": (lambda x: {"beta": x["beta"].double()}, TypeError, "beta is float64"),
    "offsets in int16": (
        lambda x: {"cu_seqlens": x["cu_seqlens"].short()},
        TypeError,
        "cu_seqlens is int16",
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
    "offsets with gaps": (
        lambda x: {"cu_seqlens": x["cu_seqlens"].repeat_interleave(2)[::2]},
        ValueError,
        "cu_seqlens has strides",
    ),
    "q is no tensor": (lambda x: {"q": 3}, TypeError, "q must be a torch.Tensor"),
    "g is no tensor": (lambda x: {"g": None}, TypeError, "g must be a torch.Tensor"),
    "head size 64": (lambda x: {n: x[n][..., :64].contiguous() for n in "qkv"}, ValueError, "64"),
    "value heads that are no multiple": (
        lambda x: {"v": torch.cat([x["v"], x["v"][:, :1]], 1)},
        ValueError,
        "v has 4 heads, which is no multiple of the 3",
    ),
    "gates of too few value heads": (
        lambda x: {"v": torch.cat([x["v"], x["v"]], 1)},
        ValueError,
        r"g must be \[37, 6, 128\]",
    ),
    "fewer keys": (lambda x: {"k": x["k"][:-1]}, ValueError, "k must be"),
    "gate per head": (lambda x: {"g": x["g"][..., 0].contiguous()}, ValueError, "g must be"),
    "beta per channel": (lambda x: {"beta": x["g"]}, ValueError, "beta must be"),
    "batch beside offsets": (lambda x: {"q": x["q"][None]}, ValueError, "q must be"),
    "no offsets for packed": (lambda x: {"cu_seqlens": None}, ValueError, "without cu_seqlens"),
    "q's channels apart": (lambda x: {"q": apart(x["q"])}, ValueError, "q has strides"),
    "v's channels apart": (lambda x: {"v": apart(x["v"])}, ValueError, "v has strides"),
    "k's rows at odd bytes": (lambda x: {"k": padded(x["k"])}, ValueError, "k has strides"),
    "k misaligned": (lambda x: {"k": shifted(x["k"])}, ValueError, "k must start on"),
    "k elsewhere": (lambda x: {"k": x["k"].to("meta")}, ValueError, "k is on meta"),
    "g negated in a view": (
        lambda x: {"g": torch._neg_view(x["g"])},
        ValueError,
        "g is a view that negates",
    ),
    "beta the imaginary part of a conjugate": (
        lambda x: {"beta": torch.complex(x["beta"], x["beta"]).conj().imag},
        ValueError,
        "beta is a view that negates",
    ),
    "v sparse": (lambda x: {"v": x["v"].to_sparse()}, ValueError, "v is sparse_coo"),
    "offsets elsewhere": (
        lambda x: {"cu_seqlens": x["cu_seqlens"].to("meta")},
        ValueError,
        "cu_seqlens is on meta",
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
    "final state is no tensor": (
        lambda x: {"final_state": True},
        TypeError,
        "final_state must be a torch.Tensor",
    ),
    "state out in fp16": (
        lambda x: {"final_state": states().half()},
        TypeError,
        "final_state is float16",
    ),
    "state out for another N": (
        lambda x: {"final_state": states(N=3)},
        ValueError,
        "final_state must be",
    ),
    "offsets negated in a view": (
        lambda x: {"cu_seqlens": torch._neg_view(x["cu_seqlens"])},
        ValueError,
        "cu_seqlens is a view that negates",
    ),
    "scale is text": (lambda x: {"scale": "0.5"}, TypeError, "scale must be a number"),
    "scale is NaN": (lambda x: {"scale": math.nan}, ValueError, "scale is nan"),
    "scale beyond fp32": (lambda x: {"scale": 1e39}, ValueError, "finite in float32"),
    "unknown gate": (lambda x: {"gate": "tanh"}, ValueError, "gate='tanh' is not one of"),
    "lower bound of a log gate": (
        lambda x: {"lower_bound": -5.0},
        ValueError,
        "lower_bound is given, but gate='log'",
    ),
    "A_log of a log gate": (lambda x: {"A_log": torch.zeros(3)}, ValueError, "A_log is given"),
    "bias of a log gate": (
        lambda x: {"dt_bias": torch.zeros(3, 128)},
        ValueError,
        "dt_bias is given",
    ),
    "safe gate without A_log": (
        lambda x: {"gate": "safe", "lower_bound": -5.0},
        ValueError,
        "gate='safe' needs A_log",
    ),
    "safe gate without a bound": (
        lambda x: {"gate": "safe", "A_log": torch.zeros(3)},
        ValueError,
        "gate='safe' needs lower_bound",
    ),
    "safe gate of a positive bound": (
        lambda x: {"gate": "safe", "A_log": torch.zeros(3), "lower_bound": 5.0},
        ValueError,
        "lower_bound=5.0 is not served",
    ),
    "safe gate below what is kept": (
        lambda x: {"gate": "safe", "A_log": torch.zeros(3), "lower_bound": -101},
        ValueError,
        "lower_bound=-101 is not served",
    ),
    "softplus with a bound": (
        lambda x: {"gate": "softplus", "A_log": torch.zeros(3), "lower_bound": -5.0},
        ValueError,
        "gate='softplus' has none",
    ),
    "A_log in bf16": (
        lambda x: {"gate": "softplus", "A_log": torch.zeros(3).bfloat16()},
        TypeError,
        "A_log is bfloat16",
    ),
    "A_log of another length": (
        lambda x: {"gate": "softplus", "A_log": torch.zeros(4)},
        ValueError,
        r"A_log must be \[3\]",
    ),
    "bias of one head": (
        lambda x: {"gate": "softplus", "A_log": torch.zeros(3), "dt_bias": torch.zeros(128)},
        ValueError,
        r"dt_bias must be \[3, 128\]",
    ),
    "l2norm as a number": (lambda x: {"l2norm": 1}, TypeError, "l2norm must be True or False"),
    "validate": (
        lambda x: {"validate": "no"},
        TypeError,
        "validate must be True or False, not 'no'",
    ),
    "validate as a number": (
        lambda x: {"validate": 0},
        TypeError,
        "validate must be True or False, not 0",
    ),
    "unknown schedule name": (
        lambda x: {"schedule": {"bt": 32, "anchor": "mid", "stage": 3}},
        ValueError,
        "no 'stage'",
    ),
    "schedule without bt": (lambda x: {"schedule": {"anchor": "mid"}}, ValueError, "needs 'bt'"),
    "schedule of an unknown bt": (
        lambda x: {"schedule": {"bt": 48, "anchor": "mid"}},
        ValueError,
        "bt=48 is not one of",
    ),
    "schedule with bt as text": (
        lambda x: {"schedule": {"bt": "32", "anchor": "mid"}},
        ValueError,
        "bt='32' is no positive int",
    ),
    "schedule of an unknown anchor": (
        lambda x: {"schedule": {"bt": 32, "anchor": "middle"}},
        ValueError,
        "anchor='middle' is not one of",
    ),
    "schedule of odd segments": (
        lambda x: {"schedule": {"bt": 32, "anchor": "mid", "segments": 3}},
        ValueError,
        "segments=3 is not one of",
    ),
    "schedule that is a text": (lambda x: {"schedule": "fused"}, TypeError, "schedule must be"),
    "schedule of no known form": (
        lambda x: {"schedule": {"form": "triton"}},
        ValueError,
        "form='triton'",
    ),
    "fused schedule without builders": (
        lambda x: {"schedule": {"form": "fused", "frame": "middle"}},
        ValueError,
        "needs 'builders'",
    ),
    "fused schedule that would spill": (
        lambda x: {"schedule": {"frame": "boundary", "builders": 3}},
        ValueError,
        "builders=3 with frame=boundary",
    ),
    "fused schedule of no waves": (
        lambda x: {"schedule": {"frame": "middle", "builders": 3, "waves": 0}},
        ValueError,
        "waves=0 is no positive int",
    ),
}


@pytest.mark.parametrize("schedule", [None, CONFIG])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_also_after_calls_that_were_right(launched, case, schedule):
    change, error, message = REFUSED[case]
    x, state = tensors(), states()
    out, final_state = torch.empty_like(x["v"]), torch.empty_like(state)
    for how in ({}, {"initial_state": state}, {"out": out, "final_state": final_state}):
        kda_prefill(**x, **how, schedule=schedule)
    del launched[:]
    with pytest.raises(error, match=message):
        kda_prefill(**{**x, "schedule": schedule, **change(x)})
    assert not launched


SPLIT_DECLINES = {
    "l2norm": (lambda x: {"l2norm": True}, "l2norm"),
    "slices of one projection": (
        lambda x: dict(
            zip("qkv", torch.cat([x[n] for n in "qkv"], -1).split(128, -1), strict=True)
        ),
        "not contiguous",
    ),
    "value heads": (
        lambda x: {n: torch.cat([x[n], x[n]], 1) for n in ("v", "g", "beta")},
        "more value heads than keys",
    ),
}


@pytest.mark.parametrize("case", SPLIT_DECLINES)
def test_split_schedules_decline_other_forms_by_name(launched, case):
    change, message = SPLIT_DECLINES[case]
    x = tensors()
    with pytest.raises(ValueError, match=f"{message}.*not served by a split schedule"):
        kda_prefill(**{**x, "schedule": CONFIG, **change(x)})
    assert not launched


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
    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
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
        entry.on_stream(stream, torch.device("cuda", 0))


def test_a_compiled_entry_point_runs_eagerly(launched):
    x = tensors()
    step = torch.compile(lambda **kw: kda_prefill(**kw, schedule=CONFIG)[0] + 1, backend="eager")
    assert torch.all(step(**x) == 2)
    assert len(launched) == 1


def test_a_call_of_a_compiled_program_is_not_checked_again_either(launched, monkeypatch):
    x = tensors()
    step = torch.compile(lambda **kw: kda_prefill(**kw)[0] + 1, backend="eager")
    step(**x)
    monkeypatch.setattr(entry, "check", lambda *_, **__: pytest.fail("checked again"))
    assert torch.all(step(**x) == 2)
    assert len(launched) == 2
