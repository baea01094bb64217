"""The states at inner segment boundaries: an exact affine scan, in CuTe DSL for sm_90a.

A segment acts on its incoming state as ``S^T -> S^T M^T + C^T`` (M keys x keys, C the state it
leaves when it starts from zero).  C and M come from the same scan of the chunks, M from the
identity with U = 0; :class:`Compose` runs it for all segments but a sequence's last at once.
Segment 0 starts from the true initial state instead, so its C is the next state itself and it
needs no M.  :class:`Carry` then walks the boundaries, p - 2 products a sequence and head.

One entry of the buffer belongs to one inner boundary: fp32 C of the segment in front of it, which
Carry replaces by the true state, in the order of accumulator fragments; then that segment's M^T
in bf16 as the shared-memory image Carry multiplies with.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import memory, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from .image import HEAD, ImageLayout, unroll_of
from .step import (
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
    widen,
    zero,
)

__all__ = ["Carry", "Compose"]

BF16, F32, I32, I64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64
ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
MAP_BYTES = 2 * HEAD * HEAD


class Compose:
    """Pass 1: C of segments 0 to p - 2 and M of segments 1 to p - 2.

    The dependent path of the scan's step alone: no Q, no O.

    Parameters
    ----------
    bt, rows, segments : int
        As for the scan; segments at least 2.
    """

    def __init__(self, bt: int, rows: int, segments: int) -> None:
        self.bt, self.rows, self.segments = bt, rows, segments
        self.layout = ImageLayout(bt)
        self.unroll = unroll_of(bt, rows)
        self.wgs = rows // 64
        # A stage: W | Kbar | decay, padded to 1 KiB | our rows of U.
        self.off_k, self.off_e = 2 * bt * HEAD, 4 * bt * HEAD
        self.off_u = self.off_e + 1024
        self.stage = self.off_u + 2 * bt * rows
        self.loaded = self.off_e + 4 * HEAD + 2 * bt * rows
        # C and M of four segments are more CTAs than an H200 has SMs as soon as 14 heads: two
        # to an SM rather than a second wave.
        self.blocks = 3 - self.wgs
        room = SMEM_LIMIT // self.blocks - 1024 * (self.blocks - 1) - 512
        self.stages = min(MAX_STAGES, room // self.stage)
        self.jobs = 2 * segments - 3  # C_0, then C_s and M_s

    @cute.jit
    def __call__(
        self,
        X: cute.Tensor,
        CU: cute.Tensor,
        S0: cute.Tensor | None,
        BUF: cute.Tensor,
        T: cutlass.Int32,
        N: cutlass.Int32,
        H: cutlass.Int32,
        stream: CUstream,
    ):
        """Launch; N and H are positive."""
        self.kernel.set_name_prefix(
            f"kda_pass1_bt{self.bt}_r{self.rows}_s{self.segments}",
            keep_mangled_name=False,
            remove_cutlass_symbol=True,
        )
        mma_t, mma_s = product(OperandMajorMode.K, self.bt), product(OperandMajorMode.MN, HEAD)
        self.kernel(X, CU, S0, BUF, T, N, mma_t, mma_s).launch(
            grid=(HEAD // self.rows * self.jobs * N, H, 1),
            block=(128 * self.wgs + 128, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        X: cute.Tensor,
        CU: cute.Tensor,
        S0: cute.Tensor | None,
        BUF: cute.Tensor,
        T: cutlass.Int32,
        N: cutlass.Int32,
        mma_t: cute.TiledMma,
        mma_s: cute.TiledMma,
    ):
        bt, wgs, layout = self.bt, self.wgs, self.layout
        tidx, h = cute.arch.thread_idx()[0], cute.arch.block_idx()[1]
        split = HEAD // self.rows
        part, job = cute.arch.block_idx()[0] % split, cute.arch.block_idx()[0] // split
        job, n = job % self.jobs, job // self.jobs
        segment = (job + 1) // 2
        is_map = job > 0 and job % 2 == 0
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = warp_id // 4

        row0, _row1, chunks, slot0 = sequence_slots(CU, n, T, bt, self.unroll)
        entry = sequence_entry(row0, n, T, N, bt, self.unroll, self.segments) + segment
        parts = sequence_parts(chunks, self.segments, self.unroll)
        first, chunks = segment_chunks(chunks, segment, parts, self.unroll)

        smem = memory.SmemAllocator()
        base = smem.allocate_array(BF16, self.stages * self.stage // 2, byte_alignment=1024)
        bars = smem.allocate_array(I64, 2 * self.stages)
        pipe = bulk_pipeline(bars, self.stages, self.loaded, 4 * wgs)

        def view(byte, sl):  # (rows, cols, stages) of one part of the stage
            p = cute.recast_ptr(base + byte // 2, sl.inner, BF16)
            stages = cute.make_layout(self.stages, stride=self.stage // 2)
            return cute.make_tensor(p, cute.append(cute.slice_(sl.outer, (None, None, 0)), stages))

        b_sl = lambda order, rows, k: sm90.make_smem_layout_b(order, (64, rows, k), BF16, 1)
        sW, sK = view(0, b_sl(ROW, bt, HEAD)), view(self.off_k, b_sl(COL, HEAD, bt))
        sU = view(self.off_u, sm90.make_smem_layout_epi(BF16, COL, (64 * wgs, bt), 1))
        sE = cute.make_tensor(
            cute.recast_ptr(base + self.off_e // 2, dtype=F32),
            cute.make_layout((4, 8, 4, self.stages), stride=(1, 16, 4, self.stage // 4)),
        )

        if segment >= parts - 1:
            pass  # no inner boundary behind this segment
        elif warp_id >= 4 * wgs:
            cute.arch.setmaxregister_decrease(40)
            if warp_id == 4 * wgs:
                bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BF16)
                # (image offset, stage offset, size) in elements; W's two blocks lie apart, with
                # Qhat behind each.
                block, u = bt * 64, bt * self.rows
                pieces = (
                    (0, 0, block),
                    (layout.block_q // 2, block, block),
                    (layout.off_k // 2, self.off_k // 2, 2 * block),
                    (layout.off_e // 2, self.off_e // 2, 2 * HEAD),
                    (layout.common // 2 + part * u, self.off_u // 2, u),
                )
                st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
                for c in cutlass.range(chunks + 1, unroll=1):  # the last twice, as in the scan
                    pipe.producer_acquire(st)
                    src = X[slot0 + first + min(c, chunks - 1), h, None].iterator
                    dst = base + st.index * (self.stage // 2)
                    with cute.arch.elect_one():
                        for off, at, size in pieces:
                            cute.copy(
                                bulk,
                                cute.make_tensor(src + off, cute.make_layout(size)),
                                cute.make_tensor(dst + at, cute.make_layout(size)),
                                mbar_ptr=pipe.producer_get_barrier(st),
                            )
                    st.advance()
        else:
            cute.arch.setmaxregister_increase(232 if self.wgs == 2 else 208)
            t, block = tidx % 128, part * wgs + wg
            for m in (mma_t, mma_s):
                m.set(warpgroup.Field.ACCUMULATE, True)
            thr_t, thr_s = mma_t.get_slice(t), mma_s.get_slice(t)
            rW = mma_t.make_fragment_B(thr_t.partition_B(sW))
            rK = mma_s.make_fragment_B(thr_s.partition_B(sK))
            sEq = sE[None, None, t % 4, None]
            acc = lambda mma, cols: cute.make_rmem_tensor(mma.partition_shape_C((64, cols)), F32)
            a_op = lambda k: cute.make_rmem_tensor(mma_t.partition_shape_A((64, k)), BF16)
            accS, accV, aS, aV = acc(mma_s, HEAD), acc(mma_t, bt), a_op(HEAD), a_op(bt)
            u = cute.make_rmem_tensor(accV.layout, BF16)
            e = cute.make_rmem_tensor(cute.make_layout((4, 8)), F32)
            e_acc = cute.make_tensor(
                e.iterator, cute.make_layout(((2, 2, HEAD // 8), 1, 1), stride=((1, 0, 2), 0, 0))
            )
            ld = cute.make_tiled_copy_C(
                cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_t
            )
            ld_s = ld.get_slice(t).partition_S(cute.local_tile(sU, (64, bt), (wg, 0, None)))

            # The start: S0 for segment 0, the identity for a map, zero for the others.
            keep = I32(-1)
            zero(accS)
            row = block * 64 + t // 32 * 16 + t % 32 // 4  # and row + 8
            if is_map:
                keep = I32(0)
                for j in cutlass.range_constexpr(HEAD // 8):
                    for i in (0, 1, 2, 3):  # of a thread's elements in columns 8 j to 8 j + 7
                        if row + i // 2 * 8 == 8 * j + t % 4 * 2 + i % 2:
                            accS[4 * j + i] = F32(1.0)
            if cutlass.const_expr(S0 is not None):
                if segment == 0:
                    tile = cute.local_tile(S0[n, h, None, None], (64, HEAD), (block, 0))  # type: ignore[index]
                    load_state(thr_s.partition_C(tile), accS)

            st = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            pipe.consumer_wait(st)
            cute.copy(ld, ld_s[None, None, None, st.index], ld.retile(u))
            widen(u, accV, keep)
            for c0 in cutlass.range(0, chunks, self.unroll, unroll=1):
                for c in [c0 + i for i in range(self.unroll)]:
                    warpgroup.wait_group(0)  # K.Vn of the last chunk
                    narrow(accS, aS)
                    warpgroup.fence()
                    for kb in cutlass.range_constexpr(HEAD // 16):  # Vn^T, on top of U^T
                        cute.gemm(
                            mma_t, accV, aS[None, None, kb], rW[None, None, kb, st.index], accV
                        )
                    warpgroup.commit_group()
                    if c > 0:
                        pipe.consumer_release(done)
                        done.advance()
                    cute.arch.sync_warp()  # as in the scan: the decay behind the products
                    cute.autovec_copy(sEq[None, None, st.index], e)
                    accS.store(accS.load() * e_acc.load())
                    warpgroup.wait_group(0)  # W.S
                    narrow(accV, aV)
                    warpgroup.fence()
                    for kb in cutlass.range_constexpr(bt // 16):
                        cute.gemm(
                            mma_s, accS, aV[None, None, kb], rK[None, None, kb, st.index], accS
                        )
                    warpgroup.commit_group()
                    st.advance()
                    pipe.consumer_wait(st)
                    cute.copy(ld, ld_s[None, None, None, st.index], ld.retile(u))
                    widen(u, accV, keep)
                warpgroup.wait_group(0)

            if is_map:
                # Row-major halves of 64 columns in the 128-byte swizzle: image.swizzled_offset.
                at = BUF[entry, h, None].iterator + STATE_WORDS
                out = cute.recast_ptr(at.align(16), dtype=I32) + row * 32 + t % 4
                a = cute.make_rmem_tensor(accS.layout, BF16)
                narrow(accS, a)
                pairs = cute.recast_tensor(a, I32)
                for i in cutlass.range_constexpr(STATE_WORDS // 4 // 128):
                    piece = i // 2 % 8 ^ t % 32 // 4
                    word = i // 16 * HEAD * 32 + i % 2 * 8 * 32 + piece * 4
                    cute.make_tensor(out + word, cute.make_layout(1))[0] = pairs[i]
            else:
                cute.autovec_copy(
                    cute.make_tensor(accS.iterator, cute.make_layout((4, 16))),
                    entry_fragment(BUF, entry, h, block, t),
                )


class Carry:
    """Between the passes: each boundary's C becomes the true state.

    One warpgroup for 64 value rows of a sequence and head: bf16 state times bf16 M in fp32, on
    top of C.  All maps of a sequence fit in shared memory and are fetched at once.

    Parameters
    ----------
    bt, segments, unroll : int
        As for the scan; segments at least 4.
    """

    def __init__(self, bt: int, segments: int, unroll: int) -> None:
        self.bt, self.segments, self.unroll = bt, segments, unroll
        self.maps = segments - 2

    @cute.jit
    def __call__(
        self,
        CU: cute.Tensor,
        BUF: cute.Tensor,
        T: cutlass.Int32,
        N: cutlass.Int32,
        H: cutlass.Int32,
        stream: CUstream,
    ):
        """Launch; N and H are positive."""
        self.kernel.set_name_prefix(
            f"kda_carry_bt{self.bt}_s{self.segments}",
            keep_mangled_name=False,
            remove_cutlass_symbol=True,
        )
        self.kernel(CU, BUF, T, N, product(OperandMajorMode.MN, HEAD)).launch(
            grid=(2 * N, H, 1),
            block=(128, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        CU: cute.Tensor,
        BUF: cute.Tensor,
        T: cutlass.Int32,
        N: cutlass.Int32,
        mma: cute.TiledMma,
    ):
        t, h = cute.arch.thread_idx()[0], cute.arch.block_idx()[1]
        block, n = cute.arch.block_idx()[0] % 2, cute.arch.block_idx()[0] // 2
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row0, _row1, chunks, _slot0 = sequence_slots(CU, n, T, self.bt, self.unroll)
        entry = sequence_entry(row0, n, T, N, self.bt, self.unroll, self.segments)
        parts = sequence_parts(chunks, self.segments, self.unroll)

        smem = memory.SmemAllocator()
        sl = sm90.make_smem_layout_b(COL, (64, HEAD, HEAD), BF16, self.maps)
        sM = smem.allocate_tensor(BF16, sl.outer, byte_alignment=1024, swizzle=sl.inner)
        flat = cute.recast_ptr(sM.iterator, dtype=BF16)
        bars = smem.allocate_array(I64, self.maps)
        if t == 0:
            for i in range(self.maps):
                cute.arch.mbarrier_init(bars + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if parts > 2:
            if warp_id == 0:
                bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), BF16)
                for i in cutlass.range(parts - 2, unroll=1):
                    at = BUF[entry + 1 + i, h, None].iterator + STATE_WORDS
                    src = cute.recast_ptr(at.align(16), dtype=BF16)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bars + i, MAP_BYTES)
                        cute.copy(
                            bulk,
                            cute.make_tensor(src, cute.make_layout(HEAD * HEAD)),
                            cute.make_tensor(flat + i * HEAD * HEAD, cute.make_layout(HEAD * HEAD)),
                            mbar_ptr=bars + i,
                        )
            mma.set(warpgroup.Field.ACCUMULATE, True)
            rM = mma.make_fragment_B(mma.get_slice(t).partition_B(sM))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((64, HEAD)), F32)
            a = cute.make_rmem_tensor(mma.partition_shape_A((64, HEAD)), BF16)
            ahead = cute.make_rmem_tensor(cute.make_layout((4, 16)), F32)
            flat_acc = cute.make_tensor(acc.iterator, ahead.layout)
            cute.autovec_copy(entry_fragment(BUF, entry, h, block, t), flat_acc)
            cute.autovec_copy(entry_fragment(BUF, entry + 1, h, block, t), ahead)
            for i in cutlass.range(parts - 2, unroll=1):
                narrow(acc, a)
                flat_acc.store(ahead.load())
                cute.autovec_copy(
                    entry_fragment(BUF, entry + min(i + 2, parts - 2), h, block, t), ahead
                )
                cute.arch.mbarrier_wait(bars + i, 0)
                warpgroup.fence()
                for kb in cutlass.range_constexpr(HEAD // 16):
                    cute.gemm(mma, acc, a[None, None, kb], rM[None, None, kb, i], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                cute.autovec_copy(flat_acc, entry_fragment(BUF, entry + 1 + i, h, block, t))
