"""The contract on a Hopper GPU: what is served is right against the float64 oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from any_prefill_oracle import assert_close, oracle
from any_prefill_vendored import CONFIGS, api, inputs, on_hopper, package

pytestmark = on_hopper

BOUND = package.GATE_BOUND
LENGTHS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 500)


def packed(lengths):
    return [0, *itertools.accumulate(lengths)]


def names(config):
    return type(config).__name__ + "-" + "-".join(str(v) for v in vars(config).values())


@pytest.fixture(params=CONFIGS, ids=names)
def every_schedule(request, monkeypatch):
    """Serve all shapes with one schedule of the table, each in turn."""
    monkeypatch.setattr(api, "choose", lambda any_shape_arguments: request.param)
    return request.param


def judge(x, what="", **options):
    """Run into memory full of NaN and compare with the oracle, twice alike."""
    want_o, want_state = oracle(**x, scale=options.get("scale"))
    runs = []
    for _ in range(2):
        out = torch.full_like(x["v"], math.nan)
        state = torch.full_like(want_state, math.nan, dtype=torch.float32)
        o, final = package.any_prefill(**x, **options, out=out, final_state=state)
        assert o is out
        assert final is state
        runs.append((o, final))
    assert_close(runs[0][0], want_o, f"o {what}")
    assert_close(runs[0][1], want_state, f"final_state {what}")
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second), f"{what}: two runs on equal inputs differ"
    return runs[0]


# -- lengths, offsets, gates -----------------------------------------------------------


@pytest.mark.parametrize("state", [True, False], ids=["state", "no state"])
def test_any_length_and_one_past_a_chunk(every_schedule, state):
    judge(inputs(packed(LENGTHS), heads=2, state=state))
    for offsets in ([0, 1], [0, 63, 64], [0, 17, 50, 51]):
        judge(inputs(offsets, state=state), f"{offsets}")


def test_gates_over_the_whole_range_that_is_declared(every_schedule):
    low = -30.0 if BOUND is None else BOUND
    families = {
        "wide": (low, 0.0),
        "slow": (-0.01, 0.0),
        "constant": (low, low),
        "none": (0.0, 0.0),
    }
    if BOUND is None:
        families |= {"very strong": (-1e4, -1e4), "full reset": (-math.inf, -math.inf)}
    for name, gates in families.items():
        x = inputs(packed((130, 47)), heads=2, gates=(-1.0, 0.0))
        x["g"].uniform_(*gates) if gates[0] < gates[1] else x["g"].fill_(gates[0])
        judge(x, name)
    mixed = inputs(packed((130, 47)), heads=2)
    mixed["g"][..., ::2], mixed["g"][..., 1::2] = max(low, -5.0), -0.001
    judge(mixed, "mixed")


def test_similar_keys_with_strong_writes_and_slow_gates(every_schedule):
    x = inputs(packed((200, 33)), heads=2, gates=(-0.01, 0.0))
    shared = torch.randn(128, device="cuda")
    keys = torch.nn.functional.normalize(x["k"].float() + 0.25 * shared, dim=-1)
    x["k"] = keys.bfloat16()
    x["beta"].uniform_(0.94, 0.96)
    judge(x)


@pytest.mark.skipif(BOUND is None, reason="every gate is served")
def test_gates_past_the_bound_are_refused_where_they_are_looked_at():
    x = inputs([0, 16], heads=1)
    x["g"].fill_(BOUND - 1)
    with pytest.raises(ValueError, match=f"g reaches {BOUND - 1:g}"):
        package.any_prefill(**x, validate=True)
    # part: past_the_bound


@pytest.mark.parametrize("state", [True, False], ids=["state", "no state"])
def test_empty_sequences_keep_their_state(every_schedule, state):
    x = inputs([0, 0, 37, 37], state=state)
    _, final = judge(x)
    for n in (0, 2):
        kept = x["initial_state"][n] if state else torch.zeros_like(final[n])
        assert torch.equal(final[n], kept)
    nothing = inputs([0, 0], state=state)
    o, final = package.any_prefill(**nothing)
    assert o.shape[0] == 0
    assert torch.equal(final, nothing["initial_state"] if state else torch.zeros_like(final))


MALFORMED = ([0, 30], [1, 37], [0, 20, 10, 37], [-5, 50], [37, 0], [5, 5, 20, 20], [60, 80])


def test_malformed_offsets_touch_nothing_out_of_range_and_leave_nothing_unwritten(every_schedule):
    for offsets in MALFORMED:
        x = inputs(offsets, tokens=37, gates=(-0.01, 0.0))
        around = torch.full((37 + 128, 3, 128), 7.0, dtype=torch.bfloat16, device="cuda")
        out = around[64:101]
        out.fill_(math.nan)
        N = len(offsets) - 1
        states = torch.full((N + 2, 3, 128, 128), 7.0, device="cuda")
        final = states[1 : N + 1].fill_(math.nan)
        package.any_prefill(**x, out=out, final_state=final)
        want_o, want_state = oracle(**x)
        assert_close(out, want_o, f"o {offsets}")
        assert_close(final, want_state, f"final_state {offsets}")
        assert torch.all(out[want_o == 0] == 0), f"{offsets}: rows that no sequence covers"
        assert torch.all(around[:64] == 7)
        assert torch.all(around[101:] == 7)
        assert torch.all(states[0] == 7)
        assert torch.all(states[-1] == 7)


@pytest.mark.parametrize("offsets", MALFORMED, ids=str)
def test_malformed_offsets_are_refused_where_they_are_looked_at(offsets):
    with pytest.raises(ValueError, match="cu_seqlens"):
        package.any_prefill(**inputs(offsets, tokens=37), validate=True)


@pytest.mark.parametrize(
    "offsets", [[0, 1, 2, 3, 4096], [0, 4093, 4094, 4095, 4096]], ids=["long last", "long first"]
)
def test_skewed_lengths(every_schedule, offsets):
    # Strong gates: what is 600 tokens back is below e^-600 of the state.
    x = inputs(offsets, heads=4, gates=(-3.0, -1.0))
    o, final = package.any_prefill(**x)
    for n, (low, high) in enumerate(itertools.pairwise(offsets)):
        from_ = max(low, high - 600)
        part = {name: x[name][from_:high] for name in ("q", "k", "v", "g", "beta")}
        part["cu_seqlens"] = torch.tensor([0, high - from_], dtype=torch.int32)
        start = x["initial_state"][n : n + 1] if from_ == low else None
        want_o, want_state = oracle(**part, initial_state=start)
        settled = 0 if from_ == low else 100
        assert_close(o[from_ + settled : high], want_o[settled:], f"o {n}")
        assert_close(final[n : n + 1], want_state, f"final_state {n}")


def test_more_than_2_to_the_31_elements():
    T, H = 1048592, 16
    assert T * H * 128 > 2**31
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of free device memory")
    draw = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, v = (torch.empty(T, H, 128, **draw).normal_(0, 0.09) for _ in range(3))
    x = {"q": q, "k": k, "v": v, "g": torch.empty(any_gate_axes, device="cuda").uniform_(-3, -1)}
    x["beta"] = torch.rand(T, H, device="cuda")
    o, final = package.any_prefill(
        **x, cu_seqlens=torch.tensor([0, T], dtype=torch.int32, device="cuda")
    )
    last = {name: value[-400:] for name, value in x.items()}
    want_o, want_state = oracle(**last, cu_seqlens=torch.tensor([0, 400]))
    assert_close(o[-200:], want_o[-200:], "o, last rows")
    assert_close(final, want_state, "final_state")


# -- arguments -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.5, 1.0, 0.0])
def test_scale_is_honoured_and_zero_is_not_missing(scale):
    o, _ = judge(inputs([0, 37, 64]), scale=scale)
    assert (float(o.abs().max()) == 0) == (scale == 0)


def test_a_batch_of_equal_sequences_is_what_offsets_would_say():
    x = inputs([0, 40, 80, 120])
    o, final = package.any_prefill(**x)
    lead = {n: x[n].unflatten(0, (3, 40)) for n in ("q", "k", "v", "g", "beta")}
    batched, state = package.any_prefill(**lead, initial_state=x["initial_state"])
    assert batched.shape == (3, 40, 3, 128)
    assert_close(batched.flatten(0, 1), o.double(), "o")
    assert_close(state, final.double(), "final_state")


def right_or_refused(x, want_o, want_state, what, **options):
    """Either the oracle's answer, or the refusal that ``support`` announced."""
    answer = package.support(**x, **options)
    if not answer:
        with pytest.raises((TypeError, ValueError)) as caught:
            package.any_prefill(**x, **options)
        assert str(caught.value) == answer.reason
        return answer.reason
    o, state = package.any_prefill(**x, **options)
    assert_close(o, want_o, f"o {what}")
    assert_close(state, want_state, f"final_state {what}")
    return ""


def test_views_value_heads_long_offsets_and_short_states_are_read_by_value_or_refused():
    """One form of arguments, so that it is compiled once: slices of a fused buffer, int64 offsets,
    an initial state in bf16; then more value heads than keys in the same form."""
    x = inputs([0, 20, 33], heads=4)
    wide = torch.randn(33, 4, 384, device="cuda").bfloat16()
    wide[..., :256] = torch.nn.functional.normalize(wide[..., :256].float(), dim=-1).bfloat16()
    x |= {"q": wide[..., :128], "k": wide[..., 128:256], "v": wide[..., 256:]}
    x["initial_state"] = x["initial_state"].bfloat16()
    x["cu_seqlens"] = x["cu_seqlens"].long()
    right_or_refused(x, *oracle(**x), "views")
    few = {**x, "q": x["q"][:, ::2], "k": x["k"][:, ::2]}
    shared = {n: few[n].repeat_interleave(2, 1) for n in ("q", "k")}
    right_or_refused(few, *oracle(**{**x, **shared}), "value heads")


def test_what_models_have_is_activated_in_the_kernel_or_refused():
    x = inputs([0, 50, 133], heads=2)
    A_log, dt_bias = torch.randn(2, device="cuda") * 0.2, torch.randn(any_bias_shape, device="cuda")
    raw = {**x, "g": torch.randn_like(x["g"]).bfloat16(), "q": x["q"] * 3, "k": x["k"] * 2}
    raw["beta"] = torch.randn_like(x["beta"]).bfloat16()

    def unit(t):
        t = t.double()
        return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    # part: raw_shifted
    told = {
        **raw,
        "q": unit(raw["q"]),
        "k": unit(raw["k"]),
        "g": any_activated_gate,
        "beta": raw["beta"].double().sigmoid(),
    }
    # part: raw_options
    right_or_refused(raw, *oracle(**told), "raw", **options)
