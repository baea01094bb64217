"""The scan kernels against torch on random images: ragged, empty, clamped, segmented."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from scan_compile import compiled_scan
from scan_reference import Case, random_case

pytestmark = pytest.mark.gpu
pytest.importorskip("cutlass")
log = logging.getLogger(__name__)

# (bt, rows, segments, with an initial state)
VARIANTS = [
    (16, 64, 1, True),
    (32, 64, 1, True),
    (64, 64, 1, True),
    (16, 128, 1, True),
    (32, 128, 1, True),
    (64, 128, 1, True),
    (16, 64, 1, False),
    (32, 64, 1, False),
    (32, 64, 2, True),
    (16, 128, 2, False),
    (64, 64, 4, True),
    (16, 64, 4, True),
    (32, 64, 8, True),
    (32, 64, 8, False),
    (16, 64, 8, True),
    (64, 128, 8, True),
]

random.seed(5)
SHORT = [0]
for _ in range(70):
    SHORT.append(SHORT[-1] + random.choice([0, 1, 5, 31, 64, 70]))
CASES = {  # name: offsets, rows, heads
    "one token": ([0, 1], 1, 1),
    "one sequence": ([0, 2048], 2048, 3),
    "no tokens": ([0, 0, 0], 0, 2),
    "ragged": ([0, 0, 17, 2065, 2066, 2566], 2566, 2),
    "around chunks": ([0, 63, 63, 127, 192, 1740], 1740, 2),
    "gaps and nonsense": ([-7, 30, 20, 950, 5000], 1000, 1),
    "covered in part": ([5, 40, 900], 1000, 1),
    "many short": (SHORT, SHORT[-1], 1),
    "many short, one long": ([*SHORT, SHORT[-1] + 3000], SHORT[-1] + 3003, 1),
}


def launch(variant: tuple[int, int, int, bool], case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs on poisoned memory: rows of o that the scan does not write stay NaN."""
    scan, kept = compiled_scan(*variant)
    T, heads, _ = case.out.shape
    sizes = scan.buffers(T, len(case.offsets) - 1, heads)
    nan = float("nan")
    buffers = tuple(
        torch.full(shape, nan, dtype=getattr(torch, dtype), device="cuda") for shape, dtype in sizes
    )
    o = torch.full(case.out.shape, nan, dtype=torch.bfloat16, device="cuda")
    s = torch.full(case.final.shape, nan, device="cuda")
    kept.function(case.x, case.offsets, case.initial, o, s, buffers or None)
    torch.cuda.synchronize()
    return o, s


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """max and rms error relative to the reference; NaN stays NaN."""
    if want.numel() == 0:
        return 0.0, 0.0
    difference = got.double() - want.double()
    tiny = 1e-30
    return (
        float(difference.abs().max() / want.abs().max().clamp(min=tiny)),
        float(difference.norm() / want.norm().clamp(min=tiny)),
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_scan_matches_torch_and_repeats_bit_for_bit(
    variant: tuple[int, int, int, bool],
) -> None:
    bt, _rows, _segments, with_state = variant
    scan, _ = compiled_scan(*variant)
    wrong = []
    for seed, (name, (offsets, T, heads)) in enumerate(CASES.items()):
        case = random_case(bt, scan.unroll, offsets, T, heads, with_state, seed)
        o, s = launch(variant, case)
        again = launch(variant, case)
        seen = {
            "o": errors(o[case.covered].float(), case.out[case.covered]),
            "state": errors(s, case.final),
        }
        log.info("%s %s: %s", variant, name, seen)
        # bf16 operands: a sum in another order flips a rounding here and there.
        for what, (largest, rms) in seen.items():
            if not (largest < 1.5e-2 and rms < 5e-3):
                wrong.append((name, what, largest, rms))
        if not bool(o[~case.covered].isnan().all()):
            wrong.append((name, "wrote a row of no sequence"))
        for first, second in ((o, again[0]), (s, again[1])):
            kind = torch.int16 if first.dtype == torch.bfloat16 else torch.int32
            if not torch.equal(first.view(kind), second.view(kind)):
                wrong.append((name, "two runs differ"))
    assert wrong == []


def test_segments_are_the_same_scan_as_one_chain() -> None:
    """A dropped carry, or one from the wrong segment, is far outside this."""
    variant = (32, 64, 8, True)
    case = random_case(32, 4, [0, 2048], 2048, 2, True, 11)
    chain, split = launch((32, 64, 1, True), case), launch(variant, case)
    for one, other in zip(chain, split, strict=True):
        largest, rms = errors(other.float(), one.float())
        assert largest < 1.5e-2
        assert rms < 5e-3
