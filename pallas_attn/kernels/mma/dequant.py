"""How keys of 8 bits and the queries that they meet become float16 for matmuls: see
`thread_math.to_16_bits`.
"""

import functools
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_attn._call import gpu_specs
from pallas_attn.kernels.lang import asm, thread_math

Value = Any

DTYPES = thread_math.NARROW


def by_integers(dtype: str, gpu: str | None) -> bool:
    """Whether the GPU has no instruction that converts from this dtype."""
    return dtype == "float8_e4m3fn" and gpu_specs.number(gpu or "sm80") < 89


def interleaved(first: list[Value], second: list[Value]) -> list[Value]:
    """Words of 4 numbers of two rows a and b -> words a0 b0 a1 b1 and a2 b2 a3 b3."""
    return [
        llvm.inline_asm(asm.i32(), [a, b], f"prmt.b32 $0, $1, $2, {order};", "=r,r,r")
        for a, b in zip(first, second, strict=True)
        for order in ("0x5140", "0x7362")
    ]


# Exponents of float32: that of the largest power of two that has an inverse, and that of 2**127.
MOST, HIGH = 253 << 23, 254 << 23


def normalised(words: list[Value], dtype: str) -> tuple[list[Value], Value]:
    """(The row in float16, divided by a power of two that leaves its largest number below 4; that
    power), of a row of 16-bit numbers of which each of 4 lanes holds a quarter.
    """
    floats = [x for word in words for x in thread_math.from_word(word, 4, dtype)]
    kind = asm.i32()
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
