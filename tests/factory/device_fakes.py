"""An operation, a family and baselines for the simulated device.

Every schedule is one way to be right, slow, wrong, broken or dishonest.  The
gate, the timer and the processes that meet them are the real ones.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from candidates import Baseline, Build, BuildError, Family, Parameter, Schedule, ToolchainError
from factory.device.hardware import Bench, KernelEvent, RecordingError
from factory.device.simulated import (
    SimulatedDevice,
    _SimulatedBench,
    launch,
    neighbour_is_busy,
    throttle,
)
from operations import (
    Contract,
    Operation,
    Probe,
    Regime,
    Region,
    TensorError,
    TensorSpec,
    Tolerance,
    Workload,
)

COLUMNS = 8


@dataclass(frozen=True)
class Rows(Workload):
    rows: int = 0


def _regime(name: str, role: Any, floor: float, severity: float | None = None) -> Regime:
    return Regime(name, role, floor, "drawn for tests", {"min": floor}, severity)


class FakeOperation(Operation):
    """``o = scale * exp(g) * v + initial`` (0 if None), ``total`` = column sums of ``o``."""

    name = "fake"
    version = "1"
    tensors = (
        TensorSpec("g", ("T", COLUMNS), "float32", "input", "log gate"),
        TensorSpec("v", ("T", COLUMNS), "float32", "input", "values"),
        TensorSpec("initial", (COLUMNS,), "float32", "optional", "offset"),
        TensorSpec("o", ("T", COLUMNS), "float32", "output", "result"),
        TensorSpec("total", (COLUMNS,), "float32", "output", "column sums"),
    )
    regimes: ClassVar = {
        r.name: r
        for r in (
            _regime("production", "production", -5.0),
            _regime("steep", "sweep", -5.0, -5.0),
            _regime("gentle", "sweep", -1.0, -1.0),
            _regime("slow", "slow", -0.01),
            _regime("beyond", "edge", -20.0),
            _regime("mild", "mild", -1.0),
        )
    }
    workloads: ClassVar = {
        w.name: w
        for w in (
            Rows("16", rows=16),
            Rows("33", rows=33),
            Rows("64", rows=64),
            Rows("128", rows=128),
            Rows("1", held_out=True, rows=1),
            Rows("77", held_out=True, rows=77),
        )
    }
    tolerances: ClassVar = {
        "o": Tolerance(1e-4, 1e-4, "float32"),
        "total": Tolerance(1e-4, 1e-4, "float32"),
    }
    contract = Contract(("float32",))

    def generate(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any]:
        assert isinstance(workload, Rows)
        draw = torch.Generator().manual_seed(seed)
        shape = (workload.rows, COLUMNS)
        g = torch.rand(shape, generator=draw) * max(regime.gate_floor, -30.0)
        v = torch.randn(shape, generator=draw)
        initial = torch.randn(COLUMNS, generator=draw)
        tensors = {"g": g, "v": v, "initial": initial}
        return {**{n: t.to(device) for n, t in tensors.items()}, "scale": 1.0}

    def raw_form(
        self, workload: Workload, regime: Regime, *, seed: int, device: str = "cpu"
    ) -> dict[str, Any] | None:
        if regime.role != "production":
            return None
        inputs = self.generate(workload, regime, seed=seed, device=device)
        return {**inputs, "g": -inputs["g"]}

    def outputs(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        nan = torch.full_like(inputs["v"], torch.nan)
        return {"o": nan, "total": torch.full_like(inputs["v"][0], torch.nan)}

    def oracle(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return self.fast_oracle(inputs)

    def fast_oracle(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        o = inputs["scale"] * inputs["g"].double().exp() * inputs["v"].double()
        if inputs["initial"] is not None:
            o = o + inputs["initial"].double()
        return {"o": o, "total": o.sum(0)}

    def probes(
        self,
        workload: Workload,
        regime: Regime,
        *,
        seed: int,
        device: str = "cpu",
        chunk: int | None = None,
    ) -> tuple[Probe, ...]:
        drawn, other = (
            self.generate(workload, regime, seed=s, device=device) for s in (seed, seed + 1)
        )
        rows = len(drawn["g"])
        later = torch.cat([drawn["g"][:9], other["g"][9:]])
        return (
            Probe("as drawn", workload, drawn),
            Probe(
                "causality of g",
                workload,
                {**drawn, "g": later},
                base="as drawn",
                same=(Region("o", ((0, 8),)),),
                near=(Region("o", ((8, min(9, rows)),)),),
            ),
            Probe("scale doubled", workload, {**drawn, "scale": 2.0}),
            Probe("no initial", workload, {**drawn, "initial": None}, other_form=True),
        )

    def compare(
        self,
        outputs: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
        workload: Workload,
        regime: Regime | None = None,
    ) -> tuple[TensorError, ...]:
        found = []
        for name, tensor in outputs.items():
            bound = self.tolerances[name]
            difference = (tensor.double() - expected[name]).abs()
            bad = int((~torch.isfinite(tensor)).sum())
            max_rel = float(difference.max() / expected[name].abs().max())
            rms_rel = float(difference.norm() / expected[name].norm())
            within = not bad and max_rel <= bound.max_rel and rms_rel <= bound.rms_rel
            found.append(TensorError(name, "all", max_rel, rms_rel, not bad, bad, within))
        return tuple(found)

    def reduced(self) -> tuple[Workload, ...]:
        return self.tuned()[:1]

    def floor_bytes(self, workload: Workload) -> int:
        assert isinstance(workload, Rows)
        return workload.rows * COLUMNS * 12

    def raw_floor_bytes(self, workload: Workload) -> int:
        assert isinstance(workload, Rows)
        return workload.rows * COLUMNS * 10


class BrokenOracle(FakeOperation):
    """Its oracle runs out of memory."""

    def fast_oracle(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        raise torch.OutOfMemoryError("out of memory in the oracle")


OPERATION = FakeOperation()


def right(inputs: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> None:
    o = inputs["scale"] * inputs["g"].exp() * inputs["v"]
    if inputs["initial"] is not None:
        o = o + inputs["initial"]
    outputs["o"].copy_(o)
    outputs["total"].copy_(o.sum(0))


def compute(inputs: Mapping[str, Any], outputs: Mapping[str, torch.Tensor], us: float) -> None:
    launch("fake_main", us + 0.01 * len(inputs["v"]))
    right(inputs, outputs)


_SEEN: dict[int, int] = {}
_LAST: dict[int, torch.Tensor] = {}
_CACHE: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _replays(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    key = i["v"].data_ptr()
    if key not in _CACHE:
        compute(i, o, 10.0)
        _CACHE[key] = (o["o"].clone(), o["total"].clone())
    launch("fake_main", 10.0)
    o["o"].copy_(_CACHE[key][0])
    o["total"].copy_(_CACHE[key][1])


def _spoils(i: Mapping[str, Any], o: Mapping[str, torch.Tensor], where: str) -> None:
    compute(i, o, 10.0)
    if where == "last row":
        o["o"][-1] = torch.nan  # as it was handed over
    elif where == "one element":
        o["total"][3] = torch.nan
    elif where == "everywhere":
        o["o"].mul_(1.01)
    elif where == "steep gates":
        o["o"].mul_(torch.where(i["g"].min() < -3.0, 2.0, 1.0))


def _returns(**replaced: Any) -> Callable[..., Any]:
    def call(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        compute(i, o, 10.0)
        return {**o, **{n: make(o[n]) for n, make in replaced.items()}}

    return call


class _Lazy(Mapping[str, torch.Tensor]):
    """Computes when it is looked into."""

    def __init__(self, i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
        self._given = i, o

    def __getitem__(self, name: str) -> torch.Tensor:
        right(*self._given)
        return self._given[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given[1])

    def __len__(self) -> int:
        return len(self._given[1])


class _LazyName(str):
    """Computes when it is compared with a name, as looking into a dict does."""

    given: tuple[Any, Any]
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        right(*self.given)
        return str.__eq__(self, other)


class _LazyTensor(torch.Tensor):
    """Computes when it is read."""

    given: tuple[Any, Any]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        for tensor in given:
            if isinstance(tensor, cls) and "given" in tensor.__dict__:
                right(*tensor.__dict__.pop("given"))
        return super().__torch_function__(function, types, given, named)


def _lazy(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    launch("fake_main", 5.0)
    return _Lazy(i, o)


def _lazy_name(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    launch("fake_main", 5.0)
    names = {_LazyName(n): t for n, t in o.items()}
    for name in names:
        name.given = i, o
    return names


def _lazy_tensor(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    launch("fake_main", 5.0)
    tensors = {n: t.as_subclass(_LazyTensor) for n, t in o.items()}
    tensors["o"].given = i, o
    return dict(tensors)


def _lazy_method(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    launch("fake_main", 5.0)
    for tensor in o.values():
        tensor.data_ptr = lambda: right(i, o) or 0  # type: ignore[method-assign]
    return o


def _lazy_stride(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    launch("fake_main", 5.0)
    for tensor in o.values():
        true = torch.Tensor.stride(tensor)
        tensor.stride = lambda true=true: right(i, o) or true  # type: ignore[method-assign]
    return o


def _lazy_import(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Computes when the next thing is imported, whoever imports it."""
    launch("fake_main", 5.0)
    true = builtins.__import__

    def hook(*given: Any, **named: Any) -> Any:
        builtins.__import__ = true
        right(i, o)
        return true(*given, **named)

    builtins.__import__ = hook
    return o


def _lazy_once(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """In one sample, not in the last."""
    key = o["o"].data_ptr()
    _SEEN[key] = _SEEN.get(key, 0) + 1
    if _SEEN[key] == 20:
        return _lazy(i, o)
    compute(i, o, 10.0)
    return o


def _changes(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    compute(i, o, 10.0)
    i["v"].zero_()


def _zeroes_v(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    """What is right of zeros is zero: only against changed inputs."""
    launch("fake_main", 10.0)
    i["v"].zero_()
    o["o"].zero_()
    o["total"].zero_()


_UPLOADED: set[int] = set()


def _uploads_at_first(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    """Like a descriptor of an output's address, made when that is first met."""
    if o["o"].data_ptr() not in _UPLOADED:
        _UPLOADED.add(o["o"].data_ptr())
        launch("Memcpy HtoD", 1.0)
    compute(i, o, 10.0)


def _overwrites_when_timed(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    """Like a state written in place, once the gate is behind it."""
    compute(i, o, 10.0)
    key = (i["initial"] if i["initial"] is not None else i["v"]).data_ptr()
    _SEEN[key] = _SEEN.get(key, 0) + 1
    if _SEEN[key] > 12:
        i["initial"].copy_(o["total"])


def _wrong_on_the_largest(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    compute(i, o, 1.0)
    if len(i["v"]) == 128:
        o["o"].mul_(1.01)


def _instant_on_the_largest(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    launch("fake_main", 0.0 if len(i["v"]) == 128 else 10.0)
    right(i, o)


def _calls_the_oracle(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in OPERATION.oracle(i).items():
        o[name].copy_(tensor)


def _overwrites(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    compute(i, o, 10.0)
    i["initial"].copy_(o["total"])


def _flickers_when_busy(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    busy = neighbour_is_busy()
    compute(i, o, 10.0)
    o["o"].mul_(1.0 + 1e-6 if busy else 1.0)


def _ignores_scale(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    compute({**i, "scale": 1.0}, o, 10.0)


def _ignores_none(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    initial = torch.ones(COLUMNS) if i["initial"] is None else i["initial"]
    compute({**i, "initial": initial}, o, 10.0)


def _looks_ahead(i: Mapping[str, Any], o: Mapping[str, torch.Tensor], row: int) -> None:
    compute(i, o, 10.0)
    o["o"][row] += 1e-6 * i["g"][-1]


def _flickers(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    compute(i, o, 10.0)
    o["o"].mul_(1.0 + random.SystemRandom().random() * 1e-6)


def _spins(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    while True:
        time.sleep(0.01)


def _raises(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _calls_a_library(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    launch("library_gemm", 1.0)
    right(i, o)


def _depends_on_data(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    compute(i, o, 10.0 if i["g"].min() < -1.0 else 110.0)


def _is_instant(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    launch("fake_main", 0.0)
    right(i, o)


def _hoards(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    hoard = b"x" * (500 << 20)
    time.sleep(600)
    assert hoard


def _says(*frames: bytes, then: Callable[[], Any] | None = None) -> Callable[..., None]:
    """Writes into the pipe to the job, whose number is among the arguments; by default waits."""

    def call(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
        for frame in frames:
            os.write(int(sys.argv[1]), frame)
        (then or (lambda: time.sleep(600)))()

    return call


def framed(said: bytes | object) -> bytes:
    packed = said if isinstance(said, bytes) else json.dumps(said).encode()
    return struct.pack("!i", len(packed)) + packed


def flood() -> None:
    frame = framed({"at": "x"}) * 1000
    while True:
        os.write(int(sys.argv[1]), frame)


def _leaves_a_child_behind() -> None:
    if os.fork() == 0:
        time.sleep(600)
    os._exit(7)


def _leaves_a_session_behind() -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    _leaves_a_child_behind()


def _raises_this(error: Exception) -> Callable[..., None]:
    def call(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
        raise error

    return call


def _floods_its_log(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    while True:
        os.write(1, b"an error of no interest " * 4000)


_FAULT = {"kind": "toolchain", "message": "install another compiler"}


def _loses_its_log(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    log = Path(os.readlink("/proc/self/fd/1"))
    log.unlink()
    log.mkdir()
    os._exit(9)


def _hands_on_its_log(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    """Its log is a file of somebody else from now on."""
    compute(i, o, 10.0)
    log = Path(os.readlink("/proc/self/fd/1"))
    if log.exists():
        log.unlink()
        log.symlink_to(log.with_name("victim"))


class _Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit


def _other_strides(t: torch.Tensor) -> torch.Tensor:
    """The same elements in the same memory, in another order."""
    values = t.clone()
    turned = t.as_strided(t.shape, tuple(torch.empty(t.shape[::-1]).t().stride()))
    return turned.copy_(values)


HOSTILE: dict[str, Callable[..., Any]] = {
    "loses_its_log": _loses_its_log,
    "hands_on_its_log": _hands_on_its_log,
    "is_mute": _raises_this(_Mute()),
    "floods_its_log": _floods_its_log,
    "says_half": _says(b"\x00\x00\x10\x00abc"),
    "floods_places": _says(then=flood),
    "says_no_json": _says(framed(b"{")),
    "nests": _says(framed(b"[" * 200_000)),
    "announces_much": _says(struct.pack("!iQ", -1, 1 << 45)),
    "faults_with_numbers": _says(framed({"fault": {"kind": 5, "message": []}})),
    "faults_as_nobody": _says(framed({"fault": {"kind": "driver", "message": "x"}})),
    "blames_by_pipe": _says(framed({"fault": _FAULT})),
    "blames_the_toolchain": _raises_this(ToolchainError("install another compiler")),
    "answers_twice": _says(framed({"ok": {}}) * 2),
    "escapes": _raises_this(RuntimeError("\x1b[31mred \udcff\u202e" + "x" * (9 << 20))),
    "leaves_a_child_behind": _says(then=_leaves_a_child_behind),
    "leaves_a_session_behind": _says(then=_leaves_a_session_behind),
    "hangs_up": _says(then=lambda: (os.close(int(sys.argv[1])), time.sleep(600))),
}
"""What a candidate can do that knows how its process speaks to the job."""

_CALLED = {"runs_hot": 0}


def _runs_hot(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    """The clock falls for a millisecond, some calls after the warm-up."""
    _CALLED["runs_hot"] += 1
    if _CALLED["runs_hot"] == 60:
        throttle(1000.0)
    compute(i, o, 10.0)


def _stays_hot(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    throttle(1e9)
    compute(i, o, 10.0)


def _fast_and_wrong_when_slow(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    compute(i, o, 1.0)
    o["o"].mul_(torch.where(i["g"].min() > -0.02, 2.0, 1.0))


def _remembers_its_last(i: Mapping[str, Any], o: Mapping[str, torch.Tensor]) -> None:
    """Does nothing where the inputs at its address are those of its last call, as in bursts."""
    key, v = o["o"].data_ptr(), i["v"]
    if key in _LAST and torch.equal(_LAST[key], v):
        return
    compute(i, o, 10.0)
    _LAST[key] = v.clone()


def _takes(us: float) -> Callable[..., None]:
    return lambda i, o: compute(i, o, us)


CALLS: dict[str, Callable[..., Any]] = {
    "good": _takes(10.0),
    "twin": _takes(10.0),
    "better": _takes(8.0),
    "hopeless": _takes(100.0),
    "runs_hot": _runs_hot,
    "stays_hot": _stays_hot,
    "depends_on_data": _depends_on_data,
    "wrong": lambda i, o: _spoils(i, o, "everywhere"),
    "wrong_when_steep": lambda i, o: _spoils(i, o, "steep gates"),
    "zeroes_v": _zeroes_v,
    "uploads_at_first": _uploads_at_first,
    "overwrites_when_timed": _overwrites_when_timed,
    "wrong_on_the_largest": _wrong_on_the_largest,
    "instant_on_the_largest": _instant_on_the_largest,
    "oracle": _calls_the_oracle,
    "fast_and_wrong_when_slow": _fast_and_wrong_when_slow,
    "remembers_its_last": _remembers_its_last,
    "fifty": _takes(50.0),
    "takes_a_second": _takes(1e6),
    "nan": lambda i, o: _spoils(i, o, "one element"),
    "last_row": lambda i, o: _spoils(i, o, "last row"),
    "unwritten": lambda i, o: launch("fake_main", 10.0),
    "changes_input": _changes,
    "overwrites_initial": _overwrites,
    "flickers": _flickers,
    "flickers_when_busy": _flickers_when_busy,
    "ignores_scale": _ignores_scale,
    "ignores_none": _ignores_none,
    "looks_ahead": lambda i, o: _looks_ahead(i, o, 3),
    "looks_ahead_in_its_chunk": lambda i, o: _looks_ahead(i, o, 8),
    "claims_bitwise_causality": lambda i, o: _looks_ahead(i, o, 8),
    "replays": _replays,
    "library": _calls_a_library,
    "nothing": lambda i, o: right(i, o),
    "instant": _is_instant,
    "empty": _returns(o=torch.empty_like),
    "other_memory": _returns(o=lambda t: t.clone()),
    "other_strides": _returns(o=_other_strides),
    "sparse": _returns(o=lambda t: t.to_sparse()),
    "other_dtype": _returns(o=lambda t: t.double()),
    "other_shape": _returns(total=lambda t: t[:4]),
    "elsewhere": _returns(o=lambda t: t.to("meta")),
    "lazy": _lazy,
    "lazy_name": _lazy_name,
    "lazy_tensor": _lazy_tensor,
    "lazy_method": _lazy_method,
    "lazy_stride": _lazy_stride,
    "lazy_import": _lazy_import,
    "lazy_once": _lazy_once,
    "spins": _spins,
    "aborts": lambda i, o: os.abort(),
    "exits": lambda i, o: os._exit(3),
    "quits": lambda i, o: exit("as if nothing happened"),
    "raises": _raises,
    "hoards": _hoards,
    **HOSTILE,
}
NAMES = tuple(f"name_{n}" for n in range(10))
"""One kernel under ten names, which takes about as long each time."""
LOADS = (
    "in_bind", "keeps_its_first", "forges_clock", "build_error", "toolchain_error",
    "spins_loading", "nameless",
)  # fmt: skip
LOADS_HOSTILE = {
    "loads_as_nothing": framed({"ok": {}}),
    "loads_as_numbers": framed({"ok": {"kernel_names": [1]}}),
    "loads_never": b"\x00\x00\x10\x00abc",
    "loads_somewhere": b"",
}
NARROW = ("narrow", "narrower")


@dataclass
class FakeRunnable:
    kind: str
    kernel_names: tuple[str, ...] = ("fake_",)

    @property
    def bitwise_causal(self) -> bool:
        return self.kind == "claims_bitwise_causality"

    def bind(self, inputs: Any, outputs: Any) -> Callable[[], Mapping[str, torch.Tensor]]:
        call = CALLS.get(self.kind, CALLS["good"])
        if self.kind in NAMES:
            draw = random.Random(os.getpid())
            call = lambda i, o: compute(i, o, 10.0 * draw.uniform(1.0, 1.01))  # noqa: E731
        if self.kind == "in_bind":  # does the work where nobody looks at the clock
            kept = {n: torch.empty_like(t) for n, t in outputs.items()}
            right(inputs, kept)

            def call(i: Any, o: Any) -> None:
                launch("fake_main", 5.0)
                for name, tensor in kept.items():
                    o[name].copy_(tensor)

        if self.kind == "keeps_its_first":  # hopes that the first call is the one looked at
            first: dict[str, torch.Tensor] = {}

            def call(i: Any, o: Any) -> None:
                if not first:
                    compute(i, o, 10.0)
                    first.update({n: t.clone() for n, t in o.items()})
                launch("fake_main", 5.0)
                for name, tensor in first.items():
                    o[name].copy_(tensor)

        def bound() -> Mapping[str, torch.Tensor]:
            returned = call(inputs, outputs)
            return outputs if returned is None else returned

        return bound


class _BlindBench(_SimulatedBench):
    def record(self, body: Callable[[], None]) -> list[KernelEvent]:
        raise RecordingError("the profiler shows no kernels: CUPTI is missing")


class WithoutProfiler(SimulatedDevice):
    def bench(self, arena: Any, gpu_bytes: int) -> Bench:
        return _BlindBench(arena)


class _OldToolchainBench(_SimulatedBench):
    def record(self, body: Callable[[], None]) -> list[KernelEvent]:
        raise RuntimeError("unsupported PTX .version 9.1")


class WithOldToolchain(SimulatedDevice):
    """No kernel runs on it, not even the smoke kernel."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "driver": "470.1", "cuda": "11.4"}

    def bench(self, arena: Any, gpu_bytes: int) -> Bench:
        return _OldToolchainBench(arena)


class FakeFamily(Family):
    name = "fakes"
    operation = "fake"
    parameters = (
        Parameter("kind", (*CALLS, *LOADS, *LOADS_HOSTILE, *NARROW, *NAMES), "how it behaves"),
    )

    def presets(self) -> tuple[str, ...]:
        return ("all",)

    def offered(self, preset: str) -> tuple[Schedule, ...]:
        return tuple(self.schedule({"kind": k}) for k in self.parameters[0].choices)

    def problems(self, schedule: Schedule) -> tuple[str, ...]:
        return ()

    def gate_bound(self, schedule: Schedule) -> float | None:
        return {"narrow": -5.5, "narrower": -2.0}.get(str(schedule["kind"]))

    def emulate(self, schedule: Schedule, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def modelled_us(self, schedule: Schedule, workload: Workload) -> float:
        return 10.0

    def source_hash(self) -> str:
        return "0" * 64

    def compile(self, schedule: Schedule) -> Build:
        raise NotImplementedError

    def load(self, schedule: Schedule) -> FakeRunnable:
        kind = str(schedule["kind"])
        if kind == "build_error":
            raise BuildError("does not compile: 240 registers")
        if kind == "toolchain_error":
            raise ToolchainError("fake-dsl 0.1 is broken; install 0.2")
        if kind == "spins_loading":
            time.sleep(600)
        if kind in LOADS_HOSTILE:
            os.write(int(sys.argv[1]), LOADS_HOSTILE[kind])
            if kind == "loads_somewhere":
                flood()
            time.sleep(600)
        if kind == "forges_clock":
            time.perf_counter_ns = lambda: 0
            torch.cuda.synchronize = lambda *_: None
            torch.cuda.Event.elapsed_time = lambda *_: 0.0  # type: ignore[method-assign]
        return FakeRunnable(kind, ("",) if kind == "nameless" else ("fake_",))


FAMILY = FakeFamily()


class FakeBaseline(Baseline):
    """A control that takes ``us`` and is off by ``factor``, and after some calls by others.

    ``keeps`` is of how many input sets, the latest, it keeps indices that it uploads;
    ``tunes_us`` is what its first call on a shape takes beside.
    """

    operation = "fake"

    def __init__(
        self,
        name: str = "steady",
        *,
        us: float = 20.0,
        later_us: float | None = None,
        form: str = "activated",
        absent: str | None = None,
        broken: bool = False,
        factor: float = 1.0,
        later_factor: float | None = None,
        keeps: int | None = None,
        tunes_us: float = 0.0,
    ) -> None:
        self.name = name
        self._keeps = keeps
        self._tunes_us = tunes_us
        self._factor = factor
        self._later_factor = factor if later_factor is None else later_factor
        self.input_form = form
        self._us = us
        self._later_us = us if later_us is None else later_us
        self._absent = absent
        self._broken = broken
        self._loads = 0
        self._tuned: set[int] = set()
        self._kept: deque[Mapping[str, Any]] = deque(maxlen=keeps)

    def missing(self) -> str | None:
        return self._absent

    def version(self) -> str:
        return f"{self.name} 1"

    def load(self, workload: Workload, raw: Mapping[str, Any] | None) -> Any:
        if self._broken:
            os.abort()
        if self.input_form == "raw" and raw is None:
            raise ValueError(f"{self.name} takes raw inputs only")
        self._loads += 1
        # The first reading loads three input sets of four workloads in two regimes.
        us, factor = self._us, self._factor
        if self._loads > 24:
            us, factor = self._later_us, self._later_factor
        return _Control(us, raw if self.input_form == "raw" else None, factor, self._prepare)

    def _prepare(self, inputs: Mapping[str, Any]) -> None:
        """What a call does before its work, if it meets an input set or a shape anew."""
        rows = len(inputs["v"])
        if self._tunes_us and rows not in self._tuned:
            self._tuned.add(rows)
            launch("control_tuning", self._tunes_us)
        if self._keeps is not None and not any(kept is inputs for kept in self._kept):
            self._kept.append(inputs)
            launch("Memcpy HtoD", 1.0)


@dataclass
class _Control:
    us: float
    raw: Mapping[str, Any] | None
    factor: float
    prepare: Callable[[Mapping[str, Any]], None]
    kernel_names: tuple[str, ...] = ("control_",)

    def bind(self, inputs: Any, outputs: Any) -> Callable[[], Mapping[str, torch.Tensor]]:
        mine = dict(inputs) if self.raw is None else {**self.raw, "g": -self.raw["g"]}
        ready = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in mine.items()}

        def call() -> Mapping[str, torch.Tensor]:
            self.prepare(ready)
            launch("control_main", self.us + 0.01 * len(ready["v"]), host_us=5.0)
            right(ready, outputs)
            outputs["o"].mul_(self.factor)
            return outputs

        return call
