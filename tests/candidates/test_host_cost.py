"""How little a known call does on the host: its looks at tensors, its frames, its allocations."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from host_cost import counted

from candidates._delta_rule.kernel import known
from candidates.gdn_prefill.kernel import arguments as gdn_arguments
from candidates.gdn_prefill.kernel import entry as gdn
from candidates.kda_prefill.kernel import arguments as kda_arguments
from candidates.kda_prefill.kernel import entry as kda

PREFILL = {"kda": kda.kda_prefill, "gdn": gdn.gdn_prefill}


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve CPU tensors with functions that do nothing."""
    for name in ("_KNOWN", "_PREPARED"):
        monkeypatch.setattr(known, name, {})
    monkeypatch.setattr(known, "current_device", (-1).__index__)
    for entry, arguments in ((kda, kda_arguments), (gdn, gdn_arguments)):
        monkeypatch.setattr(arguments, "on_gpu", lambda x: True)
        monkeypatch.setattr(entry, "compiled", lambda *_: function)
        monkeypatch.setattr(entry, "on_stream", lambda stream, device: None)
        monkeypatch.setattr(entry, "sms", lambda device: 132)


def function(*args: Any) -> None:
    """In place of a compiled one."""


def call(operation: str, form: str) -> dict[str, Any]:
    """Arguments of a call of packed sequences."""
    T, H, bf16 = 37, 3, torch.bfloat16
    rows = torch.randn(T, H, 384).to(bf16).split(128, -1)
    x: dict[str, Any] = {n: row.contiguous() for n, row in zip("qkv", rows, strict=True)}
    channels = (128,) if operation == "kda" else ()
    x |= {"g": -torch.rand(T, H, *channels), "beta": torch.rand(T, H)}
    x["cu_seqlens"] = torch.tensor([0, 20, T], dtype=torch.int32)
    if "raw" in form:
        x |= {"g": x["g"].to(bf16), "beta": x["beta"].to(bf16), "beta_logits": True, "l2norm": True}
        x |= {"gate": "softplus", "A_log": torch.zeros(H), "dt_bias": torch.zeros(H, *channels)}
        x["initial_state"] = torch.randn(2, H, 128, 128)
    if "slices" in form:
        x |= dict(zip("qkv", rows, strict=True))
    if "given" in form:
        x |= {"out": torch.empty(T, H, 128).to(bf16), "final_state": torch.empty(2, H, 128, 128)}
    return x


MOST = {
    ("kda", "plain"): (15, 4, 3),
    ("kda", "raw"): (22, 4, 3),
    ("kda", "slices"): (20, 6, 3),
    ("kda", "given"): (27, 4, 1),
    ("kda", "raw given"): (35, 4, 1),
    ("gdn", "plain"): (16, 6, 3),
    ("gdn", "raw"): (24, 6, 3),
    ("gdn", "slices"): (21, 8, 3),
    ("gdn", "raw given"): (37, 6, 1),
}
"""Looks at tensors, frames with the compiled function's own, and allocations."""


@pytest.mark.parametrize(("operation", "form"), MOST)
def test_a_known_call_does_little(
    operation: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, prefill = call(operation, form), PREFILL[operation]
    with torch.no_grad():
        for _ in range(2):
            prefill(**x)
        for entry in (kda, gdn):
            monkeypatch.setattr(entry, "check", lambda *_, **__: pytest.fail("checked again"))
        found = counted(prefill, x)
    for (name, names), most in zip(found.items(), MOST[operation, form], strict=True):
        assert len(names) <= most, (name, names)


def test_gradients_are_looked_at_where_they_are_enabled_alone() -> None:
    x = call("kda", "raw")
    for _ in range(2):
        kda.kda_prefill(**x)
    looks = counted(kda.kda_prefill, x)["looks"]
    assert looks.count("requires_grad") == 8  # offsets are whole numbers
    with torch.no_grad():
        assert "requires_grad" not in counted(kda.kda_prefill, x)["looks"]


@pytest.mark.parametrize("operation", PREFILL)
def test_a_new_length_of_a_known_kind_is_not_checked_and_its_function_is_at_hand(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, prefill = call(operation, "raw"), PREFILL[operation]
    asked: list[Any] = []
    with torch.no_grad():
        prefill(**x)
        for entry in (kda, gdn):
            monkeypatch.setattr(entry, "check", lambda *_, **__: pytest.fail("checked again"))
            monkeypatch.setattr(entry, "compiled", lambda *form: asked.append(form) or function)
        for T in (37, 36, 35, 34):
            prefill(**{n: t[:T] if n in ("q", "k", "v", "g", "beta") else t for n, t in x.items()})
    assert len(asked) == 1


def test_a_collection_is_not_counted_as_part_of_a_call() -> None:
    def when_collected(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    def call() -> list[list[int]]:
        return [[i] for i in range(100)]

    collected: list[str] = []
    often = gc.get_threshold()
    gc.callbacks.append(when_collected)
    gc.set_threshold(5)
    try:
        frames = counted(call, {})["frames"]
        call()
    finally:
        gc.set_threshold(*often)
        gc.callbacks.remove(when_collected)
    assert collected, "so a call does make one due"
    assert "when_collected" not in frames
