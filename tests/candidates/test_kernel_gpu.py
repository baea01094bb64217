"""The compiled kernels on an sm90 GPU, against the float64 oracle and against misuse.

Run with ``pytest -m gpu -s`` to see the errors of every regime, also where all is well.
"""

from __future__ import annotations

import functools
import math
import subprocess
import sys
import time

import pytest
import torch
from on_a_gpu import assert_replays_in_a_graph, assert_streams_share_nothing

import operations
from candidates import Schedule
from candidates.kda_prefill import space
from candidates.kda_prefill.kernel import launch
from candidates.kda_prefill.kernel.entry import Config, kda_prefill, workspace
from operations.kda_prefill import KdaWorkload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

OPERATION = operations.get("kda_prefill")
DEVICE = "cuda"
MID = Config(bt=32, anchor="mid")

SMALL = (
    KdaWorkload("one", heads=1, lengths=(1,)),
    KdaWorkload("seventeen", heads=2, lengths=(17,)),
    KdaWorkload("sixty-three", heads=3, lengths=(63,)),
    KdaWorkload("five-hundred", heads=5, lengths=(500,)),
    KdaWorkload("edges", heads=2, lengths=(15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)),
    KdaWorkload("empty", heads=3, lengths=(0, 0, 37, 0, 1, 130, 0)),
    KdaWorkload("no-state", heads=4, lengths=(0, 100, 0, 511), initial_state=False),
    KdaWorkload("scale", heads=2, lengths=(77, 130), scale=0.5),
    KdaWorkload("scale-zero", heads=2, lengths=(77, 130), scale=0.0),
    # Eight heads: where gates forget everything, o is (q k) beta v, and operands that were scaled
    # and rounded are off by a share of |q| |k|.  Of a few tokens in two heads all q k may be small.
    KdaWorkload("many", heads=8, lengths=tuple(1 + (37 * n) % 128 for n in range(70))),
    KdaWorkload("long", heads=3, lengths=(2047, 1, 3000)),
)
LARGE = ("2048/12/1", "8192/12/4", "8192/16/1")


def schedules() -> list[Schedule]:
    """One of each distinct PREP and each distinct SCAN of those that bear gates of -5."""
    out, preps, scans = [], set(), set()
    for schedule in space.offered("kda_prefill"):
        if space.is_fused(schedule):
            continue
        view = space.KdaSchedule.of(schedule)
        if not space.bears_contract(view):
            continue
        prep = (view.bt, view.anchor, view.block, view.diagonal, view.unroll)
        scan = (view.bt, view.rows, view.segments)
        if prep not in preps or scan not in scans:
            out.append(schedule)
        preps.add(prep)
        scans.add(scan)
    return out


def name_of(value) -> str:
    """Test id of a schedule or configuration, usable in ``-k``: ``bt32-mid-segments1-rows64``."""
    if isinstance(value, Config):
        value = space.KdaSchedule(
            value.bt, value.anchor, value.block, value.diagonal, value.segments, value.rows
        ).schedule()
    return value.key.replace("anchor=", "").replace("=", "").replace(" ", "-")


def report(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@functools.lru_cache(maxsize=512)
def case(workload, regime_name, seed=0):
    """Inputs on the GPU and the float64 answer."""
    inputs = OPERATION.generate(workload, OPERATION.regimes[regime_name], seed=seed, device=DEVICE)
    return inputs, OPERATION.fast_oracle(inputs)


def regimes_for(schedule):
    bound = space.gate_bound(schedule)
    return [
        r.name
        for r in OPERATION.regimes.values()
        if r.gates and (bound is None or r.gate_floor >= bound)
    ]


def poison_free_memory(inputs) -> None:
    """Leave NaN in the blocks that torch's allocator will hand out as scratch."""
    T, H, _ = inputs["q"].shape
    N = inputs["cu_seqlens"].shape[0] - 1
    for bt in (16, 32, 64):
        for shape, _ in workspace(Config(bt, "mid", segments=8), T, N, H):
            block = torch.full(shape, math.nan, device=DEVICE, dtype=torch.bfloat16)
            del block


def worst(errors):
    """(max_rel, rms_rel) over all slices of each output, and the slices out of tolerance."""
    table = {
        name: (
            max(e.max_rel for e in errors if e.tensor == name),
            max(e.rms_rel for e in errors if e.tensor == name),
        )
        for name in ("o", "final_state")
    }
    return table, [e for e in errors if not e.within]


def run(loaded, inputs):
    outputs = OPERATION.outputs(inputs)
    return loaded.bind(inputs, outputs)()


def judge(loaded, schedule, workloads, names, lines, failures):
    for regime in names:
        total = {"o": (0.0, 0.0), "final_state": (0.0, 0.0)}
        for workload in workloads:
            inputs, expected = case(workload, regime)
            poison_free_memory(inputs)
            first = run(loaded, inputs)
            table, bad = worst(
                OPERATION.compare(first, expected, workload, OPERATION.regimes[regime])
            )
            for name, pair in table.items():
                total[name] = tuple(max(a, b) for a, b in zip(total[name], pair, strict=True))
            if bad:
                shown = ", ".join(
                    f"{e.tensor} {e.scope} max {e.max_rel:.2e} rms {e.rms_rel:.2e}"
                    f"{'' if e.finite else f' nonfinite {e.nonfinite_count}'}"
                    for e in bad[:3]
                )
                failures.append(f"{schedule.key} | {regime} | {workload.name}: {shown}")
            second = run(loaded, inputs)
            for name in first:
                if not torch.equal(first[name], second[name]):
                    failures.append(f"{schedule.key} | {regime} | {workload.name}: {name} differs "
                                    "between two runs on equal inputs")  # fmt: skip
        lines.append(
            f"  {regime:20} o {total['o'][0]:.1e} {total['o'][1]:.1e}"
            f"   state {total['final_state'][0]:.1e} {total['final_state'][1]:.1e}"
        )


@pytest.mark.parametrize("schedule", schedules(), ids=name_of)
def test_right_in_every_regime_within_its_bound_twice_alike(schedule):
    loaded = launch.load_schedule(schedule)
    lines, failures = [f"{schedule.key}   (worst of all slices: max, rms)"], []
    judge(loaded, schedule, SMALL, regimes_for(schedule), lines, failures)
    report("\n".join(lines))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("schedule", schedules(), ids=name_of)
def test_right_on_tuned_shapes(schedule):
    loaded = launch.load_schedule(schedule)
    lines, failures = [f"{schedule.key}   tuned shapes"], []
    workloads = [OPERATION.workloads[name] for name in LARGE]
    judge(loaded, schedule, workloads, ("production", "slow", "mixed"), lines, failures)
    report("\n".join(lines))
    assert not failures, "\n".join(failures)


MALFORMED = ([0, 30], [1, 37], [0, 20, 10, 37], [-5, 50], [37, 0], [5, 5, 20, 20], [60, 80])


@pytest.mark.parametrize(
    "config", [Config(16, "mid"), MID, Config(32, "mid", segments=4)], ids=name_of
)
def test_malformed_offsets_are_made_safe(config):
    base = OPERATION.generate(
        KdaWorkload("t37", heads=2, lengths=(37,)), OPERATION.regimes["slow"], seed=1, device=DEVICE
    )
    failures = []
    for offsets in MALFORMED:
        N = len(offsets) - 1
        state = torch.randn(N, 2, 128, 128, device=DEVICE)
        x = {**base, "cu_seqlens": torch.tensor(offsets, dtype=torch.int32, device=DEVICE)}
        x["initial_state"] = state
        expected = OPERATION.fast_oracle(x)
        out = torch.full_like(base["v"], math.nan)
        o, s = kda_prefill(**x, schedule=config, out=out)
        for name, got, want in (("o", o, expected["o"]), ("state", s, expected["final_state"])):
            error = (got.double() - want).abs().max() / want.abs().max().clamp_min(1e-9)
            uncovered = want == 0 if name == "o" else torch.zeros_like(want, dtype=torch.bool)
            if not error < 1.5e-2 or bool((got[uncovered] != 0).any()):
                failures.append(f"{config} {offsets} {name}: {error.item():.2e}")
        with pytest.raises(ValueError, match="cu_seqlens"):
            kda_prefill(**x, schedule=config, validate=True)
    assert not failures, "\n".join(failures)


def small(seed=0, lengths=(100, 33), heads=3, regime="slow"):
    return case(KdaWorkload(f"small-{lengths}", heads=heads, lengths=lengths), regime, seed)


def assert_close(got, want, tolerance=1.5e-2):
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    assert error < tolerance, error


def test_inputs_are_not_written():
    inputs, _ = small()
    before = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    kda_prefill(**inputs, schedule=MID)
    for name, copy in before.items():
        assert torch.equal(inputs[name], copy), name


def test_batch_form_equals_the_packed_form():
    inputs, _ = small(lengths=(40, 40, 40))
    o, s = kda_prefill(**inputs, schedule=MID)
    form = {n: inputs[n].view(3, 40, *inputs[n].shape[1:]) for n in ("q", "k", "v", "g", "beta")}
    o2, s2 = kda_prefill(**form, initial_state=inputs["initial_state"], schedule=MID)
    assert torch.equal(o2.flatten(0, 1), o)
    assert torch.equal(s2, s)


def test_views_into_one_allocation_are_served_and_strided_ones_refused():
    inputs, _ = small()
    T = inputs["q"].shape[0]
    o, s = kda_prefill(**inputs, schedule=MID)
    rows = torch.cat([inputs["q"], inputs["k"], inputs["v"]])
    view = {"q": rows[:T], "k": rows[T : 2 * T], "v": rows[2 * T :]}
    o2, s2 = kda_prefill(**{**inputs, **view}, schedule=MID)
    assert torch.equal(o, o2)
    assert torch.equal(s, s2)
    fused = torch.cat([inputs["q"], inputs["k"], inputs["v"]], -1)
    with pytest.raises(ValueError, match=r"not contiguous.*not served by a split schedule"):
        kda_prefill(**{**inputs, "q": fused[..., :128]}, schedule=MID)
    with pytest.raises(ValueError, match="cu_seqlens is on cpu"):
        kda_prefill(**{**inputs, "cu_seqlens": inputs["cu_seqlens"].cpu()}, schedule=MID)


@pytest.mark.parametrize("config", [MID, Config(16, "mid"), Config(64, "pairs", 64, 1, 16, "mid")],
                         ids=name_of)  # fmt: skip
def test_state_updated_in_place(config):
    inputs, _ = small(lengths=(100, 0, 33))
    _, s = kda_prefill(**inputs, schedule=config)
    state = inputs["initial_state"].clone()
    kda_prefill(**{**inputs, "initial_state": state}, final_state=state, schedule=config)
    assert torch.equal(state, s)


def test_no_rows_and_no_sequences():
    state = torch.randn(2, 3, 128, 128, device=DEVICE)
    x = {n: torch.empty(0, 3, 128, device=DEVICE).bfloat16() for n in ("q", "k", "v")}
    x |= {"g": torch.empty(0, 3, 128, device=DEVICE), "beta": torch.empty(0, 3, device=DEVICE)}
    cu = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    o, s = kda_prefill(**x, cu_seqlens=cu, initial_state=state, schedule=MID)
    assert torch.equal(s, state)
    inputs, _ = small()
    none = {**inputs, "cu_seqlens": cu[:1], "initial_state": None}
    o, s = kda_prefill(**none, schedule=MID)
    assert s.shape[0] == 0
    assert bool((o == 0).all())


def test_only_empty_sequences_between_uncovered_rows():
    inputs, _ = small()
    cu = torch.full((3,), 7, dtype=torch.int32, device=DEVICE)
    x = {**inputs, "cu_seqlens": cu}
    o, s = kda_prefill(**x, schedule=MID)
    assert torch.equal(s, inputs["initial_state"])
    assert bool((o == 0).all())


def slow_down() -> None:
    torch.cuda._sleep(2_000_000)  # about a millisecond: work queued behind it is really behind


@pytest.mark.parametrize("how", ["context", "stream", "handle"])
def test_runs_on_the_callers_stream_between_producer_and_consumer(how):
    inputs, _ = small(lengths=(300,))
    want, want_state = kda_prefill(**inputs, schedule=MID)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    q = torch.empty_like(inputs["q"])
    for i in range(100):
        q.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            slow_down()
            q.copy_(inputs["q"])
        x = {**inputs, "q": q}
        if how == "context":
            with torch.cuda.stream(side):
                o, s = kda_prefill(**x, schedule=MID)
        else:
            given = side if how == "stream" else side.cuda_stream
            o, s = kda_prefill(**x, schedule=MID, stream=given)
        with torch.cuda.stream(side):
            consumed, consumed_state = o.clone(), s.clone()
        side.synchronize()
        assert torch.equal(consumed, want), i
        assert torch.equal(consumed_state, want_state), i


def test_handle_zero_is_the_default_stream_also_inside_another_ones_context():
    inputs, _ = small(lengths=(300,))
    want, _ = kda_prefill(**inputs, schedule=MID)
    torch.cuda.synchronize()
    side, q = torch.cuda.Stream(), torch.zeros_like(inputs["q"])
    torch.cuda.synchronize()
    slow_down()
    q.copy_(inputs["q"])  # on the default stream
    with torch.cuda.stream(side):  # does not wait for the default stream
        o, _ = kda_prefill(**{**inputs, "q": q}, schedule=MID, stream=0)
    torch.cuda.default_stream().synchronize()
    assert torch.equal(o, want)


def test_two_streams_do_not_share_scratch():
    cases = [small(seed, lengths=(700, 50), heads=4)[0] for seed in (1, 2)]
    assert_streams_share_nothing(lambda x: kda_prefill(**x, schedule=MID), cases, times=200)


@pytest.mark.parametrize("segments", [1, 4])
def test_replays_in_a_cuda_graph(segments):
    config = Config(32, "mid", segments=segments)
    first, _ = small(1, lengths=(1500, 33))
    second, _ = small(2, lengths=(1500, 33))
    assert_replays_in_a_graph(lambda x: kda_prefill(**x, schedule=config), first, second)


FIRST_CALL_IN_CAPTURE = """
import torch
from candidates.kda_prefill.kernel.entry import Config, compiled, kda_prefill
config = Config(32, "mid")
compiled(config, True)
x = {n: torch.randn(64, 2, 128, device="cuda").bfloat16() * 0.1 for n in "qkv"}
x |= {"g": -torch.rand(64, 2, 128, device="cuda"), "beta": torch.rand(64, 2, device="cuda")}
x["cu_seqlens"] = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
x["initial_state"] = torch.randn(1, 2, 128, 128, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    o, s = kda_prefill(**x, schedule=config)
graph.replay()
want, _ = kda_prefill(**x, schedule=config)
torch.cuda.synchronize()
assert torch.equal(o, want)
"""


def test_the_first_call_of_a_process_may_be_captured():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL_IN_CAPTURE], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_memory_is_flat_over_many_lengths():
    inputs, _ = small(lengths=(700,), heads=2)
    after = []
    for i in range(500):
        T = 1 + (i * 37) % 700
        x = {n: inputs[n][:T] for n in ("q", "k", "v", "g", "beta")}
        cu = torch.tensor([0, T], dtype=torch.int32, device=DEVICE)
        kda_prefill(**x, cu_seqlens=cu, initial_state=inputs["initial_state"], schedule=MID)
        after.append(torch.cuda.memory_allocated())
    assert len(set(after[20:])) == 1, sorted(set(after[20:]))


@pytest.mark.parametrize("config", [MID, Config(16, "start"), Config(64, "pairs", 64, 1, 16, "mid"),
                                    Config(32, "mid", segments=8)], ids=name_of)  # fmt: skip
def test_over_2_to_31_elements(config):
    T, H, tail = 1048592, 16, 1500
    generator = torch.Generator(DEVICE).manual_seed(0)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < 70 << 30:
        pytest.skip(f"needs 70 GiB of GPU memory, {free >> 30} are free")

    def bf16():
        x = torch.empty(T, H, 128, device=DEVICE, dtype=torch.bfloat16)
        for part in x.split(1 << 16):
            noise = torch.randn(part.shape, device=DEVICE, generator=generator)
            part.copy_(noise / noise.norm(dim=-1, keepdim=True))
        return x

    q, k, v = bf16(), bf16(), bf16()
    g = torch.rand(T, H, 128, device=DEVICE, generator=generator).mul_(-5)
    beta = torch.rand(T, H, device=DEVICE, generator=generator)
    cu = torch.tensor([0, T], dtype=torch.int32, device=DEVICE)
    o, s = kda_prefill(q, k, v, g, beta, cu, schedule=config)
    last = {
        name: x[-2 * tail :].clone()
        for name, x in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items()
    }
    last |= {"cu_seqlens": torch.tensor([0, 2 * tail], dtype=torch.int32, device=DEVICE)}
    want = OPERATION.fast_oracle({**last, "initial_state": None, "scale": 1 / math.sqrt(128)})
    assert_close(o[-tail:], want["o"][-tail:])
    assert_close(s, want["final_state"])


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_host_cost_per_call(segments):
    config = Config(32, "mid", segments=segments)
    inputs, _ = small(lengths=(64,), heads=1)
    outputs = OPERATION.outputs(inputs)
    bound = launch.LoadedSchedule(config).bind(inputs, outputs)
    calls = {
        "bound call": bound,
        "kda_prefill": lambda: kda_prefill(**inputs, schedule=config),
        "kda_prefill(out=, final_state=)": lambda: kda_prefill(
            **inputs, schedule=config, out=outputs["o"], final_state=outputs["final_state"]
        ),
    }
    for name, call in calls.items():
        for _ in range(50):
            call()
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            times.append((time.perf_counter() - start) / 20 * 1e6)
        median = sorted(times)[len(times) // 2]
        report(f"host time per call, {segments} segments, {name}: {median:.1f} us")
        assert median < 200  # others spend 230 us and more
