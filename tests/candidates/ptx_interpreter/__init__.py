"""Runs the PTX of a kernel on the CPU, warp by warp, with barriers and wgmma; for tests.

All threads of a CTA are numpy lanes; the warps that stand at one instruction go through it
together, so that a random choice of the next warp gives another legal interleaving.  Barriers in
shared memory, named barriers and a warpgroup's products block like on the machine: what can
never go on raises :class:`Deadlock`.  Asynchronous copies and products take effect when they are
issued, which is one of the orders that the machine may choose.

Only what the kernels under test are made of is known; anything else raises
``NotImplementedError``.

``program`` parses; ``state`` is what a CTA has; ``cta`` chooses who goes on; the others are the
instructions: ``memory``, ``copies``, ``barriers``, ``matrices``, ``lanes`` and ``arithmetic``.
"""

from ptx_interpreter.cta import Cta, Deadlock, run_cluster
from ptx_interpreter.program import Program, parsed
from ptx_interpreter.state import Memory, Part

__all__ = ["Cta", "Deadlock", "Memory", "Part", "Program", "parsed", "run_cluster"]
