"""Causality and arguments of KDA prefill, asked of implementations that break one each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

import operations
from factory.device.bank import Bank
from factory.device.probes import Answer, ask_probes
from factory.device.protocol import Bound, Ref, Run
from factory.device.simulated import SimulatedDevice

OPERATION = operations.get("kda_prefill")
WORKLOAD = OPERATION.workloads["1024/4/1"]
Call = Callable[[dict[str, Any]], Mapping[str, torch.Tensor]]


@pytest.fixture(scope="module")
def bank() -> Bank:
    device = SimulatedDevice()
    arena = device.create_arena(1 << 28)
    arena.close()  # the mapping stays
    return Bank(OPERATION, device, arena, seed=11, private_bytes=1 << 28)


@dataclass
class InProcess:
    """A child that computes where the test runs."""

    bank: Bank
    call: Call
    said: dict[str, Any] = field(default_factory=dict)

    def ready(self) -> dict[str, Any]:
        return self.said

    def ask(self, message: Run, limit_s: float) -> dict[str, Any]:
        for case in message.cases:
            for bound in case.sets:
                self._call(bound)
        return {}

    def _call(self, bound: Bound) -> None:
        view = self.bank.view
        inputs = {n: view(v) if isinstance(v, Ref) else v for n, v in bound.inputs.items()}
        for name, tensor in self.call(inputs).items():
            view(bound.outputs[name]).copy_(tensor)


def asked(bank: Bank, call: Call, **said: Any) -> Answer:
    return ask_probes(
        OPERATION,
        bank,
        InProcess(bank, call, said),  # type: ignore[arg-type]
        WORKLOAD,
        OPERATION.regimes["slow"],
        limit_s=10,
        stage="gate",
        thorough=True,
    )


def right(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return dict(OPERATION.fast_oracle(inputs))


def leaks(unit: int, size: float) -> Call:
    """Adds to the start of each ``unit`` tokens a little of its last token's values."""

    def call(inputs: dict[str, Any]) -> Mapping[str, torch.Tensor]:
        found = right(inputs)
        o, v = found["o"], inputs["v"].double()
        largest = o.abs().amax((0, 2))
        cu = inputs["cu_seqlens"].tolist()
        for begin, end in pairwise(cu):
            for first in range(begin, end, unit):
                last = min(first + unit, end) - 1
                if last > first:
                    o[first] += size * (largest * v[last, :, 0].sign())[:, None]
        return found

    return call


def replaced(name: str, value: Callable[[dict[str, Any]], Any]) -> Call:
    return lambda inputs: right({**inputs, name: value(inputs)})


def test_the_oracle_itself_answers_all(bank: Bank) -> None:
    answer = asked(bank, right, bitwise_causal=True)
    assert answer.reason == ""
    assert answer.details == {"asked": 11, "bitwise_causal": True, "largest_move": 0.0}


def test_a_small_move_in_the_own_chunk_is_accepted_and_recorded(bank: Bank) -> None:
    answer = asked(bank, leaks(64, 0.004))
    assert answer.reason == ""
    assert answer.details["largest_move"] == pytest.approx(0.008, rel=0.1)


WRONG: dict[str, tuple[Call, dict[str, Any], str]] = {
    "leak in the chunk": (
        leaks(64, 0.01),
        {},
        "causality: v changed from token 165 of sequence 1 on: earlier rows of the same chunk"
        " moved by 2.",
    ),
    "leak across chunks": (leaks(256, 1e-4), {}, "causality: v changed"),
    "leak past a stated chunk": (leaks(64, 0.004), {"chunk": 16}, "o[0:230] changed"),
    "leak against a claim": (
        leaks(64, 0.004),
        {"bitwise_causal": True},
        "claims bitwise causality, but earlier rows moved by",
    ),
    "scale": (replaced("scale", lambda i: OPERATION.workloads["1024/4/1"].scale), {}, "scale "),
    "scale of 0 as missing": (
        replaced("scale", lambda i: i["scale"] or 128**-0.5),
        {},
        "scale of 0: o is off by",
    ),
    "initial state": (
        replaced("initial_state", lambda i: torch.zeros(4, 2, 128, 128)),
        {},
        "as drawn: o head 1 is off by",
    ),
    "missing initial state": (
        replaced(
            "initial_state",
            lambda i: (
                torch.ones(4, 2, 128, 128) if i["initial_state"] is None else i["initial_state"]
            ),
        ),
        {},
        "initial_state of None: o sequence 0 is off by",
    ),
    "boundaries": (
        replaced("cu_seqlens", lambda i: torch.tensor([0, 70, 277, 277, 341], dtype=torch.int32)),
        {},
        "other boundaries in cu_seqlens: o head 0 is off by",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(bank: Bank, name: str) -> None:
    call, said, words = WRONG[name]
    reason = asked(bank, call, **said).reason
    assert reason.startswith("slow ")
    assert words in reason


def test_a_sequence_that_another_one_moves_is_found(bank: Bank) -> None:
    def call(inputs: dict[str, Any]) -> Mapping[str, torch.Tensor]:
        found = right(inputs)
        found["final_state"][0] *= 1.0 + 1e-6 * float(inputs["g"][276].sum().sign())
        found["final_state"][0, 0, 0, 0] += 1e-6 * float(inputs["k"][270].sum())
        return found

    reason = asked(bank, call).reason
    assert "causality: k changed" in reason
    assert "final_state[0:1] changed" in reason
