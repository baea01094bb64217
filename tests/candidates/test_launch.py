"""Compilation without a GPU: what is read back, judged and kept, and whose fault a failure is."""

from __future__ import annotations

import functools
import importlib
import sys
import time
from dataclasses import replace

import pytest

from candidates import BuildError, Schedule, ToolchainError
from candidates._delta_rule.kernel import toolchain
from candidates.kda_prefill.kernel import launch

MID = Schedule((("bt", 32), ("anchor", "mid"), ("segments", 1), ("rows", 64)))


@pytest.fixture(scope="module")
def host():
    toolchain.require_dsl()
    return importlib.import_module("candidates.kda_prefill.kernel.host")


@pytest.fixture(scope="module")
def bad(host):
    return importlib.import_module("bad_kernels")


@pytest.fixture
def jobs(host, monkeypatch):
    """Names of what is compiled from here on."""
    shared = importlib.import_module("candidates._delta_rule.kernel.host")
    compile_function, names = shared.compile_function, []
    monkeypatch.setattr(
        shared,
        "compile_function",
        lambda job, *args, **kw: (
            names.append(type(job).__name__) or compile_function(job, *args, **kw)
        ),
    )
    return names


def judged(host, job, arguments):
    """Resources and problems of one compiled object."""
    from candidates._delta_rule.kernel.resources import (
        Cubin,
        budget_problems,
        dynamic_smem,
        kernel_resources,
    )

    compiled, cubin = host.compile_function(job, arguments, keep=True)
    kernels, _ = kernel_resources(Cubin(cubin), dynamic_smem(str(compiled.ir_module)))
    return kernels, [budget_problems(k) for k in kernels]


def test_a_spilling_kernel_compiles_and_is_caught(host, bad):
    (kernel,), (problems,) = judged(host, bad.LocalArray(), bad.fake_arguments())
    assert kernel.name.startswith("bad_local")
    assert kernel.stack_bytes >= 256
    assert kernel.threads == 128
    assert [p.split(":")[0] for p in problems] == ["spills"]


def test_shared_memory_over_the_limit_compiles_and_is_caught(host, bad):
    kernels, problems = judged(host, bad.TwoKernels(232452), bad.fake_arguments())
    assert [k.name.rstrip("_01") for k in kernels] == ["good_plain", "bad_smem"]
    assert [k.dynamic_smem_bytes for k in kernels] == [0, 232452]
    assert [k.threads for k in kernels] == [64, 64]
    assert problems[0] == ()
    assert [p.split(":")[0] for p in problems[1]] == ["smem"]
    _, fitting = judged(host, bad.TwoKernels(232448), bad.fake_arguments())
    assert fitting == [(), ()]


def test_a_schedule_is_compiled_and_judged(host, monkeypatch):
    # A part that another test of this process compiled would bring that test's seconds along.
    for part in ("_prep_part", "scan_part"):
        monkeypatch.setattr(launch, part, getattr(launch, part).__wrapped__)
    began = time.perf_counter()
    build = launch.compile_schedule(MID)
    took = time.perf_counter() - began
    assert build.schedule_key == MID.key
    prefixes = launch.kernel_names(1)
    assert len(build.kernels) == len(prefixes)
    for kernel, prefix in zip(build.kernels, prefixes, strict=True):
        assert kernel.name.startswith(prefix)
        assert 0 < kernel.registers <= 255
        assert kernel.threads
        assert kernel.dynamic_smem_bytes
    assert build.problems == ()
    assert len(build.cubin_sha256) == 64
    assert 0 < build.seconds <= took


def test_every_offered_schedule_compiles_within_its_budgets(host):
    from candidates.kda_prefill import space

    problems = []
    codes = {}
    for schedule in space.offered("kda_prefill"):
        build = launch.compile_schedule(schedule)
        problems += [f"{schedule.key}: {p}" for p in build.problems]
        if schedule.get("waves") in (None, 1):  # how many pieces is a number at the launch
            codes.setdefault(build.cubin_sha256, []).append(schedule.key)
    assert not problems, "\n".join(problems)
    # Two schedules with equal machine code would be one schedule under two names.
    assert not [keys for keys in codes.values() if len(keys) > 1]


@pytest.mark.parametrize("segments", [2, 4])
def test_segments_bring_their_kernels_in_launch_order(host, segments):
    from candidates._delta_rule.kernel.image import boundary_words
    from candidates._delta_rule.kernel.scan import Scan
    from candidates.kda_prefill.kernel.entry import Config, workspace

    schedule = Schedule((("bt", 32), ("anchor", "mid"), ("segments", segments), ("rows", 64)))
    build = launch.compile_schedule(schedule)
    prefixes = launch.kernel_names(segments)
    assert len(build.kernels) == len(prefixes)
    for kernel, prefix in zip(build.kernels, prefixes, strict=True):
        assert kernel.name.startswith(prefix)
    assert build.problems == ()
    scan = Scan(32, 64, segments)
    assert boundary_words(segments) == scan.words
    (_, boundaries) = workspace(Config(32, "mid", 64, segments), 8192, 2, 3)
    assert (boundaries,) == scan.buffers(8192, 2, 3)


def test_equal_schedules_give_equal_code_and_parts_are_compiled_once(jobs):
    first = launch.compile_schedule(MID)
    jobs.clear()
    assert launch.compile_schedule(MID) == first  # its seconds too
    assert jobs == []
    launch._prep_part.cache_clear()
    again = launch.compile_schedule(MID)
    assert jobs == ["Prep"]
    assert replace(again, seconds=first.seconds) == first


def test_schedules_share_the_parts_they_have_in_common(jobs):
    wide = Schedule((("bt", 32), ("anchor", "mid"), ("segments", 1), ("rows", 128)))
    launch.compile_schedule(MID)
    jobs.clear()
    build = launch.compile_schedule(wide)
    assert "Prep" not in jobs
    assert build.kernels[0] == launch.compile_schedule(MID).kernels[0]
    assert build.cubin_sha256 != launch.compile_schedule(MID).cubin_sha256


@pytest.mark.parametrize("with_state", [True, False])
def test_one_call_is_a_bare_function_that_checks_its_arguments(host, with_state):
    import torch
    import tvm_ffi

    from candidates.kda_prefill.kernel.entry import Config

    function = host.compile_call(Config(32, "mid"), with_state)
    assert isinstance(function, tvm_ffi.Function)
    with pytest.raises(TypeError):
        function(1)
    T, H, N = 5, 2, 1
    lead = (T, H, 128)
    cpu = [torch.zeros(lead).bfloat16() for _ in range(3)] + [torch.zeros(lead), torch.zeros(T, H)]
    state = torch.zeros(N, H, 128, 128)
    x = torch.zeros(8, H, 8)
    args = [
        *cpu, torch.zeros(N + 1, dtype=torch.int32), state if with_state else None,
        torch.zeros(lead).bfloat16(), state, x.bfloat16(), None, 1.0, None, None, None,
    ]  # fmt: skip
    assert len(args) == len(host.ABI)
    with pytest.raises((TypeError, ValueError, RuntimeError)):  # CPU tensors, a short image
        function(*args)


def test_a_compilation_without_the_ffi_is_noticed(host, bad, monkeypatch):
    class Silent:
        pass

    with pytest.raises(host.NoFunctionError, match="--enable-tvm-ffi was ignored"):
        host.bare_function(Silent())

    def ignored(config, with_state):
        return host.bare_function(Silent())

    with pytest.raises(ToolchainError, match="ignored"):
        launch.compiling(lambda: ignored(None, True), "x")


def test_a_schedule_that_does_not_trace_is_the_candidates_fault(host):
    wrong = Schedule((("bt", 32), ("anchor", "sideways"), ("segments", 1), ("rows", 64)))
    with pytest.raises(BuildError, match="sideways"):
        launch.compile_schedule(wrong)


def test_an_unknown_knob_is_named(host):
    with pytest.raises(BuildError, match="stages"):
        launch.compile_schedule(Schedule((*MID.items, ("stages", 3))))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ImportError("no module named x"), ToolchainError),
        (OSError(28, "no space left on device"), ToolchainError),
        (ToolchainError("old"), ToolchainError),
        (RuntimeError("\n  bad layout\nmore"), BuildError),
        (MemoryError(), MemoryError),
    ],
)
def test_whose_fault_a_failed_compilation_is(error, expected):
    def fail():
        raise error

    with pytest.raises(expected) as caught:
        launch.compiling(fail, "schedule")
    assert "\n" not in str(caught.value)


def test_loading_without_a_gpu_is_the_machines_fault(host, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="no CUDA GPU"):
        launch.load_schedule(MID)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    with pytest.raises(ToolchainError, match="B200 is sm_100"):
        launch.load_schedule(MID)


def test_a_loaded_schedule_is_not_compiled_again_when_it_is_bound(host, monkeypatch):
    import torch

    from candidates.kda_prefill.kernel import entry

    made = []
    monkeypatch.setattr(host, "compile_call", lambda *what: made.append(what) or print)
    monkeypatch.setattr(launch, "require_gpu", lambda: None)
    monkeypatch.setattr(entry.arguments, "on_gpu", lambda x: True)
    monkeypatch.setattr(entry, "compiled", functools.lru_cache(entry.compiled.__wrapped__))
    x = {n: torch.randn(9, 2, 128).bfloat16() for n in ("q", "k", "v")}
    x |= {"g": -torch.rand(9, 2, 128), "beta": torch.rand(9, 2), "scale": None}
    x["cu_seqlens"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    x["initial_state"] = torch.zeros(2, 2, 128, 128)
    outputs = {"o": torch.empty_like(x["v"]), "final_state": torch.empty(2, 2, 128, 128)}
    launch.load_schedule(MID).bind(x, outputs)
    assert made == [(entry.Config(32, "mid"), True, entry.Options())]


def test_a_bound_call_launches_on_the_given_outputs(monkeypatch):
    import torch

    from candidates.kda_prefill.kernel import entry

    calls = []
    monkeypatch.setattr(entry.arguments, "on_gpu", lambda x: True)
    monkeypatch.setattr(
        entry, "compiled", lambda config, state, options: lambda *a: calls.append((state, a))
    )
    x = {n: torch.randn(9, 2, 128).bfloat16() for n in ("q", "k", "v")}
    x |= {"g": -torch.rand(9, 2, 128), "beta": torch.rand(9, 2), "initial_state": None}
    x["cu_seqlens"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    outputs = {"o": torch.empty_like(x["v"]), "final_state": torch.empty(2, 2, 128, 128)}
    loaded = launch.LoadedSchedule(entry.Config(32, "mid"))
    assert loaded.kernel_names == ("kda_prep_", "kda_scan_")
    call = loaded.bind({**x, "scale": 0.0}, outputs)
    assert calls == []
    for _ in range(2):
        result = call()
        assert result["o"] is outputs["o"]
        assert result["final_state"] is outputs["final_state"]
    (state, args), (_, other) = calls
    assert state is False
    assert args[7] is outputs["o"]
    assert args[11] == 0.0
    assert args[9].data_ptr() != other[9].data_ptr()
    with pytest.raises(ValueError, match="cu_seqlens is None"):
        loaded.bind({**x, "cu_seqlens": None}, outputs)
    with pytest.raises(ValueError, match="not contiguous"):
        loaded.bind({**x, "beta": torch.rand(9, 4)[:, ::2]}, outputs)


class TestToolchain:
    """The message names package, version found and the fix."""

    def test_version_is_returned(self):
        assert toolchain.require_dsl().startswith("4.8")

    @pytest.mark.parametrize(
        ("module", "package"),
        [("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")],
    )
    def test_a_broken_package(self, monkeypatch, module, package):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ToolchainError, match=rf"{package} \d.* does not import .*pip install"):
            toolchain.require_dsl()

    def test_an_absent_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cutlass", None)
        monkeypatch.setattr(toolchain, "_installed", lambda package: None)
        with pytest.raises(ToolchainError, match="nvidia-cutlass-dsl is not installed"):
            toolchain.require_dsl()

    @pytest.mark.parametrize("version", ["4.7.0", "4.9.0", "5.0", "unknown"])
    def test_another_version(self, monkeypatch, version):
        import cutlass

        monkeypatch.setattr(cutlass, "__version__", version)
        with pytest.raises(ToolchainError, match=f"nvidia-cutlass-dsl {version} .*pip install"):
            toolchain.require_dsl()

    def test_the_wrong_cuda_flavour(self, monkeypatch):
        monkeypatch.setattr(toolchain, "_flavour", lambda: "cu12")
        with pytest.raises(ToolchainError, match="cu12 libraries, not cu13"):
            toolchain.require_dsl()

    def test_the_flavour_in_use_is_read_from_the_loaded_compiler(self):
        toolchain.require_dsl()
        assert toolchain._flavour() == "cu13"
