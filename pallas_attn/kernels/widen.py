"""Numbers of 8 bits made bfloat16 in registers: 4 of them, a word, become 2 words.

A float8 is a bfloat16 with fewer bits: its bits, shifted to where a bfloat16 has them, are the
number but for the exponent's bias, which one exact multiplication mends, subnormals included. NaN
is not kept: a quantised row that holds one has it in its scale.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_attn.kernels import warps

Value = Any

# How far right the bits go, and the bfloat16 (twice) that the result is multiplied by.
_SHIFT = {"float8_e4m3fn": 4, "float8_e5m2": 3}
_BIAS = {"float8_e4m3fn": 0x7B807B80, "float8_e5m2": 0x77807780}  # 2**120, 2**112
DTYPES = (*_SHIFT, "int8")


def widened(words: list[Value], dtype: str) -> list[Value]:
    """Words of 4 numbers -> words of 2, in the order in which they lie."""
    one = _int8 if dtype == "int8" else _float8
    return [pair for word in words for pair in one(word, dtype)]


def _float8(word: Value, dtype: str) -> list[Value]:
    shift, bias = _SHIFT[dtype], utils.c(_BIAS[dtype], warps.i32())
    kept = 0x7F007F00 >> shift
    pairs = []
    for selector in (0x1100, 0x3322):  # each number in the upper half of 16 bits
        ptx = (
            "{ .reg .b32 w, m; "
            f"prmt.b32 w, $1, 0, {selector:#x}; shr.b32 m, w, {shift}; and.b32 m, m, {kept:#x}; "
            "and.b32 w, w, 0x80008000; or.b32 w, w, m; mul.bf16x2 $0, w, $2; }"
        )
        pairs.append(llvm.inline_asm(warps.i32(), [word, bias], ptx, "=r,r,r"))
    return pairs


def _int8(word: Value, dtype: str) -> list[Value]:
    """Behind the exponent of 2**23 lies number + 128."""
    del dtype
    kind, pairs = warps.i32(), []
    for low in (0, 2):
        ptx = (
            "{ .reg .b32 u, a, b; .reg .f32 x, y; xor.b32 u, $1, 0x80808080; "
            f"prmt.b32 a, u, 0x4B000000, {0x7440 + low:#x}; "
            f"prmt.b32 b, u, 0x4B000000, {0x7441 + low:#x}; "
            "mov.b32 x, a; mov.b32 y, b; sub.f32 x, x, 0f4B000080; sub.f32 y, y, 0f4B000080; "
            "cvt.rn.bf16x2.f32 $0, y, x; }"
        )
        pairs.append(llvm.inline_asm(kind, [word], ptx, "=r,r"))
    return pairs


def pair_of_floats(pointer: Value, index: Any) -> Value:
    """2 neighbouring float32, the first at an even `index`."""
    kind = ir.VectorType.get((2,), ir.F32Type.get())
    address = utils.getelementptr(pointer, [index.value], ir.F32Type.get())
    return llvm.load(kind, address, alignment=8)
