"""User files: what is read without running them, what is refused, what loading gives."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch

from candidates import BuildError, ToolchainError
from candidates.user import UserFamily, UserFileError, read_user_file
from operations import Workload

HEAD = 'OPERATION = "toy"\nKERNELS = ("mine_",)\n'
RUN = "def run(inputs, outputs):\n    outputs['y'].copy_(inputs['x'])\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


def read(tmp_path: Path, text: str, **given) -> UserFamily:
    return read_user_file(written(tmp_path, text), **given)


def test_a_declaration_is_read_without_running_the_file(tmp_path: Path) -> None:
    text = (
        "raise SystemExit('it ran')\n" + HEAD + "GATE_BOUND: float = -5\nDEVICES = ['cpu', 'cuda']"
        "\ndef bind(inputs, outputs, unroll=4): ...\ndef emulate(inputs): ...\n"
    )
    found = read(tmp_path, text).declaration
    assert (found.operation, found.kernels, found.gate_bound) == ("toy", ("mine_",), -5.0)
    assert (found.devices, found.entry, found.emulates) == (("cpu", "cuda"), "bind", True)


def test_what_is_not_declared_takes_the_strictest_default(tmp_path: Path) -> None:
    family = read(tmp_path, HEAD + RUN)
    assert family.declaration.gate_bound is None, "right for any gate"
    assert family.declaration.devices == ("cuda",)
    assert family.offered("all") == (family.kernel,)
    assert family.problems(family.emulation)
    assert not family.problems(family.kernel)


def test_what_is_claimed_of_causality_is_said_by_what_is_loaded(tmp_path: Path) -> None:
    plain = read(tmp_path, HEAD + RUN)
    said = plain.load(plain.kernel)
    assert (said.chunk_tokens, said.bitwise_causal) == (None, False)
    claiming = read(tmp_path, HEAD + "CHUNK = 32\nBITWISE_CAUSAL = True\n" + RUN)
    said = claiming.load(claiming.kernel)
    assert (said.chunk_tokens, said.bitwise_causal) == (32, True)


def test_the_operation_may_come_from_the_caller_but_not_contradict(tmp_path: Path) -> None:
    assert read(tmp_path, 'KERNELS = ("m",)\n' + RUN, operation="toy").operation == "toy"
    with pytest.raises(UserFileError, match="declares OPERATION = 'toy', but 'other'"):
        read(tmp_path, HEAD + RUN, operation="other")


BAD = {
    "no Python": ("def run(:\n", "line 1 is not Python"),
    "null byte": ("x = 1\0\n", "is not Python"),
    "no function": (HEAD, "neither bind nor run"),
    "two functions": (HEAD + RUN + "def bind(inputs, outputs): ...\n", "both bind and run"),
    "one argument": (HEAD + "def run(inputs): ...\n", "run(inputs, outputs) and does not take"),
    "three arguments": (HEAD + "def run(a, b, c): ...\n", "does not take"),
    "keyword needed": (HEAD + "def run(a, b, *, c): ...\n", "does not take"),
    "emulate": (HEAD + RUN + "def emulate(a, b): ...\n", "emulate(inputs)"),
    "async": (HEAD + "async def run(inputs, outputs): ...\n", "is async"),
    "defined twice": (HEAD + RUN + RUN, "run is defined twice"),
    "assigned twice": (HEAD + 'KERNELS = ("",)\n' + RUN, "KERNELS is assigned twice"),
    "computed": ('OPERATION = "toy"\nKERNELS = tuple("a")\n' + RUN, "must be a literal"),
    "no operation": ('KERNELS = ("a",)\n' + RUN, "declare what it computes"),
    "no kernels": ('OPERATION = "toy"\n' + RUN, "declare the prefixes"),
    "any kernel": ('OPERATION = "toy"\nKERNELS = ("mine", "")\n' + RUN, "declare the prefixes"),
    "any void kernel": ('OPERATION = "toy"\nKERNELS = ("void ",)\n' + RUN, "declare the prefixes"),
    "kernels as text": ('OPERATION = "toy"\nKERNELS = ("mine")\n' + RUN, "declare the prefixes"),
    "positive bound": (HEAD + "GATE_BOUND = 5.0\n" + RUN, "GATE_BOUND is 5.0"),
    "boolean bound": (HEAD + "GATE_BOUND = False\n" + RUN, "GATE_BOUND is False"),
    "endless bound": (HEAD + "GATE_BOUND = -1e999\n" + RUN, "GATE_BOUND is -inf"),
    "chunk": (HEAD + "CHUNK = 0\n" + RUN, "CHUNK is 0"),
    "endless chunk": (HEAD + f"CHUNK = {1 << 31}\n" + RUN, "CHUNK is 2147"),
    "chunk as flag": (HEAD + "CHUNK = True\n" + RUN, "CHUNK is True"),
    "flag": (HEAD + "BITWISE_CAUSAL = 1\n" + RUN, "BITWISE_CAUSAL is 1"),
    "devices": (HEAD + "DEVICES = ('tpu',)\n" + RUN, "DEVICES is ('tpu',)"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_in_one_line_that_names_it(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(UserFileError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert "mine.py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_readable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserFileError, match=r"cannot read .*absent\.py: No such file"):
        read_user_file(tmp_path / "absent.py")
    with pytest.raises(UserFileError, match="Is a directory"):
        read_user_file(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UserFileError, match=r"pipe\.py is no file of source"):
        read_user_file(tmp_path / "pipe.py")


def called(family: UserFamily, form=None) -> torch.Tensor:
    x, y = torch.arange(4.0), torch.full((4,), torch.nan)
    call = family.load(form or family.kernel).bind({"x": x}, {"y": y})
    return call()["y"]


def test_run_and_bind_both_make_a_call_that_fills_the_outputs(tmp_path: Path) -> None:
    assert called(read(tmp_path, HEAD + RUN)).tolist() == [0, 1, 2, 3]
    bind = (
        "def bind(inputs, outputs):\n"
        "    doubled = inputs['x'] * 2\n"
        "    return lambda: {'y': doubled + 0}\n"
    )
    assert called(read(tmp_path, HEAD + bind)).tolist() == [0, 2, 4, 6]


def test_bind_must_return_a_call(tmp_path: Path) -> None:
    family = read(tmp_path, HEAD + "def bind(inputs, outputs):\n    return outputs\n")
    with pytest.raises(TypeError, match="bind returns dict, not a function"):
        called(family)


def test_an_emulation_is_loaded_like_a_kernel(tmp_path: Path) -> None:
    family = read(tmp_path, HEAD + RUN + "def emulate(inputs):\n    return {'y': -inputs['x']}\n")
    assert family.offered("all") == (family.kernel, family.emulation)
    assert called(family, family.emulation).tolist() == [0, -1, -2, -3]
    assert family.emulate(family.emulation, {"x": torch.ones(1)})["y"].item() == -1
    broken = read(tmp_path, HEAD + RUN + "def emulate(inputs):\n    return inputs['x']\n")
    with pytest.raises(TypeError, match="emulate returns Tensor"):
        called(broken, broken.emulation)


def test_it_crosses_processes_and_its_module_runs_once(tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = HEAD + f"open({str(count)!r}, 'a').write('x')\n" + RUN
    family = pickle.loads(pickle.dumps(read(tmp_path, text)))
    assert not count.exists()
    for _ in range(3):
        family.load(family.kernel)
    assert count.read_text() == "x"
    assert not (tmp_path / "__pycache__").exists(), "no bytecode is left beside the user's file"


def test_what_was_read_is_what_runs(tmp_path: Path) -> None:
    family = read(tmp_path, HEAD + RUN)
    written(tmp_path, HEAD + RUN + "# another\n")
    with pytest.raises(BuildError, match=r"mine\.py changed while it was being checked"):
        family.load(family.kernel)


def test_a_missing_distribution_is_the_machines_and_a_neighbour_the_files_fault(
    tmp_path: Path,
) -> None:
    family = read(tmp_path, "import no_such_distribution.part\n" + HEAD + RUN)
    with pytest.raises(ToolchainError, match="imports 'no_such_distribution', which is not inst"):
        family.load(family.kernel)
    (tmp_path / "neighbour.py").touch()
    family = read(tmp_path, "import neighbour\n" + HEAD + RUN)
    with pytest.raises(BuildError, match="a candidate is one file"):
        family.load(family.kernel)


def test_a_failed_import_leaves_no_half_module(tmp_path: Path) -> None:
    family = read(tmp_path, HEAD + RUN + "raise ValueError('on import')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="on import"):
            family.load(family.kernel)
    assert not [m for m in sys.modules.values() if getattr(m, "__file__", "") == family.path]


def test_a_name_that_import_rebinds_is_refused(tmp_path: Path) -> None:
    family = read(tmp_path, HEAD + RUN + "run = 3\n")
    with pytest.raises(BuildError, match="run is not a function after import"):
        family.load(family.kernel)


def test_it_pretends_to_no_cost_model_and_no_compilation(tmp_path: Path) -> None:
    family = read(tmp_path, HEAD + RUN)
    with pytest.raises(ValueError, match="no cost model"):
        family.modelled_us(family.kernel, Workload("w"))
    with pytest.raises(BuildError, match="compiled by itself"):
        family.compile(family.kernel)


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    import hashlib

    path = written(tmp_path, HEAD + RUN)
    assert read_user_file(path).source_hash() == hashlib.sha256(path.read_bytes()).hexdigest()
