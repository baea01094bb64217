"""What GDN's entry point refuses, by name and before any launch, and what it passes on."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gdn_compile import asked, raw_call
from on_a_gpu import moved

from candidates._delta_rule.kernel import known
from candidates._delta_rule.kernel.options import Options
from candidates.gdn_prefill.kernel import arguments, entry, launch
from candidates.gdn_prefill.kernel.entry import (
    DEFAULT,
    Config,
    FusedConfig,
    gdn_prefill,
    workspace,
)
from candidates.gdn_prefill.space import GdnSchedule


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Serve CPU tensors with a function that records its arguments and fills the outputs."""
    calls: list[Any] = []

    def compiled(config: Config, with_state: bool, options: Options) -> Any:
        def function(*args: Any) -> None:
            forms = (
                (3, options.gate_dtype), (4, options.beta_dtype), (5, options.offsets),
                (6, options.initial_state if with_state else None), (8, options.final_state),
            )  # fmt: skip
            for i, name in forms:  # as TVM-FFI does before a launch
                x = args[i]
                if name != (None if x is None else str(x.dtype).removeprefix("torch.")):
                    raise TypeError(f"argument #{i}: mismatched type")
            calls.append((config, with_state, options, args))
            args[7].fill_(1.0)
            if args[8] is not None:
                args[8].fill_(2.0)

        return function

    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
    monkeypatch.setattr(known, "_KNOWN", {})
    monkeypatch.setattr(known, "_PREPARED", {})
    monkeypatch.setattr(known, "current_device", lambda: -1)
    monkeypatch.setattr(entry, "compiled", compiled)
    monkeypatch.setattr(entry, "on_stream", lambda stream, device: None)
    monkeypatch.setattr(entry, "sms", lambda device: 132)
    return calls


def tensors(T: int = 37, H: int = 2, HV: int = 4, batch: int | None = None) -> dict[str, Any]:
    lead = (T,) if batch is None else (batch, T)
    out: dict[str, Any] = {n: torch.randn(*lead, H, 128).bfloat16() for n in ("q", "k")}
    out["v"] = torch.randn(*lead, HV, 128).bfloat16()
    out |= {"g": -torch.rand(*lead, HV), "beta": torch.rand(*lead, HV)}
    if batch is None:
        out["cu_seqlens"] = torch.tensor([0, T // 2, T], dtype=torch.int32)
    return out


def states() -> torch.Tensor:
    return torch.randn(2, 4, 128, 128)


def test_packed_call_passes_tensors_in_the_order_of_the_abi(launched: list[Any]) -> None:
    pytest.importorskip("cutlass")
    from candidates.gdn_prefill.kernel.host import ABI

    x, state = tensors(), states()
    o, final_state = gdn_prefill(**x, initial_state=state, schedule=Config(16, segments=4))
    ((config, with_state, options, args),) = launched
    assert (config, with_state, options) == (Config(16, 64, 4), True, Options())
    named = dict(zip(ABI, args, strict=True))
    for name, tensor in (x | {"initial_state": state, "o": o, "final_state": final_state}).items():
        assert named[name] is tensor, name
    assert named["scale"] == 1 / math.sqrt(128)
    assert o.shape == (37, 4, 128)
    assert final_state is not None
    assert final_state.shape == (2, 4, 128, 128)
    for tensor, (shape, name) in zip(args[9:11], workspace(config, 37, 2, 4), strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, getattr(torch, name))
    assert args[12:] == (None, None)


def test_scratch_is_new_in_each_call_and_one_segment_needs_one(launched: list[Any]) -> None:
    x = tensors()
    for schedule in (Config(32), None):
        for _ in range(2):
            gdn_prefill(**x, schedule=schedule)
    assert [config for config, *_ in launched] == [Config(32)] * 2 + [DEFAULT] * 2
    for (_, _, _, first), (_, _, _, second) in zip(launched[::2], launched[1::2], strict=True):
        assert first[9].data_ptr() != second[9].data_ptr()
    assert launched[0][3][10] is None


def test_batch_without_offsets_is_equal_sequences(launched: list[Any]) -> None:
    x = tensors(T=20, batch=3)
    o, final_state = gdn_prefill(**x)
    args = launched[0][3]
    assert args[0].shape == (60, 2, 128)
    assert args[2].shape == (60, 4, 128)
    assert args[3].shape == (60, 4)
    assert args[5].tolist() == [0, 20, 40, 60]
    assert o.shape == (3, 20, 4, 128)
    assert final_state is not None
    assert final_state.shape == (3, 4, 128, 128)
    assert torch.all(o == 1)


def test_what_the_caller_leaves_to_the_kernel_is_passed_on(launched: list[Any]) -> None:
    x, A_log, dt_bias = tensors(), torch.zeros(4), torch.ones(4)
    x["g"], x["beta"] = x["g"].bfloat16(), x["beta"].bfloat16()
    x["cu_seqlens"] = x["cu_seqlens"].long()
    gdn_prefill(
        **x, gate="softplus", A_log=A_log, dt_bias=dt_bias, beta_logits=True, l2norm=True,
        final_state=False, initial_state=states().bfloat16(), scale=0,
    )  # fmt: skip
    ((_, _, options, args),) = launched
    assert options == Options(
        "softplus", "bfloat16", True, "bfloat16", True, True, "bfloat16", None, "int64"
    )
    assert args[8] is None
    assert args[10:12] == (0.0, 2)  # scale, pieces
    assert args[12] is A_log
    assert args[13].shape == (4, 1)
    assert args[13].data_ptr() == dt_bias.data_ptr()


def test_views_are_passed_as_they_are(launched: list[Any]) -> None:
    x, one = tensors(), torch.randn(37, 2, 512).bfloat16()
    x |= {"q": one[..., :128], "k": one[..., 128:256], "beta": torch.rand(37, 8)[:, ::2]}
    gdn_prefill(**x)
    ((_, _, options, args),) = launched
    assert options == Options(compact=False)
    assert args[0] is x["q"]
    assert args[4] is x["beta"]
    batch = tensors(T=20, batch=3)
    batch["g"] = torch.rand(3, 21, 4)[:, :20]
    with pytest.raises(ValueError, match=r"g has strides .*without a gap"):
        gdn_prefill(**batch)
    batch["g"] = torch.rand(3, 20, 8)[..., 4:]
    gdn_prefill(**batch)
    assert launched[1][3][3].shape == (60, 4)
    assert launched[1][3][3].data_ptr() == batch["g"].data_ptr()


def test_results_may_be_given_and_a_state_updated_in_place_with_one_segment(
    launched: list[Any],
) -> None:
    x, state = tensors(), states()
    out = torch.empty_like(x["v"])
    one = Config(32)
    o, final = gdn_prefill(**x, initial_state=state, out=out, final_state=state, schedule=one)
    assert o is out
    assert final is state
    with pytest.raises(ValueError, match="final_state shares memory with initial_state"):
        gdn_prefill(**x, initial_state=state, final_state=state, schedule={"bt": 32, "segments": 2})
    with pytest.raises(ValueError, match="out shares memory with v"):
        gdn_prefill(**x, out=x["v"])


@pytest.mark.parametrize("shape", [(0, 2, 4), (5, 2, 4)])
def test_no_rows_or_no_sequences_launch_nothing(
    launched: list[Any], shape: tuple[int, int, int]
) -> None:
    x = tensors(*shape)
    if shape[0]:
        x["cu_seqlens"] = torch.zeros(1, dtype=torch.int32)
    state = torch.randn(x["cu_seqlens"].numel() - 1, 4, 128, 128)
    o, final = gdn_prefill(**x, initial_state=state)
    assert launched == []
    assert not o.any()
    assert final is not None
    assert torch.equal(final, state)


WRONG = {
    "q is no tensor": ({"q": 3}, TypeError, "q must be a torch.Tensor"),
    "fp16": ({"k": torch.zeros(37, 2, 128).half()}, TypeError, "k is float16, only bfloat16"),
    "head size": ({"q": torch.zeros(37, 2, 64).bfloat16()}, ValueError, "head size 64"),
    "heads": ({"v": torch.zeros(37, 3, 128).bfloat16()}, ValueError, "v has 3 heads.*of the 2"),
    "a gate per channel": ({"g": torch.zeros(37, 4, 128)}, ValueError, r"g must be \[37, 4\]"),
    "gates of key heads": ({"g": torch.zeros(37, 2)}, ValueError, r"g must be \[37, 4\]"),
    "fp64 beta": ({"beta": torch.zeros(37, 4).double()}, TypeError, "beta is float64"),
    "channels apart": (
        {"v": torch.zeros(37, 4, 256).bfloat16()[..., ::2]},
        ValueError,
        "v has strides .*channels must be contiguous",
    ),
    "8 bytes apart": (
        {"q": torch.zeros(37, 2, 132).bfloat16()[..., :128]},
        ValueError,
        "q has strides .*multiple of 16 bytes",
    ),
    "strided out": (
        {"out": torch.zeros(37, 4, 256).bfloat16()[..., :128]},
        ValueError,
        "out has strides",
    ),
    "offsets": ({"cu_seqlens": torch.zeros(3)}, TypeError, "cu_seqlens is float32"),
    "state": ({"initial_state": torch.zeros(2, 2, 128, 128)}, ValueError, "initial_state must be"),
    "fp16 state": ({"initial_state": states().half()}, TypeError, "initial_state is float16"),
    "scale": ({"scale": math.nan}, ValueError, "scale is nan"),
    "gate": ({"gate": "safe"}, ValueError, r"gate='safe' is not one of \['log', 'softplus'\]"),
    "no slope": ({"gate": "softplus"}, ValueError, r"needs A_log, fp32 \[4\]"),
    "slope": ({"A_log": torch.zeros(4)}, ValueError, "A_log is given, but gate='log'"),
    "bias": (
        {"gate": "softplus", "A_log": torch.zeros(4), "dt_bias": torch.zeros(4, 128)},
        ValueError,
        "dt_bias must be",
    ),
    "validate": ({"validate": "no"}, TypeError, "validate must be True or False, not 'no'"),
    "validate as a number": ({"validate": 0}, TypeError, "validate must be True or False, not 0"),
    "flag": ({"l2norm": 1}, TypeError, "l2norm must be True or False"),
    "schedule": ({"schedule": {"bt": 32, "anchor": "mid"}}, ValueError, "no 'anchor'"),
    "schedule type": (
        {"schedule": 32},
        TypeError,
        "schedule must be a Config, a FusedConfig or a mapping",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_served_is_refused_by_name_in_one_line(launched: list[Any], what: str) -> None:
    change, error, message = WRONG[what]
    with pytest.raises(error, match=message) as refused:
        gdn_prefill(**(tensors() | change))
    assert "\n" not in str(refused.value)
    assert launched == []


@pytest.fixture
def checked(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that went through the checks."""
    calls, check = [], entry.check

    def counting(*args: Any, **more: Any) -> Options:
        calls.append(args)
        return check(*args, **more)

    monkeypatch.setattr(entry, "check", counting)
    return calls


def test_a_call_like_one_before_is_checked_no_more_and_the_same(
    launched: list[Any], checked: list[Any]
) -> None:
    x, A_log, dt_bias = tensors(), torch.zeros(4), torch.ones(4)
    how = {"gate": "softplus", "A_log": A_log, "dt_bias": dt_bias, "scale": 0.5}
    for _ in range(3):
        o, final = gdn_prefill(**x, **how, initial_state=states())
        assert o.shape == (37, 4, 128)
        assert final is not None
        assert final.shape == (2, 4, 128, 128)
    assert len(checked) == 1
    first, *others = (args for _, _, _, args in launched)
    for other in others:
        assert len(other) == len(first)
        assert other[0] is x["q"]
        assert other[10:12] == (0.5, 2)  # scale, pieces
        assert other[13].shape == (4, 1)
        assert other[9].data_ptr() != first[9].data_ptr()


def test_what_decides_how_a_call_is_served_is_checked_anew(
    launched: list[Any], checked: list[Any]
) -> None:
    x = tensors()
    gdn_prefill(**x)
    gdn_prefill(**x, schedule=Config(64))
    gdn_prefill(**x, l2norm=True)
    gdn_prefill(**x, final_state=False)
    gdn_prefill(**(x | {"beta": x["beta"].bfloat16()}))
    gdn_prefill(**tensors(H=4))
    assert len(checked) == 6
    assert [config for config, *_ in launched] == [DEFAULT, Config(64), *[DEFAULT] * 4]
    with pytest.raises(ValueError, match=r"v has 4 heads.*of the 3"):
        gdn_prefill(**tensors(H=3))
    batch = tensors(T=20, batch=3)
    for _ in range(2):  # the kernels know offsets only: these calls are made otherwise
        assert gdn_prefill(**batch)[0].shape == (3, 20, 4, 128)


def test_heads_that_take_turns_under_the_same_value_heads_are_each_checked(
    launched: list[Any],
) -> None:
    for _ in range(3):
        for H in (2, 4, 1):
            gdn_prefill(**tensors(H=H))
    assert len(launched) == 9
    with pytest.raises(ValueError, match=r"v has 4 heads.*of the 3"):
        gdn_prefill(**tensors(H=3))
    assert len(launched) == 9


def test_what_a_compiled_function_cannot_see_is_looked_at_every_time(
    launched: list[Any], checked: list[Any]
) -> None:
    x, out = tensors(), torch.empty(37, 4, 128, dtype=torch.bfloat16)
    for _ in range(2):
        assert gdn_prefill(**x, out=out)[0] is out
    assert len(checked) == 1
    with pytest.raises(ValueError, match="out shares memory with v"):
        gdn_prefill(**x, out=x["v"])
    x["g"].requires_grad_()
    with pytest.raises(ValueError, match="g requires grad"):
        gdn_prefill(**x)


@pytest.mark.parametrize("config", [Config(32), FusedConfig(64)], ids=str)
def test_a_known_call_updates_its_state_in_place_without_another_check(
    launched: list[Any], checked: list[Any], config: Config | FusedConfig
) -> None:
    x, first, other = tensors(), states(), states()
    for state in (first, first, other, first):  # elsewhere too: what is looked at is cheap
        o, final = gdn_prefill(**x, initial_state=state, final_state=state, schedule=config)
        assert final is state
        assert (o == 1).all()
        assert (state == 2).all()
    assert len(checked) == 1
    assert [args[6] is args[8] for _, _, _, args in launched] == [True] * 4
    halves = torch.randn(3, 4, 128, 128)
    with pytest.raises(ValueError, match="final_state shares memory with initial_state"):
        gdn_prefill(**x, initial_state=halves[:2], final_state=halves[1:], schedule=config)


@pytest.mark.parametrize("config", [Config(32, segments=2), FusedConfig(128)], ids=str)
def test_a_known_call_in_pieces_does_not_update_in_place(
    launched: list[Any], checked: list[Any], config: Config | FusedConfig
) -> None:
    x, state = tensors(), states()
    for _ in range(2):
        gdn_prefill(**x, initial_state=state, final_state=states(), schedule=config)
    assert len(checked) == 1
    with pytest.raises(ValueError, match="final_state shares memory with initial_state"):
        gdn_prefill(**x, initial_state=state, final_state=state, schedule=config)
    assert len(launched) == 2


@pytest.mark.parametrize("name", ["initial_state", "out", "final_state"])
def test_a_known_call_refuses_steps_between_rows(launched: list[Any], name: str) -> None:
    x = tensors() | {"initial_state": states(), "out": torch.empty(37, 4, 128).bfloat16()}
    x["final_state"] = states()
    gdn_prefill(**x)
    wide = x[name].repeat_interleave(2, 0)
    with pytest.raises(ValueError, match=f"{name} has strides"):
        gdn_prefill(**x | {name: wide[::2]})
    assert len(launched) == 1


def test_a_gradient_is_refused(launched: list[Any]) -> None:
    x = tensors()
    x["g"].requires_grad_()
    with pytest.raises(ValueError, match="g requires grad"):
        gdn_prefill(**x)
    with torch.no_grad():
        gdn_prefill(**x)
    assert len(launched) == 1


def test_tensors_on_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="q is on cpu; move the inputs to a CUDA device"):
        gdn_prefill(**tensors())


def test_a_bound_call_launches_on_the_given_outputs(launched: list[Any]) -> None:
    x = {**tensors(), "initial_state": None, "scale": 0.0}
    outputs = {"o": torch.empty_like(x["v"]), "final_state": torch.empty(2, 4, 128, 128)}
    loaded = launch.LoadedSchedule(Config(64))
    assert loaded.kernel_names == ("gdn_prep_", "kda_scan_")
    assert loaded.chunk_tokens == 64
    call = loaded.bind(x, outputs)
    assert launched == []
    for _ in range(2):
        result = call()
        assert result["o"] is outputs["o"]
        assert result["final_state"] is outputs["final_state"]
    (_, state, _, args), (_, _, _, other) = launched
    assert state is False
    assert args[11] == 0.0
    assert args[9].data_ptr() != other[9].data_ptr()
    with pytest.raises(ValueError, match="cu_seqlens is None"):
        loaded.bind({**x, "cu_seqlens": None}, outputs)


def test_a_compiled_call_is_a_bare_function_that_checks_its_arguments() -> None:
    pytest.importorskip("cutlass")
    import tvm_ffi

    entry.compiled.cache_clear()
    function = entry.compiled(Config(16), False, Options())
    assert isinstance(function, tvm_ffi.Function)
    with pytest.raises(TypeError):
        function(1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is compiled, in place of compiling it."""
    pytest.importorskip("cutlass")
    from candidates.gdn_prefill.kernel import host

    calls: list[Any] = []
    monkeypatch.setattr(host, "compile_call", lambda *what: calls.append(what) or print)
    entry.compiled.cache_clear()
    yield calls
    entry.compiled.cache_clear()


def test_one_function_serves_every_number_of_waves(made: list[Any]) -> None:
    for waves in (1, 2, 4):
        assert entry.compiled(FusedConfig(128, waves), True, Options()) is print
    assert made == [(FusedConfig(128), True, Options())]


def test_a_loaded_schedule_is_not_compiled_again_when_it_is_bound(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require_gpu", lambda: None)
    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
    x, state = tensors(), states()
    outputs = {"o": torch.empty_like(x["v"]), "final_state": torch.empty_like(state)}
    loaded = launch.load_schedule(GdnSchedule(16).schedule())
    loaded.bind({**x, "initial_state": state, "scale": None}, outputs)
    assert made == [(Config(16), True, Options())]


def test_importing_the_entry_point_loads_neither_the_dsl_nor_torchs_compiler() -> None:
    code = (
        "import sys, candidates.gdn_prefill.kernel.entry\n"
        "print(sorted({'cutlass', 'tvm_ffi', 'torch._dynamo'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("compact", [True, False])
def test_a_call_that_is_moved_keeps_its_form(
    compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
    options = Options("softplus", "bfloat16", True, "bfloat16", True, True, compact=compact)
    raw, _ = raw_call(options, (70, 0, 5))
    raw = moved(raw, "meta")
    names = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state")
    form = entry.check(**{n: raw[n] for n in names}, **asked(options, raw))
    assert form.compact == compact
