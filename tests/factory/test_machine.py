"""What this machine is: GPUs that may be used, versions, fingerprints."""

from __future__ import annotations

import pytest

from factory import doctor, machine
from factory.errors import MachineError
from factory.plan import choose_clock
from factory.provenance import canonical_json, digest, fingerprint
from leaderboard import Clock

SMI = """#!/bin/sh
cat <<'EOF'
0, NVIDIA H200, GPU-aaaa, 580.1, 9.0
1, NVIDIA A100, GPU-bbbb, 580.1, 8.0
2, NVIDIA H200, GPU-cccc, 580.1, 9.0
EOF
"""


def test_memory_that_is_left_is_read_where_it_is_told(tmp_path):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 24000 kB\nMemFree: 1 kB\nMemAvailable:   12345 kB\n")
    assert machine.available_bytes(told) == 12345 * 1024
    assert machine.available_bytes(tmp_path / "absent") is None


@pytest.fixture
def three_gpus(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]),
        ("2,1", ["GPU-cccc", "GPU-bbbb"]),
        ("1", ["GPU-bbbb"]),
        ("GPU-cc", ["GPU-cccc"]),
        ("0,9,2", ["GPU-aaaa"]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(three_gpus, monkeypatch, visible, uuids):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [g.uuid for g in machine.gpus()] == uuids


def test_the_clock_follows_the_gpu(three_gpus, monkeypatch):
    assert choose_clock(None, required=True) is Clock.GPU
    assert choose_clock("modelled", required=True) is Clock.MODELLED
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose_clock(None, required=True) is Clock.MODELLED
    with pytest.raises(MachineError, match="needs an sm90 GPU"):
        choose_clock("gpu", required=True)
    assert choose_clock("gpu", required=False) is Clock.GPU


def test_a_broken_driver_tool_means_no_gpu(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == ()


def test_doctor_wants_a_cuda_build_beside_a_gpu(three_gpus):
    found = {f.id: f for f in doctor.examine()}
    assert found["gpu"].found == "2 x NVIDIA H200, driver 580.1"
    torch_build = found["torch CUDA build"]
    assert torch_build.status in ("ok", "fault")
    assert (torch_build.status == "fault") == (torch_build.found == "CPU build")


def test_a_fingerprint_is_the_hash_of_its_values(three_gpus):
    one, same = fingerprint("s"), fingerprint("s")
    assert one == same
    assert one.id == digest(one.values)
    assert one.values["gpu"] == "NVIDIA H200"
    assert {"torch", "dsl", "tvm_ffi", "python", "driver"} <= set(one.values)
    assert fingerprint("other").id != one.id
    assert fingerprint("s", {"gpu_uuid": "GPU-aaaa"}).id != one.id


def test_canonical_json_does_not_depend_on_order():
    assert canonical_json({"b": 1, "a": [1, "é"]}) == canonical_json({"a": [1, "é"], "b": 1})
    assert canonical_json({"a": 1}) == '{"a":1}'
