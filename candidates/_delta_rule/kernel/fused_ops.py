"""Instructions of the fused kernels alone, as PTX; the others are in :mod:`.prep_ops`.

Barriers in shared memory are 32-bit addresses, like everything of a fused kernel there.
"""

from __future__ import annotations

from candidates._delta_rule.kernel import prep_ops as op

__all__ = [
    "ballot",
    "bar_arrive",
    "bar_arrive_in",
    "bar_end",
    "bar_expect",
    "bar_expect_in",
    "bar_init",
    "bar_wait",
    "below",
    "copy4",
    "copy16",
    "copy16_whole",
    "fence_async",
    "fetch",
    "in_cta",
    "largest",
    "load_shared32",
    "load_shared64",
    "log2",
    "mul",
    "mul_bf16x2",
    "opaque",
    "rcp",
    "rsqrt",
    "send",
    "send_f32x2",
    "sqrt",
    "store_shared64",
    "sync_builders",
    "sync_cluster",
    "sync_group",
    "sync_group_below",
    "sync_scanners",
    "sync_warp",
]

F32, I32 = op.F32, op.I32


def bar_init(address, count):
    """Make a barrier of ``count`` arrivals a phase."""
    op.ptx(f"mbarrier.init.shared::cta.b64 [{{$r0}}], {count};", inputs=[address])


def bar_end(address):
    """What was a barrier is plain memory again."""
    op.ptx("mbarrier.inval.shared::cta.b64 [{$r0}];", inputs=[address])


def bar_arrive(address):
    """One arrival."""
    op.ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", inputs=[address])


def bar_wait(address, parity):
    """Until the phase of this parity is over; that before the first one has parity 1."""
    op.ptx(
        "{ .reg .pred p; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1};"
        " @!p bra LAB_WAIT; }",
        inputs=[address, parity],
    )


def fence_async():
    """What this thread wrote to shared memory becomes visible to wgmma."""
    op.ptx("fence.proxy.async.shared::cta;")


def sync_group(number):
    """All 128 threads of a building warpgroup."""
    op.ptx("bar.sync {$r0}, 128;", inputs=[number])


def sync_builders(threads):
    """All building threads."""
    op.ptx(f"bar.sync 4, {threads};")


def sync_scanners():
    """All 256 scanning threads."""
    op.ptx("bar.sync 5, 256;")


def sync_group_below(number, x, bound):
    """:func:`sync_group`; 1 for everybody if anybody's ``x`` is less than ``bound``, else 0."""
    return op.ptx(
        "{ .reg .pred p, q; setp.lt.f32 q, {$r1}, {$r2}; bar.red.or.pred p, {$r0}, 128, q;"
        " vote.sync.ballot.b32 {$w0}, p, 0xffffffff; and.b32 {$w0}, {$w0}, 1; }",
        [I32],
        [number, x, bound],
    )


def ballot(x):
    """A bit for each lane: whether its number is not 0."""
    return op.ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; vote.sync.ballot.b32 {$w0}, p, 0xffffffff; }",
        [I32],
        [x],
    )


def sync_warp():
    """All lanes; orders their accesses to shared memory."""
    op.ptx("bar.warp.sync 0xffffffff;")


def copy16(address, source, size, at=0):
    """Global to shared, 16 bytes, of which the first ``size`` are read and the rest are 0."""
    op.ptx(
        f"cp.async.cg.shared.global [{{$r0}}+{at}], [{{$r1}}], 16, {{$r2}};",
        inputs=[address, source, size],
    )


def copy4(address, source, size):
    """Global to shared, 4 bytes, or 0 where ``size`` is 0."""
    op.ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};", inputs=[address, source, size])


def sqrt(x):
    """Fast square root."""
    return op.ptx("sqrt.approx.ftz.f32 {$w0}, {$r0};", [F32], [x])


def rcp(x):
    """Fast reciprocal; 0 of infinity."""
    return op.ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", [F32], [x])


def rsqrt(x):
    """Fast reciprocal of the square root."""
    return op.ptx("rsqrt.approx.ftz.f32 {$w0}, {$r0};", [F32], [x])


def log2(x):
    """Fast binary logarithm."""
    return op.ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", [F32], [x])


def mul(x, y):
    """The product, rounded: no sum that it is a term of takes it into an fma."""
    return op.ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", [F32], [x, y])


def mul_bf16x2(x, y):
    """Products of two packed bf16."""
    return op.ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", [I32], [x, y])


def largest(x):
    """The largest of a warp's numbers, none of which is negative."""
    return op.ptx("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", [F32], [x])


def load_shared32(address, at=0):
    """Four bytes of shared memory."""
    return op.ptx(f"ld.shared.b32 {{$w0}}, [{{$r0}}+{at}];", [I32], [address])


def copy16_whole(address, source, at=0):
    """Global to shared, 16 bytes."""
    op.ptx(f"cp.async.cg.shared.global [{{$r0}}+{at}], [{{$r1}}], 16;", inputs=[address, source])


def load_shared64(address, at=0):
    """Eight bytes of shared memory, as two registers."""
    return op.ptx(f"ld.shared.v2.b32 {{{{$w0}}, {{$w1}}}}, [{{$r0}}+{at}];", [I32] * 2, [address])


def store_shared64(address, words, at=0):
    """Two registers to shared memory."""
    op.ptx(f"st.shared.v2.b32 [{{$r0}}+{at}], {{{{$r1}}, {{$r2}}}};", inputs=[address, *words])


def opaque(x):
    """``x``, in a way that keeps the compiler from hoisting what is computed from it."""
    return op.ptx("mov.b32 {$w0}, {$r0};", [I32], [x])


def bar_expect(address, size: int):
    """One arrival, and ``size`` bytes more that have to come before the phase is over."""
    op.ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], " + f"{size};", inputs=[address])


def fetch(target, source, size: int, barrier):
    """Bytes from global to shared memory, which a barrier counts."""
    op.ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], "
        + f"{size}, [{{$r2}}];",
        inputs=[target, source, barrier],
    )


# --------------------------------------------------------------------- the other CTA of a pair


def in_cta(address, rank):
    """The same place in the shared memory of a CTA of the cluster."""
    return op.ptx("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", [I32], [address, rank])


def bar_arrive_in(address):
    """One arrival at a barrier of any CTA of the cluster; ``address`` from :func:`in_cta`.

    Says that this thread has read, not that it has written: a release at the scope of the cluster
    would wait until its stores to global memory are done.
    """
    op.ptx("mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", inputs=[address])


def bar_expect_in(address, size: int):
    """One arrival, and ``size`` bytes more that have to come before the phase is over."""
    op.ptx(
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [{$r0}], " + f"{size};",
        inputs=[address],
    )


def send(target, source, size: int, barrier):
    """Bytes to another CTA, which its barrier counts; addresses of it from :func:`in_cta`."""
    op.ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}], " + f"{size}, [{{$r2}}];",
        inputs=[target, source, barrier],
    )


def send_f32x2(address, x, y, barrier):
    """Eight bytes to another CTA, which its barrier counts; addresses from :func:`in_cta`."""
    op.ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], {{$r1}, {$r2}},"
        " [{$r3}];",
        inputs=[address, x, y, barrier],
    )


def sync_cluster():
    """All threads of the cluster."""
    op.ptx("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")


def below(row, end, values, at):
    """Store 16 bytes at address ``at`` if ``0 <= row < end``, predicated."""
    op.ptx(
        "{ .reg .pred p; setp.lo.u32 p, {$r0}, {$r1};"
        " @p st.global.v4.b32 [{$r2}], {{$r3}, {$r4}, {$r5}, {$r6}}; }",
        inputs=[row, end, at, *values],
    )
