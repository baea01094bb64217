"""Calls like one before: served without the checks, and refused where they are not alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from entry_stand_in import CONFIG, states, tensors

from candidates._delta_rule.kernel import known
from candidates.kda_prefill.kernel import entry
from candidates.kda_prefill.kernel.entry import DEFAULT, FusedConfig, kda_prefill


def test_a_call_like_one_before_is_not_checked_again(launched, monkeypatch):
    x, state = tensors(), states()
    first = kda_prefill(**x, initial_state=state)
    longer = {**tensors(T=50), "initial_state": states()}
    monkeypatch.setattr(entry, "check", lambda *_, **__: pytest.fail("checked again"))
    again = kda_prefill(**x, initial_state=state, scale=0.0)
    assert [r.shape for r in again] == [r.shape for r in first]
    assert launched[1][2][:7] == launched[0][2][:7]
    assert launched[1][2][10] == 0.0
    o, _ = kda_prefill(**longer)
    assert o.shape == (50, 3, 128)
    assert launched[2][2][0] is longer["q"]


def test_outputs_are_compared_with_inputs_wherever_they_come_to_lie(launched):
    x, state = tensors(), states()
    out = torch.empty_like(x["v"])
    for _ in range(3):
        kda_prefill(**x, initial_state=state, out=out)
    both = torch.empty(2 * x["v"].numel(), dtype=torch.bfloat16)
    for name, shift in (("v", 0), ("k", 8 * 128), ("q", x["q"].numel() - 8)):
        n = x["q"].numel()
        moved = both[shift : shift + n].view(x["q"].shape)
        kda_prefill(**{**x, name: both[n:].view(moved.shape)}, initial_state=state, out=out)
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            kda_prefill(
                **{**x, name: moved}, initial_state=state, out=both[:n].view(moved.shape)
            )  # fmt: skip


def test_slices_are_known_by_their_strides(launched):
    rows = torch.randn(37, 3, 384).bfloat16()
    x = {**tensors(), **dict(zip("qkv", rows.split(128, -1), strict=True))}
    for _ in range(2):
        kda_prefill(**x)
    assert not entry.check(*x.values()).compact
    far = rows.new_empty(37, 3, 512)[..., :128]
    kda_prefill(**{**x, "q": far})
    odd = rows.new_empty(37, 3, 129)[..., :128]
    with pytest.raises(ValueError, match="q has strides"):
        kda_prefill(**{**x, "q": odd})


@pytest.mark.parametrize("bound", [2, 3, 7])
def test_what_is_known_is_bounded_and_calls_are_served_all_the_same(launched, monkeypatch, bound):
    monkeypatch.setattr(known, "_KINDS", bound)
    monkeypatch.setattr(known, "_CALLS", bound)
    monkeypatch.setattr(known, "_FORMS", 2)
    for H in range(1, 5):
        longest = tensors(T=40, H=H)
        for T in (37, 38, 39, 40):
            x = {n: t[:T] for n, t in longest.items() if n != "cu_seqlens"}
            x["cu_seqlens"] = tensors(T=T, H=H)["cu_seqlens"]
            rows = torch.randn(T, H, 256).bfloat16()
            forms = ({}, {"q": rows[..., :128]}, {"g": x["g"].bfloat16()})
            for form in (*forms, {"beta": x["beta"].bfloat16()}, *forms):
                given = {**x, **form}
                o, _ = kda_prefill(**given)
                assert o.shape == (T, H, 128)
                _, _, args = launched.pop()
                assert all(a is b for a, b in zip(args, given.values(), strict=False))
        assert len(known._KNOWN) <= bound
        assert len(known._PREPARED) <= bound
        assert all(len(forms) <= 2 for forms in known._KNOWN.values())


def test_a_kind_that_was_forgotten_and_met_again_is_known_in_its_new_form(launched, monkeypatch):
    monkeypatch.setattr(known, "_KINDS", 1)
    x = tensors()
    for _ in range(2):
        kda_prefill(**x)
    kda_prefill(**x, l2norm=True)
    x["g"] = x["g"].bfloat16()
    kda_prefill(**x)
    monkeypatch.setattr(entry, "check", lambda *_, **__: pytest.fail("checked again"))
    kda_prefill(**x)


def test_schedules_that_take_turns_on_one_shape_each_run_their_own_kernel(launched):
    x = tensors()
    schedules = [CONFIG, DEFAULT, FusedConfig("middle", 2), known.ByShape(lambda *_: CONFIG)]
    for _ in range(3):
        for schedule in schedules:
            kda_prefill(**x, schedule=schedule)
    assert [config for config, _, _ in launched] == [*schedules[:3], CONFIG] * 3


def test_calls_without_rows_are_checked_each_time(launched):
    x = tensors(T=0)
    for _ in range(3):
        o, state = kda_prefill(**x)
        assert o.shape == (0, 3, 128)
        assert (state == 0).all()
    with pytest.raises(TypeError, match="k is float16"):
        kda_prefill(**{**x, "k": x["k"].half()})
    assert not launched


LAID_OUT_WITH_GAPS = {
    "initial_state, heads of more": ("initial_state", lambda x: torch.cat([x, x], 1)[:, :3]),
    "initial_state, every second": ("initial_state", lambda x: x.repeat_interleave(2, 0)[::2]),
    "final_state, heads of more": ("final_state", lambda x: torch.cat([x, x], 1)[:, :3]),
    "out, heads of more": ("out", lambda x: torch.cat([x, x], -2)[..., :3, :]),
}


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("case", LAID_OUT_WITH_GAPS)
def test_gaps_that_a_compiled_function_does_not_see_are_refused_in_every_call(
    launched, case, batch
):
    name, change = LAID_OUT_WITH_GAPS[case]
    x = tensors(T=37 if batch is None else 20, batch=batch)
    right = {
        "initial_state": states(),
        "final_state": states(),
        "out": torch.empty_like(x["v"]),
    }
    for _ in range(3):
        kda_prefill(**x, **right)
    del launched[:]
    with pytest.raises(ValueError, match=f"{name} has strides"):
        kda_prefill(**x, **{**right, name: change(right[name])})
    assert not launched


def test_rows_with_gaps_are_known_apart_from_rows_without(launched):
    """The outermost stride is none that a compiled function for compact tensors sees."""
    x = tensors()
    for _ in range(3):
        kda_prefill(**x)
    del launched.forms[:]
    for name in ("q", "k", "v", "g", "beta"):
        apart = {**x, name: torch.cat([x[name], x[name]], 1)[:, :3]}
        for _ in range(3):
            kda_prefill(**apart)
    assert [options.compact for options in launched.forms] == [False] * 15


def test_a_batch_that_lost_its_last_rows_is_not_known_by_its_strides(launched):
    x = tensors(T=21, batch=2)
    x |= dict(zip("qkv", torch.randn(2, 21, 3, 384).bfloat16().split(128, -1), strict=True))
    for _ in range(3):
        kda_prefill(**x)
    del launched[:]
    with pytest.raises(ValueError, match=r"q has strides .* sequences must follow"):
        kda_prefill(**{name: tensor[:, :20] for name, tensor in x.items()})
    one = {name: tensor[:1] for name, tensor in x.items()}
    for _ in range(3):
        kda_prefill(**one)
    del launched[:]
    with pytest.raises(ValueError, match=r"q has strides .* sequences must follow"):
        kda_prefill(**{name: tensor[:, :20].expand(2, *[-1] * (tensor.dim() - 1))
                       for name, tensor in one.items()})  # fmt: skip
    assert not launched


def test_value_heads_are_a_multiple_also_where_others_were_served(launched):
    x = tensors(H=4)
    grouped = {**x, **{n: x[n][:, :2].contiguous() for n in "qk"}}
    for _ in range(3):
        kda_prefill(**grouped)
        kda_prefill(**x)
    del launched[:]
    with pytest.raises(ValueError, match="v has 4 heads, which is no multiple of the 3"):
        kda_prefill(**{**x, **{n: x[n][:, :3].contiguous() for n in "qk"}})
    assert not launched


def test_forms_that_take_turns_each_go_to_their_function_unchecked(launched, monkeypatch):
    x, state = tensors(), states()
    slices = dict(zip("qkv", torch.randn(37, 3, 384).bfloat16().split(128, -1), strict=True))
    forms = {
        "plain": {},
        "gates": {"g": x["g"].bfloat16()},
        "strengths": {"beta": x["beta"].bfloat16()},
        "offsets": {"cu_seqlens": x["cu_seqlens"].long()},
        "slices": slices,
        "slices and gates": {**slices, "g": x["g"].bfloat16()},
        "state": {"initial_state": state},
        "bf16 state": {"initial_state": state.bfloat16()},
        "no final state": {"final_state": False},
        "final state": {"final_state": torch.empty_like(state)},
        "bf16 final state": {"final_state": torch.empty_like(state).bfloat16()},
        "out": {"out": torch.empty_like(x["v"])},
    }
    for _ in range(2):
        for form in forms.values():
            kda_prefill(**{**x, **form})
    first = launched.forms[: len(forms)]
    assert len(set(first)) == len(forms) - 3  # state, final state and out are no form of their own
    monkeypatch.setattr(entry, "check", lambda *_, **__: pytest.fail("checked again"))
    for length in (37, 30):  # and of another length at once
        del launched[:], launched.forms[:]
        for _ in range(2):
            for form in forms.values():
                given = {n: t[:length] if n in "qkvgbetaout" else t
                         for n, t in {**x, **form}.items()}  # fmt: skip
                kda_prefill(**given)
        assert launched.forms == first * 2


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias",
                                  "out", "final_state"])  # fmt: skip
def test_what_changes_in_a_tensor_that_was_served_is_seen(launched, name):
    """Its gradient, its memory: the same tensor object each time."""
    x = {
        **tensors(), "gate": "softplus", "A_log": torch.zeros(3), "dt_bias": torch.zeros(3, 128),
        "initial_state": states(), "final_state": states(),
    }  # fmt: skip
    x["out"] = torch.empty_like(x["v"])
    for _ in range(3):
        kda_prefill(**x)
    x[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires grad"):
        kda_prefill(**x)
    with torch.no_grad():
        kda_prefill(**x)
    x[name].requires_grad_(False)
    del launched[:]
    kda_prefill(**x)
    assert len(launched) == 1
    x[name].data = torch._neg_view(x[name].data)
    with pytest.raises(ValueError, match=f"{name} is a view that negates"):
        kda_prefill(**x)
    x[name].data = x[name].data.resolve_neg().double()
    with pytest.raises(TypeError, match=f"{name} is float64"):
        kda_prefill(**x)
    assert len(launched) == 1


@pytest.mark.parametrize("name", ["l2norm", "beta_logits"])
@pytest.mark.parametrize("value", [0, 1, None])
def test_numbers_are_no_flags_also_where_the_flag_was_served(launched, name, value):
    for flag in (False, True, False, True):
        kda_prefill(**tensors(), **{name: flag})
    with pytest.raises(TypeError, match=f"{name} must be True or False"):
        kda_prefill(**tensors(), **{name: value})


def test_another_device_than_the_current_one_takes_the_long_way(launched, monkeypatch):
    x = tensors()
    for _ in range(2):
        kda_prefill(**x)
    seen = []
    monkeypatch.setattr(entry, "on_stream", lambda stream, device: seen.append(device))
    kda_prefill(**x)
    assert seen == []
    monkeypatch.setattr(known, "current_device", lambda: 1)
    kda_prefill(**x)
    assert seen == [torch.device("cpu")]


def test_a_stream_that_is_current_anyway_is_no_reason_to_check_again(launched, monkeypatch):
    x, went = tensors(), []
    for _ in range(2):
        kda_prefill(**x)
    monkeypatch.setattr(entry, "on_stream", lambda stream, device: went.append(stream))
    monkeypatch.setattr(known, "current_stream", lambda index: {-1: 1}[index])
    kda_prefill(**x, stream=1)
    assert went == []
    others = [0, 2, True, "1", 1.0]
    for other in others:
        kda_prefill(**x, stream=other)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kda_prefill(**x, stream=1, validate=True)
    assert went == [*others, 1]
    del went[:]
    monkeypatch.setattr(known, "current_stream", None)  # as where torch knows no CUDA
    kda_prefill(**x, stream=1)
    assert went == [1]


@pytest.mark.parametrize(
    ("device", "handle", "current"), [("cpu", 7, True), ("cpu", 8, False), ("meta", 7, False)]
)
def test_a_stream_is_current_on_its_own_device_alone(monkeypatch, device, handle, current):
    class Stream:
        """With the attributes of torch's, which needs a GPU."""

    stream = Stream()
    stream.device, stream.cuda_stream = torch.device(device), handle
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(known, "current_stream", lambda index: 7)
    assert known.is_current(stream, torch.empty(0)) is current
    assert not known.is_current(stream, [0])


def test_a_schedule_by_shape_is_asked_once_for_each_shape(launched):
    asked = []

    def choose(q, v, cu_seqlens):
        asked.append(q.shape[0])
        return CONFIG if q.shape[0] < 40 else DEFAULT

    by_shape = known.ByShape(choose)
    for T in (37, 50, 37, 50, 37, 50):
        kda_prefill(**tensors(T), schedule=by_shape)
    assert [config for config, _, _ in launched] == [CONFIG, DEFAULT] * 3
    assert len(asked) <= 6
    del asked[:]
    for T in (37, 50):
        kda_prefill(**tensors(T), schedule=by_shape)
    assert asked == []
    for T in (50, 60):  # where the wrong call is also the first of its length
        wrong = {**tensors(T), "q": tensors(37)["q"]}
        with pytest.raises(ValueError, match="k must be"):
            kda_prefill(**wrong, schedule=by_shape)
        kda_prefill(**tensors(T), schedule=by_shape)
        assert launched[-1][0] == DEFAULT


def test_threads_that_call_at_once_are_each_served_as_alone(launched, monkeypatch):
    for bound in ("_KINDS", "_FORMS", "_CALLS"):
        monkeypatch.setattr(known, bound, 2)
    makes = [lambda T=T, n=n: {**tensors(T), **n} for T in (17, 18, 19)
             for n in ({}, {"final_state": False}, {"l2norm": True})]  # fmt: skip

    def work(n):
        for turn in range(60):
            x = makes[(n + turn) % len(makes)]()
            o, state = kda_prefill(**x)
            assert o.shape == x["v"].shape
            assert (state is None) == ("final_state" in x)
            assert (o == 1).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(launched) == 240
