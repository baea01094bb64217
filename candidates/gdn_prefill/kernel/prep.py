"""PREP for gates of one number a token: what of a chunk does not depend on the state, for sm_90a.

One CTA takes one chunk of one value head and leaves its image, in the form that KDA's PREP leaves
(:mod:`candidates._delta_rule.kernel.image`), for the same scan.  With b the inclusive cumulative
gate of the chunk, one number for each token, the decay leaves the sum over channels:

    Akk_ij = (k_i . k_j) e^(b_i - b_j)      Aqk_ij = (q_i . k_j) e^(b_i - b_j)

So scores are plain products of the rows as they come, and each is then multiplied by an
exponential of its own in fp32, whose exponent is at most 0 on and below the diagonal: right for
every gate, without an anchor, and for 64 tokens as for 16.  Khat, Qhat and Kbar are rows times one
factor each.

q, k and v are fetched by cp.async into the places of Qhat, W and U, and scaled or multiplied in
place.  The inverse is that of every PREP.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import memory

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Activation, Gates
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import L2NORM_EPS, PLAIN, Options
from candidates._delta_rule.kernel.prep import ChunkPrep, positions
from candidates._delta_rule.kernel.prep_inverse import invert
from candidates._delta_rule.kernel.tiles import HALF, LOWER_BYTES, LOWER_PITCH, TILE, twist
from candidates.gdn_prefill.kernel.prep_plan import Plan

__all__ = ["Prep"]

F32, I32, I64 = op.F32, op.I32, op.I64


class Prep(ChunkPrep, Activation):
    """The PREP kernel of one schedule, compiled once for every T, N, H and HV.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.
    unroll : int, optional
        Chunks per turn of the scan's loop; sequences are padded to a multiple of it.
    options : Options, optional
        The form of the inputs.  Where it is ``compact``, tensors are contiguous; else rows are
        found by the tensors' own strides.  Head counts may differ either way.

    Attributes
    ----------
    threads, smem_bytes : int
        Per CTA.
    """

    def __init__(self, bt: int, unroll: int = 1, options: Options = PLAIN) -> None:
        self.options, self.plan = options, Plan(bt)
        self.bt, self.unroll, self.layout = bt, unroll, self.plan.layout
        self.threads, self.smem_bytes = self.plan.threads, self.plan.smem_bytes
        self.name = f"gdn_prep_{bt}{options.suffix}"

    @cute.jit
    def __call__(
        self,
        Q: cute.Tensor,
        K: cute.Tensor,
        V: cute.Tensor,
        G: cute.Tensor,
        B: cute.Tensor,
        CU: cute.Tensor,
        O: cute.Tensor,
        X: cute.Tensor,
        scale: cutlass.Float32,
        A_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        stream: CUstream,
    ):
        """Launch on ``stream``.

        Parameters
        ----------
        Q, K : Tensor
            ``[T, H, 128]`` bf16.
        V : Tensor
            ``[T, HV, 128]`` bf16; HV is a multiple of H.
        G : Tensor
            ``[T, HV]``: log gates, or what they are made of.
        B : Tensor
            ``[T, HV]``: write strengths, or their logits.
        CU : Tensor
            ``[N + 1]``, any content.
        O : Tensor
            ``[T, HV, 128]`` bf16: rows that no sequence covers are cleared, no other is touched.
        X : Tensor
            ``[slots, HV, elements]`` bf16: the images, written.
        scale : Float32
        A_log, dt_bias : Tensor or None
            Of the gate's activation: fp32 ``[HV]`` and ``[HV, 1]``.
        stream : CUstream
        """
        self.kernel.set_name_prefix(self.name, keep_mangled_name=False, remove_cutlass_symbol=True)
        # Value heads run fastest: neighbouring CTAs read neighbouring memory, and those of one key
        # head the same rows of q and k.  One more slot than there are, if there are none, because
        # rows outside of all sequences still count.
        group = V.shape[1] // Q.shape[1]
        self.kernel(Q, K, V, G, B, CU, O, X, scale, group, A_log, dt_bias).launch(
            grid=(max(X.shape[0], 1) * V.shape[1], 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.plan.blocks_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, Q, K, V, G, B, CU, O, X, scale, group, A_log, dt_bias):
        G = Gates(G, A_log, dt_bias, None)
        plan, layout, bt = self.plan, self.layout, self.bt
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = memory.SmemAllocator()
        base = smem.allocate_array(cutlass.Int8, plan.smem_bytes, byte_alignment=1024).toint()

        HV = V.shape[1]
        if warp == 0:
            self.find_place(CU, O, V.shape[0], HV, base, lane)
        cute.arch.sync_threads()
        # Row r of the chunk is token `start` + r; those from `rows` on are beyond the end.
        start, rows, slot, head = op.load_i32x4(base, plan.off_place)
        if rows >= 0:
            key_head = head // group
            self.fetch(Q, base + layout.off_q, layout.block_q, tid, start, key_head, rows)
            self.fetch(K, base, layout.block_q, tid, start, key_head, rows)
            cute.arch.cp_async_commit_group()
            self.fetch(V, base + layout.common, bt * HALF, tid, start, head, rows)
            cute.arch.cp_async_commit_group()
            if warp == 0:
                self.gates(G, B, base, start, rows, head, lane)
            if cutlass.const_expr(plan.tiles > 1):  # Aqk is 0 above its diagonal blocks
                if tid < bt * bt // 8:
                    op.store_zero16(base + tid * 16, layout.off_a)
            pad = layout.common - layout.off_e - 4 * HEAD
            if cutlass.const_expr(pad > 0):
                if tid < pad // 16:
                    op.store_zero16(base + tid * 16, layout.off_e + 4 * HEAD)
            cute.arch.cp_async_wait_group(1)
            if cutlass.const_expr(self.options.l2norm):
                self.norms(base, tid)  # of pieces that the thread fetched itself: no barrier
            cute.arch.sync_threads()

            for jobs in plan.rounds:
                if warp < len(jobs):
                    tiles = self.multiply(jobs, base, warp, lane)
                    self.finish(jobs, tiles, base, warp, lane, scale)
            cute.arch.sync_threads()
            if warp >= plan.diagonal_warps:  # while the others substitute
                self.write_scaled(base, tid, scale)
            invert(plan, base, warp, lane)
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()

            target = X.iterator.toint() + (I64(slot) * HV + head) * layout.image
            if warp == plan.warps - 1:  # what is ready leaves while W and U are computed
                with cute.arch.elect_one():
                    for off, size in (
                        (layout.off_q, bt * HALF),
                        (layout.off_q + layout.block_q, bt * HALF),
                        (layout.off_k, layout.common - layout.off_k),
                    ):
                        op.store_bulk(target + off, base + off, size)
                    cute.arch.cp_async_bulk_commit_group()
            self.apply_inverse(base, warp, lane)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()
            if warp == plan.warps - 1:
                with cute.arch.elect_one():
                    for off, size in (
                        (0, bt * HALF),
                        (layout.block_q, bt * HALF),
                        (layout.common, 2 * bt * HALF),
                    ):
                        op.store_bulk(target + off, base + off, size)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)

    # ------------------------------------------------------------------------- input rows

    def piece(self, number):
        """A 16-byte piece of a [BT, 128] part: row, piece of the row, and offset of the two in the
        swizzle, apart from the half that the piece is in."""
        row, p = number // 16, number % 16
        return row, p, row * HALF + ((p % 8) ^ (row % 8)) * 16

    def pieces(self, tid):
        """The pieces that a thread fetches."""
        return [self.piece(tid + i * self.threads) for i in range(TILE * self.bt // self.threads)]

    def rows_of(self, X, start, head):
        """Address of row 0 of a head, and bytes from a row to the next."""
        if self.options.compact:
            heads = X.shape[1]
            return X.iterator.toint() + (I64(start) * heads + head) * (2 * HEAD), heads * (2 * HEAD)
        at = I64(X.stride[0]) * I64(start) + I64(X.stride[1]) * I64(head)
        return X.iterator.toint() + at * I64(2), I32(X.stride[0]) * 2

    def fetch(self, X, place, block, tid, start, head, rows):
        """Rows of q, k or v into the part of the image at ``place``, whose halves are ``block``
        bytes apart; 0 beyond the end."""
        source, step = self.rows_of(X, start, head)
        for row, p, at in self.pieces(tid):
            op.copy16_async(
                place + (p // 8 * block + at),
                op.mad_wide(row, step, source + I64(p * 16)),
                op.select(row < rows, I32(16), I32(0)),
            )

    @cute.jit
    def gates(self, G, B, base, start, rows, head, lane):
        """One warp: beta, the cumulative gate and its exponentials, and the chunk's decay."""
        plan = self.plan
        per = max(plan.bt // 32, 1)
        active = self.gate_constants(G, head, 0, 1)
        total, sums, strengths = [F32(0.0)], [F32(0.0)] * per, [F32(0.0)] * per
        for i in cutlass.range_constexpr(per):
            row = lane * per + i
            gate, beta = F32(-math.inf if self.options.raw_gate else 0.0), self.no_strength
            if row < rows:
                gate = F32(G.g[start + row, head])
                beta = self.strength(B, start + row, head)
            total = self.add_gates([gate], active, total)
            sums[i], strengths[i] = total[0], self.activated(beta)
        total = total[0]
        before = total  # inclusive over lanes, then without the lane's own
        for d in (1, 2, 4, 8, 16):
            below = cute.arch.shuffle_sync_up(before, offset=d, mask_and_clamp=0)
            if lane >= d:
                before = before + below
        end = cute.arch.shuffle_sync(before, offset=31)
        before = cute.arch.shuffle_sync_up(before, offset=1, mask_and_clamp=0)
        if lane == 0:
            before = F32(0.0)
        for i in cutlass.range_constexpr(per):
            row = lane * per + i
            if row < plan.bt:
                b, at = before + sums[i], base + row * 4
                op.store_f32(at, strengths[i], plan.off_beta)
                op.store_f32(at, b, plan.off_sum)
                op.store_f32(at, op.exp2(b), plan.off_into)
                op.store_f32(at, op.exp2(cute.arch.fmin(end - b, F32(0.0))), plan.off_onto)
        decay = op.exp2(end)  # one for all channels, whose order so does not matter
        op.store_f32x4(base + lane * 16, [decay] * 4, self.layout.off_e)

    def norms(self, base, tid):
        """Of the thread's own pieces: what divides the rows of k and of q by their norm."""
        plan = self.plan
        for row, p, at in self.pieces(tid):
            place = base + (p // 8 * self.layout.block_q + at)
            for off, to in ((0, plan.off_key), (self.layout.off_q, plan.off_query)):
                square = F32(0.0)
                for pair in op.load_i32x4(place, off):
                    for x in op.unpack(pair):
                        square = op.fma(x, x, square)
                for d in (1, 2, 4, 8):  # 16 neighbouring threads have a row
                    square = square + cute.arch.shuffle_sync_bfly(square, offset=d)
                # All of them store the same number.
                op.store_f32(base + row * 4, ops.rsqrt(square + F32(L2NORM_EPS)), to)

    # ----------------------------------------------------------------------------- scores

    def multiply(self, jobs, base, warp, lane):
        """This warp's tile of ``jobs``, rows times columns over 128 channels: one accumulator
        for each 8 columns."""
        layout, plan = self.layout, self.plan
        query, row = (op.table([getattr(j, n) for j in jobs], warp) for n in ("query", "row"))
        col = op.table([j.col for j in jobs], warp)
        a = base + query * layout.off_q + row * (TILE * HALF)
        a = a + lane % 16 * HALF + (((lane // 16) ^ (lane % 8)) << 4)
        b = base + col * (TILE * HALF)
        if plan.wide:
            b = b + (lane // 16 * 8 + lane % 8) * HALF + (((lane // 8 % 2) ^ (lane % 8)) << 4)
        else:
            half = op.table([j.half for j in jobs], warp)
            b = b + (half * 8 + lane % 8) * HALF + (((lane // 8) ^ (lane % 8)) << 4)
        acc = [op.zeros(), op.zeros()]
        for channels in range(0, HEAD, 16):
            # Exchanging pieces of a row flips bits of the address: nothing is added.
            far, at = channels // 64 * layout.block_q, channels % 64 * 2
            rows = op.ldmatrix(a ^ at, far)
            if plan.wide:
                cols = op.ldmatrix(b ^ at, far)
                acc = [op.mma(acc[i], rows, cols[2 * i : 2 * i + 2]) for i in range(2)]
            else:  # two chains hide half of the latency
                i = channels // 16 % 2
                if i == 0:
                    cols = op.ldmatrix(b ^ at, far)
                acc[i] = op.mma(acc[i], rows, cols[2 * i : 2 * i + 2])
        return acc if plan.wide else [[x + y for x, y in zip(*acc, strict=True)]]

    @cute.jit
    def finish(self, jobs, tiles, base, warp, lane, scale):
        """Decay, and beta or the scale, in fp32; L to fp32, Aqk to the image.

        What is above the diagonal is replaced by a select; its exponents, which would be positive,
        are never formed.
        """
        layout, plan = self.layout, self.plan
        query = op.table([j.query for j in jobs], warp)
        row, first = positions(jobs, warp, lane)
        ends = [
            op.load_f32x2(base + first * 4, plan.off_sum + 32 * half) for half in range(len(tiles))
        ]
        for i in cutlass.range_constexpr(2):
            r = row + 8 * i
            b = op.load_f32(base + r * 4, plan.off_sum)
            beta = op.load_f32(base + r * 4, plan.off_beta)
            by = op.select(query > 0, scale, beta)
            if cutlass.const_expr(self.options.l2norm):
                own = op.select(query > 0, I32(plan.off_query), I32(plan.off_key))
                by = by * op.load_f32(base + r * 4 + own)
            block = row // TILE * (row // TILE + 1) // 2 + first // TILE
            lower = base + block * LOWER_BYTES + (r % TILE * LOWER_PITCH + first % TILE) * 4
            for half in cutlass.range_constexpr(len(tiles)):
                col = first + 8 * half
                pair = [
                    tiles[half][2 * i + j]
                    * op.exp2(cute.arch.fmin(b - ends[half][j], F32(0.0)))
                    * by
                    for j in range(2)
                ]
                if cutlass.const_expr(self.options.l2norm):
                    keys = op.load_f32x2(base + first * 4, plan.off_key + 32 * half)
                    pair = [x * y for x, y in zip(pair, keys, strict=True)]
                if query > 0:  # a token reads what it wrote: the diagonal counts
                    x, y = (op.select(col + j <= r, pair[j], F32(0.0)) for j in range(2))
                    piece = (col // 8) ^ twist(plan.bt, r)
                    op.store32(
                        base + r * (2 * plan.bt) + piece * 16 + col % 8 * 2,
                        op.pack(x, y),
                        layout.off_a,
                    )
                else:
                    x, y = (op.select(col + j < r, pair[j], F32(0.0)) for j in range(2))
                    op.store_f32x2(lower, x, y, plan.off_l + 32 * half)

    # ---------------------------------------------------------------------------- operands

    @cute.jit
    def write_scaled(self, base, tid, scale):
        """Khat and Qhat over the rows of k and q, and Kbar; by the warps that do not substitute."""
        plan = self.plan
        first = 32 * plan.diagonal_warps
        every = plan.threads - first
        for i in cutlass.range_constexpr(-(-TILE * plan.bt // every)):
            piece = tid - first + i * every
            if piece < TILE * plan.bt:
                self.write_piece(base, scale, *self.piece(piece))

    def write_piece(self, base, scale, row, p, at):
        """One piece of :meth:`write_scaled`."""
        plan, layout = self.plan, self.layout
        wide = base + (p // 8 * layout.block_q + at)
        narrow = base + (p // 8 * (self.bt * HALF) + at)
        load = lambda at: op.load_f32(base + row * 4, at)
        into, onto = load(plan.off_into), load(plan.off_onto)
        outward = into * scale
        if self.options.l2norm:
            key = load(plan.off_key)
            into, onto, outward = into * key, onto * key, outward * load(plan.off_query)
        keys = [op.unpack(x) for x in op.load_i32x4(wide)]
        queries = [op.unpack(x) for x in op.load_i32x4(wide, layout.off_q)]
        for pairs, by, place, off in (
            (keys, into, wide, 0),
            (queries, outward, wide, layout.off_q),
            (keys, onto, narrow, layout.off_k),
        ):
            op.store_i32x4(place, [op.pack(x * by, y * by) for x, y in pairs], off)
