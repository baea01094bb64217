"""The scan compiles for sm_90a within its budgets; needs no GPU."""

from __future__ import annotations

import pytest
from scan_compile import compiled_scan

from candidates._delta_rule.kernel.resources import (
    budget_problems,
)

pytest.importorskip("cutlass")

# (bt, rows, segments, with an initial state)
VARIANTS = [
    (32, 64, 1, True),
    (16, 128, 1, False),
    (64, 64, 1, True),
    (32, 64, 2, False),
    (16, 64, 8, True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_scan_compiles_without_spills_and_within_a_block(
    variant: tuple[int, int, int, bool],
) -> None:
    scan, kept = compiled_scan(*variant)
    resources = kept.kernels
    prefixes = ["kda_scan_"]
    if scan.segments > 1:
        prefixes.insert(0, "kda_pass1_")
    if scan.segments > 2:
        prefixes.insert(1, "kda_carry_")
    assert [r.name[: len(p)] for r, p in zip(resources, prefixes, strict=True)] == prefixes
    assert [p for r in resources for p in budget_problems(r)] == []
    # What ptxas says when it serialises products: groups in flight over the loop's edge
    # (C7514), a loop it takes for divergent (C7519), too few registers (C7511).
    assert "Compiling entry function" in kept.remarks
    assert [c for c in ("C7511", "C7514", "C7519") if c in kept.remarks] == []


def test_scan_refuses_rows_and_segments_by_name() -> None:
    from candidates._delta_rule.kernel.scan import Scan

    with pytest.raises(ValueError, match="rows=32"):
        Scan(32, 32)
    with pytest.raises(ValueError, match="segments=3"):
        Scan(32, 64, 3)


def test_segments_share_one_buffer_bounded_by_rows_and_by_sequences() -> None:
    from candidates._delta_rule.kernel.scan import Scan

    assert Scan(32, 64).buffers(4096, 1, 8) == ()
    ((shape, dtype),) = Scan(32, 64, 2).buffers(4096, 1, 8)
    assert (shape, dtype) == ((1, 8, 16384), "float32")
    ((shape, _),) = Scan(32, 64, 8).buffers(4096, 1000, 8)
    assert shape == (16, 8, 24576)
