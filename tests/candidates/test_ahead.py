"""Objects compiled ahead of time stand in for a compilation, and only for their own schedule's."""

from __future__ import annotations

from pathlib import Path

import pytest

import candidates
from candidates import ToolchainError
from candidates._delta_rule.ahead import FILES
from candidates.kda_prefill.kernel import launch

pytest.importorskip("cutlass")

FAMILY = candidates.get("kda_prefill")
FUSED = FAMILY.schedule({"form": "fused", "frame": "middle", "builders": 2, "waves": 2})


@pytest.fixture(scope="module")
def made() -> dict[str, bytes]:
    return dict(FAMILY.objects(FUSED))


@pytest.fixture
def folder(made: dict[str, bytes], tmp_path: Path) -> Path:
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch):
    """With nothing compiled or adopted, and no way to compile."""
    from candidates.kda_prefill.kernel import entry, host

    def never(*args: object, **options: object) -> None:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(launch, "require_gpu", lambda: None)
    monkeypatch.setattr(host, "compile_function", never)
    monkeypatch.setattr(entry, "_ADOPTED", {})
    entry.compiled.cache_clear()
    yield entry
    entry.compiled.cache_clear()


def test_what_is_loaded_is_not_compiled(folder: Path, entry) -> None:
    import tvm_ffi

    loaded = FAMILY.load_objects(FUSED, folder)
    assert loaded.kernel_names[0] == "kda_fused_"
    for with_state in (True, False):
        function = entry.compiled(loaded.config, with_state)
        assert isinstance(function, tvm_ffi.Function)
        with pytest.raises(TypeError, match="Expects"):  # it checks its arguments as ever
            function(1)
    other = entry.FusedConfig("boundary", 2)
    with pytest.raises(AssertionError, match="to be compiled"):
        entry.compiled(other, True)


def test_a_damaged_object_is_an_error_and_is_not_adopted(folder: Path, entry) -> None:
    (folder / "state.o").write_bytes(b"not an object")
    with pytest.raises(Exception, match=r".") as caught:
        FAMILY.load_objects(FUSED, folder)
    assert not isinstance(caught.value, AssertionError)
    assert entry._ADOPTED == {}
    (folder / "state.o").unlink()
    with pytest.raises(Exception, match=r"."):
        FAMILY.load_objects(FUSED, folder)


def test_both_forms_of_the_call_are_made(made: dict[str, bytes]) -> None:
    assert set(made) == set(FILES)
    assert made["state.o"] != made["no_state.o"]
    assert all(data.startswith(b"\x7fELF") for data in made.values())


def test_without_a_gpu_loading_is_the_machines_fault(folder: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    with pytest.raises(ToolchainError, match="no CUDA GPU"):
        FAMILY.load_objects(FUSED, folder)
