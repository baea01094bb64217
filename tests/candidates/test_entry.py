"""What the entry point refuses, by name and before any launch, and what it passes on."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from candidates._delta_rule.kernel import known
from candidates._delta_rule.kernel.image import ImageLayout
from candidates._delta_rule.kernel.options import Options
from candidates._delta_rule.kernel.pieces import Scratch
from candidates.kda_prefill.kernel import arguments, entry
from candidates.kda_prefill.kernel.entry import DEFAULT, Config, FusedConfig, kda_prefill
from candidates.kda_prefill.kernel.fused_plan import NEVER, SHORTER

CONFIG = Config(bt=32, anchor="mid")


class Launches(list):
    """Configuration, whether there was a state, and arguments of each; ``forms`` their options."""

    def __init__(self):
        super().__init__()
        self.forms = []


@pytest.fixture
def launched(monkeypatch):
    """Serve CPU tensors with a function that records its arguments and fills the outputs."""
    calls = Launches()

    def compiled(config, with_state, options=None):
        def function(*args):
            check_like_a_compiled_function(options, with_state, args)
            calls.append((config, with_state, args))
            calls.forms.append(options)
            args[7].data.fill_(1.0)  # a kernel knows nothing of gradients
            if args[8] is not None:
                args[8].data.fill_(2.0)

        return function

    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
    monkeypatch.setattr(known, "_KNOWN", {})
    monkeypatch.setattr(known, "_PREPARED", {})
    monkeypatch.setattr(known, "current_device", lambda: -1)
    monkeypatch.setattr(entry, "compiled", compiled)
    monkeypatch.setattr(entry, "on_stream", lambda stream, device: None)
    monkeypatch.setattr(entry, "sms", lambda device: 132)
    return calls


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_like_a_compiled_function(options, with_state, args):
    """What TVM-FFI checks before a launch: dtypes, shapes, devices, alignment, constant strides.

    Of a compact tensor a stride that is a product of unknown sizes goes by unseen.
    """
    bf16 = torch.bfloat16
    lead = "BT" if options.offsets == "equal" else "T"
    HV = "H" if options.compact else "V"
    cu = None if options.offsets == "equal" else getattr(torch, options.offsets)
    n = "B" if options.offsets == "equal" else "N"
    want = (
        (bf16, lead + "HD"), (bf16, lead + "HD"), (bf16, lead + HV + "D"),
        (DTYPES[options.gate_dtype], lead + HV + "D"), (DTYPES[options.beta_dtype], lead + HV),
        (cu, "C"), (DTYPES[options.initial_state] if with_state else None, n + HV + "DD"),
        (bf16, lead + HV + "D"), (DTYPES.get(options.final_state), n + HV + "DD"),
    )  # fmt: skip
    f32 = torch.float32
    want = [*zip(args, want, strict=False)]
    want += [(args[-3], (f32 if options.raw_gate else None, HV))]
    want += [(args[-2], (f32 if options.bias else None, HV + "D"))]
    sizes = {"D": 128}
    for i, (x, (dtype, dims)) in enumerate(want):
        if dtype is None:
            if x is not None:
                raise TypeError(f"argument #{i} must be None")
            continue
        if x.dtype is not dtype or x.dim() != len(dims):
            raise TypeError(f"argument #{i}: mismatched type or rank")
        if any(sizes.setdefault(d, size) != size for d, size in zip(dims, x.shape, strict=True)):
            raise ValueError(f"argument #{i}: mismatched shape")
        if x.device.type != "cpu":
            raise ValueError(f"argument #{i}: mismatched device")
        wide = dims[-1] == "D"
        if wide and x.data_ptr() % 16:
            raise ValueError(f"argument #{i}: misaligned")
        if i > 4 or options.compact:
            known = 1
            for size, stride, dim in zip(x.shape[::-1], x.stride()[::-1], dims[::-1], strict=True):
                if size > 1 and stride != known:
                    raise ValueError(f"argument #{i}: mismatched strides")
                if dim != "D":
                    break
                known *= size
        elif wide and (x.stride(-1) != 1 or any(s * x.itemsize % 16 for s in x.stride()[:-1])):
            raise ValueError(f"argument #{i}: mismatched strides")


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


def apart(x):
    """Equal values, every other element."""
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    return wide[..., ::2].copy_(x)


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
