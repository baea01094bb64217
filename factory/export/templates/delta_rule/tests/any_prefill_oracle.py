"""The definition, token by token in float64, and how far from it a result may be."""

from __future__ import annotations

import torch

# part: oracle


def assert_close(got, want, what: str) -> None:
    """Judge one output over all of it and head by head (its second axis)."""
    assert torch.isfinite(got).all(), f"{what}: not finite"
    got = got.double()
    if want.numel() == 0:
        return
    pairs = [("all", got, want)]
    pairs += [(f"head {h}", got[:, h], want[:, h]) for h in range(want.shape[1])]
    for scope, a, b in pairs:
        if float(b.abs().max()) == 0:
            assert float(a.abs().max()) == 0, f"{what}, {scope}: not zero"
            continue
        max_rel = float((a - b).abs().max() / b.abs().max())
        rms_rel = float((a - b).norm() / b.norm())
        assert max_rel <= MAX_REL, f"{what}, {scope}: max error {max_rel:.2e}"
        assert rms_rel <= RMS_REL, f"{what}, {scope}: rms error {rms_rel:.2e}"
