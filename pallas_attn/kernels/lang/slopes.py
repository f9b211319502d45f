"""Slopes along the columns of a tile, as numbers in the instructions."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import math, vector

from pallas_attn.kernels.lang import mosaic

Array = jax.Array
COLUMNS = 8  # that a quad of threads holds two each of: they are taken as the first of them


def add_slopes(s: Array, slope: Array) -> Array:
    """s + slope * (column rounded down to a multiple of `COLUMNS`): float32 [64, keys], [64].

    Said in jax.numpy the products are computed before the loop over kv tiles, held in 16 registers
    or more, and spilled. Here a logit takes one multiply-add.
    """

    def code(_, s, slope):
        registers, own = s.registers.copy(), [_only(r) for r in slope.registers.flat]
        for at, register in enumerate(s.registers.flat):
            pair, (block, row) = register, divmod(at, 2)
            for i in range(2 if block else 0):
                logit = vector.extract(register, [], [i])
                column = utils.c(float(COLUMNS * block), logit.type)
                pair = vector.insert(math.fma(own[row], column, logit), pair, [], [i])
            registers[np.unravel_index(at, registers.shape)] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)

    def values(s, slope):  # what the interpreter runs
        column = jnp.arange(s.shape[1])[None] // COLUMNS * COLUMNS
        return s + slope[:, None] * column.astype(jnp.float32)

    inline: Any = code
    inline.values = values
    result = plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=mosaic.TILE)
    call = plgpu.inline_mgpu(arg_types=(mosaic.TILE, mosaic.ROW), return_type=result)
    return call(inline)(s, slope)


def _only(register: ir.Value) -> ir.Value:
    return vector.extract(register, [], [0])
