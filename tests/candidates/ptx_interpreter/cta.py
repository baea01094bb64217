"""Which threads of a CTA go on, and what each instruction is; CTAs of a cluster in turns."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from ptx_interpreter import arithmetic, barriers, copies, lanes, matrices, memory
from ptx_interpreter.program import Instruction, Program
from ptx_interpreter.state import LANES, WARPGROUP, Memory, Part, State

__all__ = ["Cta", "Deadlock", "run_cluster"]

_TOGETHER = ("wgmma.mma", "shfl.sync", "vote.sync", "redux.sync", "bar.warp.sync", "elect.sync")
"""Instructions at which the lanes of a warp, or of a warpgroup, wait for one another."""

_INSTRUCTIONS = {
    name: execute
    for module in (arithmetic, barriers, copies, lanes, matrices, memory)
    for name, execute in module.INSTRUCTIONS.items()
}


class Deadlock(Exception):
    """No warp can go on."""


class Cta(State):
    """One CTA.

    Parameters
    ----------
    program : Program
    memory : Memory
    parameters : list of bytes
        Of the kernel, as the driver passes them.
    index, count : int
        Number of this block and of all.
    shared_bytes, stage_bytes : int
        Dynamic shared memory, and one stage of the ring at its beginning.
    parts : dict of int to Part
        wgmma operands by their number of columns.
    order : random.Random or None
        Picks the warp that goes on; None is the lowest instruction first.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        parameters: list[bytes],
        index: int,
        count: int,
        shared_bytes: int,
        stage_bytes: int,
        parts: dict[int, Part],
        order: random.Random | None = None,
    ) -> None:
        super().__init__(
            program.threads, memory, parameters, index, count, shared_bytes, stage_bytes, parts
        )
        self.program, self.order = program, order
        self.executed = 0

    def run(self) -> None:
        """Until all threads have returned.

        Raises
        ------
        Deadlock
            If none can go on before that.
        """
        for stuck in self.steps():
            if stuck:
                raise Deadlock(stuck)

    def steps(self) -> Iterator[str]:
        """Go on; now and then, and when nothing can, let others have a turn.

        Yields
        ------
        str
            Where all threads stand, if none can go on.
        """
        taken = 0
        n, code = self.n, self.program.instructions
        at = np.zeros(n, np.int64)
        done, held, waiting = (np.zeros(n, bool) for _ in range(3))
        barrier = np.full(n, -1)
        here, limit, mask = 0, 0, done
        progress = straight = False
        while straight or not done.all():
            if straight:  # these lanes are still the lowest, and all that was asked below holds
                here += 1
            else:
                ready = ~(done | held | waiting)
                if not ready.any():
                    if not progress or not waiting.any():
                        places = sorted({int(p) for p in at[~done]})
                        yield "; ".join(code[min(p, len(code) - 1)].text for p in places)
                    waiting[:], progress = False, False
                    continue
                here, mask, limit = self._next(at, ready)
            straight = False
            taken += 1
            if taken % 256 == 0:
                yield ""
            if here >= len(code):
                done |= mask
                progress = True
                continue
            instruction = code[here]
            live = mask
            if instruction.predicate is not None:
                name, negated = instruction.predicate
                live = mask & (self.registers[name] != negated)
            opcode, a = instruction.opcode, instruction.arguments
            passed = barriers.over(self, instruction, mask)
            if passed is not None:
                at[passed] = here + 1
                waiting |= mask & ~passed
                progress |= bool(passed.any())
                self.executed += int(passed.sum())
                continue
            if opcode.startswith(_TOGETHER):
                size = WARPGROUP if opcode.startswith("wgmma") else LANES
                together = np.repeat(mask.reshape(-1, size).all(1), size)
                waiting |= mask & ~together
                if not together.any():
                    continue
                mask = live = together
            at[mask] = here + 1
            progress = True
            self.executed += 1
            if opcode.startswith("bra"):
                at[live] = self.program.labels[a[0]]
            elif opcode == "ret":
                done |= live
            elif opcode in ("bar.sync", "bar.red.or.pred"):
                if opcode != "bar.sync":  # as bar.sync, with a vote: result, ..., own predicate
                    result, vote, a = a[0], self.registers[a[3]], a[1:]
                number, size = self.get(a[0]), int(a[1]) if len(a) > 1 else n
                held |= live
                barrier[live] = number[live]
                for i in np.unique(number[live]):
                    arrived = held & (barrier == i)
                    if arrived.sum() == size:
                        held[arrived] = False
                        if opcode != "bar.sync":  # nobody has gone on: votes are still there
                            self.put(result, np.full(n, vote[arrived].any()), arrived)
            else:
                if live.any():
                    self._execute(instruction, live)
                straight = here + 1 < limit

    def _next(self, at: np.ndarray, ready: np.ndarray) -> tuple[int, np.ndarray, int]:
        """What is executed next, by which lanes, and where these have to look again."""
        if self.order is None:
            here = int(at[ready].min())
            mask = ready & (at == here)
            others = at[ready & ~mask]
            return here, mask, int(others.min()) if others.size else len(self.program.instructions)
        by_warp = ready.reshape(-1, LANES)
        one = self.order.choice(np.flatnonzero(by_warp.any(1)).tolist())
        here = int(at.reshape(-1, LANES)[one][by_warp[one]].min())
        # Lanes that have left a branch wait for those of their warp that are still inside.
        last = np.where(ready, at, here + 1).reshape(-1, LANES).min(1).repeat(LANES)
        return here, ready & (at == here) & (last == here), 0

    def _execute(self, instruction: Instruction, mask: np.ndarray) -> None:
        parts, a = instruction.parts, instruction.arguments
        execute = _INSTRUCTIONS.get(parts[0])
        if execute is None:
            raise NotImplementedError(instruction.text)
        try:
            # Infinities are part of the arithmetic: what they spoil is replaced by selection.
            with np.errstate(over="ignore", invalid="ignore"):
                execute(self, parts, a, mask)
        except (AssertionError, IndexError, KeyError, ValueError) as error:
            raise type(error)(f"{instruction.text}: {error}") from error


def run_cluster(ctas: list[Cta]) -> None:
    """Run CTAs that see each other's shared memory, in turns.

    Raises
    ------
    Deadlock
        If no thread of any can go on.
    """
    for rank, cta in enumerate(ctas):
        cta.cluster, cta.rank = ctas, rank
    running = {cta.rank: cta.steps() for cta in ctas}
    while running:
        before, stuck = [cta.executed for cta in ctas], []
        for rank in list(running):
            said = next(running[rank], None)
            if said is None:
                del running[rank]
            elif said:
                stuck.append(said)
        if running and len(stuck) == len(running) and before == [c.executed for c in ctas]:
            raise Deadlock(" | ".join(stuck))
