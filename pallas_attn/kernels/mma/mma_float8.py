"""Operands of mma.sync on float8 (from sm89 on), which `mma_sync.scores` multiplies as pairs: two
float8 stand for a 16-bit number, so that rows of shared memory, `ldmatrix` and the left operand in
registers are those of 16 bits, at half the columns.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Operand, RegisterTile
from pallas_attn.kernels.mma import mma_rowmajor, wgmma_float8
from pallas_attn.kernels.mma.wgmma_float8 import UNIT

PAIR = jnp.bfloat16  # dtype that stands for two float8
PROBABILITIES = "float8_e4m3fn"


def paired(x: Operand) -> Operand:
    """float8 [.., n] as [.., n / 2] of `PAIR`."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), PAIR)


def probabilities(p: RegisterTile) -> RegisterTile:
    """P float32 [64, keys] as a left operand, [64, keys / 2] of `PAIR`: float8_e4m3fn, columns in
    `wgmma_float8.ORDER`.
    """
    shape = (p.shape[0], p.shape[1] // 2)

    def code(p):
        numbers = [
            [vector.extract(register, [], [i]) for i in range(2)] for register in p.registers.flat
        ]
        pair, registers = ir.VectorType.get((2,), ir.BF16Type.get()), []
        for block in range(p.shape[1] // UNIT):
            for row in range(2):
                first, second = numbers[4 * block + row], numbers[4 * block + 2 + row]
                word = wgmma_float8.packed([*first, *second])
                registers.append(utils.bitcast(word, pair))
        return mma_rowmajor.tile_with(registers, shape)

    def twin(p):
        return np.ascontiguousarray(wgmma_float8.reordered(jnp.asarray(p))).view(PAIR)

    result: Any = mma_rowmajor.tile_of(shape, PAIR)
    return mosaic.inline(code, twin, (p,), (mosaic.TILE,), result)
