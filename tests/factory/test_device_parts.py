"""Parts of a job that need no process: statistics, identity, windows, memory, imports."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import device_fakes as fakes
import pytest
import torch

from factory.device import open_job
from factory.device.bank import Bank, Draw, same_bytes, seed_of
from factory.device.clock import busy_ns, windows
from factory.device.cuda import _sku
from factory.device.gate import in_order
from factory.device.hardware import KernelEvent, RecordingError
from factory.device.nvml import Gauge
from factory.device.process import ChildFailure
from factory.device.simulated import SimulatedDevice
from factory.device.timing import claimed_us
from factory.device.verdicts import interval, of_failure, undeclared
from factory.stages.base import HarnessError
from leaderboard.records import StageStatus


def event(name: str, start: int, us: float = 1.0) -> KernelEvent:
    return KernelEvent(name, start, round(us * 1000))


def test_windows_keep_what_lies_between_a_pair_of_markers() -> None:
    names = ["flush", "mark", "a", "b", "mark", "flush", "warm", "mark", "c", "mark", "copy"]
    found = windows([event(n, i) for i, n in enumerate(names)], "mark")
    assert [[e.name for e in w] for w in found] == [["a", "b"], ["c"]]


def test_a_marker_too_many_is_noticed() -> None:
    with pytest.raises(RecordingError, match="do not pair"):
        windows([event(n, i) for i, n in enumerate(["mark", "a", "mark", "mark"])], "mark")


@pytest.mark.parametrize(
    ("events", "busy"),
    [
        ([], 0),
        ([(0, 10)], 10),
        ([(0, 10), (10, 5)], 15),
        ([(0, 10), (30, 5)], 15),  # a gap is nobody's
        ([(0, 10), (8, 5)], 13),  # launched programmatically: it stands by for 2
        ([(0, 10), (2, 3), (4, 2), (12, 1)], 11),  # within another one
        ([(0, 10), (0, 10), (9, 3)], 12),
    ],
)
def test_kernels_that_overlap_count_once(events: list[tuple[int, int]], busy: int) -> None:
    assert busy_ns([KernelEvent("a", start, taken) for start, taken in events]) == busy


def test_the_interval_of_a_median_covers_it_19_times_in_20() -> None:
    draw = random.Random(5)
    covered = 0
    for _ in range(2000):
        _, low, high = interval([draw.expovariate(1.0) for _ in range(30)])
        covered += low <= math.log(2) <= high
    assert 0.94 < covered / 2000 < 0.985


@pytest.mark.parametrize("n", range(1, 40))
def test_an_interval_holds_its_median(n: int) -> None:
    samples = [float(i * i % 17) for i in range(n)]
    median, low, high = interval(samples)
    assert median == statistics.median(samples)
    assert min(samples) <= low <= median <= high <= max(samples)
    if n < 6:
        assert (low, high) == (min(samples), max(samples))


def test_a_thirty_sample_interval_is_the_tenth_from_both_ends() -> None:
    assert interval([float(i) for i in range(1, 31)]) == (15.5, 10.0, 21.0)


def test_names_are_compared_by_prefix_and_without_a_return_type() -> None:
    launched = ["kda_prep_32_0", "void at::native::add<4>(int)", "Memcpy DtoD", "gemm"]
    assert undeclared(launched, ["kda_prep_", "at::native::"]) == ["Memcpy DtoD", "gemm"]
    assert undeclared(launched, ["kda_", "void at::", "Memcpy", "gemm"]) == []


def test_the_sweep_comes_first_and_from_mild_to_steep() -> None:
    names = [r.name for r in in_order(list(fakes.OPERATION.regimes.values()))]
    assert names == ["gentle", "steep", "production", "slow", "beyond"]


def test_every_failure_of_a_child_is_a_verdict_but_the_toolchain() -> None:
    expected = {
        "timeout": StageStatus.TIMEOUT,
        "died": StageStatus.CRASHED,
        "memory": StageStatus.CRASHED,
        "candidate": StageStatus.CRASHED,
        "rejected": StageStatus.REJECTED,
        "build": StageStatus.INFEASIBLE,
    }
    for kind, status in expected.items():
        assert of_failure(ChildFailure(kind, "why")).status is status
    with pytest.raises(HarnessError, match="why"):
        of_failure(ChildFailure("toolchain", "why"))


def test_seeds_differ_between_sets_and_are_replayable() -> None:
    keys = [(r, w, i) for r in ("a", "b") for w in ("1", "2", "12") for i in range(3)]
    seeds = [seed_of(7, *key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [seed_of(7, *key) for key in keys]
    assert set(seeds).isdisjoint(seed_of(8, *key) for key in keys)
    assert max(seeds) < 2**31


def test_bytes_are_compared_not_values() -> None:
    nan = torch.tensor([math.nan, 0.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))


class Counting(fakes.FakeOperation):
    """Counts how often inputs are drawn."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, str]] = []

    def generate(self, workload, regime, *, seed, device="cpu"):  # type: ignore[no-untyped-def]
        self.drawn.append((regime.name, workload.name))
        return super().generate(workload, regime, seed=seed, device=device)


def bank_of(operation: fakes.FakeOperation, arena_bytes: int, private_bytes: int) -> Bank:
    device = SimulatedDevice()
    arena = device.create_arena(arena_bytes)
    arena.close()  # the mapping stays
    return Bank(operation, device, arena, seed=1, private_bytes=private_bytes)


def test_inputs_are_drawn_once_and_the_least_recently_used_make_room() -> None:
    operation = Counting()
    workload = operation.workloads["128"]
    a, b, c = (Draw(workload, operation.regimes[n]) for n in ("production", "slow", "beyond"))
    # Two sets of 9 KiB of inputs fit into the arena, three do not.
    bank = bank_of(operation, 24 << 10, 1 << 20)
    for draw in (a, b, a, b, a, c, a, b):
        with bank.use([draw]) as (entry,):
            assert bank.altered(entry) is None
    assert [r for r, _ in operation.drawn] == ["production", "slow", "beyond", "slow"]


def test_answers_are_bounded_too() -> None:
    operation = Counting()
    draws = [Draw(operation.workloads["128"], r) for r in operation.regimes.values()]
    bank = bank_of(operation, 1 << 20, 40 << 10)
    for draw in (*draws, *draws):
        with bank.use([draw]):
            pass
    assert len(operation.drawn) == 2 * len(draws)


def test_what_is_in_use_does_not_make_room() -> None:
    operation = Counting()
    draws = [
        Draw(operation.workloads["128"], operation.regimes[n])
        for n in ("production", "slow", "beyond")
    ]
    bank = bank_of(operation, 24 << 10, 1 << 20)
    with pytest.raises(HarnessError, match="raise arena_bytes"), bank.use(draws):
        pass
    with bank.use(draws[:2]) as entries:  # nothing stays pinned after the failure
        assert len(entries) == 2


def test_a_changed_input_is_named_and_put_right() -> None:
    operation = Counting()
    bank = bank_of(operation, 1 << 20, 1 << 20)
    with bank.use([Draw(operation.workloads["16"], operation.regimes["slow"])]) as (entry,):
        bank.view(entry.inputs["v"])[3, 3] = 0.0
        assert bank.altered(entry) == "v"
        assert bank.altered(entry) is None


def test_outputs_are_lent_poisoned_and_given_back() -> None:
    operation = Counting()
    bank = bank_of(operation, 16 << 10, 1 << 20)
    with bank.use([Draw(operation.workloads["16"], operation.regimes["slow"])]) as (entry,):
        for _ in range(50):
            with bank.scratch() as scratch:
                refs = scratch.outputs(entry)
                assert all(bool(bank.view(r).isnan().all()) for r in refs.values())
                bank.view(refs["o"]).zero_()


def test_a_childs_process_starts_without_oracle_or_records() -> None:
    code = (
        "import sys, factory.device.child\n"
        "bad = ('operations.kda_prefill', 'factory.device.bank', 'factory.device.job',"
        " 'leaderboard', 'sqlalchemy', 'torch')\n"
        "print([n for n in bad if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says nothing where there is a GPU")
def test_without_nvml_there_is_no_gauge() -> None:
    assert Gauge.find("GPU-00000000-0000-0000-0000-000000000000") is None


@pytest.mark.parametrize(
    ("name", "board"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA L4", "NVIDIA L4"),
    ],
)
def test_boards_of_one_chip_are_told_apart(name: str, board: str) -> None:
    assert _sku(name) == board


def test_more_time_than_passed_is_a_contradiction() -> None:
    reading = {"gpu": [10.0] * 30, "cold": [12.0] * 9, "per_call": [20.0] * 3, "burst": 20}
    assert claimed_us({**reading, "pipelined": [11.0, 11.0]}) == 300 + 108 + 60 + 440


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="no sm90 GPU is visible"):
        open_job(fakes.OPERATION, fakes.FAMILY, seed=1, log_dir=tmp_path)
