"""KDA prefill draws and evaluates what it did when its results were measured, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from operations.kda_prefill import OPERATION, KdaWorkload

W = KdaWorkload("pinned", heads=3, lengths=(40, 0, 1, 70))
SEED = 3

PINNED_WITH = "2.13.0+cpu"
"""torch, on which the last bits of exp, log and sums depend."""

ALIKE = ("AVX2", "AVX512")
"""Vector instructions with which torch gave the same bytes."""

ON_ANY_PROCESSOR = {"MKL_CBWR": "COMPATIBLE"}
"""Products and logarithms whose last bits are not those of one maker's processors.

The library reads it once, at its first call: digests are read in a process of their own.
"""

# regime -> digests of the raw form or else the inputs, the oracle, the chunked one and the probes
DIGESTS: dict[str, tuple[str, str, str, str]] = {
    "production": ("7bd7d6f03c0d4aff", "3b3900ce1ef0c860", "3b3900ce1ef0c860", "967516f7f1a831b7"),
    "production_spread": (
        "9853d0569862fe6f",
        "42f9e5a06073f8da",
        "42f9e5a06073f8da",
        "d46ea02f2142b06a",
    ),
    "mixed": ("94eddddfd71a4c05", "0cb57dd0a4acfd03", "0cb57dd0a4acfd03", "d7c2885708c047a2"),
    "similar_keys": (
        "00824233e7063d8b",
        "4e677ef2104f9970",
        "4e677ef2104f9970",
        "fb20cb78c66a8f12",
    ),
    "one_hot_state": (
        "1d2603d077f9bf73",
        "032e43115d9618b7",
        "032e43115d9618b7",
        "8d86450b565e0c04",
    ),
    "closed_ends": ("82deddfa0a522afc", "f1f87663588f5218", "f1f87663588f5218", "a3311302094f2016"),
    "beyond_single_inf": (
        "72a8636f8802e470",
        "fee5ffde2b76d787",
        "fee5ffde2b76d787",
        "ae035ded0f31d04c",
    ),
    "beyond_scattered": (
        "73795dd82dd646f8",
        "5eb2fe1d8ad04ba5",
        "5eb2fe1d8ad04ba5",
        "fda457f18162f24a",
    ),
    "mild": ("69942060144aa174", "ecbf1e742651a796", "ecbf1e742651a796", "6beae620033c4bdb"),
}

# regime -> |q| + |k| + |v|, -g where finite, beta, |initial_state|, |o|, |final_state|
SUMS: dict[str, tuple[float, ...]] = {
    "production": (40149.4231, 106605.919, 166.389452, 157040.402, 127.532188, 47541.5643),
    "production_spread": (40017.584, 106024.0, 162.707469, 156195.911, 207.419319, 55436.242),
    "mixed": (40228.8833, 106581.312, 161.370828, 157215.617, 1924.24057, 94530.5291),
    "similar_keys": (47876.6022, 213.112217, 316.333053, 157234.298, 2574.9803, 136898.248),
    "one_hot_state": (39969.0101, 0.424475498, 0.820760261, 12.0, 5.23421084, 143.938005),
    "closed_ends": (39688.9334, 52890.0, 154.0, 156974.194, 2115.3373, 107568.631),
    "beyond_single_inf": (40155.9752, 206.127015, 170.795106, 157176.084, 2005.1763, 54438.4945),
    "beyond_scattered": (39978.2624, 54209350.1, 172.030125, 156668.255, 2063.70546, 111036.171),
    "mild": (40058.295, 34439.7326, 164.017063, 156930.669, 206.209827, 61772.785),
}

NAMES = tuple(DIGESTS)
"""Each rule of the gate, the keys, the write strengths and the state at least once."""


def _digest(values: dict[str, Any]) -> str:
    h = hashlib.sha256()
    for name, x in sorted(values.items()):
        h.update(name.encode())
        if isinstance(x, torch.Tensor):
            h.update(f"{x.dtype} {tuple(x.shape)}".encode())
            h.update(x.contiguous().view(torch.uint8).numpy().tobytes())
        else:
            h.update(repr(x).encode())
    return h.hexdigest()[:16]


def digests(name: str) -> tuple[str, ...]:
    regime = OPERATION.regimes[name]
    inputs = OPERATION.generate(W, regime, seed=SEED)
    raw = OPERATION.raw_form(W, regime, seed=SEED)
    asked = OPERATION.probes(W, regime, seed=SEED)
    probes = {f"{p.name} {n}": x for p in asked for n, x in p.inputs.items()}
    outputs = (OPERATION.oracle(inputs), OPERATION.fast_oracle(inputs))
    # The last bits of a float64 product are those of one processor's matrix library.
    rounded = ({n: x.float() for n, x in out.items()} for out in outputs)
    return tuple(_digest(x) for x in (raw or inputs, *rounded, probes))


def sums(name: str) -> tuple[float, ...]:
    inputs = OPERATION.generate(W, OPERATION.regimes[name], seed=SEED)
    values = {**inputs, **OPERATION.oracle(inputs)}
    tokens = sum(values[n].double().abs().sum().item() for n in ("q", "k", "v"))
    gates = values["g"].double()
    names = ("beta", "initial_state", "o", "final_state")
    rest = (values[n].double().abs().sum().item() for n in names)
    return (tokens, -gates[gates.isfinite()].sum().item(), *rest)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_outputs_sum_to_what_they_did(name: str) -> None:
    assert sums(name) == pytest.approx(SUMS[name], rel=1e-4)


@pytest.fixture(scope="module")
def read_here() -> dict[str, tuple[str, ...]]:
    vectors = torch.backends.cpu.get_cpu_capability()
    if torch.__version__ != PINNED_WITH or vectors not in ALIKE:
        pytest.skip(
            f"digests were read with torch {PINNED_WITH} and {' or '.join(ALIKE)}, "
            f"this is {torch.__version__} and {vectors}"
        )
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, **ON_ANY_PROCESSOR, "PYTHONPATH": root}
    run = [sys.executable, __file__]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    return {name: tuple(found) for name, found in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", NAMES)
def test_inputs_oracles_and_probes_are_the_same_bytes(
    read_here: dict[str, tuple[str, ...]], name: str
) -> None:
    assert read_here[name] == DIGESTS[name]


def test_the_version_is_that_of_the_measured_results() -> None:
    assert OPERATION.version == "2"


if __name__ == "__main__":
    sys.stdout.write(json.dumps({name: digests(name) for name in NAMES}))
