"""Where a run may not start from zero: exact segments, made by pairs of CTAs.

All runs stand in one line; CTAs 2 i and 2 i + 1 are a pair and own runs 2 i and 2 i + 1.  Where the
guard lets both start from zero, each CTA takes the pieces of its own.  A piece at whose cut it
fails becomes a *job* of the pair: each CTA builds every second chunk and sends it to the other as
well, and both scan all chunks.  There are three at most, which come behind the CTAs' own pieces:

* The first piece of the pair, if the guard fails where it begins, is an exact segment.  The state
  it leaves is ``M S_in + C`` and its outputs are ``O + P S_in``.  C and O come from the scan of
  the first CTA, from zero; M and P are the same scan in the second, from the identity and with
  U = 0: 128 rows of a state more, and P stands where O would.
* The two pieces at the cut between the runs are one if the guard fails there.  If that is not the
  first one, each CTA takes half of its value rows.
* So they do with the second CTA's last piece, if it ends within a sequence and the first CTA has no
  piece of its own, which would be idle.

The fix-up (:mod:`candidates._delta_rule.kernel.fixup`) composes segments and corrects outputs
afterwards.  What this needs of shared and global memory is in :mod:`.fused_plan` and
:mod:`candidates._delta_rule.kernel.pieces`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.exact import Segments
from candidates._delta_rule.kernel.pieces import JOB_WORDS
from candidates.kda_prefill.kernel.fused_plan import RUN, SCAN_WARPS, FusedPlan

__all__ = [
    "AGAIN",
    "AS_GUESSED",
    "LAST",
    "NOTHING",
    "OWN",
    "Exact",
]

F32, I32, I64 = op.F32, op.I32, op.I64

NOTHING, AS_GUESSED, AGAIN = 0, 1, 2
"""What a CTA does alone: nothing; its own run, as its builders began it, or from another chunk."""

OWN = 4
"""What a CTA does is one of these and OWN times the jobs of its pair."""

LAST = 4
"""Of the word that says which warpgroups scan: the job is its CTA's last."""


class Exact(Segments):
    """The part of the fused kernel that knows pairs of CTAs, and what each of them does.

    A job is (sequence, head, first and past-the-last row, first chunk, chunks of it and of the
    warm-up among them, warpgroups that scan and whether it is the last job, map or not, target,
    entry, one word of other use: of job 0, what the CTA does).

    A warp's own piece has the pieces behind it in place of the warpgroups, and in the last word its
    place in the ring, counted from the first piece.  A builder has in place of the map whether it
    is only a guess.
    """

    plan: FusedPlan

    def begin_ring(self, at, lane, scans: int, again: bool = False):
        """Make the barriers of a CTA, a lane each; ``scans`` warps let a stage go.

        Parameters
        ----------
        again : bool
            Whether they were barriers before.
        """
        stages, lane = self.plan.stages, ops.opaque(lane)  # not worth a register beyond this
        arrivals = op.select(lane < 2 * stages, I32(scans), I32(2))  # full, empty, sums
        arrivals = op.select(lane < stages, I32(4), arrivals)
        end = "@p mbarrier.inval.shared::cta.b64 [{$r1}];" if again else ""
        op.ptx(
            "{ .reg .pred p; setp.lt.u32 p, {$r0}, " + f"{3 * stages}; {end}"
            " @p mbarrier.init.shared::cta.b64 [{$r1}], {$r2}; }",
            inputs=[lane, at + (lane * 8 + self.plan.off_bar), arrivals],
        )
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def renew_ring(self, at, warp_id, lane, scans: cutlass.Constexpr):
        """Make all barriers anew, by one warp; nobody uses them at the time."""
        if warp_id == SCAN_WARPS:
            self.begin_ring(at, lane, scans, again=True)
            ops.sync_warp()

    @cute.jit
    def begin_anew(self, at, warp_id, lane):
        """Throw away what was built; a CTA alone.  All threads."""
        cute.arch.sync_threads()
        self.renew_ring(at, warp_id, lane, SCAN_WARPS)
        cute.arch.sync_threads()

    @cute.jit
    def begin_again(self, at, warp_id, lane, job):
        """Before each job of a pair: nothing is in flight, then all barriers are new, and the
        scanning warps of both CTAs let a stage go.  All threads."""
        if job == 0:  # what came before is this CTA's alone
            cute.arch.sync_threads()
        else:
            ops.sync_cluster()
        self.renew_ring(at, warp_id, lane, 2 * SCAN_WARPS)
        self.meet_pair()

    def meet_pair(self):
        """All threads of both CTAs.  Whoever made barriers has fenced them, and nothing else has to
        be seen: a release would wait for what is on its way to global memory."""
        op.ptx("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;")

    @cute.jit
    def take_run(self, at, number, own, lane):
        """Make the first piece of the CTA's run this warp's job; whether it has one."""
        there = I32(0)
        if own > NOTHING:
            there = I32(1)
            run = self.get_job(at, RUN)
            run[8] = run[11] = I32(0)
            if lane == 0:
                self.put_job(at, number, run)
            ops.sync_warp()
        return there

    def put_choice(self, at, choice):
        """Tell the builders what the CTA does, and leave zeros; one thread, before all meet."""
        op.store_i32x4(at, [I32(0)] * 4, self.plan.off_zero)
        op.store32(at, choice, self.plan.off_jobs + 4 * (JOB_WORDS - 1))

    def await_choice(self, at):
        """Meet the scanning warps; what the CTA does."""
        cute.arch.sync_threads()
        return self.choice(at)

    def choice(self, at):
        """What the CTA does, once that is decided."""
        word = ops.load_shared32(at, self.plan.off_jobs + 4 * (JOB_WORDS - 1))
        return cute.arch.make_warp_uniform(word)
