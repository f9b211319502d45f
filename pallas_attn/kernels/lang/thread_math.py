"""Arithmetic of one thread on float32 and on words of narrower numbers, in MLIR and PTX.

Every operation is rounded to nearest even and none is fused with another, so that a program gives
the same bits here, in NumPy and wherever else IEEE arithmetic is done.
"""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang.asm import give, i32, word_type

Value = ir.Value

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
NARROW = tuple(_CODE)  # dtypes of 8 bits
_BY_INTEGERS = " ".join(
    f"{{ .reg .b32 m, c; prmt.b32 {x}, $2, 0, {order}; and.b32 m, {x}, 0x7F007F00; "
    f"shr.u32 m, m, 1; and.b32 {x}, {x}, 0x80008000; or.b32 {x}, {x}, m; mov.b32 c, 0x78807880; "
    f"mul.f16x2 m, {x}, c; mov.b32 c, 0; mul.f16x2 m, m, c; mov.b32 c, 0x5C005C00; "
    f"fma.rn.f16x2 {x}, {x}, c, m; }}"
    for x, order in (("$0", "0x1404"), ("$1", "0x3424"))
)


def _int(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def to_16_bits(words: list[Value], dtype: str, integers: bool = False) -> list[Value]:
    """Words of 4 numbers of 8 bits -> words of 2 float16, in the same order, without rounding.
    `integers`: without the instruction that GPUs have for float8_e4m3fn from sm89 on.

      float8_e4m3fn  one instruction converts two numbers. Without it, integer instructions put its
                     bits into the upper half of a float16, all but the sign one place lower: that
                     is the number divided by 256, subnormal ones too. NaN becomes 1.875, the only
                     one that overflows when it is multiplied by 36864; infinity times 0 is then
                     added, which makes it NaN again
      float8_e5m2    is the upper half of a float16
      int8           is put, plus 128, into the mantissa of 1024.0, from which 1024 + 128 is
                     subtracted
    """
    two = ir.Type.parse("!llvm.struct<(i32, i32)>")
    code = _BY_INTEGERS if integers else _CODE[dtype]
    made = [llvm.inline_asm(two, [word], code, "=&r,=&r,r") for word in words]
    return [llvm.extractvalue(i32(), pair, [i]) for pair in made for i in range(2)]


def from_word(word: Value, nbytes: int, dtype: str) -> list[Value]:
    """The numbers in a word of bfloat16, float16 or float32, or in one of 4 to 16 bytes of `NARROW`
    dtypes from sm89 on, as float32, the first in memory first.
    """
    if nbytes == 16:
        halves = [vector.extract(word, [], [i]) for i in range(4)]
    elif nbytes == 8:
        high = arith.shrui(word, utils.c(32, word.type))
        halves = [arith.trunci(i32(), x) for x in (word, high)]
    else:
        halves = [arith.extui(i32(), word) if nbytes < 4 else word]
    if dtype in NARROW:
        halves, nbytes, dtype = to_16_bits(halves, dtype), 2 * nbytes, "float16"
    if dtype == "float32":
        return [as_float(x) for x in halves]
    sixteen = utils.c(16, i32())
    if dtype == "bfloat16":
        top = utils.c(-(2**16), i32())
        pairs = [(arith.shli(x, sixteen), arith.andi(x, top)) for x in halves]
        return [as_float(x) for pair in pairs for x in pair][: nbytes // 2]
    pairs = [(x, arith.shrui(x, sixteen)) for x in halves]
    narrow = [arith.trunci(_int(16), x) for pair in pairs for x in pair][: nbytes // 2]
    f16, f32 = ir.F16Type.get(), ir.F32Type.get()
    return [arith.extf(f32, arith.bitcast(f16, x)) for x in narrow]


def as_float(bits: Value) -> Value:
    return arith.bitcast(ir.F32Type.get(), bits)


def as_bits(number: Value) -> Value:
    return arith.bitcast(i32(), number)


def reciprocal(a: Value) -> Value:
    """1 / a for a from 2**-126 to 2**125: the code that ptxas makes of `rcp.rn` there, without the
    branch for all other numbers.
    """
    code = (
        "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; fma.rn.f32 e, $1, r, 0fBF800000; "
        "neg.f32 e, e; fma.rn.f32 $0, r, e, r; }"
    )
    return llvm.inline_asm(ir.F32Type.get(), [a], code, "=f,f")


def most_of_lanes(value: Value, lanes: int) -> Value:
    """The largest of a 32-bit integer over each group of so many neighbouring lanes."""
    if lanes == 32:
        return over_warp(value, "max")
    while lanes > 1:
        lanes //= 2
        code = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
        value = arith.maxsi(value, give(i32(), code, [value], "=r,r"))
    return value


def over_warp(value: Value, operation: str) -> Value:
    """The sum ("add") or the largest ("max") of a 32-bit integer over the warp: one instruction."""
    code = f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;"
    return give(i32(), code, [value], "=r,r")


def rounded(numbers: list[Value], dtype: str) -> Value:
    """float32 numbers as those of a wider dtype than 8 bits, rounded to nearest even: a word."""
    kind = utils.dtype_to_ir_type(jnp.dtype(dtype))
    each = [x if dtype == "float32" else arith.truncf(kind, x) for x in numbers]
    vectors = llvm.mlir_undef(ir.VectorType.get((len(each),), kind))
    for i, x in enumerate(each):
        vectors = vector.insert(x, vectors, [], [i])
    return llvm.bitcast(word_type(len(each) * jnp.dtype(dtype).itemsize), vectors)


_PAIR = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}


def to_word(numbers: list[Value], dtype: str) -> Value:
    """1, 2, 4 or 8 numbers as int8 or float8 (sm89 and later), rounded to nearest even: a word of
    as many bytes. They must be within the range of the dtype.
    """
    if dtype == "int8":
        code = "cvt.rni.s32.f32 $0, $1;"
        return packed([llvm.inline_asm(i32(), [x], code, "=r,f") for x in numbers], 8)
    if len(numbers) == 1:
        numbers = [*numbers, utils.c(0.0, ir.F32Type.get())]
        return arith.trunci(_int(8), to_word(numbers, dtype))
    code = f"cvt.rn.satfinite.{_PAIR[dtype]}.f32 $0, $2, $1;"  # the first operand goes on top
    firsts = zip(numbers[::2], numbers[1::2], strict=True)
    pairs = [llvm.inline_asm(_int(16), list(pair), code, "=h,f,f") for pair in firsts]
    return packed([arith.extui(i32(), pair) for pair in pairs], 16)


def packed(numbers: list[Value], bits: int) -> Value:
    """The low `bits` of each 32-bit integer one above the other: a word of 1 to 16 bytes."""
    halves = []
    for lo in range(0, len(numbers), 32 // bits):
        half = utils.c(0, i32())
        for n, number in enumerate(numbers[lo : lo + 32 // bits]):
            low = arith.andi(number, utils.c(2**bits - 1, i32()))
            half = arith.ori(half, arith.shli(low, utils.c(n * bits, i32())))
        halves.append(half)
    if len(halves) == 4:
        vectors = llvm.mlir_undef(word_type(16))
        for i, half in enumerate(halves):
            vectors = vector.insert(half, vectors, [], [i])
        return vectors
    if len(halves) == 2:
        low, high = (arith.extui(_int(64), half) for half in halves)
        return arith.ori(low, arith.shli(high, utils.c(32, _int(64))))
    total_bits = len(numbers) * bits
    return halves[0] if total_bits == 32 else arith.trunci(_int(total_bits), halves[0])
