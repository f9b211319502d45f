"""Operands of Hopper's matmuls on float8, both of which must be K-major.

In S = Q K^T they are, since Q and K are contiguous along the head dim. In O = P V, V is not, so
memory holds V^T. P is the left operand, in registers.

In an accumulator a thread has 2 neighbouring columns of each 8, but in a left operand of 8 bits it
has 4 neighbouring columns of each 16. No numbers move between threads: each passes the 4 of 16
columns that it has, so the columns of P are reordered (`ORDER`), and those of V^T likewise.
"""

import operator

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.asm import give, i32
from pallas_attn.kernels.lang.types import RegisterTile

UNIT = 16  # columns that are reordered together
# Column ORDER[n] of 16 scores becomes column n of the operand: thread j of 4 has the scores of
# columns 2 j, 2 j + 1, 8 + 2 j and 9 + 2 j.
ORDER = np.arange(UNIT).reshape(2, 4, 2).transpose(1, 0, 2).ravel()
_PROBABILITIES = jnp.float8_e4m3fn  # also beside V of float8_e5m2, which has one bit less
_PACK = (
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)


def probabilities(p: RegisterTile) -> RegisterTile:
    """P float32 [64, keys] as a left operand: float8_e4m3fn, columns in `ORDER`."""
    layout = plgpu.Layout.WGMMA_8BIT

    def code(p):
        numbers = [
            [vector.extract(register, [], [i]) for i in range(2)] for register in p.registers.flat
        ]
        words = []
        for block in range(p.shape[1] // UNIT):
            for row in range(2):
                first, second = numbers[4 * block + row], numbers[4 * block + 2 + row]
                words.append(packed([*first, *second]))
        return mosaic.array_of(words, p.shape, layout)

    result = mosaic.tile_type(p.shape, _PROBABILITIES, layout=layout)
    return mosaic.inline(code, reordered, (p,), (mosaic.TILE,), result, traced=True)


def packed(numbers: list[ir.Value]) -> ir.Value:
    """4 floats as a vector of 4 float8."""
    word = give(i32(), _PACK, numbers, "=r,f,f,f,f")
    return utils.bitcast(word, ir.VectorType.get((4,), ir.Float8E4M3FNType.get()))


def reordered(p: jax.Array) -> jax.Array:
    """`probabilities` in jax.numpy."""
    columns = p.reshape(p.shape[0], -1, UNIT)[:, :, ORDER]
    return columns.reshape(p.shape).astype(_PROBABILITIES)


def zeros(shape: tuple[int, int]) -> RegisterTile:
    """An accumulator of zeros in a register of its own. ptxas drops the zeros of a matmul that
    starts from them, but where two matmuls share them it first writes zeros to all registers.
    """

    def code():
        zero = give(ir.F32Type.get(), "mov.b32 $0, 0;", [], "=f")
        pair = vector.broadcast(ir.VectorType.get((2,), zero.type), zero)
        return mosaic.array_of([pair] * (shape[0] * shape[1] // 256), shape, mosaic.TILE)

    def twin():
        return jnp.zeros(shape, jnp.float32)

    result = mosaic.tile_type(shape, jnp.float32, layout=mosaic.TILE)
    return mosaic.inline(code, twin, (), (), result, traced=True)


def added(a: RegisterTile, b: RegisterTile) -> RegisterTile:
    """a + b at this place of the program. LLVM moves plain additions behind the matmuls that follow
    them, and the results of all of these are then alive at once.
    """

    def code(a, b):
        words = []
        for pairs in zip(a.registers.flat, b.registers.flat, strict=True):
            numbers = [[vector.extract(pair, [], [i]) for pair in pairs] for i in range(2)]
            sums = [give(x.type, "add.f32 $0, $1, $2;", [x, y], "=f,f,f") for x, y in numbers]
            words.append(vector.from_elements(pairs[0].type, sums))
        return mosaic.array_of(words, a.shape, mosaic.TILE)

    result = mosaic.tile_type(a.shape, jnp.float32, layout=mosaic.TILE)
    kinds = (mosaic.TILE, mosaic.TILE)
    return mosaic.inline(code, operator.add, (a, b), kinds, result, traced=True)
