"""The instructions that PREP is made of, as PTX.

Shared memory is addressed by plain 32-bit byte addresses plus immediates.  Every access of
PREP to it goes through here, so the compiler keeps them in the order in which they are written,
around barriers too.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

BF16, F32, I32, I64, U64 = (
    cutlass.BFloat16,
    cutlass.Float32,
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Uint64,
)


def ptx(code, outputs=(), inputs=()):
    """One instruction; ``{$w0}`` and ``{$r0}`` name its outputs and inputs."""
    return cute.arch.inline_ptx(code, write_only_types=list(outputs), read_only_args=list(inputs))


def _regs(kind, n):
    return "{" + ", ".join(f"{{${kind}{i}}}" for i in range(n)) + "}"


def select(condition, a, b):
    """``a`` where ``condition`` holds, else ``b`` (a run-time select, never a product)."""
    return type(a)(cutlass.select_(condition, a, b))


def table(values, index):
    """``values[index]`` of up to 16 numbers below 16, for a run-time index."""
    word = sum(v << 4 * i for i, v in enumerate(values))
    shifted = U64(word) >> U64(index * 4)
    return I32(shifted & U64(15))


def anew(x, lane):
    """``x``, the same in a warp or a lane's own number, in a way that keeps ptxas from sharing what
    is computed from it with other code: it would hold addresses in registers from there to here."""
    return cute.arch.shuffle_sync(x, offset=lane)


# ------------------------------------------------------------------------- shared memory


def store32(address, value, at=0):
    ptx(f"st.shared.b32 [{{$r0}}+{at}], {{$r1}};", inputs=[address, value])


def store_bf16(address, x, at=0):
    """Round to bf16 and store."""
    ptx(
        "{ .reg .b16 h; cvt.rn.bf16.f32 h, {$r1}; st.shared.b16 [{$r0}+" + f"{at}" + "], h; }",
        inputs=[address, x],
    )


def store_i32x4(address, values, at=0):
    ptx(
        f"st.shared.v4.b32 [{{$r0}}+{at}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        inputs=[address, *values],
    )


def load_i32x4(address, at=0):
    return ptx(f"ld.shared.v4.b32 {_regs('w', 4)}, [{{$r0}}+{at}];", [I32] * 4, [address])


def store_f32(address, value, at=0):
    ptx(f"st.shared.f32 [{{$r0}}+{at}], {{$r1}};", inputs=[address, value])


def store_f32x2(address, x, y, at=0):
    ptx(f"st.shared.v2.f32 [{{$r0}}+{at}], {{{{$r1}}, {{$r2}}}};", inputs=[address, x, y])


def store_f32x4(address, values, at=0):
    ptx(
        f"st.shared.v4.f32 [{{$r0}}+{at}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        inputs=[address, *values],
    )


def store_zero16(address, at=0):
    """Clear 16 bytes."""
    ptx(
        f"st.shared.v4.b32 [{{$r0}}+{at}], {{{{$r1}}, {{$r1}}, {{$r1}}, {{$r1}}}};",
        inputs=[address, I32(0)],
    )


def load_f32(address, at=0):
    return ptx(f"ld.shared.f32 {{$w0}}, [{{$r0}}+{at}];", [F32], [address])


def load_i32(address, at=0):
    return ptx(f"ld.shared.b32 {{$w0}}, [{{$r0}}+{at}];", [I32], [address])


def load_f32x2(address, at=0):
    return ptx(f"ld.shared.v2.f32 {_regs('w', 2)}, [{{$r0}}+{at}];", [F32] * 2, [address])


def load_f32x4(address, at=0):
    return ptx(f"ld.shared.v4.f32 {_regs('w', 4)}, [{{$r0}}+{at}];", [F32] * 4, [address])


def ldmatrix(address, at=0, transpose=False):
    """Four 8 x 8 bf16 matrices; lane l names row l % 8 of matrix l / 8."""
    trans = ".trans" if transpose else ""
    return ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {_regs('w', 4)}, [{{$r0}}+{at}];",
        [I32] * 4,
        [address],
    )


def stmatrix(address, values, at=0, transpose=False):
    regs = "{{$r1}, {$r2}, {$r3}, {$r4}}"
    trans = ".trans" if transpose else ""
    ptx(
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [{{$r0}}+{at}], {regs};",
        inputs=[address, *values],
    )


# ------------------------------------------------------------------------- global memory


def mad_wide(a, b, c):
    """``a * b + c`` with a 64-bit sum and product."""
    return ptx("mad.wide.s32 {$w0}, {$r0}, {$r1}, {$r2};", [I64], [a, b, c])


def load_row(gate, key, query, row, rows, beyond="0f00000000"):
    """Two gates, and two keys and two queries in one register each: of one row, 0 from ``rows``
    on, or ``beyond`` for gates.  Nobody writes them while the kernel runs, and nobody needs them
    again."""
    code = """{
        .reg .pred inside;
        setp.lt.s32 inside, {$r3}, {$r4};
        mov.f32 {$w0}, BEYOND; mov.f32 {$w1}, BEYOND;
        mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;
        @inside ld.global.nc.L1::no_allocate.v2.f32 {{$w0}, {$w1}}, [{$r0}];
        @inside ld.global.nc.L1::no_allocate.b32 {$w2}, [{$r1}];
        @inside ld.global.nc.L1::no_allocate.b32 {$w3}, [{$r2}];
    }"""
    code = code.replace("BEYOND", beyond)
    return ptx(code, [F32, F32, I32, I32], [gate, key, query, row, rows])


def load_row16(gate, key, query, row, rows, beyond="0x00000000"):
    """As :func:`load_row` with gates in bf16, in one register."""
    code = """{
        .reg .pred inside;
        setp.lt.s32 inside, {$r3}, {$r4};
        mov.b32 {$w0}, BEYOND; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0;
        @inside ld.global.nc.L1::no_allocate.b32 {$w0}, [{$r0}];
        @inside ld.global.nc.L1::no_allocate.b32 {$w1}, [{$r1}];
        @inside ld.global.nc.L1::no_allocate.b32 {$w2}, [{$r2}];
    }"""
    code = code.replace("BEYOND", beyond)
    return ptx(code, [I32, I32, I32], [gate, key, query, row, rows])


def prefetch(address):
    """The line of ``address`` to L2."""
    ptx("prefetch.global.L2 [{$r0}];", inputs=[address])


def copy16_async(address, source, bytes_, at=0):
    """Global to shared, 16 bytes, of which the first ``bytes_`` are read and the rest are 0."""
    ptx(
        f"cp.async.cg.shared.global [{{$r0}}+{at}], [{{$r1}}], 16, {{$r2}};",
        inputs=[address, source, bytes_],
    )


def store_bulk(target, address, size):
    """Shared to global by the copy engine; ``size`` bytes, a multiple of 16."""
    ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], " + f"{size};",
        inputs=[target, address],
    )


# -------------------------------------------------------------------------- arithmetic


def exp2(x):
    """2^x; results below the normal range are 0."""
    return cute.math.exp2(x, fastmath=True)


def fma(a, b, c):
    return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", [F32], [a, b, c])


def unpack(pair):
    """Two bf16 to fp32; the low half first."""
    return (
        ptx("shl.b32 {$w0}, {$r0}, 16;", [F32], [pair]),
        ptx("and.b32 {$w0}, {$r0}, 0xffff0000;", [F32], [pair]),
    )


def pack(low, high):
    """Two fp32 to bf16, rounded to nearest even, in one register."""
    return ptx("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", [I32], [low, high])


def to_tf32(x):
    """Round to tf32: half a unit more, of what the instruction then cuts off.

    The conversion instruction also keeps the NaN that this would wrap around, in four times
    the instructions.  A score that is NaN shows in Aqk anyway.
    """
    return ptx("add.u32 {$w0}, {$r0}, 0x1000;", [I32], [x])


def mma(acc, a, b):
    """``acc + A B`` of bf16 A [16, 16] and B [16, 8]; acc [16, 8] in four fp32 registers."""
    code = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    return _mma(code, acc, a, b)


def mma_tf32(acc, a, b):
    """``acc + A B`` of tf32 A [16, 8] and B [8, 8]."""
    return _mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 ", acc, a, b)


def _mma(code, acc, a, b):
    r = lambda i: "{$r" + str(i) + "}"
    operands = ", ".join(
        "{" + ", ".join(r(i) for i in part) + "}" for part in ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9))
    )
    code += _regs("w", 4) + ", " + operands + ";"
    return list(ptx(code, [F32] * 4, [*a, *b, *acc]))


def zeros():
    """A cleared 16 x 8 accumulator."""
    return [F32(0.0)] * 4
