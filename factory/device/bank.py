"""What the job knows and its children do not: inputs as drawn, and right answers.

Inputs live in the arena, where children read them; a pristine copy and the
expected answers stay in the job's own memory.  Both are bounded; the least
recently used input sets make room.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from factory.device.hardware import Arena, Device
from factory.device.protocol import Bound, Ref
from factory.stages.base import HarnessError
from operations import Operation, Probe, Regime, Workload

if TYPE_CHECKING:
    import torch

__all__ = ["Bank", "Draw", "Entry", "seed_of"]

_ALIGNMENT = 512
_POISON = 0xFF
"""Every byte of it: NaN in all floating-point formats."""


def seed_of(job_seed: int, regime: str, workload: str, index: int) -> int:
    """Seed of one input set, below 2**31: a job's sets are all different, and replayable."""
    text = f"{job_seed}/{regime}/{workload}/{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1


@dataclass(frozen=True)
class Draw:
    """Which input set is meant: the ``index``-th of a workload in a regime."""

    workload: Workload
    regime: Regime
    index: int = 0
    raw: bool = False
    """Whether the un-activated form is needed beside it."""
    name: str = ""
    """Of what is asked by it, if that is not the workload."""

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.regime.name, self.workload.name, self.index)

    @property
    def label(self) -> str:
        return f"{self.regime.name} {self.name or self.workload.name}"


@dataclass
class Entry:
    """One input set and its right answers."""

    draw: Draw
    seed: int
    inputs: dict[str, Any]
    """Arguments; tensors as references into the arena."""
    pristine: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    shapes: dict[str, tuple[tuple[int, ...], str]]
    """Output name to shape and dtype."""
    raw: dict[str, Any] | None = None
    drew_raw: bool = False
    pins: int = 0
    private_bytes: int = 0
    refs: list[Ref] = field(default_factory=list)


class _Space:
    """First fit over the arena's bytes."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]

    def take(self, nbytes: int) -> int | None:
        need = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        for number, (start, length) in enumerate(self._free):
            if length >= need:
                self._free[number : number + 1] = (
                    [(start + need, length - need)] if length > need else []
                )
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        need = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (start, need)]):
            if merged and merged[-1][0] + merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._free = merged


class Bank:
    """Input sets of one job, drawn when first needed.

    Parameters
    ----------
    operation : Operation
    device : Device
    arena : Arena
    seed : int
        Of the job; :func:`seed_of` derives the rest.
    private_bytes : int
        Bound on pristine inputs and expected answers together.
    """

    def __init__(
        self, operation: Operation, device: Device, arena: Arena, *, seed: int, private_bytes: int
    ) -> None:
        self._operation = operation
        self._device = device
        self._arena = arena
        self._seed = seed
        self._budget = private_bytes
        self._private = 0
        self._space = _Space(arena.size)
        self._entries: OrderedDict[tuple[str, str, int], Entry] = OrderedDict()
        self._probes: dict[tuple[str, str, int | None], list[tuple[Probe, Entry]]] = {}
        """Small, asked of every candidate, never evicted."""

    @contextmanager
    def use(self, draws: Sequence[Draw]) -> Iterator[list[Entry]]:
        """Input sets that stay where they are while in use.

        Raises
        ------
        HarnessError
            If they cannot be generated or answered, or do not fit.
        """
        held: list[Entry] = []
        try:
            for draw in draws:
                entry = self._entry(draw)
                entry.pins += 1
                held.append(entry)
            yield held
        finally:
            for entry in held:
                entry.pins -= 1

    def probes(
        self, workload: Workload, regime: Regime, chunk: int | None
    ) -> list[tuple[Probe, Entry]]:
        """The operation's probes with their inputs in the arena, drawn once.

        Raises
        ------
        HarnessError
            If they cannot be generated or answered, or do not fit.
        """
        key = (regime.name, workload.name, chunk)
        if key not in self._probes:
            self._probes[key] = self._draw_probes(workload, regime, chunk)
        return self._probes[key]

    @contextmanager
    def scratch(self) -> Iterator[Scratch]:
        """Arena memory for outputs, given back at the end."""
        lent = Scratch(self)
        try:
            yield lent
        finally:
            for ref in lent.refs:
                self._space.give(ref.offset, ref.nbytes)

    def view(self, ref: Ref) -> torch.Tensor:
        return self._arena.view(ref)

    def settle(self) -> None:
        """Wait until what was written into the arena can be read by another process.

        Raises
        ------
        HarnessError
            If the device is lost.
        """
        try:
            self._device.check()
        except RuntimeError as error:
            raise HarnessError(f"the device does not answer the job itself: {error}") from error

    def altered(self, entry: Entry, inputs: Mapping[str, Any] | None = None) -> str | None:
        """Name of an input whose bytes are not those drawn; it is put right again.

        ``inputs`` looks at other references that should hold the same values.
        """
        found = None
        for name, tensor in entry.pristine.items():
            shared = self.view((inputs or entry.inputs)[name])
            if not same_bytes(shared, tensor):
                shared.copy_(tensor)
                found = found or name
        return found

    def _entry(self, draw: Draw) -> Entry:
        entry = self._entries.get(draw.key)
        if entry is None:
            entry = self._draw(draw)
            self._entries[draw.key] = entry
        self._entries.move_to_end(draw.key)
        if draw.raw and not entry.drew_raw:
            self._draw_raw(entry)
        return entry

    def _draw(self, draw: Draw) -> Entry:
        seed = seed_of(self._seed, *draw.key)
        try:
            inputs = self._operation.generate(
                draw.workload, draw.regime, seed=seed, device=self._device.torch_device
            )
            expected = dict(self._operation.fast_oracle(inputs))
            outputs = self._operation.outputs(inputs)
        except Exception as error:
            raise _fault(draw, error) from error
        entry = self._keep(draw, seed, inputs, expected, outputs)
        for name, value in inputs.items():
            entry.inputs[name] = self._share(entry, value)
        return entry

    def _keep(
        self,
        draw: Draw,
        seed: int,
        inputs: Mapping[str, Any],
        expected: dict[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> Entry:
        """An entry whose private side is filled; its inputs are still to be shared."""
        shapes = {n: (tuple(t.shape), _dtype(t)) for n, t in outputs.items()}
        pristine = {n: v.contiguous() for n, v in inputs.items() if hasattr(v, "data_ptr")}
        held = [*pristine.values(), *expected.values()]
        private = sum(t.numel() * t.element_size() for t in held)
        self._make_room(private)
        self._private += private
        return Entry(draw, seed, {}, pristine, expected, shapes, private_bytes=private)

    def _draw_probes(
        self, workload: Workload, regime: Regime, chunk: int | None
    ) -> list[tuple[Probe, Entry]]:
        seed = seed_of(self._seed, regime.name, f"{workload.name} probes", 0)
        try:
            asked = self._operation.probes(
                workload, regime, seed=seed, device=self._device.torch_device, chunk=chunk
            )
        except Exception as error:
            raise _fault(Draw(workload, regime, name="probes"), error) from error
        found: list[tuple[Probe, Entry]] = []
        shared: dict[int, Any] = {}
        """By identity: most probes differ from each other in one argument."""
        for number, probe in enumerate(asked):
            draw = Draw(probe.workload, regime, number, name=probe.name)
            try:
                expected = dict(self._operation.fast_oracle(probe.inputs))
                outputs = self._operation.outputs(probe.inputs)
            except Exception as error:
                raise _fault(draw, error) from error
            entry = self._keep(draw, seed, probe.inputs, expected, outputs)
            for name, value in probe.inputs.items():
                if id(value) not in shared:
                    shared[id(value)] = self._share(entry, value)
                entry.inputs[name] = shared[id(value)]
            found.append((probe, entry))
        return found

    def _draw_raw(self, entry: Entry) -> None:
        draw = entry.draw
        entry.pins += 1
        try:
            raw = self._operation.raw_form(
                draw.workload, draw.regime, seed=entry.seed, device=self._device.torch_device
            )
            if raw is not None:
                entry.raw = {n: self._share(entry, v) for n, v in raw.items()}
            entry.drew_raw = True
        except HarnessError:
            raise
        except Exception as error:
            raise _fault(draw, error) from error
        finally:
            entry.pins -= 1

    def _share(self, entry: Entry, value: Any) -> Any:
        if not hasattr(value, "data_ptr"):
            return value
        ref = self.take(tuple(value.shape), _dtype(value))
        entry.refs.append(ref)
        self.view(ref).copy_(value)
        return ref

    def take(self, shape: tuple[int, ...], dtype: str) -> Ref:
        """Arena memory for one tensor.

        Raises
        ------
        HarnessError
            If it does not fit beside what is in use.
        """
        import torch

        nbytes = getattr(torch, dtype).itemsize
        for size in shape:
            nbytes *= size
        while (offset := self._space.take(nbytes)) is None:
            if not self._evict():
                raise HarnessError(
                    f"{nbytes / 2**20:.0f} MiB do not fit into the {self._arena.size / 2**30:.1f}"
                    " GiB shared with candidates; raise arena_bytes or use fewer workloads"
                )
        return Ref(offset, nbytes, shape, dtype)

    def _make_room(self, nbytes: int) -> None:
        while self._private + nbytes > self._budget and self._evict():
            pass

    def _evict(self) -> bool:
        for key, entry in self._entries.items():
            if entry.pins == 0:
                for ref in entry.refs:
                    self._space.give(ref.offset, ref.nbytes)
                self._private -= entry.private_bytes
                del self._entries[key]
                return True
        return False


class Scratch:
    """Outputs, and inputs to be overwritten, for one message."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self.refs: list[Ref] = []

    def take(self, shape: tuple[int, ...], dtype: str) -> Ref:
        """Arena memory of no particular content."""
        ref = self._bank.take(shape, dtype)
        self.refs.append(ref)
        return ref

    def outputs(self, entry: Entry) -> dict[str, Ref]:
        """Poisoned output tensors for ``entry``: NaN in every element."""
        import torch

        refs = {n: self.take(*spec) for n, spec in entry.shapes.items()}
        for ref in refs.values():
            flat = Ref(ref.offset, ref.nbytes, (ref.nbytes,), "uint8")
            self._bank.view(flat).fill_(_POISON)
            assert self._bank.view(flat).dtype == torch.uint8
        return refs

    def inputs(self, entry: Entry) -> dict[str, Any]:
        """A second home for the values of ``entry``."""
        home = dict(entry.inputs)
        for name, tensor in entry.pristine.items():
            home[name] = self.take(tuple(tensor.shape), _dtype(tensor))
            self._bank.view(home[name]).copy_(tensor)
        return home

    def bound(self, entry: Entry) -> Bound:
        """The entry's own inputs with fresh outputs."""
        return Bound(entry.inputs, self.outputs(entry), entry.raw)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one shape hold the same bits, NaN included."""
    import torch

    if a.numel() == 0:
        return True
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    word = words[a.element_size()]
    return torch.equal(a.reshape(-1).view(word), b.reshape(-1).view(word))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _fault(draw: Draw, error: Exception) -> HarnessError:
    return HarnessError(f"inputs or oracle of {draw.label} failed: {type(error).__name__}: {error}")
