"""The building warpgroups of the fused kernel: inputs into the ring, and two matrices of a chunk.

Of 64 tokens a warp has 16 rows of every matrix.  Of 32 tokens, whose keys over queries are one
operand of 64 rows, two warps have rows of keys and of X, and the others those of queries and of
outputs.  Scores come from wgmma on the inputs as they lie in shared memory; X from exact 8 x 8
blocks in fp32, merged in tf32 and then in fp16, which keep equally many digits.  Every
intermediate is an entry of the answer, so nothing cancels.
"""

from __future__ import annotations

import itertools
import math

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from candidates._delta_rule.kernel import fused_ops as ops
from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Activation
from candidates._delta_rule.kernel.options import L2NORM_EPS, Options
from candidates._delta_rule.kernel.prep_inverse import blank
from candidates.gdn_prefill.kernel.fused_jobs import Jobs
from candidates.gdn_prefill.kernel.fused_ops import (
    as_operand,
    diagonal,
    mma16,
    prefix_sum,
    sync_threads_of,
)
from candidates.gdn_prefill.kernel.fused_plan import (
    HEAD,
    LOWER_PITCH,
    TILE,
    TILE_BYTES,
    lower_block,
    strict_block,
)

__all__ = ["Build"]

BF16, F32, I32, I64 = op.BF16, op.F32, op.I32, op.I64
_PITCH = 4 * LOWER_PITCH


class Build(Jobs, Activation):
    """The part of the fused kernel that loads inputs and makes the matrices of chunks."""

    options: Options

    @cute.jit
    def build(
        self, Q, K, V, G, B, scale, base, warp_id, lane, mma_b, mma_b0
    ):  # fmt: skip
        """One of the building warpgroups: every ``builders``-th chunk of the CTA's jobs."""
        plan = self.plan
        at = base.toint()
        w, group = warp_id % 4, warp_id // 4 - plan.scanners
        own = at + (plan.off_group + group * plan.size_group)
        number = group + 1
        full, empty = at + plan.off_bar, at + (plan.off_bar + 8 * plan.stages)
        turn = plan.builders

        # wgmma: rows of K or Q by rows of K.
        tile = (2 * plan.bt, 2 * plan.bt, HEAD)
        a_sl = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, BF16, 1)
        b_sl = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, BF16, 1)
        block = (64, HEAD, plan.stages)
        t = w * 32 + lane
        thr = mma_b.get_slice(t)
        left, right = self.in_stages(base, a_sl), self.in_stages(base, b_sl)
        right = cute.local_tile(right, (plan.bt, HEAD, plan.stages), (0, 0, 0))
        rA = [
            mma_b.make_fragment_A(thr.partition_A(cute.local_tile(left, block, (part, 0, 0))))
            for part in range(plan.bt // 32)
        ]
        rB = mma_b.make_fragment_B(thr.partition_B(right))
        acc = cute.make_rmem_tensor(mma_b.partition_shape_C((64, plan.bt)), F32)
        queries = cute.make_rmem_tensor(4 * plan.tiles, I32)  # Aqk as left operand

        for j in cutlass.range(self.turns, unroll=1):
            self.meet(j)
            job, count, _ = self.job(at, j)
            _, h, first, rows, warm, half, _, is_map, *_, back = job
            begin = self.chunks_before(at, j)
            watched = op.select(back > 0, warm, I32(0))  # where keys have to be in bounds
            key_head = cute.arch.make_warp_uniform(h // (V.shape[1] // K.shape[1]))
            inputs = Q, K, V, first, rows, (h, key_head), half, is_map
            # Builders take turns through both jobs: the stage of a first chunk is free because
            # this builder waited for it when it made its last one.
            mine = group - begin % turn
            if mine < 0:
                mine = mine + turn
            s = (begin + mine) % plan.stages
            parity, slot = (begin + mine) // plan.stages & 1, (begin + mine) % plan.slots
            raw = I32(0)
            if mine < count:
                self.fetch(*inputs, at, mine, s, w, lane)
                raw = self.number(G, B, first, rows, h, mine, w, lane)
            cute.arch.cp_async_commit_group()
            for c in cutlass.range(mine, count, turn, unroll=1):
                later, s_later, parity_later = c + turn, s + turn, parity
                if s_later >= plan.stages:
                    s_later = s_later - plan.stages
                    parity_later = parity ^ 1
                table = at + (plan.off_table + s * plan.table)
                self.put_number(raw, table, G, B, h, rows - c * plan.bt, w, lane)
                cute.arch.cp_async_wait_group(0)
                if cutlass.const_expr(self.options.l2norm):
                    ops.sync_warp()
                    if w >= plan.first_fetcher:
                        self.norms(at + s * plan.stage, table, w - plan.first_fetcher, lane)
                ops.fence_async()
                ops.sync_group(number)  # the inputs are there; the last chunk's blocks are read
                self.score(acc, rA[0], rB, s, mma_b, mma_b0)
                # While that runs.  Frees that stage, and the slot of this chunk's matrices.
                ops.bar_wait(empty + 8 * s_later, parity_later ^ 1)
                if later < count:
                    self.fetch(*inputs, at, later, s_later, w, lane)
                    raw = self.number(G, B, first, rows, h, later, w, lane)
                cute.arch.cp_async_commit_group()
                sums, end = self.sum_gates(own, table, scale, w, lane)
                warpgroup.wait_group(0)
                slots = at + (plan.off_slot + slot * plan.slot)
                if cutlass.const_expr(plan.bt == 64):
                    self.keys(acc, own, sums, table, at, c * plan.bt < watched, w, lane)
                    ops.sync_warp()
                    self.score(acc, rA[1], rB, s, mma_b, mma_b0)
                    corner = self.diagonal(own, w, lane)  # while that runs
                    warpgroup.wait_group(0)
                    self.queries(acc, queries, sums, table, w, lane)
                    self.invert(corner, own, slots, sums, table, end, number, w, lane)
                    ops.sync_group(number)  # X is there
                    self.outputs(queries, own, slots, table, scale, w, lane)
                else:
                    if w < 2:
                        self.keys(acc, own, sums, table, at, c * plan.bt < watched, w, lane)
                        ops.sync_warp()
                        corner = self.diagonal(own, w, lane)
                        self.invert(corner, own, slots, sums, table, end, number, w, lane)
                    else:
                        self.queries(acc, queries, sums, table, w - 2, lane)
                    ops.sync_group(number)  # X is there
                    if w >= 2:
                        self.outputs(queries, own, slots, table, scale, w - 2, lane)
                ops.fence_async()
                ops.sync_warp()
                if lane == 0:
                    ops.bar_arrive(full + 8 * s)
                s, parity = s_later, parity_later
                if cutlass.const_expr(turn % plan.slots > 0):
                    slot = slot + turn
                    if slot >= plan.slots:
                        slot = slot - plan.slots

    def score(self, acc, rA, rB, s, mma_b, mma_b0):
        """64 rows of keys over queries, by those of keys."""
        warpgroup.fence()
        for kb in range(HEAD // 16):
            mma = mma_b if kb else mma_b0
            cute.gemm(mma, acc, rA[None, None, kb, s], rB[None, None, kb, s], acc)
        warpgroup.commit_group()

    def in_stages(self, base, layout):
        """(rows, columns, stages) of keys over queries."""
        return ring(base, 0, layout, self.plan.stages, self.plan.stage)

    # ------------------------------------------------------------------------------- inputs

    @cute.jit
    def fetch(self, Q, K, V, first, rows, heads, half, is_map, at, c, s, w, lane):
        """Inputs of chunk ``c`` into stage ``s``, on their way; rows from ``rows`` on are 0, and
        all values where a map is scanned.

        By the warps that do not invert, if there are some.
        """
        plan = self.plan
        lane = ops.opaque(lane)  # addresses are found anew each time: registers are short
        stage, begin, left = at + s * plan.stage, first + c * plan.bt, rows - c * plan.bt
        h, key_head = heads
        # (first byte in the stage, channels, tensor, bytes of its rows to skip)
        parts = (
            (0, HEAD, K, I64(K.stride[1]) * I64(key_head * 2)),
            (plan.off_q, HEAD, Q, I64(Q.stride[1]) * I64(key_head * 2)),
            (plan.off_v, plan.rows, V, I64(V.stride[1]) * I64(h * 2) + I64(half * (2 * plan.rows))),
        )
        if w >= plan.first_fetcher:
            if left >= plan.bt and is_map == 0:
                for part in parts:
                    self.fetch_part(stage, *part, begin, None, w - plan.first_fetcher, lane)
            else:
                values = op.select(is_map > 0, I32(0), left)
                for part, there in zip(parts, (left, left, values), strict=True):
                    self.fetch_part(stage, *part, begin, there, w - plan.first_fetcher, lane)

    def fetch_part(self, stage, first, width, X, skipped, begin, left, w, lane):
        """A lane takes one of the 16-byte columns, in rows that are multiples of 8 apart: a row is
        always the same in its 8, and so is its swizzle."""
        bt, every = self.plan.bt, 2 * self.plan.fetchers
        turns = 1 if width < HEAD else 8 // every
        if width < HEAD:
            row, column = (w >> 1) * (bt // 2) + (w & 1) * 4 + (lane >> 3), lane & 7
        else:
            row, column = w * (2 * turns) + (lane >> 4), lane & 15
        target = stage + row * 128 + (((column & 7) ^ (row & 7)) << 4)
        if width == HEAD:
            pitch = bt * 128 if first == self.plan.off_v else self.plan.half
            target = target + (column >> 3) * pitch
        step = I32(X.stride[0]) * 2
        source = X.iterator.toint() + skipped + I64(column * 16)
        source = op.mad_wide(begin + row, step, source)
        for turn in range(turns):  # two rows on, the swizzle exchanges pieces that are 2 apart
            to = target ^ (32 * turn)
            for i in range(bt // 8 * width // HEAD):
                on = 8 * i + 2 * turn
                here = op.mad_wide(step, I32(on), source)
                if left is None:
                    ops.copy16_whole(to, here, first + on * 128)
                else:
                    size = op.select(row + on < left, I32(16), I32(0))
                    ops.copy16(to, here, size, first + on * 128)

    def token_of(self, w, lane):
        """Token of a chunk whose gate, if the first is 0, or write strength, if 1, is a lane's."""
        w, warps = w - self.plan.first_fetcher, self.plan.bt // 32
        return w // warps, (w % warps) * 32 + lane

    @cute.jit
    def number(self, G, B, first, rows, h, c, w, lane):
        """Of chunk ``c`` a token's gate or write strength; as bits, since to convert them would be
        to wait for them."""
        which, token = self.token_of(w, lane)
        token = token + c * self.plan.bt
        row = first + op.select(token < rows, token, I32(0))
        bits = I32(0)
        if which == 0:
            bits = load_bits(G.g, row, h)
        elif which == 1:
            bits = load_bits(B, row, h)
        return bits

    @cute.jit
    def put_number(self, bits, table, G, B, h, left, w, lane):
        """What :meth:`number` gave to a stage's table, activated; gates in units of ln 2, summed
        over each 32 tokens up to each.  Of the chunk's tokens ``left`` are there."""
        which, token = self.token_of(w, lane)
        place = table + token * 4
        if which == 0:
            beyond = F32(-math.inf if self.options.raw_gate else 0.0)
            number = op.select(token < left, as_float(bits, G.g), beyond)
            active = self.gate_constants(G, h, 0, 1)
            op.store_f32(place, prefix_sum(self.add_gates([number], active, [F32(0.0)])[0]))
        elif which == 1:
            number = op.select(token < left, as_float(bits, B), self.no_strength)
            op.store_f32(place, self.activated(number), self.plan.off_strength)

    @cute.jit
    def sum_gates(self, own, table, scale, w, lane):
        """Where a chunk's sums of gates are, in units of ln 2, and the last of them; what the scan
        needs of them goes to the stage's table."""
        plan, place = self.plan, table + lane * 4
        total = [op.load_f32(place, 128 * i) for i in range(plan.bt // 32)]
        sums = table
        if cutlass.const_expr(plan.bt == 64):  # to the warp's own place
            total[1] = total[1] + cute.arch.shuffle_sync(total[0], offset=31)
            sums = own + (plan.off_sums + w * (4 * plan.bt))
            for i in cutlass.range_constexpr(2):
                op.store_f32(sums + lane * 4, total[i], 128 * i)
        end = cute.arch.shuffle_sync(total[-1], offset=31)
        if w == plan.first_fetcher:
            for i in cutlass.range_constexpr(plan.bt // 32):
                decay = op.exp2(total[i])
                keys, queries = decay, decay * scale
                if cutlass.const_expr(self.options.l2norm):
                    keys = keys * op.load_f32(place, plan.off_norms + 128 * i)
                    queries = queries * op.load_f32(place, plan.off_norms + 4 * plan.bt + 128 * i)
                op.store_f32(place, keys, plan.off_decay + 128 * i)
                op.store_f32(place, queries, plan.off_read + 128 * i)
            if lane == 0:
                op.store_f32(table, op.exp2(end), plan.off_last)
        ops.sync_warp()
        return sums, end

    def norms(self, stage, table, w, lane):
        """1 / sqrt(|x|^2 + eps) of the keys and queries that a warp fetched, to the table.

        A token's channels are spread over four lanes, as operands of mma are: the products of 8
        tokens with themselves have the squares on their diagonal, whatever the order of channels.
        """
        lane = ops.opaque(lane)
        token, quarter = lane >> 2, lane & 3
        own = quarter == token >> 1  # holds the diagonal, in column ``token & 1``
        each = 8 // self.plan.fetchers
        for query, group, i in itertools.product(
            range(2), range(self.plan.bt // 32), range(0, each, 2)
        ):
            near = w * each + i + (token & 1)  # row among 8
            row = (token >> 1) * 8 + (32 * group) + near
            place = stage + row * 128 + (quarter >> 1) * self.plan.half
            words = [
                op.load_i32x4(
                    place + ((((quarter & 1) * 4 + j) ^ near) << 4), query * self.plan.off_q
                )
                for j in range(4)
            ]
            square = diagonal(words, token)
            norm = ops.rsqrt(square + F32(L2NORM_EPS))
            self.put_norm(own, table + row * 4, norm, query)

    @cute.jit
    def put_norm(self, own, place, norm, query: cutlass.Constexpr):
        if own:
            op.store_f32(place, norm, self.plan.off_norms + 4 * self.plan.bt * query)

    # ----------------------------------------------------------------------------- matrices

    def tile_place(self, lane):
        """Where in a 16 x 16 block of fp16 a lane's row of 16 bytes for ldmatrix and stmatrix is.

        Rows of 32 bytes; the halves of rows 4 to 7 of 8 change places, against bank conflicts.
        """
        row = lane & 15
        return row * 32 + (((lane >> 4) ^ (row >> 2 & 1)) << 4)

    def weights(self, sums, table, of_rows, ct, half, lane):
        """e^(b_i - b_j) of a lane's four elements of half a block; above the diagonal too, where
        the exponent may be positive and what it makes is selected away.  With l2norm, over the
        norm of k_j."""
        at = 64 * ct + 32 * half
        of_columns = op.load_f32x2(sums + (lane & 3) * 8, at)
        out = [op.exp2(of_rows[i // 2] - of_columns[i % 2]) for i in range(4)]
        if self.options.l2norm:
            norms = op.load_f32x2(table + (lane & 3) * 8, self.plan.off_norms + at)
            out = [out[i] * norms[i % 2] for i in range(4)]
        return out

    def over_norms(self, values, table, w, lane, query):
        """A lane's two numbers of rows, with l2norm over the norms of their keys or queries."""
        if not self.options.l2norm:
            return values
        norms = self.row_values(table, w, lane, self.plan.off_norms + 4 * self.plan.bt * query)
        return [x * y for x, y in zip(values, norms, strict=True)]

    def row_values(self, sums, w, lane, at=0):
        """Of a lane's two rows."""
        place = sums + (w * TILE + (lane >> 2)) * 4
        return [op.load_f32(place, at + 32 * i) for i in range(2)]

    @cute.jit
    def keys(self, acc, own, sums, table, base, watched, w, lane):
        """L of block row ``w``: in fp16, and its diagonal block in fp32.

        If the chunk is watched, whether ``beta |k|^2`` is between 0 and 2 for each key: these are
        on the diagonal.
        """
        plan, lane = self.plan, ops.opaque(lane)  # addresses are found anew: registers are short
        place = own + (plan.off_lower + self.tile_place(lane)) + (w * (w - 1) >> 1) * TILE_BYTES
        diagonal = own + (plan.off_diagonal + w * plan.diagonal)
        diagonal = diagonal + (lane >> 2) * _PITCH + (lane & 3) * 8
        of_rows = self.row_values(sums, w, lane)
        strength = self.row_values(table, w, lane, plan.off_strength)
        strength = self.over_norms(strength, table, w, lane, 0)
        for ct in cutlass.range_constexpr(self.plan.tiles):
            if ct <= w:
                block = []
                for half in cutlass.range_constexpr(2):
                    by = self.weights(sums, table, of_rows, ct, half, lane)
                    at = 8 * ct + 4 * half
                    block.append([acc[at + i] * (by[i] * strength[i // 2]) for i in range(4)])
                if ct < w:
                    op.stmatrix(place + ct * TILE_BYTES, as_operand(block))
                else:
                    for half in cutlass.range_constexpr(2):
                        for r in cutlass.range_constexpr(2):
                            x, y = block[half][2 * r : 2 * r + 2]
                            op.store_f32x2(diagonal, x, y, 8 * r * _PITCH + 32 * half)
                    if cutlass.const_expr(plan.cuts):
                        if watched and (lane & 3) == lane >> 3:
                            odd = (lane >> 2 & 1) > 0
                            x = op.select(odd, block[0][1], block[0][0])
                            y = op.select(odd, block[1][3], block[1][2])
                            # As a negation: of NaN, too.
                            if not (x >= 0.0 and x <= 2.0 and y >= 0.0 and y <= 2.0):
                                op.store32(base, I32(1), plan.off_count + 4)

    @cute.jit
    def queries(self, acc, queries, sums, table, w, lane):
        """Aqk of block row ``w`` without its scale, as left operand."""
        lane = ops.opaque(lane)
        of_rows = self.row_values(sums, w, lane)
        scales = self.over_norms([F32(1.0)] * 2, table, w, lane, 1)
        row, col = lane >> 2, (lane & 3) * 2
        for ct in cutlass.range_constexpr(self.plan.tiles):
            if ct <= w:
                block = []
                for half in cutlass.range_constexpr(2):
                    by = self.weights(sums, table, of_rows, ct, half, lane)
                    kept = []
                    for i in cutlass.range_constexpr(4):
                        token = col + (TILE * ct + 8 * half + i % 2)
                        inside = token <= row + w * TILE + 8 * (i // 2)
                        x = acc[8 * ct + 4 * half + i] * by[i]
                        if cutlass.const_expr(self.options.l2norm):
                            x = x * scales[i // 2]
                        kept.append(op.select(inside, x, F32(0.0)))
                    block.append(kept)
                words = as_operand(block)
                for i in cutlass.range_constexpr(4):
                    queries[4 * ct + i] = words[i]

    @cute.jit
    def invert(self, left, own, slot, sums, table, end, number, w, lane):
        """X = (I + L)^-1 in fp16 blocks, and diag(e^(b_end - b)) X diag(beta) to the slot; warp
        ``w`` has block row ``w`` of them."""
        plan, lane = self.plan, ops.opaque(lane)
        place = own + self.tile_place(lane)
        lower = place + plan.off_lower
        ours = I32((w * (w + 1) >> 1) * TILE_BYTES)  # of this warp's first block of X
        below = I32((w * (w - 1) >> 1) * TILE_BYTES)  # of L
        to_end = [op.exp2(end - x) for x in self.row_values(sums, w, lane)]
        to_end = self.over_norms(to_end, table, w, lane, 0)
        self.keep(left, place + ours + w * TILE_BYTES, slot, table, to_end, w, w, lane)
        left = as_operand(left)
        # Siblings (1, 0) and (3, 2): X_ii L_ij X_jj.
        sync_threads_of(plan.builders - 1 + number * 2 + (w >> 1), 64)
        if w & 1 == 1:
            right = op.ldmatrix(lower + below + (w - 1) * TILE_BYTES, transpose=True)
            inner = as_operand(mma16(blank(), left, right))
            other = place + (((w - 1) * w >> 1) + w - 1) * TILE_BYTES
            block = negative(mma16(blank(), inner, op.ldmatrix(other, transpose=True)))
            self.keep(
                block, place + ours + (w - 1) * TILE_BYTES, slot, table, to_end, w, w - 1, lane
            )
        if cutlass.const_expr(plan.tiles > 2):
            ops.sync_group(number)
            self.invert_corner(left, place, slot, table, to_end, w, lane)

    @cute.jit
    def invert_corner(self, left, place, slot, table, to_end, w, lane):
        """Of 64 tokens, the blocks of X that rows of the second half have in the first."""
        lower = place + self.plan.off_lower
        ours = I32((w * (w + 1) >> 1) * TILE_BYTES)
        below = I32((w * (w - 1) >> 1) * TILE_BYTES)
        if w >= 2:
            inner = []
            for k in cutlass.range_constexpr(2):
                right = op.ldmatrix(lower + below + k * TILE_BYTES, transpose=True)
                total = mma16(blank(), left, right)
                inner.append(total)
            if w == 3:
                mine = op.ldmatrix(place + lower_block(3, 2) * TILE_BYTES)
                for k in cutlass.range_constexpr(2):
                    right = op.ldmatrix(lower + strict_block(2, k) * TILE_BYTES, transpose=True)
                    inner[k] = mma16(inner[k], mine, right)
            inner = [as_operand(x) for x in inner]
            corner = [
                op.ldmatrix(place + lower_block(i, j) * TILE_BYTES, transpose=True)
                for i, j in ((0, 0), (1, 0), (1, 1))
            ]
            blocks = (
                mma16(mma16(blank(), inner[0], corner[0]), inner[1], corner[1]),
                mma16(blank(), inner[1], corner[2]),
            )
            for j in cutlass.range_constexpr(2):
                block = negative(blocks[j])
                self.keep(block, place + ours + j * TILE_BYTES, slot, table, to_end, w, j, lane)

    def diagonal(self, own, w, lane):
        """X_ww as an accumulator: two blocks of 8 x 8 by exact forward substitution, a lane a
        column, twice; the third is -X22 L21 X11 with tf32 operands."""
        lane = ops.opaque(lane)
        home = own + (self.plan.off_diagonal + w * self.plan.diagonal)
        block, j = lane >> 3 & 1, lane & 7
        source = home + block * (8 * _PITCH + 32)
        x = [op.select(j == 0, F32(1.0), F32(0.0))]
        for i in range(1, 8):
            row = []
            for k in range(0, i, 4):
                row += op.load_f32x4(source, i * _PITCH + 4 * k)
            value = op.select(j == i, F32(1.0), F32(0.0))
            for k in range(i):
                value = op.fma(row[k], -x[k], value)
            x.append(value)
        ops.sync_warp()  # both blocks are read: their columns take their places, as rows
        for i in range(0, 8, 4):
            op.store_f32x4(source + j * _PITCH, x[i : i + 4], 4 * i)
        ops.sync_warp()
        # Rows 8 to 15 of left operands are 0.  The order of a summation index is free: that of
        # the second product is what the first one leaves in a lane.
        t, r = lane & 3, lane >> 2
        zero = F32(0.0)
        corner = home + (8 * _PITCH + 32)
        left = [op.load_f32(corner + t * _PITCH + r * 4, 4 * i * _PITCH) for i in range(2)]
        right = [op.load_f32(home + t * _PITCH + r * 4, (8 + 4 * i) * _PITCH) for i in range(2)]
        inner = op.mma_tf32(
            op.zeros(),
            [op.to_tf32(left[0]), zero, op.to_tf32(left[1]), zero],
            [op.to_tf32(y) for y in right],
        )
        right = op.load_f32x2(home + r * _PITCH + t * 8)
        out = op.mma_tf32(
            op.zeros(),
            [op.to_tf32(inner[0]), zero, op.to_tf32(inner[1]), zero],
            [op.to_tf32(y) for y in right],
        )
        upper, lower = (
            [op.load_f32(x + 2 * t * _PITCH + r * 4, _PITCH * e) for e in range(2)]
            for x in (home, corner)
        )
        return [[*upper, -out[0], -out[1]], [zero, zero, *lower]]

    def keep(self, block, place, slot, table, to_end, row, col, lane):
        """A block of X in fp16, and scaled to the slot as an operand in bf16."""
        op.stmatrix(place, as_operand(block))
        self.scaled(block, slot, table, to_end, row, col, lane)

    def scaled(self, block, slot, table, by_rows, row, col, lane):
        """A 16 x 16 block, times factors of its rows and beta of its columns, to a matrix of a
        slot; ``row`` and ``col`` in blocks."""
        columns = table + (col * TILE + (lane & 3) * 2) * 4
        out = []
        for half in range(2):
            beta = op.load_f32x2(columns, self.plan.off_strength + 32 * half)
            out.append([block[half][i] * (by_rows[i // 2] * beta[i % 2]) for i in range(4)])
        bt = self.plan.bt
        twisted = (lane >> (64 // bt - 1)) & (bt // 8 - 1)  # :func:`.tiles.twist` of a row
        place = (lane & 15) * (2 * bt) + (((lane >> 4) ^ twisted) << 4)
        op.stmatrix(slot + row * (TILE * 2 * bt) + (place ^ (col * 32)), as_operand(out, op.pack))

    @cute.jit
    def outputs(self, queries, own, slot, table, scale, w, lane):
        """scale Aqk X diag(beta), block row ``w``, to the slot."""
        plan, lane = self.plan, ops.opaque(lane)
        place = own + self.tile_place(lane)
        for col in cutlass.range_constexpr(plan.tiles):
            if col <= w:
                total = cute.make_rmem_tensor(8, F32)
                for i in cutlass.range_constexpr(8):
                    total[i] = F32(0.0)
                for k in cutlass.range_constexpr(col, plan.tiles):
                    if k <= w:
                        right = op.ldmatrix(
                            place + lower_block(k, col) * TILE_BYTES, transpose=True
                        )
                        halves = [[total[4 * half + i] for i in range(4)] for half in range(2)]
                        halves = mma16(halves, [queries[4 * k + i] for i in range(4)], right)
                        for i in cutlass.range_constexpr(8):
                            total[i] = halves[i // 4][i % 4]
                block = [[total[4 * half + i] for i in range(4)] for half in range(2)]
                self.scaled(block, slot + plan.slot // 2, table, [scale, scale], w, col, lane)

    @cute.jit
    def clear_slots(self, at, t, threads: cutlass.Constexpr):
        """Zeros where nobody writes: above the diagonal blocks.  Threads ``t`` of ``threads``."""
        total: cutlass.Constexpr = self.plan.slots * self.plan.slot // 16
        for i in cutlass.range(t, total, threads, unroll=1):
            op.store_zero16(at + self.plan.off_slot + i * 16)
        ops.fence_async()


def ring(base, byte, layout, count, pitch):
    """(rows, columns, count) of a swizzled matrix that stands ``count`` times, ``pitch`` bytes
    apart, from byte ``byte`` on."""
    p = cute.recast_ptr(base + byte // 2, layout.inner, BF16)
    turns = cute.make_layout(count, stride=pitch // 2)
    return cute.make_tensor(p, cute.append(cute.slice_(layout.outer, (None, None, 0)), turns))


def load_bits(X, row, h):
    """An element of [T, HV], of 2 or 4 bytes."""
    size = X.element_type.width // 8
    place = X.iterator.toint() + I64(X.stride[1]) * I64(h * size)
    place = op.mad_wide(row, I32(X.stride[0]) * size, place)
    return op.ptx(f"ld.global.nc.b{8 * size} {{$w0}}, [{{$r0}}];", [I32], [place])


def as_float(bits, X):
    """What :func:`load_bits` loaded of X."""
    code = "mov.b32 {$w0}, {$r0};" if X.element_type is F32 else "shl.b32 {$w0}, {$r0}, 16;"
    return op.ptx(code, [F32], [bits])


def negative(block):
    return [[-x for x in half] for half in block]
