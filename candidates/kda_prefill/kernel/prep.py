"""PREP: everything of a chunk that does not depend on the state, in CuTe DSL for sm_90a.

One CTA takes one chunk of one head and leaves its image
(:mod:`candidates._delta_rule.kernel.image`): the serial scan then only multiplies.  With b
the inclusive cumulative gate of the chunk, per key channel,

    Khat = k e^b    Qhat = scale q e^b    Kbar = k e^(b_BT - b)    decay = e^b_BT
    L = strict_lower(diag(beta) Akk)      X = (I + L)^-1
    W = X diag(beta) Khat                 U = X diag(beta) V       Aqk = scale lower(..)

Akk and Aqk need e^(b_i - b_j) as a row factor times a column factor; an anchor rule says how
it is split (:mod:`.prep_plan`).  A warp holds 8 tokens x 64 channels in registers, a lane two
neighbouring channels: gates are summed in fp32 without a shuffle, every store is a whole
128-byte line, and all exponents are differences of sums of the same 8-token groups, so
that those which must not be positive never are.

Products are mma.sync on bf16 with fp32 sums.  16 x 16 blocks of X come from exact substitution
in fp32, larger ones from block merges in tf32: never a power series, which cancels
catastrophically on similar keys.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import memory

from candidates._delta_rule.kernel import prep_ops as op
from candidates._delta_rule.kernel.activate import Gates
from candidates._delta_rule.kernel.image import HEAD
from candidates._delta_rule.kernel.options import PLAIN, Options
from candidates._delta_rule.kernel.prep import ChunkPrep
from candidates._delta_rule.kernel.prep_inverse import invert
from candidates._delta_rule.kernel.tiles import HALF, TILE
from candidates.kda_prefill.kernel.prep_plan import BLOCK_BYTES, GROUP, Plan
from candidates.kda_prefill.kernel.prep_scores import finish, keep, multiply
from candidates.kda_prefill.kernel.prep_steep import SteepScores

__all__ = ["Prep"]

BF16, F32, I32, I64 = op.BF16, op.F32, op.I32, op.I64


class Prep(ChunkPrep, SteepScores):
    """The PREP kernel of one schedule, compiled once for every T, N and H.

    Parameters
    ----------
    bt : int
        Tokens per chunk: 16, 32 or 64.
    anchor : str
        ``start``, ``mid``, ``end``, ``halving`` or ``pairs``.
    block : int, optional
        Tokens per sub-block, 16 or 32; only with ``pairs``.
    diagonal : str, optional
        Anchor inside sub-blocks: ``start``, ``mid``, ``end`` or ``halving``; only with ``pairs``.
    unroll : int, optional
        Chunks per turn of the scan's loop; sequences are padded to a multiple of it.
    options : Options, optional
        The form of gates, write strengths and offsets.

    Attributes
    ----------
    threads, smem_bytes : int
        Per CTA.
    """

    def __init__(
        self,
        bt: int,
        anchor: str,
        block: int | None = None,
        diagonal: str | None = None,
        unroll: int = 1,
        options: Options = PLAIN,
    ) -> None:
        self.options = options
        self.plan = Plan(bt, anchor, block, diagonal)
        self.bt, self.unroll, self.layout = bt, unroll, self.plan.layout
        self.threads, self.smem_bytes = self.plan.threads, self.plan.smem_bytes
        self.blocks = self.plan.blocks_per_sm
        rule = anchor if diagonal is None else f"{anchor}{block}_{diagonal}"
        self.name = f"kda_prep_{bt}_{rule}{options.suffix}"

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
        bound: cutlass.Float32 | None,
        stream: CUstream,
    ):
        """Launch on ``stream``.

        Parameters
        ----------
        Q, K, V : Tensor
            ``[T, H, 128]`` bf16, compact.
        G : Tensor
            ``[T, H, 128]``: log gates, or what they are made of.
        B : Tensor
            ``[T, H]``.
        CU : Tensor
            ``[N + 1]``, any content.
        O : Tensor
            ``[T, H, 128]`` bf16: rows that no sequence covers are cleared, no other is touched.
        X : Tensor
            ``[slots, H, elements]`` bf16: the images, written.
        scale : Float32
        A_log, dt_bias, bound : Tensor, Tensor, Float32 or None
            Of the gate's activation: see :class:`candidates._delta_rule.kernel.activate.Gates`.
        stream : CUstream
        """
        self.kernel.set_name_prefix(self.name, keep_mangled_name=False, remove_cutlass_symbol=True)
        # Heads run fastest: neighbouring CTAs read neighbouring memory.  One more slot than
        # there are, if there are none, because rows outside of all sequences still count.
        self.kernel(Q, K, V, G, B, CU, O, X, scale, A_log, dt_bias, bound).launch(
            grid=(max(X.shape[0], 1) * Q.shape[1], 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, Q, K, V, G, B, CU, O, X, scale, A_log, dt_bias, bound):
        G = Gates(G, A_log, dt_bias, bound)
        plan, layout, bt = self.plan, self.layout, self.bt
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = memory.SmemAllocator()
        base = smem.allocate_array(cutlass.Int8, plan.smem_bytes, byte_alignment=1024).toint()

        if warp == 0:
            self.find_place(CU, O, Q.shape[0], Q.shape[1], base, lane)
        cute.arch.sync_threads()
        # Row r of the chunk is token `start` + r; those from `rows` on are beyond the end.
        start, rows, slot, head = op.load_i32x4(base, plan.off_place)
        if rows >= 0:
            H = Q.shape[1]
            first = (I64(start) * H + head) * HEAD  # element of row 0, channel 0
            # A warp scales tokens 8 g .. 8 g + 7 in 64 channels, a lane two of these.
            group, half = warp // 2, warp % 2
            channel = half * 64 + lane * 2
            active = self.gate_constants(G, head, channel)
            gates, keys, queries = self.load_rows(
                Q, K, G.g, first + channel, H, group * GROUP, rows, active
            )
            if tid < bt:
                beta = self.no_strength
                if tid < rows:
                    beta = self.strength(B, start + tid, head)
                op.store_f32(base + tid * 4, self.activated(beta), plan.off_beta)
            # V is fetched when its place is free: on its way to L2 from now on, 64 bytes a thread.
            if tid // 4 < rows:
                piece = first * 2 + I64(tid // 4 * (H * HEAD * 2) + tid % 4 * 64)
                op.prefetch(V.iterator.toint() + piece)
            if cutlass.const_expr(plan.tiles > 1):  # Aqk is 0 above its diagonal blocks
                if tid < bt * bt // 8:
                    op.store_zero16(base + tid * 16, layout.off_a)
            pad = layout.common - layout.off_e - 4 * HEAD
            if cutlass.const_expr(pad > 0):
                if tid < pad // 16:
                    op.store_zero16(base + tid * 16, layout.off_e + 4 * HEAD)

            total = gates[GROUP - 1]
            op.store_f32x2(base + (group * HEAD + channel) * 4, total[0], total[1], plan.off_totals)
            cute.arch.sync_threads()
            totals = [
                op.load_f32x2(base + channel * 4, plan.off_totals + g * HEAD * 4)
                for g in range(plan.groups)
            ]
            # 1 for the groups before one's own
            before = [op.select(g < group, F32(1.0), F32(0.0)) for g in range(plan.groups)]
            end = self.gate_at(plan.groups, totals, before)
            if group == 0:  # its end is counted from the chunk's start
                # Fragment order, ImageLayout.decay_position of an even channel
                place = channel // 16 * 16 + channel // 2 % 4 * 4 + channel // 8 % 2 * 2
                op.store_f32x2(base + place * 4, op.exp2(end[0]), op.exp2(end[1]), layout.off_e)
            scaled = self.hats(base, group, half, lane, totals, before, end, scale)

            kept = op.zeros()  # a tile on the diagonal that takes several steps
            for phase in plan.phases:
                for index in phase:
                    self.write_operands(
                        index,
                        base,
                        group,
                        half,
                        lane,
                        gates,
                        keys,
                        queries,
                        totals,
                        before,
                        end,
                        scaled if index == 0 else [],
                    )
                steep = I32(0)
                if cutlass.const_expr(plan.anchored in phase):
                    self.vote(base, group, channel, total)
                cute.arch.sync_threads()
                if cutlass.const_expr(plan.anchored in phase):
                    steep = op.load_i32(base, plan.off_steep)
                for index, job in plan.rounds(phase):
                    spec = plan.steps[index]
                    jobs = spec.jobs[job : job + plan.warps]
                    if cutlass.const_expr(spec.diagonal_level):
                        tile = multiply(plan, index, jobs, base, warp, lane)[0]
                        kept = keep(spec.size, jobs, tile, kept, warp, lane)
                        if cutlass.const_expr(index == len(plan.steps) - 1):
                            finish(plan, jobs, [kept], base, warp, lane, scale)
                    elif cutlass.const_expr(index == plan.anchored):
                        if steep > 0:
                            self.steep_tiles(Q, K, G, base, warp, lane, scale)
                        elif warp < len(jobs):
                            tiles = multiply(plan, index, jobs, base, warp, lane)
                            finish(plan, jobs, tiles, base, warp, lane, scale)
                    elif warp < len(jobs):
                        tiles = multiply(plan, index, jobs, base, warp, lane)
                        finish(plan, jobs, tiles, base, warp, lane, scale)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_threads()

            target = X.iterator.toint() + (I64(slot) * H + head) * layout.image
            if warp == plan.warps - 1:  # what is ready leaves while X is computed
                with cute.arch.elect_one():
                    for off, size in (
                        (layout.off_q, bt * HALF),
                        (layout.off_q + layout.block_q, bt * HALF),
                        (layout.off_k, layout.common - layout.off_k),
                    ):
                        op.store_bulk(target + off, base + off, size)
                    cute.arch.cp_async_bulk_commit_group()
            self.fetch_values(V, base, tid, first, H, rows)  # its latency, too, is X's time
            invert(plan, base, warp, lane)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
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

    def fetch_values(self, V, base, tid, first, H, rows):
        """V into U's place in the image; W and U are computed in place."""
        layout = self.layout
        source = V.iterator.toint() + first * 2
        for i in range(TILE * self.bt // self.threads):
            piece = tid + i * self.threads
            row, p = piece // 16, piece % 16
            place = p // 8 * (self.bt * HALF) + row * HALF + ((p % 8) ^ (row % 8)) * 16
            op.copy16_async(
                base + place,
                op.mad_wide(row, H * (2 * HEAD), source + I64(p * 16)),
                op.select(row < rows, I32(16), I32(0)),
                layout.common,
            )
        cute.arch.cp_async_commit_group()

    def load_rows(self, Q, K, G, at, H, row, rows, active):
        """The lane's two channels of 8 rows: gates summed from the group's first row on, in
        units of ln 2; keys and queries as bf16 pairs.  Beyond the end all are 0."""
        addresses = self.addresses(Q, K, G, at)
        raw = [self.load_row(addresses, H, row + r, rows) for r in range(GROUP)]
        gates, total = [], [F32(0.0), F32(0.0)]
        for x, _, _ in raw:
            total = self.add_gates(x, active, total)
            gates.append(tuple(total))
        return gates, [x[1] for x in raw], [x[2] for x in raw]

    # ---------------------------------------------------------------------------- operands

    def gate_at(self, index, totals, before):
        """Cumulative gate at the end of the first ``index`` groups, seen from the start of the
        own group: what is between the two is summed, never a difference of larger sums."""
        out = [F32(0.0), F32(0.0)]
        for g, total in enumerate(totals):
            if isinstance(index, int):
                sign = F32(1.0 if g < index else 0.0) - before[g]
            else:
                sign = op.select(g < index, F32(1.0), F32(0.0)) - before[g]
            out = [op.fma(t, sign, x) for t, x in zip(total, out, strict=True)]
        return out

    def hats(self, base, group, half, lane, totals, before, end, scale):
        """Khat (in W's place), Qhat and Kbar, for :meth:`write_scaled`."""
        layout = self.layout
        rows = base + group * (GROUP * HALF) + lane * 4
        wide, narrow = rows + half * layout.block_q, rows + half * (self.bt * HALF)
        begin = self.gate_at(0, totals, before)
        return [
            (begin, False, [("k", wide, 0, None), ("q", wide, layout.off_q, scale)]),
            (end, True, [("k", narrow, layout.off_k, None)]),
        ]

    @cute.jit
    def write_operands(
        self, index, base, group, half, lane, gates, keys, queries, totals, before, end, scaled
    ):
        """The operands of one step, and of ``scaled`` what goes with the first."""
        plan = self.plan
        step, n = plan.steps[index], plan.tiles
        at = plan.buffer(index)
        place = base + group // 2 * BLOCK_BYTES + half * (BLOCK_BYTES // 2)
        place = place + group % 2 * (GROUP * HALF) + lane * 4
        per = step.size // GROUP
        rows_of = lambda k, q: [
            (name, place, at + block * BLOCK_BYTES, None)
            for name, block in (("k", k), ("q", q))
            if block is not None
        ]
        if cutlass.const_expr(step.kind == "both"):
            whole = step.size == self.bt
            offset = {"start": 0, "mid": per // 2, "end": per}[step.rule]
            ref = self.gate_at(offset if whole else group // per * per + offset, totals, before)
            k_rows = not (whole and step.rule == "start")
            rows = rows_of(0 if k_rows else None, k_rows * n)
            scaled = [*scaled, (ref, False, rows)]
            if cutlass.const_expr(not (whole and step.rule == "end")):
                scaled = [*scaled, (ref, True, rows_of((k_rows + 1) * n, None))]
            self.write_scaled(gates, keys, queries, scaled)
        else:
            self.write_scaled(gates, keys, queries, scaled)
        if cutlass.const_expr(step.kind == "off"):
            w = step.size // TILE
            begin = self.gate_at(group // per * per, totals, before)
            if group >= per:
                self.write_scaled(gates, keys, queries, [(begin, False, rows_of(-w, n - 2 * w))])
            for i in cutlass.range_constexpr(w, n, w):
                here = self.gate_at(2 * i, totals, before)
                if group < 2 * i:
                    column = 2 * (n - w) + plan.column_base(step.size, i)
                    self.write_scaled(gates, keys, queries, [(here, True, rows_of(column, None))])
        if cutlass.const_expr(step.kind == "level" and step.size >= GROUP):
            middle = self.gate_at(group // (2 * per) * (2 * per) + per, totals, before)
            if group // per % 2 == 1:
                self.write_scaled(gates, keys, queries, [(middle, False, rows_of(0, n))])
            else:
                self.write_scaled(gates, keys, queries, [(middle, True, rows_of(0, None))])
        if cutlass.const_expr(step.kind == "level" and step.size < GROUP):
            self.write_level(step.size, gates, keys, queries, rows_of(0, n))

    def write_scaled(self, gates, keys, queries, scaled):
        """``scaled``: (reference, column, targets), rows by e^(b - ref), columns by e^(ref - b).

        A target is ("k" or "q", address of the lane's first row, offset, further factor).
        """
        if not scaled:
            return
        for r in range(GROUP):
            pairs = {"k": op.unpack(keys[r])}
            if any(target[0] == "q" for _, _, targets in scaled for target in targets):
                pairs["q"] = op.unpack(queries[r])
            for ref, column, targets in scaled:
                factor = [
                    op.exp2(x - g if column else g - x) for x, g in zip(ref, gates[r], strict=True)
                ]
                for name, place, at, more in targets:
                    by = factor if more is None else [x * more for x in factor]
                    value = op.pack(*(x * y for x, y in zip(pairs[name], by, strict=True)))
                    op.store32(place ^ (r << 4), value, at + r * HALF)

    def write_level(self, size, gates, keys, queries, targets):
        """A level inside the group: a token is a row or a column, known at compile time."""
        for r in range(GROUP):
            if size:
                row = r // size % 2
                ref = gates[r // (2 * size) * 2 * size + size - 1]
                factor = [
                    op.exp2(g - x if row else x - g) for x, g in zip(ref, gates[r], strict=True)
                ]
            for name, place, at, _ in targets[: 1 + row] if size else targets:
                pair = (keys if name == "k" else queries)[r]
                if size:
                    pair = op.pack(*(x * y for x, y in zip(op.unpack(pair), factor, strict=True)))
                op.store32(place ^ (r << 4), pair, at + r * HALF)
