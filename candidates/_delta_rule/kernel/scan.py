"""SCAN: the serial step of a chunked delta rule over a ragged batch, in CuTe DSL for sm_90a.

One CTA owns 64 or 128 value rows of one segment of one sequence and head.  One consumer
warpgroup holds 64 rows of the transposed state S^T in fp32
wgmma accumulators for the whole sequence, so consumers never wait for each other; a producer
warp fetches one image (:mod:`.image`) a chunk with two 1-D bulk copies.  A chunk is

    Vn^T = U^T - bf16(S^T) W^T                               on the dependent path
    O^T  = bf16(S^T) Qhat^T + bf16(Vn^T) Aqk^T               off the path, in its bubbles
    S^T  = S^T diag(exp b_BT) + bf16(Vn^T) Kbar              on the dependent path

Left operands come from registers: with 64 rows a warpgroup, an accumulator and the bf16
operand made of it hold the same elements in the same order.

ptxas serialises every wgmma (C7514) if a group in flight at the loop's back edge is read after
it.  So a turn of the loop is ``unroll`` chunks and ends with nothing in flight, and PREP pads
each sequence to whole turns (a padding chunk changes nothing: K = 0, decay = 1).

An empty sequence makes no turn: the producer still fetches one image, whose slot is inside X
and whose content nothing uses, because the consumer always looks one stage ahead.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import memory, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from .image import HEAD, ImageLayout, segment_entries, unroll_of
from .segments import Carry, Compose
from .step import (
    MAP_WORDS,
    MAX_STAGES,
    SMEM_LIMIT,
    STATE_WORDS,
    bulk_pipeline,
    entry_fragment,
    load_state,
    narrow,
    product,
    segment_chunks,
    sequence_entry,
    sequence_parts,
    sequence_slots,
    store_below,
    store_state,
    widen,
    zero,
)

__all__ = ["Scan"]

BF16, F32, I32, I64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64
ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
PITCH = 24  # elements per row of a warp's slab of O: free of bank conflicts, 16-byte aligned


class Scan:
    """The scan of one schedule, compiled once for every T, N and H.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.
    rows : int
        Value rows per CTA: 64 or 128.
    segments : int, optional
        Segments a sequence may be cut into: 1, 2, 4 or 8.

    Attributes
    ----------
    unroll : int
        Chunks per turn: PREP pads every sequence to a multiple of it.
    """

    def __init__(self, bt: int, rows: int, segments: int = 1) -> None:
        if rows not in (64, 128):
            raise ValueError(f"rows={rows} is not one of [64, 128]")
        if segments not in (1, 2, 4, 8):
            raise ValueError(f"segments={segments} is not one of [1, 2, 4, 8]")
        self.bt, self.rows, self.segments = bt, rows, segments
        self.layout = ImageLayout(bt)
        self.unroll = unroll_of(bt, rows)
        self.wgs = rows // 64
        # At BT = 16 a product of n = 32 is worth more than hiding Q.S: W over Qhat in one.
        self.fuse = int(bt == 16)
        self.stage = self.layout.common + 2 * bt * rows  # bytes: the common part, our rows of U
        room = SMEM_LIMIT - 512 - 2 * PITCH * bt * rows // 16
        self.stages = min(MAX_STAGES, room // self.stage)
        self.threads = 128 * self.wgs + 128

    def buffers(self, T: int, N: int, H: int) -> tuple[tuple[tuple[int, int, int], str], ...]:
        """Scratch between the kernels of a segmented scan, as (shape, dtype name).

        Empty for one segment; else one fp32 tensor ``[entries, H, words]``.  An entry belongs to
        an inner segment boundary: the state behind it and, with more than two segments, the
        bf16 map of the segment in front of it.

        Parameters
        ----------
        T, N, H : int
            Rows, sequences and heads of the call.
        """
        if self.segments == 1:
            return ()
        entries = segment_entries(T, N, self.bt, self.unroll, self.segments)
        return (((entries, H, self.words), "float32"),)

    @property
    def words(self) -> int:
        """fp32 words of one entry of the scratch."""
        return STATE_WORDS + (MAP_WORDS if self.segments > 2 else 0)

    @cute.jit
    def __call__(
        self,
        X: cute.Tensor,
        CU: cute.Tensor,
        S0: cute.Tensor | None,
        O: cute.Tensor,
        S: cute.Tensor | None,
        buffers: Any,
        stream: CUstream,
    ):
        """Launch the scan (three kernels with more than two segments, two with two).

        Parameters
        ----------
        X : cute.Tensor
            Images bf16 [slots, H, ImageLayout.elements], 128-byte aligned.
        CU : cute.Tensor
            Offsets int32 [N + 1].
        S0 : cute.Tensor or None
            Initial states [N, H, 128, 128], fp32 or bf16, value-major; None is zero.
        O : cute.Tensor
            Output bf16 [T, H, 128]; rows of no sequence are not written.
        S : cute.Tensor
            Final states, like S0, or None.  Must not overlap S0 if ``segments > 1``: the CTA of
            the last segment writes while that of the first still reads.
        buffers : tuple of cute.Tensor or None
            Tensors of :meth:`buffers`; None for one segment.
        stream : CUstream
        """
        bt = self.bt
        T, N, H = O.shape[0], sequences(CU, S), O.shape[1]
        BUF = None if cutlass.const_expr(self.segments == 1) else buffers[0]
        mma_t, mma_t0 = product(OperandMajorMode.K, bt), product(OperandMajorMode.K, bt)
        mma_w = product(OperandMajorMode.K, bt * (1 + self.fuse))
        mma_s = product(OperandMajorMode.MN, HEAD)
        self.kernel.set_name_prefix(
            f"kda_scan_bt{bt}_r{self.rows}_s{self.segments}",
            keep_mangled_name=False,
            remove_cutlass_symbol=True,
        )
        if N * H > 0:  # a grid of no blocks cannot be launched
            if cutlass.const_expr(self.segments > 1):
                Compose(bt, self.rows, self.segments)(X, CU, S0, BUF, T, N, H, stream)
            if cutlass.const_expr(self.segments > 2):
                Carry(bt, self.segments, self.unroll)(CU, BUF, T, N, H, stream)
            self.kernel(X, CU, S0, O, S, BUF, mma_t, mma_t0, mma_w, mma_s).launch(
                grid=(HEAD // self.rows * self.segments * N, H, 1),
                block=(self.threads, 1, 1),
                stream=stream,
                min_blocks_per_mp=1,
                preferred_smem_carveout=100,
            )

    @cute.kernel
    def kernel(
        self,
        X: cute.Tensor,
        CU: cute.Tensor,
        S0: cute.Tensor | None,
        O: cute.Tensor,
        S: cute.Tensor | None,
        BUF: cute.Tensor | None,
        mma_t: cute.TiledMma,
        mma_t0: cute.TiledMma,
        mma_w: cute.TiledMma,
        mma_s: cute.TiledMma,
    ):
        bt, wgs, layout = self.bt, self.wgs, self.layout
        nw = bt * (1 + self.fuse)  # columns of the W.S product
        tidx, h = cute.arch.thread_idx()[0], cute.arch.block_idx()[1]
        split = HEAD // self.rows
        part, job = cute.arch.block_idx()[0] % split, cute.arch.block_idx()[0] // split
        segment, n = job % self.segments, job // self.segments
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = warp_id // 4

        row0, row1, chunks, slot0 = sequence_slots(CU, n, O.shape[0], bt, self.unroll)
        parts, first = I32(1), I32(0)
        if cutlass.const_expr(self.segments > 1):
            entry = sequence_entry(
                row0, n, O.shape[0], sequences(CU, S), bt, self.unroll, self.segments
            )
            parts = sequence_parts(chunks, self.segments, self.unroll)
            first, chunks = segment_chunks(chunks, segment, parts, self.unroll)

        smem = memory.SmemAllocator()
        base = smem.allocate_array(BF16, self.stages * self.stage // 2, byte_alignment=1024)
        sO = smem.allocate_tensor(  # a slab of 16 value rows for each warp
            BF16,
            cute.make_layout(((16, 4 * wgs), bt), stride=((1, PITCH * bt), PITCH)),
            byte_alignment=128,
        )
        bars = smem.allocate_array(I64, 2 * self.stages)
        pipe = bulk_pipeline(bars, self.stages, self.stage, 4 * wgs)

        def view(byte, sl):  # (rows, cols, stages) of one part of the image
            p = cute.recast_ptr(base + byte // 2, sl.inner, BF16)
            stages = cute.make_layout(self.stages, stride=self.stage // 2)
            return cute.make_tensor(p, cute.append(cute.slice_(sl.outer, (None, None, 0)), stages))

        b_sl = lambda order, rows, k: sm90.make_smem_layout_b(order, (64, rows, k), BF16, 1)
        sWQ, sA = view(0, b_sl(ROW, 2 * bt, HEAD)), view(layout.off_a, b_sl(ROW, bt, bt))
        sK = view(layout.off_k, b_sl(COL, HEAD, bt))
        sU = view(layout.common, sm90.make_smem_layout_epi(BF16, COL, (64 * wgs, bt), 1))
        # Decay in fragment order: thread q of a quad reads float4 j = columns 16 j + 2 q + ...
        sE = cute.make_tensor(
            cute.recast_ptr(base + layout.off_e // 2, dtype=F32),
            cute.make_layout((4, 8, 4, self.stages), stride=(1, 16, 4, self.stage // 4)),
        )

        if warp_id >= 4 * wgs:
            if cutlass.const_expr(wgs > 1):
                cute.arch.setmaxregister_decrease(40)
            if warp_id == 4 * wgs:
                bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BF16)
                n0, n1 = layout.common // 2, bt * self.rows
                last = max(chunks - 1, 0)
                st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
                # The last chunk twice: the consumer looks one stage ahead.
                for c in cutlass.range(chunks + 1, unroll=1):
                    pipe.producer_acquire(st)
                    src = X[slot0 + first + min(c, last), h, None].iterator
                    dst = base + st.index * (self.stage // 2)
                    with cute.arch.elect_one():  # 1-D bulk copies do not elect a lane
                        for off, at, size in ((0, 0, n0), (n0 + part * n1, n0, n1)):
                            cute.copy(
                                bulk,
                                cute.make_tensor(src + off, cute.make_layout(size)),
                                cute.make_tensor(dst + at, cute.make_layout(size)),
                                mbar_ptr=pipe.producer_get_barrier(st),
                            )
                    st.advance()
        else:
            if cutlass.const_expr(wgs > 1):
                cute.arch.setmaxregister_increase(232)
            t = tidx % 128
            for m, accumulate in ((mma_t, True), (mma_w, True), (mma_s, True), (mma_t0, False)):
                m.set(warpgroup.Field.ACCUMULATE, accumulate)
            thr_t, thr_w, thr_s = mma_t.get_slice(t), mma_w.get_slice(t), mma_s.get_slice(t)
            frag = lambda mma, thr, s: mma.make_fragment_B(thr.partition_B(s))  # descriptors
            rW = frag(mma_w, thr_w, cute.local_tile(sWQ, (nw, HEAD), (0, 0, None)))
            rQ = frag(mma_t, thr_t, cute.local_tile(sWQ, (bt, HEAD), (1, 0, None)))
            rK, rA = frag(mma_s, thr_s, sK), frag(mma_t, thr_t, sA)
            sEq = sE[None, None, t % 4, None]
            sUw = cute.local_tile(sU, (64, bt), (wg, 0, None))

            acc = lambda mma, cols: cute.make_rmem_tensor(mma.partition_shape_C((64, cols)), F32)
            a_op = lambda k: cute.make_rmem_tensor(mma_t.partition_shape_A((64, k)), BF16)
            accS, accW, accO = acc(mma_s, HEAD), acc(mma_w, nw), acc(mma_t, bt)
            aS, aV = a_op(HEAD), a_op(bt)
            # Fused, the product's columns are Vn^T, then S Qhat^T.
            accV = cute.make_tensor(accW.iterator, accO.layout)
            accQ = cute.make_tensor(accW.iterator + bt // 2 * self.fuse, accO.layout)
            u, o = [cute.make_rmem_tensor(accV.layout, BF16) for _ in range(2)]
            q = cute.make_rmem_tensor(accV.layout, F32)
            q.fill(0.0)
            e = cute.make_rmem_tensor(cute.make_layout((4, 8)), F32)
            e_acc = cute.make_tensor(
                e.iterator, cute.make_layout(((2, 2, HEAD // 8), 1, 1), stride=((1, 0, 2), 0, 0))
            )
            ld = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_t
            )
            sto = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16), mma_t
            )
            ld_s = ld.get_slice(t).partition_S(sUw)
            st_d = sto.get_slice(t).partition_D(cute.local_tile(sO, (64, bt), (wg, 0)))
            # O leaves warp by warp: a lane takes tokens l % 8 + 8 (l / 16) (+ 16 ...) and of
            # each the 8 values at 8 (l / 8 % 2).
            tok, v = t % 8 + t % 32 // 16 * 8, t % 32 // 8 % 2 * 8
            o_s = cute.make_tensor(
                (sO.iterator + warp_id * PITCH * bt + tok * PITCH + v).align(16),
                cute.make_layout((8, bt // 16), stride=(1, 16 * PITCH)),
            )
            pitch = I64(O.stride[0])  # rows of O: over 2^31 elements in all are in order
            o_at = I64(row0 + first * bt + tok) * pitch + h * HEAD + part * self.rows
            o_at = o_at + warp_id * 16 + v - bt * pitch  # of chunk -1
            rows_left = max(row1 - row0 - first * bt - tok, 0)
            state = lambda G: thr_s.partition_C(
                cute.local_tile(G[n, h, None, None], (64, HEAD), (part * wgs + wg, 0))
            )

            if cutlass.const_expr(S0 is None):
                zero(accS)
            elif cutlass.const_expr(self.segments == 1):
                load_state(state(S0), accS)
            else:
                zero(accS)
                if segment == 0:
                    load_state(state(S0), accS)
            if cutlass.const_expr(self.segments > 1):
                if segment > 0 and segment < parts:
                    cute.autovec_copy(
                        entry_fragment(BUF, entry + segment - 1, h, part * wgs + wg, t),
                        cute.make_tensor(accS.iterator, cute.make_layout((4, 16))),
                    )
            st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            pipe.consumer_wait(st)
            cute.copy(ld, ld_s[None, None, None, st.index], ld.retile(u))
            widen(u, accV)
            accO.store(accV.load())  # any value but a constant, as in zero()
            for c0 in cutlass.range(0, chunks, self.unroll, unroll=1):
                for c in [c0 + i for i in range(self.unroll)]:
                    if cutlass.const_expr(self.fuse):
                        accQ.fill(0.0)
                    warpgroup.wait_group(1)  # K.Vn of the last chunk; A.Vn may run
                    narrow(accS, aS)
                    warpgroup.fence()
                    for kb in cutlass.range_constexpr(HEAD // 16):  # Vn^T, on top of U^T
                        cute.gemm(
                            mma_w, accW, aS[None, None, kb], rW[None, None, kb, st.index], accW
                        )
                    warpgroup.commit_group()
                    # Off the path: O of the last chunk, the decay, Q.S.  The barrier keeps the
                    # decay's loads, and so its multiplications, behind the products above.
                    cute.arch.sync_warp()
                    cute.autovec_copy(sEq[None, None, st.index], e)
                    warpgroup.wait_group(1)  # A.Vn of the last chunk
                    if cutlass.const_expr(self.fuse):
                        accO.store(accO.load() + q.load())
                    narrow(accO, o)
                    if c > 0:
                        pipe.consumer_release(done)
                        done.advance()
                    accS.store(accS.load() * e_acc.load())
                    if cutlass.const_expr(not self.fuse):
                        for kb in cutlass.range_constexpr(HEAD // 16):
                            cute.gemm(
                                mma_t if kb else mma_t0,
                                accO,
                                aS[None, None, kb],
                                rQ[None, None, kb, st.index],
                                accO,
                            )
                        warpgroup.commit_group()
                    warpgroup.wait_group(1 - self.fuse)  # W.S
                    narrow(accV, aV)
                    if cutlass.const_expr(self.fuse):
                        q.store(accQ.load())
                    warpgroup.fence()
                    for kb in cutlass.range_constexpr(bt // 16):
                        cute.gemm(
                            mma_s, accS, aV[None, None, kb], rK[None, None, kb, st.index], accS
                        )
                    warpgroup.commit_group()
                    for kb in cutlass.range_constexpr(bt // 16):
                        cute.gemm(
                            mma_t if kb or not self.fuse else mma_t0,
                            accO,
                            aV[None, None, kb],
                            rA[None, None, kb, st.index],
                            accO,
                        )
                    warpgroup.commit_group()
                    st.advance()
                    pipe.consumer_wait(st)
                    cute.copy(ld, ld_s[None, None, None, st.index], ld.retile(u))
                    widen(u, accV)
                    self.emit((c - 1) * bt, rows_left, o, sto, st_d, o_s, O.iterator + o_at, pitch)
                    o_at = o_at + bt * pitch
                warpgroup.wait_group(0)
            if cutlass.const_expr(self.fuse):
                accO.store(accO.load() + q.load())
            narrow(accO, o)
            self.emit((chunks - 1) * bt, rows_left, o, sto, st_d, o_s, O.iterator + o_at, pitch)
            if cutlass.const_expr(S is not None):
                if segment == parts - 1:
                    store_state(accS, state(S))

    @cute.jit
    def emit(self, row, rows_left, o, sto, st_d, o_s, at, pitch):
        """Store O^T of a chunk: bf16 registers, the warp's slab transposed, pieces of 32 bytes.

        ``row`` is the chunk's first in the segment; ``at`` is where this lane's first piece
        goes.  The chunk before the first, of negative rows, goes through the motions only: no
        branch around the registers of running products.  The second barrier also keeps the
        stores in front of the next products, in the shadow of the last.
        """
        cute.copy(sto, sto.retile(o), st_d)
        cute.arch.sync_warp()
        x = cute.make_rmem_tensor(o_s.layout.shape, BF16)
        cute.autovec_copy(o_s, x)
        for k in cutlass.range_constexpr(self.bt // 16):
            store_below(row + 16 * k, rows_left, x[None, k], at + 16 * k * pitch)
        cute.arch.sync_warp()


def sequences(CU, S):
    """Number of sequences."""
    return CU.shape[0] - 1 if S is None else S.shape[0]
