"""What the fused kernel left of exact segments: carries, outputs and final states.

Two CTAs for each pair of the fused kernel's.  If the segment that begins with the pair needs a
carry, each composes the segments in front of it for half of the value rows, from the last one that
began freely on, ``S <- M S + C``; others of the chain do the same, which is cheaper than to wait
for one another.  Then ``O <- O + P S`` for the tokens of the segment, and ``M S + C`` once more
where the sequence ends.  Where nothing needs a carry, nothing is read but records.

The outputs' product has the tokens in its rows.  Its keys and its value columns are permuted so
that a thread's elements of P and of O are 16 bytes side by side in global memory; the
permutation is in the state alone, which goes through shared memory.  They come through shared
memory too, but each through a place that its thread alone uses: it is there for what is on its way.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cuda.bindings.driver import CUstream
from cutlass import memory
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.exact import BEGINS, CONTINUES, ENDS
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.pieces import MAPS, Scratch
from candidates._delta_rule.kernel.ragged import in_one_row
from candidates._delta_rule.kernel.step import STATE_WORDS, narrow, product, store_state

__all__ = ["SMEM_BYTES", "Fixup"]

BF16, F32, I32, I64 = op.BF16, op.F32, op.I32, op.I64
ROW, COL = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR

ROWS = 64
"""Value rows of a CTA."""

TILE = 64
"""Tokens of a warpgroup's turn."""

DEPTH = 4
"""Turns for which P and O are on their way; the first begins before the carry."""

_MAP_BYTES, _DIAGONAL_BYTES = 2 * HEAD * HEAD, 4 * HEAD
_THREADS = 256
_TURN_BYTES = (2 * HEAD + 2 * ROWS) * 2 * TILE
_STATE_BYTES = 2 * ROWS * HEAD
# Shared memory: the state, the first turn, then the others where the maps were.
_OFF_TURN = _STATE_BYTES
_OFF_MAPS = _OFF_TURN + _TURN_BYTES
_OFF_DIAGONAL = _OFF_MAPS + max(MAPS * _MAP_BYTES, (DEPTH - 1) * _TURN_BYTES)
_OFF_BARS = _OFF_DIAGONAL + MAPS * _DIAGONAL_BYTES
SMEM_BYTES = _OFF_BARS + 8 * MAPS


class Fixup:
    """The second kernel of a fused call that cuts sequences.

    Parameters
    ----------
    name : str
        What its name begins with.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @cute.jit
    def __call__(
        self,
        O: cute.Tensor,
        S: cute.Tensor | None,
        X: cute.Tensor,
        total: cutlass.Int32,
        stream: CUstream,
    ):
        """Launch on ``stream``, behind the fused kernel with the same arguments.

        Parameters
        ----------
        O, S, X : cute.Tensor
            As for the fused kernel; O may have another dimension before T.
        total : Int32
            CTAs of the fused kernel that X is for.
        stream : CUstream
        """
        if cutlass.const_expr(cute.rank(O) == 4):
            O = in_one_row(O)
        self.kernel.set_name_prefix(self.name, keep_mangled_name=False, remove_cutlass_symbol=True)
        if O.shape[1] > 0 and total > 0:
            mma_m, mma_o = product(OperandMajorMode.MN, HEAD), product(OperandMajorMode.K, ROWS)
            self.kernel(O, S, X, total, mma_m, mma_o).launch(
                grid=((total + 1) // 2 * 2, 1, 1),
                block=(_THREADS, 1, 1),
                stream=stream,
                use_pdl=True,
                min_blocks_per_mp=1,
                preferred_smem_carveout=100,
            )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        O: cute.Tensor,
        S: cute.Tensor | None,
        X: cute.Tensor,
        total: cutlass.Int32,
        mma_m: cute.TiledMma,
        mma_o: cute.TiledMma,
    ):
        H = O.shape[1]
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane, t = cute.arch.lane_idx(), cute.arch.thread_idx()[0] % 128
        wg = warp_id // 4
        pair, half = cute.arch.block_idx()[0] // 2, cute.arch.block_idx()[0] % 2
        smem = memory.SmemAllocator()
        s_map = sm90.make_smem_layout_b(COL, (TILE, HEAD, HEAD), BF16, MAPS)
        s_state = sm90.make_smem_layout_b(ROW, (TILE, ROWS, HEAD), BF16, 1)
        base = smem.allocate_array(BF16, SMEM_BYTES // 2, byte_alignment=1024)
        at = base.toint()
        view = lambda byte, sl: cute.make_tensor(
            cute.recast_ptr(base + byte // 2, sl.inner, BF16), sl.outer
        )
        sM, sS = view(_OFF_MAPS, s_map), view(0, s_state)

        # Launched when the fused kernel is about to end: what that writes is there from here on.
        cute.arch.griddepcontrol_wait()
        records = X.iterator.toint()
        begins, chain, row0, end = op.ptx(
            "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            [I32] * 4,
            [records + I64(pair) * (8 * Scratch.RECORD)],
        )
        before, after = self.flags(records, max(pair - 1 - lane, 0))
        if begins % ENDS == BEGINS:
            # Pairs in front that are exact segments as a whole, then a segment that began freely.
            steps, run = I32(0), I32(32)
            while run == 32:
                stay = before != BEGINS or after != CONTINUES
                run = cute.arch.warp_redux_sync(op.select(stay, lane, I32(32)), "min")
                steps = steps + run
                if run == 32:
                    before, after = self.flags(records, max(pair - 1 - steps - lane, 0))
            source = 2 * (pair - 1 - steps) + 1
            if cute.arch.shuffle_sync(after, offset=run) == CONTINUES:
                source = source - 1
            steps = cute.arch.make_warp_uniform(steps)
            source = cute.arch.make_warp_uniform(source)
            first = 2 * (pair - steps)
            chain, row0, end = (cute.arch.make_warp_uniform(x) for x in (chain, row0, end))
            n, h = chain // H, chain % H
            # Where the sequence ends, this segment's own map is needed as well.
            maps = steps
            if cutlass.const_expr(S is not None):
                if begins >= ENDS:
                    maps = steps + 1
            maps = cute.arch.make_warp_uniform(maps)

            bars_at = at + _OFF_BARS
            scratch = Scratch(total)
            entries = X.iterator + scratch.entries
            if warp_id == 0:
                if lane == 0:
                    for i in cutlass.range_constexpr(MAPS):
                        ops.bar_init(bars_at + 8 * i, 1)
                    cute.arch.mbarrier_init_fence()
                    for i in cutlass.range(min(maps, MAPS), unroll=1):
                        self.load(entries, first + 2 * i, at, i)
                cute.arch.sync_warp()

            # A thread has rows t / 4 and 8 more of a warp's 16, and of each row 8 of 32 columns.
            row = row0 + wg * TILE + t // 32 * 16 + lane // 4
            turns = (end - row0 + 2 * TILE - 1) // (2 * TILE)
            pitch = I64(H) * (2 * HEAD)
            place = (I64(row) * H + h) * (2 * HEAD) + lane % 4 * 16
            o_at = O.iterator.toint() + place + half * (2 * ROWS)
            p_at = records + I64(scratch.outputs) * 4 + place
            own = at + cute.arch.thread_idx()[0] * 16
            fetch_rows(own + _OFF_TURN, row, end, p_at, o_at, pitch)

            for m in (mma_m, mma_o):
                m.set(warpgroup.Field.ACCUMULATE, True)
            cute.arch.sync_threads()
            if wg == 0:
                rM = mma_m.make_fragment_B(mma_m.get_slice(t).partition_B(sM))
                acc = cute.make_rmem_tensor(mma_m.partition_shape_C((ROWS, HEAD)), F32)
                a = cute.make_rmem_tensor(mma_m.partition_shape_A((ROWS, HEAD)), BF16)
                ahead = cute.make_rmem_tensor(cute.make_layout((4, 16)), F32)
                flat_acc = cute.make_tensor(acc.iterator, ahead.layout)
                cute.autovec_copy(fragment(entries, source, half, t), flat_acc)
                cute.autovec_copy(fragment(entries, first, half, t), ahead)
                slot, phase = I32(0), I32(0)
                for i in cutlass.range(steps, unroll=1):
                    narrow(acc, a)
                    ops.bar_wait(bars_at + 8 * slot, phase)
                    self.start(acc, ahead, at, slot, t)
                    # The next one, which is there also behind the last step: this segment's own.
                    cute.autovec_copy(fragment(entries, first + 2 * (i + 1), half, t), ahead)
                    warpgroup.fence()
                    for kb in cutlass.range_constexpr(HEAD // 16):
                        cute.gemm(mma_m, acc, a[None, None, kb], rM[None, None, kb, slot], acc)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    if i + MAPS < maps:
                        ops.sync_group(1)
                        if t == 0:
                            self.load(entries, first + 2 * (i + MAPS), at, slot)
                        ops.sync_warp()
                    slot = slot + 1
                    if slot == MAPS:
                        slot = I32(0)
                        phase = phase ^ 1

                narrow(acc, a)
                self.put_state(a, at, t)
                ops.fence_async()
                if cutlass.const_expr(S is not None):
                    if maps > steps:
                        ops.bar_wait(bars_at + 8 * slot, phase)
                        self.start(acc, ahead, at, slot, t)
                        warpgroup.fence()
                        for kb in cutlass.range_constexpr(HEAD // 16):
                            cute.gemm(mma_m, acc, a[None, None, kb], rM[None, None, kb, slot], acc)
                        warpgroup.commit_group()
                        warpgroup.wait_group(0)
                        tile = cute.local_tile(S[n, h, None, None], (ROWS, HEAD), (half, 0))  # type: ignore[index]
                        store_state(acc, mma_m.get_slice(t).partition_C(tile))
            cute.arch.sync_threads()  # the state is there, the maps are done with
            step = pitch * (2 * TILE)
            for i in cutlass.range_constexpr(1, DEPTH):
                place = own + (_OFF_MAPS + (i - 1) * _TURN_BYTES)
                fetch_rows(place, row + 2 * TILE * i, end, p_at + step * i, o_at + step * i, pitch)

            rS = mma_o.make_fragment_B(mma_o.get_slice(t).partition_B(sS))
            aP = cute.make_rmem_tensor(mma_o.partition_shape_A((TILE, HEAD)), BF16)
            out = cute.make_rmem_tensor(mma_o.partition_shape_C((TILE, ROWS)), F32)
            words = cute.recast_tensor(aP, I32)
            turn = I32(0)
            for _ in cutlass.range(cute.arch.make_warp_uniform(turns), unroll=1):
                cute.arch.cp_async_wait_group(DEPTH - 1)
                place = own + (_OFF_TURN + turn * _TURN_BYTES)
                for i in cutlass.range_constexpr(HEAD // 16):
                    r, j = i // 4, i % 4
                    x = op.load_i32x4(place, _THREADS * 16 * i)
                    for w in cutlass.range_constexpr(4):
                        words[8 * j + 4 * (w // 2) + 2 * (w % 2) + r] = x[w]
                for i in cutlass.range_constexpr(ROWS // 16):
                    r, j = i // 2, i % 2
                    x = op.load_i32x4(place, _THREADS * 16 * (HEAD // 16 + i))
                    for w in cutlass.range_constexpr(4):
                        low, high = op.unpack(x[w])
                        out[16 * j + 4 * w + 2 * r] = low
                        out[16 * j + 4 * w + 2 * r + 1] = high
                fetch_rows(
                    place,
                    row + 2 * TILE * DEPTH,
                    end,
                    p_at + step * DEPTH,
                    o_at + step * DEPTH,
                    pitch,
                )
                turn = turn + 1
                if turn == DEPTH:
                    turn = I32(0)
                warpgroup.fence()
                for kb in cutlass.range_constexpr(HEAD // 16):
                    cute.gemm(mma_o, out, aP[None, None, kb], rS[None, None, kb, 0], out)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                for r in cutlass.range_constexpr(2):
                    for j in cutlass.range_constexpr(ROWS // 32):
                        x = [
                            op.pack(out[4 * i + 2 * r], out[4 * i + 2 * r + 1])
                            for i in range(4 * j, 4 * j + 4)
                        ]
                        store_below(row + 8 * r, end, o_at + pitch * (8 * r), 64 * j, x)
                row = row + 2 * TILE
                o_at = o_at + step
                p_at = p_at + step

    @cute.jit
    def flags(self, records, pair):
        """Flags of a pair's two CTAs."""
        place = records + I64(pair) * (8 * Scratch.RECORD)
        return [
            op.ptx(f"ld.global.b32 {{$w0}}, [{{$r0}}+{4 * Scratch.RECORD * i}];", [I32], [place])
            for i in range(2)
        ]

    @cute.jit
    def load(self, entries, piece, at, slot):
        """Fetch the map of an entry; one thread."""
        source = (entries + piece * Scratch.ENTRY + Scratch.MAP).toint()
        bar = at + _OFF_BARS + 8 * slot
        ops.bar_expect(bar, _MAP_BYTES + _DIAGONAL_BYTES)
        ops.fetch(at + _OFF_MAPS + slot * _MAP_BYTES, source, _MAP_BYTES, bar)
        ops.fetch(
            at + _OFF_DIAGONAL + slot * _DIAGONAL_BYTES, source + _MAP_BYTES, _DIAGONAL_BYTES, bar
        )

    def start(self, acc, ahead, at, slot, t):
        """C and what the diagonal of a map makes of the state, in fp32."""
        place = at + _OFF_DIAGONAL + slot * _DIAGONAL_BYTES + t % 4 * 16
        for j in range(8):
            by = op.load_f32x4(place, 64 * j)
            for i in range(4):
                for r in range(2):
                    k = (2 * j + i // 2) * 4 + 2 * r + i % 2
                    acc[k] = op.fma(acc[k], by[i], ahead[k])

    @cute.jit
    def put_state(self, a, at, t):
        """The bf16 state, both of its dimensions permuted, as operand of the outputs' product.

        Column 8 (4 J + j) + 2 q + e of the product is value 32 J + 8 q + 2 j + e; keys likewise.
        """
        words = cute.recast_tensor(a, I32)
        for r in cutlass.range_constexpr(2):
            value = t // 32 * 16 + t % 32 // 4 + 8 * r
            column = value // 32 * 32 + value % 8 // 2 * 8 + value % 32 // 8 * 2 + value % 2
            for g in cutlass.range_constexpr(HEAD // 32):
                piece = (4 * (g % 2) + t % 4) ^ (column % 8)
                op.store_i32x4(
                    at + column * 128 + piece * 16,
                    [words[2 * (4 * g + j) + r] for j in range(4)],
                    g // 2 * (ROWS * 128),
                )


@cute.jit
def fragment(entries, piece, block, t):
    """This thread's 64 elements of C of an entry, 64-row block ``block``, as (4, 16)."""
    at = entries + piece * Scratch.ENTRY + block * (STATE_WORDS // 2) + t * 4
    return cute.make_tensor(at.align(16), cute.make_layout((4, 16), stride=(1, 512)))


def fetch_rows(target, row, end, p_at, o_at, pitch):
    """A thread's pieces of P and O of two rows, 8 apart, on their way; 0 from row ``end`` on."""
    i = 0
    for columns, source in ((HEAD, p_at), (ROWS, o_at)):
        for r in range(2):
            size = op.select(row + 8 * r < end, I32(16), I32(0))
            for j in range(columns // 32):
                ops.copy16(
                    target, source + (pitch * (8 * r) + I64(64 * j)), size, _THREADS * 16 * i
                )
                i += 1
    cute.arch.cp_async_commit_group()


def store_below(row, end, address, offset: int, values):
    """Store four registers if ``row < end``."""
    op.ptx(
        "{ .reg .pred p; setp.lt.s32 p, {$r0}, {$r1};"
        " @p st.global.v4.b32 [{$r2}+" + f"{offset}" + "], {{$r3}, {$r4}, {$r5}, {$r6}}; }",
        inputs=[row, end, address, *values],
    )
