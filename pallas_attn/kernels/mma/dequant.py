"""Conversion of 8-bit numbers to float16 in registers, without rounding: a word of 4 numbers
becomes 2 words of 2. How, for each dtype:

  float8_e4m3fn  from sm89 on one instruction converts two numbers. Before, integer instructions
                 put its bits into the upper half of a float16, all but the sign one place lower:
                 that is the number divided by 256, subnormal ones too. NaN becomes 1.875, the only
                 one that overflows when it is multiplied by 36864; infinity times 0 is then added,
                 which makes it NaN again
  float8_e5m2    is the upper half of a float16
  int8           is put, plus 128, into the mantissa of 1024.0, from which 1024 + 128 is subtracted
"""

import functools
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_attn import _gpus
from pallas_attn.kernels.lang import thread_math, threads

Value = Any

_CODE = {
    "float8_e4m3fn": (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    ),
    "float8_e5m2": "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
    "int8": (
        "{ .reg .b32 u, c; xor.b32 u, $2, 0x80808080; mov.b32 c, 0x64806480; "
        "prmt.b32 $0, u, 0x64646464, 0x4140; prmt.b32 $1, u, 0x64646464, 0x4342; "
        "sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; }"
    ),
}
DTYPES = tuple(_CODE)
_BY_INTEGERS = " ".join(
    f"{{ .reg .b32 m, c; prmt.b32 {x}, $2, 0, {order}; and.b32 m, {x}, 0x7F007F00; "
    f"shr.u32 m, m, 1; and.b32 {x}, {x}, 0x80008000; or.b32 {x}, {x}, m; mov.b32 c, 0x78807880; "
    f"mul.f16x2 m, {x}, c; mov.b32 c, 0; mul.f16x2 m, m, c; mov.b32 c, 0x5C005C00; "
    f"fma.rn.f16x2 {x}, {x}, c, m; }}"
    for x, order in (("$0", "0x1404"), ("$1", "0x3424"))
)


def by_integers(dtype: str, gpu: str | None) -> bool:
    """Whether the GPU has no instruction that converts from this dtype."""
    return dtype == "float8_e4m3fn" and _gpus.number(gpu or "sm80") < 89


def to_16_bits(words: list[Value], dtype: str, integers: bool = False) -> list[Value]:
    """Words of 4 numbers of 8 bits -> words of 2 float16, in the same order. `integers`: see
    `by_integers`.
    """
    two = ir.Type.parse("!llvm.struct<(i32, i32)>")
    code = _BY_INTEGERS if integers else _CODE[dtype]
    made = [llvm.inline_asm(two, [word], code, "=&r,=&r,r") for word in words]
    return [llvm.extractvalue(threads.i32(), pair, [i]) for pair in made for i in range(2)]


def interleaved(one: list[Value], two: list[Value]) -> list[Value]:
    """Words of 4 numbers of two rows a and b -> words a0 b0 a1 b1 and a2 b2 a3 b3."""
    return [
        llvm.inline_asm(threads.i32(), [a, b], f"prmt.b32 $0, $1, $2, {order};", "=r,r,r")
        for a, b in zip(one, two, strict=True)
        for order in ("0x5140", "0x7362")
    ]


# Of a float32: the exponent of the largest power of two that has an inverse, and that of 2**127.
MOST, HIGH = 253 << 23, 254 << 23


def normalised(words: list[Value], dtype: str) -> tuple[list[Value], Value]:
    """(The row in float16, divided by a power of two that leaves its largest number below 4; that
    power), of a row of 16-bit numbers of which each of 4 lanes holds a quarter.
    """
    floats = [x for word in words for x in thread_math.from_word(word, 4, dtype)]
    kind = threads.i32()
    of = lambda bits: utils.c(bits, kind)  # noqa: E731
    sizes = [arith.andi(thread_math.as_bits(x), of(0x7FFFFFFF)) for x in floats]
    while len(sizes) > 1:
        sizes = [functools.reduce(arith.maxsi, sizes[i : i + 2]) for i in range(0, len(sizes), 2)]
    size = thread_math.most_of_lanes(sizes[0], 4)
    unit = arith.minsi(arith.andi(size, of(0x7F800000)), of(MOST))
    inverse = thread_math.as_float(arith.subi(of(HIGH), unit))
    scaled = [arith.mulf(x, inverse) for x in floats]
    pairs = zip(scaled[::2], scaled[1::2], strict=True)
    code = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return [
        llvm.inline_asm(kind, list(pair), code, "=r,f,f") for pair in pairs
    ], thread_math.as_float(unit)


def pair_of_floats(pointer: Value, index: Any) -> Value:
    """2 neighbouring float32, the first at an even `index`."""
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    address = utils.getelementptr(pointer, [index.value], ir.F32Type.get())
    return llvm.load(kind, address, alignment=8)
